# SPDX-License-Identifier: Apache-2.0
"""Stream and event arguments: ints, None, or the handle types of ``cuda.bindings``."""

from __future__ import annotations

from typing import Any

from cuda.bindings.driver import CUstream
from cuda.bindings.runtime import cudaStream_t

from flyt.errors import DeviceError
from flyt.frontend.current import thread
from flyt.frontend.hostmem import ADDRESS_BITS
from flyt.frontend.session import Session
from flyt.frontend.streams import Event, Stream

INVALID_HANDLE = 400

_STREAMS = frozenset({cudaStream_t, CUstream})


def number_of(handle: Any) -> int:
    """The number behind a handle; None is 0.

    Raises
    ------
    TypeError
        It is no handle.
    OverflowError
        An int that is negative or has more than 64 bits, as ``cuda.bindings`` raises.
    """
    if handle is None:
        return 0
    try:
        number = int(handle.__int__())  # not int(handle): that would read digits in a text
    except (AttributeError, TypeError, ValueError):
        raise TypeError(f"{type(handle).__name__} is no stream or event handle") from None
    if not 0 <= number < 1 << ADDRESS_BITS:
        raise OverflowError(f"{number} is no handle: it does not fit in {ADDRESS_BITS} bits")
    return number


def plain_number(handle: Any) -> int:
    """The number of the commonest handles, an int or cuda-bindings' streams; below 0 for others,
    which `number_of` converts or refuses."""
    kind = type(handle)
    if kind is int:
        return int(handle)
    return int(handle) if kind in _STREAMS else -1


def stream_of(session: Session, handle: Any) -> Stream:
    """The stream that a handle means to this thread.

    Raises
    ------
    DeviceError
        cudaErrorInvalidResourceHandle for a handle that is not one of this process's streams.
    """
    number = 0 if handle is None else handle if type(handle) is int else -1
    if not 0 <= number < 1 << ADDRESS_BITS:
        number = number_of(handle)
    return session.scheduler.stream(number, thread.device)


def event_of(session: Session, handle: Any) -> Event:
    """The event behind a handle; DeviceError as for `stream_of`."""
    number = number_of(handle)
    if not number:
        raise DeviceError(INVALID_HANDLE, "NULL is no event")
    return session.scheduler.event(number)
