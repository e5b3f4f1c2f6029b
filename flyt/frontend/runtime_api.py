# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime API with the conventions of ``cuda.bindings.runtime``.

Each function returns a tuple: a ``cudaError_t``, then the values; on failure the values are None.
Names, argument names and order are those of ``cuda.bindings.runtime``. Where CUDA's own answer to
a corner case was recorded, it decides (the oracle in ``tests/data``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

from cuda.bindings import runtime as cudart
from cuda.bindings.runtime import (
    cudaError_t,
    cudaMemcpyKind,
    cudaMemoryType,
    cudaPointerAttributes,
)

from flyt.errors import CommandTimeout, DeviceError, FlytError, ProtocolError
from flyt.frontend import current
from flyt.frontend.connection import Lost
from flyt.frontend.current import thread
from flyt.frontend.hostmem import check_destination, check_source, pointer, size_t
from flyt.frontend.pointers import Space

P = ParamSpec("P")
Answer = tuple[Any, ...]

SUCCESS = cudaError_t.cudaSuccess
INVALID_VALUE = 1
INVALID_MEMCPY_DIRECTION = 21
DEVICES_UNAVAILABLE = 46
UNREGISTERED_DEVICE = -2

HOST_ALLOC_FLAGS = 7
"""cudaHostAllocPortable | Mapped | WriteCombined: all there are."""

_FLAGS_SHOWN = {0: 2, 1: 2, 2: 2, 3: 2, 4: 6, 5: 7, 6: 7, 7: 7}
"""cudaHostGetFlags after cudaHostAlloc (read off an H200, driver 580: mapping is always on)."""

_ACCESSIBLE = frozenset({Space.DEVICE, Space.PINNED})

_SIDES: dict[int, tuple[bool, bool]] = {
    cudaMemcpyKind.cudaMemcpyHostToHost: (False, False),
    cudaMemcpyKind.cudaMemcpyHostToDevice: (True, False),
    cudaMemcpyKind.cudaMemcpyDeviceToHost: (False, True),
    cudaMemcpyKind.cudaMemcpyDeviceToDevice: (True, True),
    cudaMemcpyKind.cudaMemcpyDefault: (False, False),
}
"""Whether destination and source have to be device-accessible. With unified addressing a kind
asks for no more (all 45 pairs of places and kinds read off an H200: tests/data)."""


def _failed(code: int, text: str, values: int) -> Answer:
    thread.last_error = code
    thread.last_failure = text
    return (_error(code), *[None] * values)


def _error(code: int) -> Any:
    try:
        return cudaError_t(code)
    except ValueError:
        return cudaError_t.cudaErrorUnknown


def _cuda(values: int) -> Callable[[Callable[P, Answer]], Callable[P, Answer]]:
    """Turn a function that raises into one that answers as CUDA does.

    Parameters
    ----------
    values : int
        How many values follow the error code.
    """

    def wrap(function: Callable[P, Answer]) -> Callable[P, Answer]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Answer:
            try:
                return (SUCCESS, *function(*args, **kwargs))
            except (DeviceError, Lost) as exc:
                return _failed(exc.code, str(exc), values)
            except (ProtocolError, CommandTimeout, FlytError) as exc:
                return _failed(DEVICES_UNAVAILABLE, str(exc), values)

        return call

    return wrap


# --- errors ---


def cudaGetLastError() -> Answer:
    """The last error of this thread, which is reset to cudaSuccess; a lost session's stays."""
    code = _last()
    thread.last_error = 0
    return (_error(code),)


def cudaPeekAtLastError() -> Answer:
    """The last error of this thread; it stays."""
    return (_error(_last()),)


def _last() -> int:
    lost = current.lost()
    return lost.code if lost is not None else thread.last_error


def cudaGetErrorName(error: Any) -> Answer:
    """The name of an error code, as bytes."""
    return tuple(cudart.cudaGetErrorName(error))


def cudaGetErrorString(error: Any) -> Answer:
    """What an error code means, as bytes."""
    return tuple(cudart.cudaGetErrorString(error))


# --- devices ---


@_cuda(1)
def cudaGetDeviceCount() -> Answer:
    """How many devices the backend offers."""
    return (len(current.current().devices),)


@_cuda(1)
def cudaGetDevice() -> Answer:
    """The current device of this thread."""
    current.current()
    return (thread.device,)


@_cuda(0)
def cudaSetDevice(device: int) -> Answer:
    """Make a device this thread's current one; cudaErrorInvalidDevice if it does not exist."""
    thread.device = current.current().check_device(device)
    return ()


@_cuda(0)
def cudaDeviceSynchronize() -> Answer:
    """Wait for all work of this process on the current device, not for other processes'."""
    current.current().synchronize(thread.device)
    return ()


@_cuda(1)
def cudaRuntimeGetVersion() -> Answer:
    """The backend's CUDA runtime version."""
    return (int(current.current().welcome.snapshot["runtime_version"]),)


@_cuda(1)
def cudaDriverGetVersion() -> Answer:
    """The backend's CUDA driver version."""
    return (int(current.current().welcome.snapshot["driver_version"]),)


# --- memory ---


@_cuda(1)
def cudaMalloc(size: int) -> Answer:
    """Allocate device memory; the address is the GPU's own.

    Parameters
    ----------
    size : int
        Bytes; 0 answers the address 0 (oracle: malloc_0).

    Notes
    -----
    Unlike CUDA's, new memory is zero: it never shows another client's bytes.
    """
    count = size_t(size)
    session = current.current()
    session.connection.raise_deferred()
    return (session.allocate(count, thread.device) if count else 0,)


@_cuda(0)
def cudaFree(devPtr: Any) -> Answer:
    """Free device memory; 0 is allowed, interior or freed pointers are cudaErrorInvalidValue."""
    address = pointer(devPtr).address
    session = current.current()
    session.connection.raise_deferred()
    if address:
        session.free(address)
    return ()


@_cuda(1)
def cudaHostAlloc(size: int, flags: int) -> Answer:
    """Allocate pinned memory: page frames of the shared region, which the GPU's DMA reads itself.

    Parameters
    ----------
    size : int
        Bytes; 0 answers the address 0.
    flags : int
        cudaHostAllocPortable, Mapped and WriteCombined; all pinned memory is portable and mapped.

    Notes
    -----
    cudaErrorMemoryAllocation when the region is full. The memory is zeroed.
    """
    return _host_alloc(size, flags)


@_cuda(1)
def cudaMallocHost(size: int) -> Answer:
    """`cudaHostAlloc` with flags 0."""
    return _host_alloc(size, 0)


def _host_alloc(size: int, flags: int) -> Answer:
    count = size_t(size)
    session = current.current()
    session.connection.raise_deferred()
    if not 0 <= flags <= HOST_ALLOC_FLAGS:
        raise DeviceError(INVALID_VALUE, f"cudaHostAlloc knows no flags {flags:#x}")
    return (session.allocate_pinned(count, flags, thread.device) if count else 0,)


@_cuda(0)
def cudaFreeHost(ptr: Any) -> Answer:
    """Free pinned memory; 0 is allowed."""
    address = pointer(ptr).address
    session = current.current()
    session.connection.raise_deferred()
    if address:
        session.free_pinned(address)
    return ()


@_cuda(1)
def cudaHostGetDevicePointer(pHost: Any, flags: int) -> Answer:
    """The device's address of pinned memory: the same, since the window lies at equal addresses."""
    address = pointer(pHost).address
    place = current.current().place(address, 1)
    if flags or place.space != Space.PINNED:
        raise DeviceError(INVALID_VALUE, f"{address:#x} is no pinned memory, or flags are not 0")
    return (address,)


@_cuda(1)
def cudaHostGetFlags(pHost: Any) -> Answer:
    """The flags of pinned memory; interior pointers are allowed."""
    address = pointer(pHost).address
    place = current.current().place(address, 1)
    if place.allocation is None or place.space != Space.PINNED:
        raise DeviceError(INVALID_VALUE, f"{address:#x} is no pinned memory")
    return (_FLAGS_SHOWN[place.allocation.flags],)


@_cuda(2)
def cudaMemGetInfo() -> Answer:
    """Free and total bytes of the current device; a session's quota counts as its device."""
    return current.current().memory_info(thread.device)


@_cuda(1)
def cudaPointerGetAttributes(ptr: Any) -> Answer:
    """What an address is; answered from this process's own tables.

    Notes
    -----
    An unknown address is no error: type Unregistered, device -2 (oracle: attrs_host_unregistered).
    """
    address = pointer(ptr).address
    place = current.current().place(address, 1)
    attributes = cudaPointerAttributes()
    attributes.type = cudaMemoryType(int(place.space))
    known = place.allocation
    attributes.device = known.device if known is not None else UNREGISTERED_DEVICE
    attributes.devicePointer = address if known is not None else 0
    attributes.hostPointer = address if place.space != Space.DEVICE else 0
    return (attributes,)


# --- copies ---


@_cuda(0)
def cudaMemcpy(dst: Any, src: Any, count: int, kind: Any) -> Answer:
    """Copy ``count`` bytes.

    Parameters
    ----------
    dst, src : int or object with the buffer protocol
        Device or host addresses; ``bytes`` and read-only arrays as sources only.
    count : int
        Bytes; 0 is success before anything is looked at.
    kind : cudaMemcpyKind

    Notes
    -----
    On the legacy default stream. From pageable memory to the device it returns when the source
    may be changed; to the host, when the last byte is in place. cudaErrorInvalidValue when a range
    leaves its allocation: then no byte has moved.
    """
    size = size_t(count)
    to, origin = pointer(dst), pointer(src)
    session = current.current()
    session.connection.raise_deferred()
    if not size:
        return ()
    sides = _SIDES.get(int(kind))
    if sides is None:
        raise DeviceError(INVALID_MEMCPY_DIRECTION, f"{kind!r} is no cudaMemcpyKind")
    if not to.address or not origin.address:
        raise DeviceError(INVALID_VALUE, "source or destination is NULL")
    check_source(origin, size)
    check_destination(to, size)
    destination, source = session.place(to.address, size), session.place(origin.address, size)
    for needs_device, place, name in zip(
        sides, (destination, source), ("destination", "source"), strict=True
    ):
        if needs_device and place.space not in _ACCESSIBLE:
            raise DeviceError(
                INVALID_VALUE, f"the {name} {place.address:#x} is pageable memory, not the device's"
            )
    session.transfers.copy(destination, source, size)
    return ()


@_cuda(0)
def cudaMemset(devPtr: Any, value: int, count: int) -> Answer:
    """Fill ``count`` bytes of device or pinned memory with the low byte of ``value``."""
    size = size_t(count)
    address = pointer(devPtr).address
    session = current.current()
    session.connection.raise_deferred()
    if not size:
        return ()
    place = session.place(address, size)
    if place.space not in _ACCESSIBLE:
        raise DeviceError(INVALID_VALUE, f"{address:#x} is not memory that the device can fill")
    session.transfers.fill(place, value & 0xFF, size)
    return ()
