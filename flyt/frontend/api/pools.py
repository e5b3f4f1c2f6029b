# SPDX-License-Identifier: Apache-2.0
"""Memory in the order of streams, and the pools that it comes from."""

from __future__ import annotations

import operator
from typing import Any

from cuda.bindings.driver import cuuint64_t
from cuda.bindings.runtime import (
    cudaMemAllocationHandleType,
    cudaMemAllocationType,
    cudaMemLocationType,
    cudaMemPool_t,
    cudaMemPoolAttr,
)

from flyt.errors import DeviceError
from flyt.frontend import current
from flyt.frontend.api.convention import INVALID_VALUE, Answer, cuda
from flyt.frontend.api.devices import c_int
from flyt.frontend.api.handles import number_of, stream_of
from flyt.frontend.hostmem import pointer, size_t
from flyt.frontend.session import Session

NOT_SUPPORTED = 801

_INT_ATTRIBUTES = range(1, 4)
"""cudaMemPoolReuse*: C ints; the others are cuuint64_t."""

_ASKED = range(1, 9)
"""What the backend knows of a pool; more is told from this side's table."""

_MOST = (1 << 64) - 1


@cuda(1)
def cudaMallocAsync(size: int, hStream: Any) -> Answer:
    """Allocate device memory in the order of a stream, from its device's current pool.

    Parameters
    ----------
    size : int
        Bytes; 0 answers the address 0.
    hStream : cudaStream_t or int

    Notes
    -----
    The address comes at once; other streams may use the memory once they are ordered behind this
    one. It is zero, as all new memory.
    """
    count = size_t(size)
    session = current.current()
    session.connection.raise_deferred()
    stream = stream_of(session, hStream)
    pool = session.pools.current(stream.device)
    return (session.pools.allocate(count, pool, stream) if count else 0,)


@cuda(1)
def cudaMallocFromPoolAsync(size: int, memPool: Any, stream: Any) -> Answer:
    """`cudaMallocAsync` from a pool of the caller's choice."""
    count = size_t(size)
    session = current.current()
    session.connection.raise_deferred()
    queue, pool = stream_of(session, stream), session.pools.get(number_of(memPool))
    return (session.pools.allocate(count, pool.handle, queue) if count else 0,)


@cuda(0)
def cudaFreeAsync(devPtr: Any, hStream: Any) -> Answer:
    """Free memory of `cudaMallocAsync` in the order of a stream; returns at once.

    Notes
    -----
    cudaErrorInvalidValue for memory of cudaMalloc, for NULL, and for what was freed.
    """
    address = pointer(devPtr).address
    session = current.current()
    session.connection.raise_deferred()
    session.pools.free(address, stream_of(session, hStream))
    return ()


@cuda(1)
def cudaMemPoolCreate(poolProps: Any) -> Answer:
    """A new pool of a device.

    Parameters
    ----------
    poolProps : cudaMemPoolProps
        ``allocType`` pinned, ``location`` a device; ``maxSize`` bounds what its blocks take.

    Notes
    -----
    cudaErrorNotSupported for managed memory, memory of the host, and handles that other processes
    could open.
    """
    session = current.current()
    session.connection.raise_deferred()
    kind, location = int(poolProps.allocType), poolProps.location
    if kind == int(cudaMemAllocationType.cudaMemAllocationTypeManaged) or (
        int(location.type) > int(cudaMemLocationType.cudaMemLocationTypeDevice)
    ):
        raise DeviceError(NOT_SUPPORTED, "Flyt's pools have device memory alone")
    if (kind, int(location.type)) != (1, 1):
        raise DeviceError(INVALID_VALUE, "a pool has allocType and location.type")
    if int(poolProps.handleTypes):
        raise DeviceError(NOT_SUPPORTED, "pools can't be exported; cudaIpcGetMemHandle is there")
    if not 0 <= location.id < len(session.devices):
        raise DeviceError(INVALID_VALUE, f"there is no device {location.id}")
    return (cudaMemPool_t(session.pools.create(location.id, int(poolProps.maxSize))),)


@cuda(0)
def cudaMemPoolDestroy(memPool: Any) -> Answer:
    """Destroy a pool; what was allocated from it stays until it is freed."""
    session = current.current()
    session.connection.raise_deferred()
    session.pools.destroy(number_of(memPool))
    return ()


@cuda(0)
def cudaMemPoolTrimTo(memPool: Any, minBytesToKeep: int) -> Answer:
    """Give memory back that the pool keeps and does not use."""
    session = current.current()
    session.connection.raise_deferred()
    session.pools.trim(number_of(memPool), size_t(minBytesToKeep))
    return ()


@cuda(1)
def cudaMemPoolGetAttribute(memPool: Any, attr: Any) -> Answer:
    """An attribute of a pool: an int, or for sizes a ``cuuint64_t``."""
    session = current.current()
    session.connection.raise_deferred()
    wanted = int(attr)
    if wanted not in _ASKED:
        return (_told(session, number_of(memPool), attr),)
    value = session.pools.attribute(number_of(memPool), wanted)
    return (value if wanted in _INT_ATTRIBUTES else cuuint64_t(value),)


def _told(session: Session, handle: int, attr: Any) -> Any:
    pool = session.pools.get(handle)
    table = {
        "cudaMemPoolAttrAllocationType": int(cudaMemAllocationType.cudaMemAllocationTypePinned),
        "cudaMemPoolAttrExportHandleTypes": int(cudaMemAllocationHandleType.cudaMemHandleTypeNone),
        "cudaMemPoolAttrLocationId": pool.device,
        "cudaMemPoolAttrLocationType": int(cudaMemLocationType.cudaMemLocationTypeDevice),
        "cudaMemPoolAttrMaxPoolSize": cuuint64_t(pool.limit),
        "cudaMemPoolAttrHwDecompressEnabled": 0,
    }
    try:
        return table[cudaMemPoolAttr(int(attr)).name]
    except (ValueError, KeyError):
        raise DeviceError(INVALID_VALUE, f"a pool has no attribute {attr!r}") from None


@cuda(0)
def cudaMemPoolSetAttribute(memPool: Any, attr: Any, value: Any) -> Answer:
    """Set an attribute; the high-water marks can be set to 0 only.

    Notes
    -----
    In a session with a quota a release threshold is kept, but has no effect.
    """
    session = current.current()
    session.connection.raise_deferred()
    number = int(value) if isinstance(value, cuuint64_t) else operator.index(value)
    if not 0 <= number <= _MOST:
        raise DeviceError(INVALID_VALUE, f"{number} is no value of an attribute")
    session.pools.set_attribute(number_of(memPool), int(attr), number)
    return ()


@cuda(1)
def cudaDeviceGetDefaultMemPool(device: int) -> Answer:
    """The pool that a device has from the start."""
    return (cudaMemPool_t(current.current().pools.default(c_int(device))),)


@cuda(1)
def cudaDeviceGetMemPool(device: int) -> Answer:
    """The pool that `cudaMallocAsync` takes from; the default one at first."""
    return (cudaMemPool_t(current.current().pools.current(c_int(device))),)


@cuda(0)
def cudaDeviceSetMemPool(device: int, memPool: Any) -> Answer:
    """Let `cudaMallocAsync` on a device take from one of its pools."""
    current.current().pools.make_current(c_int(device), number_of(memPool))
    return ()
