# SPDX-License-Identifier: Apache-2.0
"""Element types that arrays may cross with: a name that all libraries share, and its size.

bfloat16 and the 8-bit floats have no twin in NumPy, so raw bytes travel with a name, never a NumPy
dtype.
"""

from __future__ import annotations

ITEMSIZES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of an element."""

NUMPY_NAMES = frozenset(ITEMSIZES) - {
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "complex32",
}
"""Those that NumPy has under the same name."""
