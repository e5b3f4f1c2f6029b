# SPDX-License-Identifier: Apache-2.0
"""Facts about cudaHostRegister: the caller's own memory, pinned where it lies."""

from __future__ import annotations

import ctypes
import mmap

from cuda.bindings.runtime import cudaError_t, cudaMemoryType

from flyt.testing._facts import Facts
from flyt.testing._lab import D2H, DEFAULT, H2D, HOST_PAGE, INVALID_VALUE, Lab

FACTS = Facts("registration")

ALREADY = int(cudaError_t.cudaErrorHostMemoryAlreadyRegistered)
NOT_REGISTERED = int(cudaError_t.cudaErrorHostMemoryNotRegistered)

GOOD_FLAGS = (0, 1, 2, 3)
"""cudaHostRegisterPortable and Mapped; ReadOnly and IoMemory depend on the machine."""

BAD_FLAGS = (16, 32)


@FACTS.fact("recorded: flags 0 to 3 are taken, unknown ones refused and nothing is registered")
def flags(lab: Lab) -> None:
    memory = lab.registered(HOST_PAGE)
    lab.ok(lab.rt.cudaHostUnregister(memory.ctypes.data))
    for value in GOOD_FLAGS:
        lab.ok(lab.rt.cudaHostRegister(memory.ctypes.data, memory.size, value))
        lab.ok(lab.rt.cudaHostUnregister(memory.ctypes.data))
    for value in BAD_FLAGS:
        answer = lab.rt.cudaHostRegister(memory.ctypes.data, memory.size, value)
        lab.refused(answer, INVALID_VALUE, f"flags {value}")
        lab.refused(lab.rt.cudaHostUnregister(memory.ctypes.data), NOT_REGISTERED, "unregistering")


@FACTS.fact("recorded: NULL, 0 bytes, pinned and device memory can't be registered")
def what_can_not_be_registered(lab: Lab) -> None:
    pageable = lab.pageable(HOST_PAGE).ctypes.data
    cases = (
        ("NULL", 0, 4096),
        ("0 bytes", pageable, 0),
        ("pinned memory", lab.pinned(4096).ctypes.data, 4096),
        ("device memory", lab.device(4096), 4096),
    )
    for name, address, size in cases:
        lab.refused(lab.rt.cudaHostRegister(address, size, 0), INVALID_VALUE, name)


@FACTS.fact("cudaHostRegister: of pages that are not mapped, or not all, nothing is registered")
def what_is_not_mapped(lab: Lab) -> None:
    memory = mmap.mmap(-1, 4 * HOST_PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory.resize(2 * HOST_PAGE)  # the rest is nobody's
    for name, offset in (("behind the end", 2 * HOST_PAGE), ("across the end", HOST_PAGE)):
        answer = lab.rt.cudaHostRegister(start + offset, 2 * HOST_PAGE, 0)
        lab.refused(answer, INVALID_VALUE, name)
        answer = lab.rt.cudaHostUnregister(start + offset)
        lab.refused(answer, NOT_REGISTERED, f"unregistering {name}")
    lab.ok(lab.rt.cudaHostRegister(start, 2 * HOST_PAGE, 0))
    lab.ok(lab.rt.cudaHostUnregister(start))


@FACTS.fact("cudaHostRegister: memory that overlaps a registration is already registered")
def ranges_do_not_overlap(lab: Lab) -> None:
    memory = lab.registered(4 * HOST_PAGE)
    for offset, size in ((0, memory.size), (HOST_PAGE, HOST_PAGE)):
        answer = lab.rt.cudaHostRegister(memory.ctypes.data + offset, size, 0)
        lab.refused(answer, ALREADY, f"{size} bytes at {offset}")


@FACTS.fact("cudaHostUnregister: the same address, once, and only registered memory")
def what_can_be_unregistered(lab: Lab) -> None:
    memory = lab.registered(HOST_PAGE)
    unregister = lab.rt.cudaHostUnregister
    lab.refused(unregister(memory.ctypes.data + 4096), INVALID_VALUE, "an interior pointer")
    lab.refused(unregister(lab.pinned(4096).ctypes.data), INVALID_VALUE, "cudaHostAlloc's memory")
    lab.refused(unregister(0), INVALID_VALUE, "NULL")
    lab.ok(unregister(memory.ctypes.data))
    lab.refused(unregister(memory.ctypes.data), NOT_REGISTERED, "the second time")


@FACTS.fact("cudaPointerGetAttributes, cudaHostGetFlags: registered memory is host memory")
def registered_memory_is_known(lab: Lab) -> None:
    memory = lab.registered(HOST_PAGE)
    for address in (memory.ctypes.data, memory.ctypes.data + 5):
        found = lab.ok(lab.rt.cudaPointerGetAttributes(address))
        lab.same(cudaMemoryType(found.type), cudaMemoryType.cudaMemoryTypeHost, "type")
        lab.same(int(found.hostPointer), address, "host pointer")
    lab.same(int(lab.ok(lab.rt.cudaHostGetFlags(memory.ctypes.data))), 2, "flags")
    lab.ok(lab.rt.cudaHostUnregister(memory.ctypes.data))
    found = lab.ok(lab.rt.cudaPointerGetAttributes(memory.ctypes.data))
    unregistered = cudaMemoryType.cudaMemoryTypeUnregistered
    lab.same(cudaMemoryType(found.type), unregistered, "type when unregistered")


@FACTS.fact("recorded: cudaFreeHost is not for registered memory")
def registered_memory_is_not_freed(lab: Lab) -> None:
    memory = lab.registered(HOST_PAGE)
    lab.refused(lab.rt.cudaFreeHost(memory.ctypes.data), INVALID_VALUE, "cudaFreeHost")
    lab.ok(lab.rt.cudaHostUnregister(memory.ctypes.data))


@FACTS.fact("cudaHostRegister: copies to and from registered memory move its bytes")
def registered_memory_is_copied(lab: Lab) -> None:
    memory, device = lab.registered(4 * HOST_PAGE), lab.device(4 * HOST_PAGE)
    data = lab.pattern(memory.size)
    memory[:] = data
    lab.put(device, memory)
    memory[:] = 0
    lab.ok(lab.rt.cudaMemcpy(memory.ctypes.data + 1, device + 1, memory.size - 1, D2H))
    data[0] = 0
    lab.same_bytes(memory, data, "registered memory after a round trip")


@FACTS.fact("cudaMemcpyAsync: copies to and from registered memory are in the stream's order")
def registered_memory_in_stream_order(lab: Lab) -> None:
    memory, device, stream = lab.registered(HOST_PAGE), lab.device(HOST_PAGE, 1), lab.stream()
    memory[:] = 9
    copy = lab.rt.cudaMemcpyAsync
    lab.ok(copy(device, memory.ctypes.data, memory.size, H2D, stream))
    lab.ok(lab.rt.cudaMemsetAsync(device, 4, 100, stream))
    lab.ok(copy(memory.ctypes.data, device, memory.size, D2H, stream))
    lab.ok(lab.rt.cudaStreamSynchronize(stream))
    lab.same_bytes(memory[:100], 4, "what was set last")
    lab.same_bytes(memory[100:], 9, "what was copied first")


@FACTS.fact("recorded: cudaMemset takes registered memory")
def registered_memory_is_set(lab: Lab) -> None:
    memory = lab.registered(HOST_PAGE)
    lab.ok(lab.rt.cudaMemset(memory.ctypes.data + 1, 3, 16))
    lab.ok(lab.rt.cudaDeviceSynchronize())
    lab.same_bytes(memory[1:17], 3, "the bytes that were set")
    lab.same((int(memory[0]), int(memory[17])), (0, 0), "the neighbours")


@FACTS.fact("recorded: a copy may not begin in registered memory and end behind it")
def copies_do_not_leave_a_registration(lab: Lab) -> None:
    memory, device = lab.registered(2 * HOST_PAGE), lab.device(4096, 0)
    lab.ok(lab.rt.cudaHostUnregister(memory.ctypes.data))
    lab.ok(lab.rt.cudaHostRegister(memory.ctypes.data, HOST_PAGE, 0))
    edge = memory.ctypes.data + HOST_PAGE
    for kind in (H2D, DEFAULT):
        answer = lab.rt.cudaMemcpy(device, edge - 6, 2048, kind)
        lab.refused(answer, INVALID_VALUE, f"across the end, {kind!r}")
    lab.ok(lab.rt.cudaMemcpy(device, edge, 2048, DEFAULT))
