# SPDX-License-Identifier: Apache-2.0
"""Initialisation and contexts: answered here, they never cross.

A device has its primary context, and what cuCtxCreate makes are further names for what the session
has there. A thread's stack of contexts decides which device is current, in this API and in the
runtime's. Without one, what needs a context is CUDA_ERROR_INVALID_CONTEXT.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

from cuda.bindings.driver import CUcontext, CUdevice

from flyt.driver.convention import (
    INVALID_CONTEXT,
    INVALID_VALUE,
    NOT_SUPPORTED,
    Answer,
    core,
    driver,
    initialized,
    state,
)
from flyt.errors import DeviceError
from flyt.frontend import current
from flyt.frontend.api import devices, streams
from flyt.frontend.current import thread
from flyt.frontend.session import Session

_FLAG_BITS = 8
"""CU_CTX_FLAGS_MASK: scheduling, mapping, local memory; all are as the backend has them."""

API_VERSION = 3020
"""What cuCtxGetApiVersion answers for contexts of every current driver."""

INVALID_DEVICE = 101

_FIRST, _STEP = 0x10_0000, 0x1000
"""Handles look like addresses that nobody has."""

_numbers = itertools.count(0x1000_0000, _STEP)
_created: dict[int, int] = {}
"""Devices of the contexts that cuCtxCreate made, by handle."""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.handles: list[int] = []
        """Of the contexts on the stack, the current one last."""


_stack = _Stack()
_retained: dict[int, int] = {}
_lock = threading.Lock()


def _primary(device: int) -> int:
    return _FIRST + device * _STEP


def handle_of(device: int) -> Any:
    """The context of a device: this thread's, if it is one of that device, else the primary one."""
    held = _stack.handles[-1] if _stack.handles else 0
    return CUcontext(held if held and device_of(held) == device else _primary(device))


def device_of(context: Any) -> int:
    """The device of a context; CUDA_ERROR_INVALID_CONTEXT for what is none."""
    number = int(context or 0)
    known = _created.get(number)
    device, rest = divmod(number - _FIRST, _STEP) if known is None else (known, 0)
    if rest or not 0 <= device < len(initialized().devices):
        raise DeviceError(INVALID_CONTEXT, f"{number:#x} is no context")
    return device


def in_context() -> Session:
    """The session, with a current context."""
    session = initialized()
    if not _stack.handles:
        raise DeviceError(INVALID_CONTEXT, "no context is current in this thread")
    thread.device = device_of(_stack.handles[-1])
    return session


def ordinal_of(device: Any) -> int:
    """A device's ordinal; CUDA_ERROR_INVALID_DEVICE for one that does not exist."""
    number = int(device)
    initialized().check_device(number)
    return number


def _settle() -> None:
    if _stack.handles:
        thread.device = device_of(_stack.handles[-1])


@driver
def cuInit(Flags: int) -> Answer:
    """Connect to the backend; CUDA_ERROR_NO_DEVICE without one."""
    if Flags:
        raise DeviceError(INVALID_VALUE, "cuInit takes flags 0")
    current.current()
    state.initialized = True
    return ()


@driver
def cuDevicePrimaryCtxRetain(dev: Any) -> Answer:
    """The primary context of a device."""
    device = ordinal_of(dev)
    with _lock:
        _retained[device] = _retained.get(device, 0) + 1
    return (CUcontext(_primary(device)),)


@driver
def cuDevicePrimaryCtxRelease(dev: Any) -> Answer:
    """Undo one cuDevicePrimaryCtxRetain. What the session has stays until it is reset or ends."""
    device = ordinal_of(dev)
    with _lock:
        if not _retained.get(device):
            raise DeviceError(INVALID_CONTEXT, f"the context of device {device} is not retained")
        _retained[device] -= 1
    return ()


@driver
def cuDevicePrimaryCtxReset(dev: Any) -> Answer:
    """End the session, of all devices, as flyt.cudaDeviceReset does."""
    ordinal_of(dev)
    current.reset()
    return ()


@driver
def cuDevicePrimaryCtxGetState(dev: Any) -> Answer:
    """Flags, and whether the context is retained."""
    return (0, int(bool(_retained.get(ordinal_of(dev)))))


@driver
def cuCtxGetCurrent() -> Answer:
    """The context of the thread; NULL if it has none."""
    initialized()
    return (CUcontext(_stack.handles[-1] if _stack.handles else 0),)


@driver
def cuCtxSetCurrent(ctx: Any) -> Answer:
    """Replace the top of the stack; NULL takes it off."""
    initialized()
    if not int(ctx or 0):
        if _stack.handles:
            _stack.handles.pop()
    else:
        device_of(ctx)
        _stack.handles[-1:] = [int(ctx)]
    _settle()
    return ()


@driver
def cuCtxPushCurrent(ctx: Any) -> Answer:
    """Push a context on this thread's stack."""
    initialized()
    device_of(ctx)
    _stack.handles.append(int(ctx))
    _settle()
    return ()


@driver
def cuCtxPopCurrent() -> Answer:
    """Pop this thread's context."""
    initialized()
    if not _stack.handles:
        raise DeviceError(INVALID_CONTEXT, "no context is current in this thread")
    popped = _stack.handles.pop()
    _settle()
    return (CUcontext(popped),)


@driver
def cuCtxCreate(ctxCreateParams: Any, flags: int, dev: Any) -> Answer:
    """One more context of a device, current from now on.

    Notes
    -----
    It shares all that the session has on the device; cuCtxDestroy frees nothing of it.
    """
    if ctxCreateParams is not None and ctxCreateParams.numExecAffinityParams:
        raise DeviceError(NOT_SUPPORTED, "contexts have no execution affinity here")
    device = ordinal_of(dev)
    if not 0 <= flags < 1 << _FLAG_BITS:
        raise DeviceError(INVALID_VALUE, f"contexts have no flags {flags:#x}")
    handle = next(_numbers)
    _created[handle] = device
    _stack.handles.append(handle)
    _settle()
    return (CUcontext(handle),)


@driver
def cuCtxDestroy(ctx: Any) -> Answer:
    """Take a context of cuCtxCreate away; from this thread's stack, too, if it is the current one.

    Notes
    -----
    What was allocated in it stays until it is freed, or the session ends.
    """
    initialized()
    handle = int(ctx or 0)
    if handle not in _created:
        raise DeviceError(INVALID_CONTEXT, f"{handle:#x} is no context of cuCtxCreate")
    if _stack.handles[-1:] == [handle]:
        _stack.handles.pop()
    del _created[handle]
    _stack.handles = [one for one in _stack.handles if one != handle]
    _settle()
    return ()


@driver
def cuCtxGetDevice() -> Answer:
    """The device of this thread's context."""
    in_context()
    return (CUdevice(thread.device),)


@driver
def cuCtxSynchronize() -> Answer:
    """Wait for all work of this process on the current device."""
    in_context()
    return core(devices.cudaDeviceSynchronize)()


@driver
def cuCtxGetFlags() -> Answer:
    """0: scheduling is Flyt's own."""
    in_context()
    return (0,)


@driver
def cuCtxGetApiVersion(ctx: Any) -> Answer:
    """The version of the API that contexts speak."""
    device_of(ctx)
    return (API_VERSION,)


@driver
def cuCtxGetId(ctx: Any) -> Answer:
    """A number of the context's own."""
    if not int(ctx or 0):
        in_context()
        return (thread.device + 1,)
    return (device_of(ctx) + 1,)


@driver
def cuCtxGetStreamPriorityRange() -> Answer:
    """The least and the greatest priority; greater is more negative."""
    in_context()
    return core(streams.cudaDeviceGetStreamPriorityRange)()
