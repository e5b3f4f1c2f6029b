# SPDX-License-Identifier: Apache-2.0
"""The allocators and the export calls of the matrix, as the driver API has them.

The runtime's names (cudaMalloc) are for the same things: it calls these. An allocation lives until
its process ends.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cu

from flyt.ipc.cuda_driver import _call as call, _location
from flyt.ipc.study.gpu import HANDLE_BYTES, Gpu, close_legacy, export_legacy, open_legacy

SIZE = 2 << 20
"""Of each allocation: the granularity of virtual memory management on today's GPUs."""

PATTERN = 0x5A

POSIX = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
NONE = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
PINNED = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED


@dataclasses.dataclass(slots=True)
class Allocation:
    """Memory of one allocator.

    Attributes
    ----------
    address : int
    pool : object, optional
        The memory pool that it is from.
    on_host : bool
        Whether the CPU fills it.
    keep : object, optional
        Lives as long.
    """

    address: int
    pool: Any = None
    on_host: bool = False
    keep: Any = None

    def fill(self, gpu: Gpu) -> None:
        if self.on_host:
            ctypes.memset(self.address, PATTERN, SIZE)
        else:
            gpu.fill(self.address, PATTERN, SIZE)


def _malloc() -> Allocation:
    return Allocation(int(call(cu.cuMemAlloc, SIZE)))


def _malloc_async() -> Allocation:
    address = int(call(cu.cuMemAllocAsync, SIZE, cu.CUstream(0)))
    return Allocation(address, pool=call(cu.cuDeviceGetDefaultMemPool, call(cu.cuCtxGetDevice)))


def _pool(handles: Any) -> Callable[[], Allocation]:
    def allocate() -> Allocation:
        properties = cu.CUmemPoolProps()
        properties.allocType = PINNED
        properties.handleTypes = handles
        properties.location = _location(0)
        pool = call(cu.cuMemPoolCreate, properties)
        address = int(call(cu.cuMemAllocFromPoolAsync, SIZE, pool, cu.CUstream(0)))
        return Allocation(address, pool=pool)

    return allocate


def _virtual(handles: Any) -> Callable[[], Allocation]:
    def allocate() -> Allocation:
        properties = cu.CUmemAllocationProp()
        properties.type = PINNED
        properties.requestedHandleTypes = handles
        properties.location = _location(0)
        return Allocation(_map(call(cu.cuMemCreate, SIZE, properties, 0)))

    return allocate


def _map(handle: Any) -> int:
    address = call(cu.cuMemAddressReserve, SIZE, SIZE, cu.CUdeviceptr(0), 0)
    call(cu.cuMemMap, address, SIZE, 0, handle, 0)
    access = cu.CUmemAccessDesc()
    access.location = _location(0)
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call(cu.cuMemSetAccess, address, SIZE, [access], 1)
    return int(address)


def _managed() -> Allocation:
    attach = cu.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value
    return Allocation(int(call(cu.cuMemAllocManaged, SIZE, attach)))


def _pinned() -> Allocation:
    return Allocation(int(call(cu.cuMemHostAlloc, SIZE, 0)), on_host=True)


def _registered() -> Allocation:
    plain = _pageable()
    call(cu.cuMemHostRegister, plain.address, SIZE, 0)
    return plain


def _pageable() -> Allocation:
    pages = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    return Allocation(address, on_host=True, keep=pages)


ALLOCATORS: dict[str, Callable[[], Allocation]] = {
    "cudaMalloc": _malloc,
    "cudaMallocAsync, default pool": _malloc_async,
    "cudaMallocFromPoolAsync, no handle type": _pool(NONE),
    "cudaMallocFromPoolAsync, POSIX handle type": _pool(POSIX),
    "cuMemCreate, no handle type": _virtual(NONE),
    "cuMemCreate, POSIX handle type": _virtual(POSIX),
    "cudaMallocManaged": _managed,
    "cudaHostAlloc": _pinned,
    "cudaHostRegister": _registered,
    "malloc": _pageable,
}
"""By the name that people know, cuMem's where the runtime has none."""


@dataclasses.dataclass(slots=True)
class Exported:
    """What crosses to another process: bytes and descriptors, which stay the exporter's."""

    octets: bytes = b""
    fds: tuple[int, ...] = ()


def _export_legacy(memory: Allocation) -> Exported:
    return Exported(export_legacy(memory.address))


def _export_handle(memory: Allocation) -> Exported:
    handle = call(cu.cuMemRetainAllocationHandle, memory.address)
    return Exported(fds=(int(call(cu.cuMemExportToShareableHandle, handle, POSIX, 0)),))


def _export_dma_buf(memory: Allocation) -> Exported:
    kind = cu.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    fd = call(cu.cuMemGetHandleForAddressRange, cu.CUdeviceptr(memory.address), SIZE, kind, 0)
    return Exported(fds=(int(fd),))


def _export_pool(memory: Allocation) -> Exported:
    fds: tuple[int, ...] = ()
    if memory.pool is not None:
        fds = (int(call(cu.cuMemPoolExportToShareableHandle, memory.pool, POSIX, 0)),)
    data = call(cu.cuMemPoolExportPointer, cu.CUdeviceptr(memory.address))
    return Exported(ctypes.string_at(data.getPtr(), HANDLE_BYTES), fds)


def _import_legacy(exported: Exported, gpu: Gpu) -> bytes:
    address = open_legacy(exported.octets)
    try:
        return gpu.read(address, SIZE)
    finally:
        close_legacy(address)


def _import_handle(exported: Exported, gpu: Gpu) -> bytes:
    handle = call(cu.cuMemImportFromShareableHandle, exported.fds[0], POSIX)
    return gpu.read(_map(handle), SIZE)


def _import_pool(exported: Exported, gpu: Gpu) -> bytes:
    pool = call(cu.cuMemPoolImportFromShareableHandle, exported.fds[0], POSIX, 0)
    access = cu.CUmemAccessDesc()
    access.location = _location(0)
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call(cu.cuMemPoolSetAccess, pool, [access], 1)
    data = cu.CUmemPoolPtrExportData()
    ctypes.memmove(data.getPtr(), exported.octets, HANDLE_BYTES)
    return gpu.read(int(call(cu.cuMemPoolImportPointer, pool, data)), SIZE)


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """A call that exports, and what another process does with what it gave."""

    export: Callable[[Allocation], Exported]
    receive: Callable[[Exported, Gpu], bytes]


WAYS = {
    "cudaIpcGetMemHandle": Way(_export_legacy, _import_legacy),
    "cuMemExportToShareableHandle": Way(_export_handle, _import_handle),
    "cuMemGetHandleForAddressRange, dma-buf": Way(_export_dma_buf, _import_handle),
    "cuMemPoolExportToShareableHandle": Way(_export_pool, _import_pool),
}
"""By the name of the call. A dma-buf is for other devices' drivers; whether CUDA takes it back is
tried as if it were memory of cuMemCreate."""
