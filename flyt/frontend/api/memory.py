# SPDX-License-Identifier: Apache-2.0
"""Device memory and pinned memory: allocate, free, register, ask."""

from __future__ import annotations

from typing import Any

from cuda.bindings.runtime import cudaMemoryType, cudaPointerAttributes

from flyt.errors import DeviceError
from flyt.frontend import current, pinning
from flyt.frontend.api.convention import INVALID_VALUE, Answer, cuda
from flyt.frontend.current import thread
from flyt.frontend.hostmem import c_uint, check_source, pointer, size_t
from flyt.frontend.pointers import Allocation, Space
from flyt.shm.memory import is_mapped

UNREGISTERED_DEVICE = -2
NOT_SUPPORTED = 801
ADDRESS_LIMIT = 1 << 64

HOST_ALLOC_FLAGS = 7
"""cudaHostAllocPortable | Mapped | WriteCombined: all there are."""

_FLAGS_SHOWN = {0: 2, 1: 2, 2: 2, 3: 2, 4: 6, 5: 7, 6: 7, 7: 7}
"""cudaHostGetFlags after cudaHostAlloc (read off an H200, driver 580: mapping is always on)."""

HOST_REGISTER_FLAGS = 1 | 2 | 8
"""cudaHostRegisterPortable | Mapped | ReadOnly. IoMemory (4) is for memory of other devices, and
CUDA refuses it for ordinary memory (recorded: hostRegister_flags)."""

_REGISTERED_FLAGS_SHOWN = 2
"""cudaHostGetFlags after cudaHostRegister (recorded): mapping is always on."""


@cuda(1)
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


@cuda(0)
def cudaFree(devPtr: Any) -> Answer:
    """Free device memory; 0 is allowed, interior or freed pointers are cudaErrorInvalidValue."""
    address = pointer(devPtr).address
    session = current.current()
    session.connection.raise_deferred()
    if address:
        session.free(address)
    return ()


@cuda(1)
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
    return _host_alloc(size, c_uint(flags))


@cuda(1)
def cudaMallocHost(size: int) -> Answer:
    """`cudaHostAlloc` with flags 0."""
    return _host_alloc(size, 0)


def _host_alloc(size: int, flags: int) -> Answer:
    count = size_t(size)
    session = current.current()
    session.connection.raise_deferred()
    if flags > HOST_ALLOC_FLAGS:
        raise DeviceError(INVALID_VALUE, f"cudaHostAlloc knows no flags {flags:#x}")
    return (pinning.allocate(session, count, flags, thread.device).address if count else 0,)


@cuda(0)
def cudaFreeHost(ptr: Any) -> Answer:
    """Free pinned memory; 0 is allowed."""
    address = pointer(ptr).address
    session = current.current()
    session.connection.raise_deferred()
    if address:
        session.free_pinned(address)
    return ()


@cuda(0)
def cudaHostRegister(ptr: Any, size: int, flags: int) -> Answer:
    """Treat memory of the caller's own as pinned; the GPU's DMA can't read it where it is.

    Parameters
    ----------
    ptr : int or object with the buffer protocol
    size : int
        Bytes.
    flags : int
        cudaHostRegisterPortable, Mapped and ReadOnly; they change nothing.

    Notes
    -----
    Kinds, bounds and attributes are those of pinned memory, but copies are staged, as from
    pageable memory: `cudaHostAlloc` spares that. It stays the caller's: it must not be unmapped
    before `cudaHostUnregister`.
    """
    memory, count, flags = pointer(ptr), size_t(size), c_uint(flags)
    session = current.current()
    session.connection.raise_deferred()
    if not memory.address or not count or memory.address + count > ADDRESS_LIMIT:
        raise DeviceError(INVALID_VALUE, f"{count} bytes at {memory.address:#x} are no memory")
    if flags & ~HOST_REGISTER_FLAGS:
        raise DeviceError(INVALID_VALUE, f"cudaHostRegister can't do flags {flags:#x} here")
    check_source(memory, count)
    if not is_mapped(memory.address, count):
        raise DeviceError(
            INVALID_VALUE, f"not all of the {count} bytes at {memory.address:#x} are mapped"
        )
    block = Allocation(
        Space.PINNED, memory.address, count, thread.device, flags=flags, registered=True
    )
    with session.connection.lock:
        session.pointers.register(block)
    return ()


@cuda(0)
def cudaHostUnregister(ptr: Any) -> Answer:
    """End a registration; only the address that was registered will do."""
    address = pointer(ptr).address
    session = current.current()
    session.connection.raise_deferred()
    if not address:
        raise DeviceError(INVALID_VALUE, "NULL is no registered memory")
    with session.connection.lock:
        session.pointers.unregister(address)
    return ()


@cuda(1)
def cudaHostGetDevicePointer(pHost: Any, flags: int) -> Answer:
    """The device's address of pinned memory: the same, since the window lies at equal addresses.

    Notes
    -----
    Registered memory has none, and that is a deviation from CUDA: only this process maps it, so
    the GPU can't reach it, and the answer is cudaErrorNotSupported.
    """
    address, flags = pointer(pHost).address, c_uint(flags)
    [place] = current.current().places(1, address)
    if flags or place.allocation is None or place.space != Space.PINNED:
        raise DeviceError(INVALID_VALUE, f"{address:#x} is no pinned memory, or flags are not 0")
    if place.allocation.registered:
        raise DeviceError(
            NOT_SUPPORTED,
            f"the GPU can't reach registered memory ({address:#x}): use cudaHostAlloc",
        )
    return (address,)


@cuda(1)
def cudaHostGetFlags(pHost: Any) -> Answer:
    """The flags of pinned memory; interior pointers are allowed."""
    address = pointer(pHost).address
    [place] = current.current().places(1, address)
    if place.allocation is None or place.space != Space.PINNED:
        raise DeviceError(INVALID_VALUE, f"{address:#x} is no pinned memory")
    if place.allocation.registered:
        return (_REGISTERED_FLAGS_SHOWN,)
    return (_FLAGS_SHOWN[place.allocation.flags],)


@cuda(2)
def cudaMemGetInfo() -> Answer:
    """Free and total bytes of the current device; a session's quota counts as its device."""
    return current.current().memory_info(thread.device)


@cuda(1)
def cudaPointerGetAttributes(ptr: Any) -> Answer:
    """What an address is; answered from this process's own tables.

    Notes
    -----
    An unknown address is no error: type Unregistered, device -2 (oracle: attrs_host_unregistered).
    The ``devicePointer`` of registered memory is its address, as CUDA's is: copies and memsets
    take it, but kernels can't use it (`cudaHostGetDevicePointer` says so).
    """
    address = pointer(ptr).address
    [place] = current.current().places(1, address)
    attributes = cudaPointerAttributes()
    attributes.type = cudaMemoryType(int(place.space))
    known = place.allocation
    attributes.device = known.device if known is not None else UNREGISTERED_DEVICE
    attributes.devicePointer = address if known is not None else 0
    attributes.hostPointer = address if place.space != Space.DEVICE else 0
    return (attributes,)
