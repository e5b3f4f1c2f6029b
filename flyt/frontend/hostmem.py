# SPDX-License-Identifier: Apache-2.0
"""Host arguments: an address, or any object with the buffer protocol.

The same arguments as in ``cuda.bindings.runtime``, with three differences, all explicit: a buffer
that is shorter than the copy, a read-only destination, and a non-contiguous array are refused
before a byte moves.
"""

from __future__ import annotations

import contextlib
import ctypes
import numbers
import operator
from typing import Any, NamedTuple

import numpy as np

from flyt.errors import DeviceError

INVALID_VALUE = 1
ADDRESS_BITS = 64
HOST_ADDRESSES = 1 << 63
"""Linux gives programs no address from here on."""


class HostArgument(NamedTuple):
    """Where an argument points; ``size`` is None for a bare address, ``owner`` keeps it alive."""

    address: int
    size: int | None = None
    readonly: bool = False
    owner: object = None


def c_uint(value: Any) -> int:
    """Flags, as a C ``unsigned int``.

    Raises
    ------
    OverflowError
        As ``cuda.bindings`` raises.
    """
    number = operator.index(value)
    if number < 0:
        raise OverflowError("can't convert negative value to unsigned int")
    if number >> 32:
        raise OverflowError("value too large to convert to unsigned int")
    return number


def size_t(value: Any) -> int:
    """A byte count, as a C ``size_t``.

    Raises
    ------
    OverflowError
        Negative, or too large, as ``cuda.bindings`` raises.
    """
    number = operator.index(value)
    if number < 0:
        raise OverflowError("can't convert negative value to size_t")
    if number >> ADDRESS_BITS:
        raise OverflowError("value too large to convert to size_t")
    return number


def pointer(argument: Any) -> HostArgument:
    """Resolve what the caller gave for a pointer.

    Parameters
    ----------
    argument : int, None, or object with the buffer protocol
        NumPy arrays of any dtype, ``bytes``, ``memoryview``, ``array.array``, ctypes arrays …

    Raises
    ------
    TypeError
        It is none of these, or an int that is no address.
    ValueError
        An array that is not contiguous; it is never treated as flat.
    """
    if argument is None:
        return HostArgument(0)
    if isinstance(argument, (int, np.integer)):  # a NumPy integer is a buffer too, of itself
        return HostArgument(_address(int(argument)))
    if isinstance(argument, np.ndarray):
        return _array(argument)
    getter = getattr(argument, "getPtr", None)
    if getter is not None and not isinstance(argument, (bytes, bytearray, memoryview)):
        return _indirect(argument)
    try:
        view = memoryview(argument)
    except TypeError:
        return _indirect(argument)
    if not view.contiguous:
        raise ValueError(f"{type(argument).__name__} is not contiguous")
    if view.nbytes == 0:
        return HostArgument(0, 0, view.readonly, view)
    # Fortran's order can't be cast; both ways read no more than the address.
    array = np.frombuffer(view.cast("B"), np.uint8) if view.c_contiguous else np.asarray(view)
    return HostArgument(int(array.ctypes.data), view.nbytes, view.readonly, array)


def plain(argument: Any, count: int) -> int:
    """Where an argument points that is an address, or a writable NumPy array of C's order with so
    many bytes at least; 0 for anything else. For the short way, a quarter of `pointer`'s cost."""
    kind = type(argument)
    if kind is int:
        return argument if 0 < argument < HOST_ADDRESSES else 0
    if kind is not np.ndarray or count > argument.nbytes:
        return 0
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(argument))
    except (TypeError, ValueError, BufferError):  # read-only, with gaps, of a dtype without buffer
        return 0


def _address(value: int) -> int:
    if not 0 <= value < 1 << ADDRESS_BITS:
        raise TypeError(f"{value} is no address: it does not fit in {ADDRESS_BITS} bits")
    return int(value)


def _array(array: np.ndarray[Any, Any]) -> HostArgument:
    flags, size = array.flags, array.nbytes
    if not (flags.c_contiguous or flags.f_contiguous):
        raise ValueError("ndarray is not contiguous")
    writeable = flags.writeable
    return HostArgument(_start(array, writeable and size > 0), size, not writeable, array)


def _start(array: Any, quick: bool) -> int:
    """The array's address; ``array.ctypes`` costs four times as much as a look at its buffer."""
    if quick:
        try:
            return ctypes.addressof(ctypes.c_char.from_buffer(array))
        except (TypeError, ValueError):  # Fortran's order, and dtypes that no buffer can describe
            pass
    return int(array.ctypes.data)


def _indirect(argument: Any) -> HostArgument:
    """What says its address itself: cuda-bindings' wrappers (CUdeviceptr and friends)."""
    try:
        return HostArgument(_address(operator.index(argument)))
    except TypeError:
        pass
    # Not int(): that would read digits in a text, and cut a float off.
    convert = None if isinstance(argument, numbers.Number) else getattr(argument, "__int__", None)
    if convert is not None:
        with contextlib.suppress(TypeError, ValueError):
            return HostArgument(_address(convert()), owner=argument)
    raise TypeError(
        f"Provided argument is of type {type(argument)} but expected an int, None or an object "
        "with the buffer protocol"
    )


def check_source(argument: HostArgument, count: int) -> None:
    """Refuse to read past the end of a buffer whose size is known."""
    if argument.size is not None and count > argument.size:
        raise DeviceError(
            INVALID_VALUE,
            f"the source buffer has {argument.size} bytes, {count} were to be read",
        )


def check_destination(argument: HostArgument, count: int) -> None:
    """Refuse to write to read-only memory or past the end of a buffer."""
    if argument.readonly:
        raise DeviceError(INVALID_VALUE, "the destination buffer is read-only")
    if argument.size is not None and count > argument.size:
        raise DeviceError(
            INVALID_VALUE,
            f"the destination buffer has {argument.size} bytes, {count} were to be written",
        )
