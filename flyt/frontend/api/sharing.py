# SPDX-License-Identifier: Apache-2.0
"""Memory and events that several clients of one backend share.

Both clients have to be the same user's, and the backend must not run with ``--isolation process``:
then their sessions live in one worker, and see the same memory at the same address.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings.runtime import (
    cudaEvent_t,
    cudaIpcEventHandle_t,
    cudaIpcMemHandle_t,
    cudaIpcMemLazyEnablePeerAccess,
)

from flyt.errors import DeviceError
from flyt.frontend import current
from flyt.frontend.api.convention import INVALID_VALUE, Answer, cuda
from flyt.frontend.api.handles import event_of
from flyt.frontend.hostmem import c_uint, pointer
from flyt.frontend.sharing import HANDLE_BYTES


def struct(kind: Any, content: bytes) -> Any:
    made = kind()
    ctypes.memmove(made.getPtr(), content, HANDLE_BYTES)  # some releases have no field for it
    return made


def content(handle: Any) -> bytes:
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


@cuda(1)
def cudaIpcGetMemHandle(devPtr: Any) -> Answer:
    """A handle of device memory for other processes.

    Parameters
    ----------
    devPtr : int
        The start of memory from `cudaMalloc`.

    Notes
    -----
    The memory stays until the last process that has it open has closed it or ended; it counts in
    the quota of each of them.
    """
    address = pointer(devPtr).address
    session = current.current()
    session.connection.raise_deferred()
    return (struct(cudaIpcMemHandle_t, session.sharing.export_memory(address)),)


@cuda(1)
def cudaIpcOpenMemHandle(handle: Any, flags: int) -> Answer:
    """The address of memory behind another process's handle: the one it has there.

    Parameters
    ----------
    handle : cudaIpcMemHandle_t
    flags : int
        cudaIpcMemLazyEnablePeerAccess.

    Notes
    -----
    cudaErrorInvalidResourceHandle when no living client in the same worker has made the handle,
    cudaErrorDeviceUninitialized for the process's own, cudaErrorMapBufferObjectFailed when the
    address is taken here.
    """
    flags, session = c_uint(flags), current.current()
    session.connection.raise_deferred()
    if flags != cudaIpcMemLazyEnablePeerAccess:
        raise DeviceError(INVALID_VALUE, "flags have to be cudaIpcMemLazyEnablePeerAccess")
    return (session.sharing.open_memory(content(handle)),)


@cuda(0)
def cudaIpcCloseMemHandle(devPtr: Any) -> Answer:
    """Close memory that was opened, as often as it was; waits for work as cudaFree does."""
    address = pointer(devPtr).address
    session = current.current()
    session.connection.raise_deferred()
    session.sharing.close_memory(address)
    return ()


@cuda(1)
def cudaIpcGetEventHandle(event: Any) -> Answer:
    """A handle of an event, made with cudaEventInterprocess, for other processes."""
    session = current.current()
    session.connection.raise_deferred()
    made = session.sharing.export_event(event_of(session, event))
    return (struct(cudaIpcEventHandle_t, made),)


@cuda(1)
def cudaIpcOpenEventHandle(handle: Any) -> Answer:
    """The event behind another process's handle; `cudaEventDestroy` lets go of it."""
    session = current.current()
    session.connection.raise_deferred()
    return (cudaEvent_t(session.sharing.open_event(content(handle)).number),)
