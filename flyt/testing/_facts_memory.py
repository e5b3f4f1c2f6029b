# SPDX-License-Identifier: Apache-2.0
"""Facts about device memory and pinned memory: allocate, free, ask what an address is."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.bindings.runtime import cudaMemoryType

from flyt.testing._facts import Facts
from flyt.testing._lab import INVALID_VALUE, OUT_OF_MEMORY, Lab

FACTS = Facts("memory")

GARBAGE = 0xDEAD_BEEF_0000
"""Looks like an address and belongs to nothing."""

ALIGNMENT = 256
"""What the programming guide promises of every address that an allocation returns."""

NO_DEVICE = -2
"""The device number of memory that CUDA knows nothing about (cudaInvalidDeviceId)."""

MAPPED, WRITE_COMBINED = 2, 4
"""Of cudaHostAlloc's flags. Whether the third, Portable, is shown differs between machines."""

BAD_HOST_ALLOC_FLAGS = (8, 16, 256, 0xFFFF_FFFF)


@FACTS.fact("programming guide: addresses are aligned to at least 256 bytes")
def addresses_are_aligned(lab: Lab) -> None:
    for size in (1, 3, 255, 4096, 4097):
        lab.same(lab.device(size) % ALIGNMENT, 0, f"alignment of {size} bytes")


@FACTS.fact("recorded: cudaMalloc and cudaHostAlloc of 0 bytes succeed and answer 0")
def nothing_is_allocated_at_null(lab: Lab) -> None:
    lab.same(int(lab.ok(lab.rt.cudaMalloc(0))), 0, "cudaMalloc(0)")
    lab.same(int(lab.ok(lab.rt.cudaHostAlloc(0, 0))), 0, "cudaHostAlloc(0)")
    lab.same(int(lab.ok(lab.rt.cudaMallocHost(0))), 0, "cudaMallocHost(0)")


@FACTS.fact("cudaMalloc: cudaErrorMemoryAllocation when memory is short; nothing is harmed")
def too_much_is_refused(lab: Lab) -> None:
    block = lab.device(4096, 7)
    for size in (1 << 60, (1 << 64) - 1):
        answer = lab.rt.cudaMalloc(size)
        lab.refused(answer, OUT_OF_MEMORY, f"cudaMalloc({size})")
        lab.same(answer[1:], (None,), "the value beside an error")
    lab.refused(lab.rt.cudaHostAlloc(1 << 60, 0), OUT_OF_MEMORY, "cudaHostAlloc(1 << 60)")
    lab.same_bytes(lab.get(block, 4096), 7, "a block allocated before")


@FACTS.fact("cudaMalloc: every allocation is memory of its own")
def blocks_do_not_overlap(lab: Lab) -> None:
    blocks = [(lab.device(size), size, value) for value, size in enumerate((1, 511, 512, 4097))]
    for address, size, value in blocks:
        lab.ok(lab.rt.cudaMemset(address, value, size))
    for address, size, value in blocks:
        lab.same_bytes(lab.get(address, size), value, f"the block of {size} bytes")


@FACTS.fact("cudaFree: NULL is no error")
def null_may_be_freed(lab: Lab) -> None:
    lab.ok(lab.rt.cudaFree(0))
    lab.ok(lab.rt.cudaFreeHost(0))


@FACTS.fact("cudaFree: freeing twice is an error (recorded: cudaErrorInvalidValue)")
def device_memory_is_freed_once(lab: Lab) -> None:
    block = lab.device(4096)
    lab.ok(lab.rt.cudaFree(block))
    lab.refused(lab.rt.cudaFree(block), INVALID_VALUE, "the second cudaFree")


@FACTS.fact("cudaFreeHost: freeing twice is an error (recorded: cudaErrorInvalidValue)")
def pinned_memory_is_freed_once(lab: Lab) -> None:
    block = lab.pinned(4096).ctypes.data
    lab.ok(lab.rt.cudaFreeHost(block))
    lab.refused(lab.rt.cudaFreeHost(block), INVALID_VALUE, "the second cudaFreeHost")


@FACTS.fact("recorded: an interior pointer can't be freed, and the block stays")
def interior_pointers_are_not_freed(lab: Lab) -> None:
    device, pinned = lab.device(4096, 5), lab.pinned(4096, 6)
    lab.refused(lab.rt.cudaFree(device + 256), INVALID_VALUE, "cudaFree of an interior pointer")
    lab.refused(lab.rt.cudaFreeHost(pinned.ctypes.data + 1), INVALID_VALUE, "cudaFreeHost")
    lab.same_bytes(lab.get(device, 4096), 5, "the device's block")
    lab.same_bytes(pinned, 6, "the pinned block")


@FACTS.fact("recorded: cudaFree takes device memory only, cudaFreeHost pinned memory only")
def each_kind_has_its_own_free(lab: Lab) -> None:
    device, pinned, pageable = lab.device(4096), lab.pinned(4096), lab.pageable(4096)
    for address in (pinned.ctypes.data, pageable.ctypes.data, GARBAGE):
        lab.refused(lab.rt.cudaFree(address), INVALID_VALUE, f"cudaFree({address:#x})")
    lab.refused(lab.rt.cudaFreeHost(device), INVALID_VALUE, "cudaFreeHost of device memory")


@FACTS.fact("recorded: cudaHostAlloc takes flags 0 to 7; with unified addressing all is mapped")
def flags_of_pinned_memory(lab: Lab) -> None:
    for flags in range(8):
        address = lab.ok(lab.rt.cudaHostAlloc(64, flags))
        seen = lab.rt.cudaHostGetFlags(address)
        lab.ok(lab.rt.cudaFreeHost(address))
        shown = int(lab.ok(seen)) & (MAPPED | WRITE_COMBINED)
        wanted = MAPPED | flags & WRITE_COMBINED
        lab.same(shown, wanted, f"mapped and write-combined of flags {flags}")
    for flags in BAD_HOST_ALLOC_FLAGS:
        lab.refused(lab.rt.cudaHostAlloc(64, flags), INVALID_VALUE, f"flags {flags}")


@FACTS.fact("cudaHostGetFlags: fails for memory that was not allocated by cudaHostAlloc")
def only_pinned_memory_has_flags(lab: Lab) -> None:
    pinned = lab.pinned(64).ctypes.data
    lab.same(int(lab.ok(lab.rt.cudaHostGetFlags(pinned + 5))), 2, "flags at an interior pointer")
    for address in (lab.pageable(64).ctypes.data, lab.device(64), 0):
        lab.refused(lab.rt.cudaHostGetFlags(address), INVALID_VALUE, f"{address:#x}")


@FACTS.fact("cudaHostGetDevicePointer: with unified addressing both pointers are equal")
def pinned_memory_has_one_address(lab: Lab) -> None:
    pinned = lab.pinned(64).ctypes.data
    for address in (pinned, pinned + 5):
        seen = lab.ok(lab.rt.cudaHostGetDevicePointer(address, 0))
        lab.same(int(seen), address, "the device pointer")


@FACTS.fact("cudaHostGetDevicePointer: flags must be 0 and the memory pinned")
def only_pinned_memory_has_a_device_pointer(lab: Lab) -> None:
    pinned = lab.pinned(64).ctypes.data
    lab.refused(lab.rt.cudaHostGetDevicePointer(pinned, 1), INVALID_VALUE, "flags 1")
    for address in (lab.pageable(64).ctypes.data, lab.device(64), 0):
        answer = lab.rt.cudaHostGetDevicePointer(address, 0)
        lab.refused(answer, INVALID_VALUE, f"{address:#x}")


@FACTS.fact("cudaHostAlloc: the host reads and writes pinned memory as its own")
def pinned_memory_is_host_memory(lab: Lab) -> None:
    size = 65_537
    data, pinned = lab.pattern(size), lab.pinned(size)
    pinned[:] = data
    device = lab.device(size)
    lab.put(device, pinned)
    pinned[:] = 0
    lab.ok(lab.rt.cudaMemcpy(pinned.ctypes.data, device, size, 2))
    lab.same_bytes(pinned, data, "pinned memory after a round trip")


def _attributes(lab: Lab, address: int) -> dict[str, Any]:
    found = lab.ok(lab.rt.cudaPointerGetAttributes(address))
    return {
        "type": cudaMemoryType(found.type),
        "device": int(found.device),
        "devicePointer": int(found.devicePointer),
        "hostPointer": int(found.hostPointer),
    }


@FACTS.fact("cudaPointerGetAttributes: device memory, at its start and inside")
def attributes_of_device_memory(lab: Lab) -> None:
    device, ordinal = lab.device(4096), int(lab.ok(lab.rt.cudaGetDevice()))
    for address in (device, device + 100, device + 4095):
        lab.same(
            _attributes(lab, address),
            {
                "type": cudaMemoryType.cudaMemoryTypeDevice,
                "device": ordinal,
                "devicePointer": address,
                "hostPointer": 0,
            },
            "attributes",
        )


@FACTS.fact("cudaPointerGetAttributes: pinned memory, at its start and inside")
def attributes_of_pinned_memory(lab: Lab) -> None:
    pinned, ordinal = lab.pinned(4096).ctypes.data, int(lab.ok(lab.rt.cudaGetDevice()))
    for address in (pinned, pinned + 17):
        lab.same(
            _attributes(lab, address),
            {
                "type": cudaMemoryType.cudaMemoryTypeHost,
                "device": ordinal,
                "devicePointer": address,
                "hostPointer": address,
            },
            "attributes",
        )


@FACTS.fact("cudaPointerGetAttributes: an address CUDA does not know is no error since 11.0")
def attributes_of_anything_else(lab: Lab) -> None:
    pageable = np.zeros(64, np.uint8)
    for address in (pageable.ctypes.data, GARBAGE, 0):
        lab.same(
            _attributes(lab, address),
            {
                "type": cudaMemoryType.cudaMemoryTypeUnregistered,
                "device": NO_DEVICE,
                "devicePointer": 0,
                "hostPointer": address,
            },
            f"attributes of {address:#x}",
        )


@FACTS.fact("cudaMemGetInfo: free and total bytes of the current device")
def memory_is_finite(lab: Lab) -> None:
    free, total = (int(value) for value in lab.ok(lab.rt.cudaMemGetInfo()))
    if not 0 < free <= total:
        lab.same((free, total), "0 < free <= total", "free and total bytes")
    lab.refused(lab.rt.cudaMalloc(total + 1), OUT_OF_MEMORY, "more than the device has")
