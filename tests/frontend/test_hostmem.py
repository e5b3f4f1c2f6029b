# SPDX-License-Identifier: Apache-2.0
"""Host arguments: every kind of buffer, and what is refused."""

from __future__ import annotations

import array
import ctypes
import decimal
import fractions
import mmap
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver, runtime

from flyt.errors import DeviceError
from flyt.frontend.hostmem import (
    HostArgument,
    c_uint,
    check_destination,
    check_source,
    pointer,
    size_t,
)


class _Pair(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int32), ("b", ctypes.c_double))


def _readonly(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values.flags.writeable = False
    return values


STRUCTURED = np.dtype([("a", "i4"), ("b", "f8")])

BUFFERS: dict[str, tuple[Callable[[], Any], int, bool]] = {
    # name: how to make it, bytes, read-only
    "bytes": (lambda: b"abcde", 5, True),
    "bytearray": (lambda: bytearray(b"abcde"), 5, False),
    "memoryview": (lambda: memoryview(bytearray(7)), 7, False),
    "memoryview of bytes": (lambda: memoryview(b"abc"), 3, True),
    "memoryview slice": (lambda: memoryview(bytearray(7))[2:5], 3, False),
    "memoryview 2-d": (lambda: memoryview(np.zeros((2, 3), "i2")), 12, False),
    "memoryview 2-d Fortran": (lambda: memoryview(np.zeros((2, 3), "i2", "F")), 12, False),
    "memoryview 0-d": (lambda: memoryview(np.zeros((), "i4")), 4, False),
    "memoryview structured": (lambda: memoryview(np.zeros(3, STRUCTURED)), 36, False),
    "memoryview big-endian": (lambda: memoryview(np.zeros(3, ">i4")), 12, False),
    "memoryview float16": (lambda: memoryview(np.zeros(3, "f2")), 6, False),
    "memoryview complex": (lambda: memoryview(np.zeros(3, "c16")), 48, False),
    "array.array": (lambda: array.array("d", [1, 2, 3]), 24, False),
    "ctypes array": (ctypes.c_int32 * 4, 16, False),
    "ctypes 2-d array": (ctypes.c_int32 * 4 * 3, 48, False),
    "ctypes structures": (_Pair * 2, 32, False),
    "ctypes structure": (_Pair, 16, False),
    "ctypes string buffer": (lambda: ctypes.create_string_buffer(5), 5, False),
    "mmap": (lambda: mmap.mmap(-1, 4096), 4096, False),
    "ndarray": (lambda: np.arange(6, dtype="i4"), 24, False),
    "ndarray C": (lambda: np.zeros((2, 3, 4), "f4"), 96, False),
    "ndarray Fortran": (lambda: np.zeros((2, 3, 4), "f4", "F"), 96, False),
    "ndarray 0-d": (lambda: np.array(1.5), 8, False),
    "ndarray one element": (lambda: np.array([5]), 8, False),
    "ndarray slice of rows": (lambda: np.zeros((5, 4), "i2")[1:3], 16, False),
    "ndarray one of each stride": (lambda: np.zeros((4, 4))[:1, :1], 8, False),
    "ndarray read-only": (lambda: _readonly(np.zeros(3)), 24, True),
    "ndarray broadcast of one": (lambda: np.broadcast_to(np.zeros(1), (1, 1)), 8, True),
    "ndarray structured": (lambda: np.zeros(3, STRUCTURED), 36, False),
    "ndarray datetime64": (lambda: np.zeros(3, "M8[ns]"), 24, False),
    "ndarray timedelta64": (lambda: np.zeros(3, "m8[s]"), 24, False),
    "ndarray bool": (lambda: np.zeros(3, bool), 3, False),
    "ndarray complex64": (lambda: np.zeros(3, "c8"), 24, False),
    "ndarray float16": (lambda: np.zeros(3, "f2"), 6, False),
    "ndarray big-endian": (lambda: np.zeros(3, ">f8"), 24, False),
    "ndarray text": (lambda: np.zeros(3, "U5"), 60, False),
    "ndarray bytes": (lambda: np.zeros(3, "S5"), 15, False),
    "recarray": (lambda: np.zeros(3, STRUCTURED).view(np.recarray), 36, False),
    "matrix view": (lambda: np.zeros((3, 3)).T, 72, False),
}

buffers = pytest.mark.parametrize(("make", "size", "readonly"), BUFFERS.values(), ids=BUFFERS)


@buffers
def test_size_and_protection(make: Callable[[], Any], size: int, readonly: bool) -> None:
    argument = make()
    got = pointer(argument)
    assert (got.size, got.readonly) == (size, readonly)


@buffers
def test_the_address_is_that_of_the_bytes(
    make: Callable[[], Any], size: int, readonly: bool
) -> None:
    argument = make()
    got = pointer(argument)
    if isinstance(argument, np.ndarray):
        assert got.address == argument.ctypes.data
    view = argument if isinstance(argument, np.ndarray) else memoryview(argument)
    before = bytes(view.tobytes("A"))
    assert ctypes.string_at(got.address, size) == before
    if not readonly:  # what is written there is in the object
        pattern = bytes(range(1, 1 + size)) if size < 200 else bytes([7]) * size
        ctypes.memmove(got.address, pattern, size)
        assert view.tobytes("A") == pattern


@pytest.mark.parametrize(
    "make",
    [
        lambda: b"",
        bytearray,
        lambda: memoryview(b""),
        lambda: array.array("i"),
        ctypes.c_int * 0,
        lambda: np.zeros(0),
        lambda: np.zeros((0, 3)),
        lambda: np.zeros((3, 0), "F"),
        lambda: memoryview(np.zeros((0, 3))),
        lambda: memoryview(np.zeros((2, 3), order="F"))[:0],
        lambda: np.zeros((4, 4))[::2, :0],
    ],
)
def test_empty_buffers_have_size_0(make: Callable[[], Any]) -> None:
    assert pointer(make()).size == 0


def test_the_argument_lives_as_long_as_its_address() -> None:
    owner = bytearray(b"x" * 10)
    got = pointer(memoryview(owner)[3:])
    assert ctypes.string_at(got.address, got.size or 0) == b"x" * 7
    with pytest.raises(BufferError):
        owner.append(1)
    del got
    owner.append(1)
    values = np.arange(1000)
    count = sys.getrefcount(values)
    got = pointer(values)
    assert sys.getrefcount(values) > count
    del got
    assert sys.getrefcount(values) == count


# --- addresses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "address"),
    [
        (0, 0),
        (1, 1),
        (0x2000_0000_0000, 0x2000_0000_0000),
        ((1 << 64) - 1, (1 << 64) - 1),
        (None, 0),
        (np.uint64((1 << 64) - 1), (1 << 64) - 1),
        (np.int64(0x1234), 0x1234),
        (np.uint32(7), 7),
        (np.uint8(7), 7),
        (np.intp(7), 7),
        (driver.CUdeviceptr(0x77000), 0x77000),
        (driver.CUdeviceptr(0), 0),
        (driver.CUstream(0x77000), 0x77000),
        (runtime.cudaStream_t(0x77000), 0x77000),
        (runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost, 2),
    ],
    ids=repr,
)
def test_an_address_has_no_size(argument: Any, address: int) -> None:
    got = pointer(argument)
    assert (got.address, got.size, got.readonly) == (address, None, False)
    assert type(got.address) is int


@pytest.mark.parametrize(
    "argument",
    [
        *("123", "", "0x10", object(), [1, 2], (1,), {}, {1}, 1j, int, len, ..., iter(())),
        *(1.5, 4096.0, decimal.Decimal(4096), fractions.Fraction(4096)),
        ctypes.byref(ctypes.c_int()),
        np.arange,
    ],
    ids=lambda argument: type(argument).__name__,
)
def test_anything_else_is_no_pointer(argument: Any) -> None:
    with pytest.raises(TypeError, match="buffer protocol"):
        pointer(argument)


@pytest.mark.parametrize("number", [-1, -(1 << 63), 1 << 64, 1 << 200, np.int64(-1), np.int8(-1)])
def test_a_number_that_is_no_address(number: Any) -> None:
    with pytest.raises(TypeError, match="no address"):
        pointer(number)


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros(6)[::2],
        lambda: np.zeros(6)[::-1],
        lambda: np.zeros((4, 4))[:, 1:3],
        lambda: np.zeros((4, 4), order="F")[1:3],
        lambda: np.zeros((2, 3, 4)).transpose(1, 0, 2),
        lambda: np.zeros(3, STRUCTURED)["b"],
        lambda: np.broadcast_to(np.zeros(1), (5,)),
        lambda: memoryview(bytearray(6))[::2],
        lambda: memoryview(bytearray(6))[::-1],
        lambda: memoryview(np.zeros((4, 4))[:, 1:3]),
    ],
    ids=[
        *("step", "reversed", "columns", "Fortran rows", "transposed", "field", "broadcast"),
        *("view step", "view reversed", "view columns"),
    ],
)
def test_what_is_not_contiguous_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        pointer(make())


# --- counts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "number"),
    [(0, 0), (1, 1), ((1 << 64) - 1, (1 << 64) - 1), (np.int32(7), 7), (True, 1)],
)
def test_size_t(value: Any, number: int) -> None:
    assert size_t(value) == number
    assert isinstance(size_t(value), int)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((-1, OverflowError), (1 << 64, OverflowError), (np.int64(-5), OverflowError)),
        *((1.0, TypeError), ("1", TypeError), (None, TypeError), (b"1", TypeError)),
    ],
)
def test_no_size_t(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        size_t(value)


@pytest.mark.parametrize("count", [0, 1, 99, 100])
def test_within_a_buffer(count: int) -> None:
    check_source(HostArgument(4096, 100), count)
    check_source(HostArgument(4096, 100, readonly=True), count)
    check_destination(HostArgument(4096, 100), count)


@pytest.mark.parametrize("count", [101, 1 << 40])
def test_past_the_end_of_a_buffer(count: int) -> None:
    for check in (check_source, check_destination):
        with pytest.raises(DeviceError, match=f"has 100 bytes, {count} were") as caught:
            check(HostArgument(4096, 100), count)
        assert caught.value.code == 1  # cudaErrorInvalidValue
        check(HostArgument(4096), count)  # a bare address has no known end


def test_a_readonly_destination() -> None:
    with pytest.raises(DeviceError, match="read-only") as caught:
        check_destination(pointer(b"abc"), 1)
    assert caught.value.code == 1


@pytest.mark.parametrize("value", [-1, 1 << 32, "x", 1 << 70], ids=str)
def test_flags_convert_as_those_of_the_bindings(value: Any) -> None:
    with pytest.raises(Exception) as theirs:
        runtime.cudaStreamCreateWithFlags(value)
    with pytest.raises(theirs.type):
        c_uint(value)


@pytest.mark.parametrize("value", [0, 1, (1 << 32) - 1, np.int64(3), True], ids=str)
def test_flags_that_are_some(value: Any) -> None:
    assert c_uint(value) == int(value)
