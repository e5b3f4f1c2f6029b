# SPDX-License-Identifier: Apache-2.0
"""A kernel's parameters: bytes at their places. Expected values are struct's."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np
import pytest
from cuda.bindings.driver import CUdeviceptr, CUresult

from flyt.errors import DeviceError
from flyt.frontend import params
from flyt.rpc.kernel_commands import FunctionFacts

# signed char, double, short, long long, pointer: as C lays them out.
FACTS = FunctionFacts({}, ((0, 1), (8, 8), (16, 2), (24, 8), (32, 8)))
EXPECTED = struct.pack("<b7xdh6xqQ", -5, 2.5, -300, -(1 << 40), 0x2000_0000_1000)


class Pointer:
    ptr = 0x2000_0000_1000


class Interface:
    __cuda_array_interface__ = {"data": (0x2000_0000_1000, False)}  # noqa: RUF012 - read only


@pytest.mark.parametrize("pointer", [Pointer(), Interface(), 0x2000_0000_1000])
def test_python_s_values_take_the_kernel_s_sizes(pointer: Any) -> None:
    given = (-5, 2.5, -300, -(1 << 40), pointer)
    assert params.from_arguments(given, FACTS) == EXPECTED
    numpys = (np.int8(-5), np.float64(2.5), np.int16(-300), np.int64(-(1 << 40)), pointer)
    assert params.from_arguments(numpys, FACTS) == EXPECTED


def test_an_array_may_hold_the_arguments() -> None:
    two = FunctionFacts({}, ((0, 4), (4, 4)))
    given: Any = np.array([1, 2], np.int32)
    assert params.from_arguments(given, two) == struct.pack("<2i", 1, 2)
    assert params.from_arguments(given[:0], FunctionFacts({}, ())) == b""


ONE = {size: FunctionFacts({}, ((0, size),)) for size in (1, 2, 4, 8, 16)}


@pytest.mark.parametrize(
    ("value", "size", "expected"),
    [
        (None, 8, bytes(8)),
        (True, 1, b"\1"),
        (np.bool_(True), 4, b"\1\0\0\0"),
        (255, 1, b"\xff"),
        (-1, 4, b"\xff" * 4),
        ((1 << 64) - 1, 8, b"\xff" * 8),
        (np.float32(1), 4, struct.pack("<f", 1)),
        (1 + 2j, 16, struct.pack("<2d", 1, 2)),
        (np.complex64(1 + 2j), 8, struct.pack("<2f", 1, 2)),
        (ctypes.c_uint16(7), 2, b"\7\0"),
        (CUdeviceptr(1 << 45), 8, struct.pack("<Q", 1 << 45)),
        (np.array((1, 2), dtype="i4,f4"), 8, struct.pack("<if", 1, 2)),
    ],
)
def test_one_argument(value: Any, size: int, expected: bytes) -> None:
    assert params.from_arguments((value,), ONE[size]) == expected


@pytest.mark.parametrize(
    ("value", "size", "error"),
    [
        (256, 1, OverflowError),
        (-129, 1, OverflowError),
        (1 << 64, 8, OverflowError),
        (1.0, 4, TypeError),
        (np.float64(1), 4, TypeError),
        (np.int32(1), 8, TypeError),
        (1 + 2j, 8, TypeError),
        (5, 16, TypeError),
        (np.zeros(3), 8, TypeError),
        ("text", 8, TypeError),
    ],
)
def test_what_would_be_cut_off_is_refused(value: Any, size: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        params.from_arguments((value,), ONE[size])


def test_too_few_or_too_many() -> None:
    for given in ((), (1, 2)):
        with pytest.raises(DeviceError) as caught:
            params.from_arguments(given, ONE[4])
        assert caught.value.code == 1


def test_pairs_of_values_and_ctypes() -> None:
    values = (-5, 2.5, -300, -(1 << 40), CUdeviceptr(0x2000_0000_1000))
    types = (ctypes.c_int8, ctypes.c_double, ctypes.c_int16, ctypes.c_int64, None)
    assert params.pack(params.from_typed(values, types), FACTS) == EXPECTED
    assert params.from_typed((CUresult(700), None), (None, ctypes.c_void_p)) == [
        struct.pack("<i", 700),
        bytes(8),
    ]
    with pytest.raises(TypeError):
        params.from_typed((1,), ())
    with pytest.raises(TypeError):
        params.from_typed((1.5,), (None,))


def test_c_s_pointers() -> None:
    held = (
        ctypes.c_int8(-5),
        ctypes.c_double(2.5),
        ctypes.c_int16(-300),
        ctypes.c_int64(-(1 << 40)),
        ctypes.c_uint64(0x2000_0000_1000),
    )
    pointers = (ctypes.c_void_p * 5)(*(ctypes.addressof(one) for one in held))
    assert params.from_pointers(ctypes.addressof(pointers), FACTS) == EXPECTED
    assert params.from_pointers(0, FunctionFacts({}, ())) == b""
    nulls = (ctypes.c_void_p * 5)()
    for address in (0, ctypes.addressof(nulls)):
        with pytest.raises(DeviceError) as caught:
            params.from_pointers(address, FACTS)
        assert caught.value.code == 1


def test_c_s_packed_buffer() -> None:
    buffer, size = ctypes.create_string_buffer(EXPECTED), ctypes.c_size_t(len(EXPECTED))
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)
    assert params.from_extra(ctypes.addressof(extra), FACTS) == EXPECTED
    size.value -= 1
    with pytest.raises(DeviceError):
        params.from_extra(ctypes.addressof(extra), FACTS)
    nothing = (ctypes.c_void_p * 5)()
    with pytest.raises(DeviceError):
        params.from_extra(ctypes.addressof(nothing), FACTS)
