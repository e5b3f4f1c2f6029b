# SPDX-License-Identifier: Apache-2.0
"""Functions of the host in the order of a stream.

They are C functions by their address (a ``CFUNCTYPE`` of ctypes makes one of a Python function),
called on a thread of the session's own. CUDA calls in them answer cudaErrorNotPermitted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from flyt.errors import DeviceError
from flyt.frontend import current
from flyt.frontend.api.convention import INVALID_VALUE, Answer, cuda
from flyt.frontend.api.handles import number_of, stream_of
from flyt.frontend.hostmem import c_uint, pointer

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
StreamCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


def launch(stream: Any, function: Callable[[int], None]) -> None:
    """Put a Python function on a stream; it gets the cudaError_t of the work before it."""
    session = current.current()
    session.connection.raise_deferred()
    session.host_calls.put(function, stream_of(session, stream))


def _address(function: Any) -> int:
    number = number_of(function)
    if not number:
        raise DeviceError(INVALID_VALUE, "there is no function at NULL")
    return number


@cuda(0)
def cudaLaunchHostFunc(stream: Any, fn: Any, userData: Any) -> Answer:
    """Call a function when a stream gets there; later work of the stream waits for it.

    Parameters
    ----------
    stream : cudaStream_t or int
    fn : cudaHostFn_t or int
        The address of a ``void (*)(void *)``.
    userData : int, None or object with the buffer protocol
        Kept alive until the function has returned.

    Notes
    -----
    After an error of the work before it, it is not called.
    """
    address, data = _address(fn), pointer(userData)

    def call(status: int) -> None:
        if not status:
            HostFunction(address)(data.address)

    launch(stream, call)
    return ()


@cuda(0)
def cudaStreamAddCallback(stream: Any, callback: Any, userData: Any, flags: int) -> Answer:
    """`cudaLaunchHostFunc` for a ``void (*)(cudaStream_t, cudaError_t, void *)``, which is called
    after errors too, and gets them. ``flags`` must be 0."""
    flags, address, data = c_uint(flags), _address(callback), pointer(userData)
    if flags:
        raise DeviceError(INVALID_VALUE, "cudaStreamAddCallback takes flags 0")
    handle = number_of(stream)
    launch(stream, lambda status: StreamCallback(address)(handle, status, data.address))
    return ()
