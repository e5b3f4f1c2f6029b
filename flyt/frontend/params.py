# SPDX-License-Identifier: Apache-2.0
"""A kernel's parameters as one buffer, laid out as the driver says: from C pointers, from pairs of
values and ctypes, or from Python's values as CuPy takes them.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flyt.errors import DeviceError
from flyt.rpc.kernel_commands import FunctionFacts

INVALID_VALUE = 1

_POINTER_BYTES = 8

BUFFER_POINTER, BUFFER_SIZE = 1, 2
"""CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE; CU_LAUNCH_PARAM_END is 0."""

_EXTRA_WORDS = 16
"""More than any ``extra`` needs: two pairs and the end."""

Packer = Callable[[Any, int, int], bytes]
"""Of the value, the kernel's size, its place."""

_INTEGERS = {
    size: (struct.Struct(f"<{form}").pack, struct.Struct(f"<{form.upper()}").pack)
    for size, form in ((1, "b"), (2, "h"), (4, "i"), (8, "q"))
}
"""By the kernel's size, for ints below 0 and for others."""


def pack(values: Sequence[bytes], facts: FunctionFacts) -> bytes:
    """Each parameter's bytes at its place.

    Raises
    ------
    DeviceError
        cudaErrorInvalidValue: too few or too many, or one that is too short.
    """
    if len(values) != len(facts.params):
        raise DeviceError(
            INVALID_VALUE, f"{len(values)} arguments for a kernel that takes {len(facts.params)}"
        )
    if not facts.params:
        return bytes(facts.size)
    if facts.form is not None and [*map(len, values)] == facts.sizes:
        return facts.form.pack(*values)
    buffer = bytearray(facts.size)
    for n, (value, (offset, size)) in enumerate(zip(values, facts.params, strict=True)):
        if len(value) < size:
            raise DeviceError(
                INVALID_VALUE, f"argument {n} has {len(value)} bytes, the kernel reads {size}"
            )
        buffer[offset : offset + size] = value[:size]
    return bytes(buffer)


def from_pointers(address: int, facts: FunctionFacts) -> bytes:
    """From C's ``void **kernelParams``; what it points to is the caller's to vouch for."""
    if not facts.params:
        return b""
    if not address:
        raise DeviceError(INVALID_VALUE, f"no parameters; the kernel takes {len(facts.params)}")
    pointers = (ctypes.c_uint64 * len(facts.params)).from_address(address)
    if not all(pointers):
        raise DeviceError(INVALID_VALUE, "a pointer to a parameter is NULL")
    values = [
        ctypes.string_at(pointer, size)
        for pointer, (_, size) in zip(pointers, facts.params, strict=True)
    ]
    return pack(values, facts)


def from_extra(address: int, facts: FunctionFacts) -> bytes:
    """From C's ``void **extra``: a buffer that is packed already, and its size."""
    words = (ctypes.c_uint64 * _EXTRA_WORDS).from_address(address)
    known: dict[int, int] = {}
    at = 0
    while at + 1 < _EXTRA_WORDS and words[at]:
        known[words[at]] = words[at + 1]
        at += 2
    if set(known) != {BUFFER_POINTER, BUFFER_SIZE} or not known[BUFFER_SIZE]:
        raise DeviceError(INVALID_VALUE, "extra wants a buffer's pointer and its size")
    size = ctypes.c_size_t.from_address(known[BUFFER_SIZE]).value
    if size < facts.size:
        raise DeviceError(
            INVALID_VALUE, f"{size} bytes of parameters, the kernel reads {facts.size}"
        )
    return ctypes.string_at(known[BUFFER_POINTER], facts.size)


def from_typed(values: Sequence[Any], types: Sequence[Any]) -> list[bytes]:
    """From ``cuda.bindings``' pair of values and ctypes; the type is None for what is an object
    of C's already (ctypes, CUdeviceptr and friends)."""
    if len(values) != len(types):
        raise TypeError(f"{len(values)} values, {len(types)} types")
    return [_typed(value, kind) for value, kind in zip(values, types, strict=True)]


def _typed(value: Any, kind: Any) -> bytes:
    if kind is None:
        return _object(value)
    if isinstance(value, kind):
        return bytes(value)
    if kind is ctypes.c_void_p and not isinstance(value, (int, type(None))):
        return _word(int(value))
    return bytes(kind(value))


def _object(value: Any) -> bytes:
    """The bytes of an object of C's."""
    if isinstance(value, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)):  # noqa: SLF001
        return bytes(value)
    pointer = getattr(value, "getPtr", None)
    if pointer is not None:
        return ctypes.string_at(pointer(), _POINTER_BYTES)
    try:
        return struct.pack("<i", operator.index(value))  # an enum
    except TypeError:
        raise TypeError(
            f"{type(value).__name__} needs a ctypes type beside it to be a kernel's parameter"
        ) from None


def from_arguments(arguments: Sequence[Any], facts: FunctionFacts) -> bytes:
    """From Python's values, as CuPy takes them.

    Device arrays (``__cuda_array_interface__``, or a ``ptr``) and None are pointers, NumPy scalars
    and structures themselves; an ``int``, ``float``, ``complex`` or ``bool`` takes the size that
    the kernel reads.

    Raises
    ------
    TypeError, OverflowError
        A float for an integer of its size, or an int that does not fit: nothing is cut off.
    """
    if len(arguments) != len(facts.params):
        raise DeviceError(
            INVALID_VALUE,
            f"{len(arguments)} arguments for a kernel that takes {len(facts.params)}",
        )
    if not facts.params:
        return pack((), facts)
    sizes = facts.sizes
    return pack([_PACKERS[type(one)](one, sizes[n], n) for n, one in enumerate(arguments)], facts)


def _boolean(value: Any, size: int, place: int) -> bytes:
    return _integer(int(value), size, place)


def _scalar(value: Any, size: int, place: int) -> bytes:
    return _exact(value.tobytes(), size, place, value.dtype)


def _complex(value: complex, size: int, place: int) -> bytes:
    return _exact(np.complex128(value).tobytes(), size, place, "complex128")


def _object_or_pointer(value: Any, size: int, place: int) -> bytes:
    address = getattr(value, "ptr", None)  # first: an array interface is made anew at each look
    return _word(address) if isinstance(address, int) else _pointed(value, size, place)


def _pointed(value: Any, size: int, place: int) -> bytes:
    """What is no number, and has no ``ptr``."""
    if value is None:
        return _word(0)
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:
        return _word(int(interface["data"][0]))
    if isinstance(value, np.ndarray):
        # CuPy passes a structure so: an array of no dimension, by value.
        if value.ndim == 0:
            return _exact(value.tobytes(), size, place, value.dtype)
        raise TypeError(f"argument {place} is an array in host memory; flyt.to_device copies it")
    return _exact(_object(value), size, place, type(value).__name__)


class _Packers(dict[type, Packer]):
    """What makes a parameter of a value, by its type; one that is new is looked at once."""

    def __missing__(self, kind: type) -> Packer:
        if len(self) >= _MOST_TYPES:  # a program that makes types all the time must not keep them
            self.clear()
        packer = self[kind] = next(
            (p for known, p in _KINDS if issubclass(kind, known)), _object_or_pointer
        )
        return packer


def _word(value: int) -> bytes:
    return value.to_bytes(_POINTER_BYTES, "little")


def _integer(value: int, size: int, place: int) -> bytes:
    forms = _INTEGERS.get(size)
    if forms is None:
        raise TypeError(f"argument {place} is an int, the kernel reads {size} bytes")
    try:
        return forms[value >= 0](value)
    except struct.error:
        raise OverflowError(f"argument {place}: {value} does not fit into {size} bytes") from None


def _float(value: float, size: int, place: int) -> bytes:
    if size != 8:
        raise TypeError(
            f"argument {place} is a Python float of 8 bytes, the kernel reads {size}: give "
            f"numpy.float32(…) or what the kernel declares"
        )
    return struct.pack("<d", value)


def _exact(data: bytes, size: int, place: int, kind: Any) -> bytes:
    if len(data) != size:
        raise TypeError(
            f"argument {place} is a {kind} of {len(data)} bytes, the kernel reads {size}"
        )
    return data


_KINDS: tuple[tuple[type, Packer], ...] = (
    (int, _integer),
    (np.bool_, _boolean),
    (np.generic, _scalar),
    (float, _float),
    (complex, _complex),
)
"""The first one that fits."""

_MOST_TYPES = 256

_PACKERS = _Packers()
