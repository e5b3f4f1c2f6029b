# SPDX-License-Identifier: Apache-2.0
"""Pools, stream-ordered memory, memory and events of other processes, host functions, rows."""

from __future__ import annotations

from typing import Any

from cuda.bindings.driver import (
    CUdeviceptr,
    CUevent,
    CUipcEventHandle,
    CUipcMemHandle,
    CUmemoryPool,
)

from flyt.driver.contexts import device_of, in_context, ordinal_of
from flyt.driver.convention import INVALID_VALUE, Answer, core, driver
from flyt.errors import DeviceError
from flyt.frontend.api import callbacks, copies, pools, rows, sharing
from flyt.frontend.hostmem import size_t

# --- pools ---


def _some(bytesize: int) -> None:
    if not size_t(bytesize):
        raise DeviceError(INVALID_VALUE, "an allocation of 0 bytes")


@driver
def cuMemAllocAsync(bytesize: int, hStream: Any) -> Answer:
    """Allocate in the order of a stream, from its device's current pool."""
    in_context()
    _some(bytesize)
    return (CUdeviceptr(core(pools.cudaMallocAsync)(bytesize, hStream)[0]),)


@driver
def cuMemAllocFromPoolAsync(bytesize: int, pool: Any, hStream: Any) -> Answer:
    """`cuMemAllocAsync` from a pool of the caller's choice."""
    in_context()
    _some(bytesize)
    return (CUdeviceptr(core(pools.cudaMallocFromPoolAsync)(bytesize, pool, hStream)[0]),)


@driver
def cuMemFreeAsync(dptr: Any, hStream: Any) -> Answer:
    """Free in the order of a stream."""
    in_context()
    return core(pools.cudaFreeAsync)(dptr, hStream)


@driver
def cuMemPoolCreate(poolProps: Any) -> Answer:
    """A new pool of a device."""
    in_context()
    return (CUmemoryPool(int(core(pools.cudaMemPoolCreate)(poolProps)[0])),)


@driver
def cuMemPoolDestroy(pool: Any) -> Answer:
    """Destroy a pool; what was allocated from it stays until it is freed."""
    in_context()
    return core(pools.cudaMemPoolDestroy)(pool)


@driver
def cuMemPoolTrimTo(pool: Any, minBytesToKeep: int) -> Answer:
    """Give memory back that the pool keeps and does not use."""
    in_context()
    return core(pools.cudaMemPoolTrimTo)(pool, minBytesToKeep)


@driver
def cuMemPoolGetAttribute(pool: Any, attr: Any) -> Answer:
    """An attribute of a pool."""
    in_context()
    return core(pools.cudaMemPoolGetAttribute)(pool, attr)


@driver
def cuMemPoolSetAttribute(pool: Any, attr: Any, value: Any) -> Answer:
    """Set an attribute of a pool."""
    in_context()
    return core(pools.cudaMemPoolSetAttribute)(pool, attr, value)


@driver
def cuDeviceGetDefaultMemPool(dev: Any) -> Answer:
    """The pool that a device has from the start."""
    pool = core(pools.cudaDeviceGetDefaultMemPool)(ordinal_of(dev))[0]
    return (CUmemoryPool(int(pool)),)


@driver
def cuDeviceGetMemPool(dev: Any) -> Answer:
    """The pool that `cuMemAllocAsync` takes from."""
    return (CUmemoryPool(int(core(pools.cudaDeviceGetMemPool)(ordinal_of(dev))[0])),)


@driver
def cuDeviceSetMemPool(dev: Any, pool: Any) -> Answer:
    """Let `cuMemAllocAsync` on a device take from one of its pools."""
    return core(pools.cudaDeviceSetMemPool)(ordinal_of(dev), pool)


# --- between processes ---


@driver
def cuIpcGetMemHandle(dptr: Any) -> Answer:
    """A handle of device memory for other processes."""
    in_context()
    made = core(sharing.cudaIpcGetMemHandle)(dptr)[0]
    return (sharing.struct(CUipcMemHandle, sharing.content(made)),)


@driver
def cuIpcOpenMemHandle(handle: Any, Flags: int) -> Answer:
    """The memory behind another process's handle, at the address it has there."""
    in_context()
    return (CUdeviceptr(core(sharing.cudaIpcOpenMemHandle)(handle, Flags)[0]),)


@driver
def cuIpcCloseMemHandle(dptr: Any) -> Answer:
    """Close memory that was opened."""
    in_context()
    return core(sharing.cudaIpcCloseMemHandle)(dptr)


@driver
def cuIpcGetEventHandle(event: Any) -> Answer:
    """A handle of an event for other processes."""
    in_context()
    made = core(sharing.cudaIpcGetEventHandle)(event)[0]
    return (sharing.struct(CUipcEventHandle, sharing.content(made)),)


@driver
def cuIpcOpenEventHandle(handle: Any) -> Answer:
    """The event behind another process's handle."""
    in_context()
    return (CUevent(int(core(sharing.cudaIpcOpenEventHandle)(handle)[0])),)


# --- host functions ---


@driver
def cuLaunchHostFunc(hStream: Any, fn: Any, userData: Any) -> Answer:
    """Call a C function of this process when a stream gets there."""
    in_context()
    return core(callbacks.cudaLaunchHostFunc)(hStream, fn, userData)


@driver
def cuStreamAddCallback(hStream: Any, callback: Any, userData: Any, flags: int) -> Answer:
    """`cuLaunchHostFunc` that gets the stream and its error."""
    in_context()
    return core(callbacks.cudaStreamAddCallback)(hStream, callback, userData, flags)


# --- copies between contexts, rows ---


@driver
def cuMemcpyPeer(
    dstDevice: Any, dstContext: Any, srcDevice: Any, srcContext: Any, ByteCount: int
) -> Answer:
    """Copy between the devices of two contexts."""
    in_context()
    to, origin = device_of(dstContext), device_of(srcContext)
    return core(copies.cudaMemcpyPeer)(dstDevice, to, srcDevice, origin, ByteCount)


@driver
def cuMemcpyPeerAsync(
    dstDevice: Any, dstContext: Any, srcDevice: Any, srcContext: Any, ByteCount: int, hStream: Any
) -> Answer:
    """`cuMemcpyPeer` in the order of a stream."""
    in_context()
    to, origin = device_of(dstContext), device_of(srcContext)
    return core(copies.cudaMemcpyPeerAsync)(dstDevice, to, srcDevice, origin, ByteCount, hStream)


@driver
def cuMemAllocPitch(WidthInBytes: int, Height: int, ElementSizeBytes: int) -> Answer:
    """Allocate rows that are aligned; address and pitch."""
    in_context()
    if ElementSizeBytes not in (4, 8, 16) or not WidthInBytes or not Height:
        raise DeviceError(INVALID_VALUE, "rows want bytes, and elements of 4, 8 or 16 bytes")
    address, pitch = core(rows.cudaMallocPitch)(WidthInBytes, Height)
    return CUdeviceptr(address), pitch


@driver
def cuMemsetD2D8(dstDevice: Any, dstPitch: int, uc: int, Width: int, Height: int) -> Answer:
    """Fill rows of bytes."""
    in_context()
    return core(rows.cudaMemset2D)(dstDevice, dstPitch, uc, Width, Height)


@driver
def cuMemsetD2D8Async(
    dstDevice: Any, dstPitch: int, uc: int, Width: int, Height: int, hStream: Any
) -> Answer:
    """`cuMemsetD2D8` in the order of a stream."""
    in_context()
    return core(rows.cudaMemset2DAsync)(dstDevice, dstPitch, uc, Width, Height, hStream)
