# SPDX-License-Identifier: Apache-2.0
"""Device memory, pinned memory, copies, fills, and what a pointer is."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings.driver import CUdeviceptr, CUmemorytype, CUpointer_attribute
from cuda.bindings.runtime import cudaMemcpyKind

from flyt.driver.contexts import handle_of, in_context
from flyt.driver.convention import INVALID_VALUE, NOT_FOUND, Answer, core, driver, initialized
from flyt.errors import DeviceError
from flyt.frontend.api import copies, memory
from flyt.frontend.hostmem import pointer, size_t
from flyt.frontend.pointers import Allocation, Space

LEGACY = 0

_KIND = cudaMemcpyKind


# --- allocation ---


@driver
def cuMemAlloc(bytesize: int) -> Answer:
    """Allocate device memory; 0 bytes are CUDA_ERROR_INVALID_VALUE here."""
    in_context()
    if not size_t(bytesize):
        raise DeviceError(INVALID_VALUE, "cuMemAlloc of 0 bytes")
    return (CUdeviceptr(core(memory.cudaMalloc)(bytesize)[0]),)


@driver
def cuMemFree(dptr: Any) -> Answer:
    """Free device memory."""
    in_context()
    return core(memory.cudaFree)(dptr)


@driver
def cuMemGetInfo() -> Answer:
    """Free and total bytes; a session's quota counts as its device."""
    in_context()
    return core(memory.cudaMemGetInfo)()


@driver
def cuMemHostAlloc(bytesize: int, Flags: int) -> Answer:
    """Allocate pinned memory; flags are cudaHostAlloc's. 0 bytes answer the address 0 (recorded:
    host_alloc_0)."""
    in_context()
    return core(memory.cudaHostAlloc)(bytesize, Flags)


@driver
def cuMemAllocHost(bytesize: int) -> Answer:
    """`cuMemHostAlloc` with flags 0."""
    in_context()
    return core(memory.cudaMallocHost)(bytesize)


@driver
def cuMemFreeHost(p: Any) -> Answer:
    """Free pinned memory."""
    in_context()
    return core(memory.cudaFreeHost)(p)


@driver
def cuMemHostRegister(p: Any, bytesize: int, Flags: int) -> Answer:
    """See flyt.cudaHostRegister: copies of it are staged."""
    in_context()
    return core(memory.cudaHostRegister)(p, bytesize, Flags)


@driver
def cuMemHostUnregister(p: Any) -> Answer:
    """End a registration."""
    in_context()
    return core(memory.cudaHostUnregister)(p)


@driver
def cuMemHostGetDevicePointer(p: Any, Flags: int) -> Answer:
    """The same address; registered memory has none (CUDA_ERROR_NOT_SUPPORTED)."""
    in_context()
    return (CUdeviceptr(core(memory.cudaHostGetDevicePointer)(p, Flags)[0]),)


@driver
def cuMemHostGetFlags(p: Any) -> Answer:
    """The flags of pinned memory."""
    in_context()
    return core(memory.cudaHostGetFlags)(p)


# --- copies ---


@driver
def cuMemcpy(dst: Any, src: Any, ByteCount: int) -> Answer:
    """Copy between any two places."""
    in_context()
    return core(copies.cudaMemcpy)(dst, src, ByteCount, _KIND.cudaMemcpyDefault)


@driver
def cuMemcpyAsync(dst: Any, src: Any, ByteCount: int, hStream: Any) -> Answer:
    """`cuMemcpy` in the order of a stream."""
    in_context()
    return core(copies.cudaMemcpyAsync)(dst, src, ByteCount, _KIND.cudaMemcpyDefault, hStream)


@driver
def cuMemcpyHtoD(dstDevice: Any, srcHost: Any, ByteCount: int) -> Answer:
    """To the device; the host's memory may be changed on return."""
    in_context()
    return core(copies.cudaMemcpy)(dstDevice, srcHost, ByteCount, _KIND.cudaMemcpyHostToDevice)


@driver
def cuMemcpyHtoDAsync(dstDevice: Any, srcHost: Any, ByteCount: int, hStream: Any) -> Answer:
    """`cuMemcpyHtoD` in the order of a stream."""
    in_context()
    kind = _KIND.cudaMemcpyHostToDevice
    return core(copies.cudaMemcpyAsync)(dstDevice, srcHost, ByteCount, kind, hStream)


@driver
def cuMemcpyDtoH(dstHost: Any, srcDevice: Any, ByteCount: int) -> Answer:
    """To the host; complete on return."""
    in_context()
    return core(copies.cudaMemcpy)(dstHost, srcDevice, ByteCount, _KIND.cudaMemcpyDeviceToHost)


@driver
def cuMemcpyDtoHAsync(dstHost: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> Answer:
    """`cuMemcpyDtoH` in the order of a stream; to pageable memory it is complete on return."""
    in_context()
    kind = _KIND.cudaMemcpyDeviceToHost
    return core(copies.cudaMemcpyAsync)(dstHost, srcDevice, ByteCount, kind, hStream)


@driver
def cuMemcpyDtoD(dstDevice: Any, srcDevice: Any, ByteCount: int) -> Answer:
    """On the device."""
    in_context()
    return core(copies.cudaMemcpy)(dstDevice, srcDevice, ByteCount, _KIND.cudaMemcpyDeviceToDevice)


@driver
def cuMemcpyDtoDAsync(dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> Answer:
    """`cuMemcpyDtoD` in the order of a stream."""
    in_context()
    kind = _KIND.cudaMemcpyDeviceToDevice
    return core(copies.cudaMemcpyAsync)(dstDevice, srcDevice, ByteCount, kind, hStream)


# --- fills ---


def _fill(address: Any, value: int, count: int, stream: Any, width: int) -> Answer:
    in_context()
    size = size_t(count) * width
    if pointer(address).address % width:
        raise DeviceError(INVALID_VALUE, f"the address of a fill of {width} bytes is not aligned")
    pattern = operator.index(value) % (1 << 8 * width)
    word = pattern.to_bytes(width, "little")
    if word == word[:1] * width:
        return core(copies.cudaMemsetAsync)(address, word[0], size, stream)
    # A pattern is sent as bytes: it is the rare case, and right.
    kind = _KIND.cudaMemcpyHostToDevice
    return core(copies.cudaMemcpyAsync)(address, word * size_t(count), size, kind, stream)


@driver
def cuMemsetD8(dstDevice: Any, uc: int, N: int) -> Answer:
    """Fill bytes; asynchronous for device memory."""
    return _fill(dstDevice, uc, N, LEGACY, 1)


@driver
def cuMemsetD8Async(dstDevice: Any, uc: int, N: int, hStream: Any) -> Answer:
    """`cuMemsetD8` in the order of a stream."""
    return _fill(dstDevice, uc, N, hStream, 1)


@driver
def cuMemsetD16(dstDevice: Any, us: int, N: int) -> Answer:
    """Fill words of two bytes."""
    return _fill(dstDevice, us, N, LEGACY, 2)


@driver
def cuMemsetD16Async(dstDevice: Any, us: int, N: int, hStream: Any) -> Answer:
    """`cuMemsetD16` in the order of a stream."""
    return _fill(dstDevice, us, N, hStream, 2)


@driver
def cuMemsetD32(dstDevice: Any, ui: int, N: int) -> Answer:
    """Fill words of four bytes."""
    return _fill(dstDevice, ui, N, LEGACY, 4)


@driver
def cuMemsetD32Async(dstDevice: Any, ui: int, N: int, hStream: Any) -> Answer:
    """`cuMemsetD32` in the order of a stream."""
    return _fill(dstDevice, ui, N, hStream, 4)


# --- pointers ---


def _known(address: int) -> Allocation | None:
    [place] = initialized().places(1, address)
    return place.allocation


@driver
def cuMemGetAddressRange(dptr: Any) -> Answer:
    """Where the allocation of a pointer begins, and its size."""
    in_context()
    known = _known(pointer(dptr).address)
    if known is None:
        raise DeviceError(NOT_FOUND, f"{int(dptr):#x} is in no allocation")
    return CUdeviceptr(known.address), known.size


def _memory_type(known: Allocation, _: int) -> Any:
    kinds = CUmemorytype
    return kinds.CU_MEMORYTYPE_DEVICE if known.space == Space.DEVICE else kinds.CU_MEMORYTYPE_HOST


def _host_pointer(known: Allocation, address: int) -> Any:
    if known.space == Space.DEVICE:
        raise DeviceError(INVALID_VALUE, "device memory has no host pointer")
    return address


_OF = CUpointer_attribute
_ATTRIBUTES: dict[Any, Callable[[Allocation, int], Any]] = {
    _OF.CU_POINTER_ATTRIBUTE_CONTEXT: lambda known, _: handle_of(known.device),
    _OF.CU_POINTER_ATTRIBUTE_MEMORY_TYPE: _memory_type,
    _OF.CU_POINTER_ATTRIBUTE_DEVICE_POINTER: lambda _, address: CUdeviceptr(address),
    _OF.CU_POINTER_ATTRIBUTE_HOST_POINTER: _host_pointer,
    _OF.CU_POINTER_ATTRIBUTE_IS_MANAGED: lambda _, __: False,
    _OF.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: lambda known, _: known.device,
    _OF.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: lambda known, _: CUdeviceptr(known.address),
    _OF.CU_POINTER_ATTRIBUTE_RANGE_SIZE: lambda known, _: known.size,
    _OF.CU_POINTER_ATTRIBUTE_MAPPED: lambda _, __: True,
    _OF.CU_POINTER_ATTRIBUTE_BUFFER_ID: lambda known, _: known.address,
    _OF.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: lambda _, __: False,
}
"""What is known of a pointer, by attribute; each gets the allocation and the address."""


@driver
def cuPointerGetAttribute(attribute: Any, ptr: Any) -> Answer:
    """One attribute; CUDA_ERROR_INVALID_VALUE for memory that CUDA does not know."""
    initialized()
    address = pointer(ptr).address
    known, tell = _known(address), _ATTRIBUTES.get(attribute)
    if known is None or tell is None:
        raise DeviceError(INVALID_VALUE, f"{address:#x} has no attribute {attribute!r}")
    return (tell(known, address),)


@driver
def cuPointerGetAttributes(numAttributes: int, attributes: Sequence[Any], ptr: Any) -> Answer:
    """Several attributes; None for those that the pointer has not."""
    initialized()
    address = pointer(ptr).address
    known = _known(address)
    told = []
    for attribute in list(attributes)[:numAttributes]:
        tell = _ATTRIBUTES.get(attribute)
        try:
            told.append(tell(known, address) if tell and known else None)
        except DeviceError:
            told.append(None)
    return (told,)
