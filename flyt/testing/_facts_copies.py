# SPDX-License-Identifier: Apache-2.0
"""Facts about cudaMemcpy and cudaMemset: every byte, size and kind, and what is refused."""

from __future__ import annotations

from typing import Any

from cuda.bindings.runtime import cudaError_t, cudaMemcpyKind

from flyt.testing._facts import Facts
from flyt.testing._lab import D2D, D2H, DEFAULT, H2D, H2H, INVALID_VALUE, Bytes, Lab

FACTS = Facts("copies")

INVALID_DIRECTION = int(cudaError_t.cudaErrorInvalidMemcpyDirection)

SIZES = (1, 3, 255, 4095, 4096, 4097, 65_535, 65_537, (1 << 20) - 1, 1 << 20, (1 << 20) + 1)
LARGE = (64 << 20) + 3
"""More than a driver's staging buffers hold."""

PINNED_SIZE = 1 << 20
N = 4096
GARBAGE = 0xDEAD_BEEF_0000

NEEDS_DEVICE: dict[Any, tuple[bool, bool]] = {
    H2H: (False, False),
    H2D: (True, False),
    D2H: (False, True),
    D2D: (True, True),
    DEFAULT: (False, False),
}
"""Whether a kind needs its destination and its source to be accessible to the device: device,
pinned or registered memory. It asks for no more (recorded: all 45 pairs of places and kinds)."""

MEMSET_VALUES = {0: 0, 1: 1, 255: 255, 256: 0, 300: 44, -1: 255}
"""cudaMemset's int and the byte that it sets."""


def _round_trip(lab: Lab, up: Bytes, down: Bytes, what: str) -> None:
    device = lab.device(up.size)
    data = lab.pattern(up.size, up.size)
    up[:] = data
    lab.put(device, up)
    down[:] = 0xA5
    lab.ok(lab.rt.cudaMemcpy(down.ctypes.data, device, down.size, D2H))
    lab.same_bytes(down, data, what)


@FACTS.fact("cudaMemcpy: copies count bytes, from and to pageable memory")
def pageable_of_every_size(lab: Lab) -> None:
    for size in SIZES:
        _round_trip(lab, lab.pageable(size), lab.pageable(size), f"{size} bytes, pageable")


@FACTS.fact("cudaMemcpy: copies count bytes, from and to pinned memory")
def pinned_of_every_size(lab: Lab) -> None:
    pinned = lab.pinned(max(SIZES))
    for size in SIZES:
        _round_trip(lab, pinned[:size], pinned[:size], f"{size} bytes, pinned")


@FACTS.fact("cudaMemcpy: a copy larger than any staging buffer")
def large_copies(lab: Lab) -> None:
    _round_trip(lab, lab.pageable(LARGE), lab.pageable(LARGE), f"{LARGE} bytes, pageable")


@FACTS.fact("cudaMemcpy: odd addresses on both sides; the bytes beside them stay")
def odd_offsets(lab: Lab) -> None:
    for source in (lab.pageable(N), lab.pinned(N)):
        device = lab.device(N, 0xEE)
        source[:] = lab.pattern(N)
        for at, start, size in ((1, 3, 1001), (2049, 0, 7), (3000, 77, 1000)):
            answer = lab.rt.cudaMemcpy(device + at, source.ctypes.data + start, size, H2D)
            lab.ok(answer)
            back = lab.pageable(size + 4, 0x55)
            lab.ok(lab.rt.cudaMemcpy(back.ctypes.data + 1, device + at - 1, size + 2, D2H))
            lab.same_bytes(back[2:-2], source[start : start + size], f"{size} bytes at {at}")
            lab.same(
                [int(back[i]) for i in (0, 1, -2, -1)],
                [0x55, 0xEE, 0xEE, 0x55],
                f"the bytes around {size} at {at}",
            )


@FACTS.fact("cudaMemcpy: the last byte of an allocation")
def the_last_byte(lab: Lab) -> None:
    device, one = lab.device(N, 1), lab.pageable(1, 9)
    lab.ok(lab.rt.cudaMemcpy(device + N - 1, one.ctypes.data, 1, H2D))
    back = lab.get(device, N)
    lab.same_bytes(back[:-1], 1, "all but the last byte")
    lab.same(int(back[-1]), 9, "the last byte")


@FACTS.fact("recorded: one byte past the end is cudaErrorInvalidValue, and no byte has moved")
def one_past_the_end(lab: Lab) -> None:
    device, other, host = lab.device(N, 1), lab.device(N, 2), lab.pageable(N + 1, 3)
    pinned = lab.pinned(N, 4)
    address, pin = host.ctypes.data, pinned.ctypes.data
    for name, to, source, size, kind in (
        ("to the device", device, address, N + 1, H2D),
        ("to the device, from its middle", device + 100, address, N - 99, H2D),
        ("to the host", address, device, N + 1, D2H),
        ("from device to device", other + 8, device, N, D2D),
        ("by default", other, device, N + 1, DEFAULT),
        ("from pinned memory", device, pin + N - 8, 16, H2D),
        ("host to host, from the device", address, device + 1, N, H2H),
    ):
        lab.refused(lab.rt.cudaMemcpy(to, source, size, kind), INVALID_VALUE, name)
    lab.same_bytes(lab.get(device, N), 1, "the device's block")
    lab.same_bytes(lab.get(other, N), 2, "the other block")
    lab.same_bytes(host, 3, "the host's memory")


@FACTS.fact("recorded: 0 bytes are success before anything is looked at")
def nothing_is_copied_anywhere(lab: Lab) -> None:
    device, host = lab.device(16, 1), lab.pageable(16, 2)
    for to, source in (
        (device, host.ctypes.data),
        (0, 0),
        (0, host.ctypes.data),
        (GARBAGE, GARBAGE),
    ):
        lab.ok(lab.rt.cudaMemcpy(to, source, 0, H2D))
    lab.ok(lab.rt.cudaMemset(0, 0, 0))
    lab.same_bytes(lab.get(device, 16), 1, "the device's block")


@FACTS.fact("recorded: NULL with a size is cudaErrorInvalidValue")
def null_is_no_place(lab: Lab) -> None:
    device, host = lab.device(16), lab.pageable(16).ctypes.data
    lab.refused(lab.rt.cudaMemcpy(device, 0, 16, H2D), INVALID_VALUE, "source NULL")
    lab.refused(lab.rt.cudaMemcpy(0, host, 16, H2D), INVALID_VALUE, "destination NULL, H2D")
    lab.refused(lab.rt.cudaMemcpy(0, device, 16, D2H), INVALID_VALUE, "destination NULL, D2H")


@FACTS.fact("cudaMemcpy: cudaErrorInvalidMemcpyDirection for a kind that there is not")
def kinds_that_are_none(lab: Lab) -> None:
    device, host = lab.device(16, 1), lab.pageable(16)
    for kind in (5, 99):  # some releases of cuda.bindings refuse a negative one themselves
        answer = lab.rt.cudaMemcpy(device, host.ctypes.data, 16, kind)
        lab.refused(answer, INVALID_DIRECTION, f"kind {kind}")
    lab.same_bytes(lab.get(device, 16), 1, "the device's block")


@FACTS.fact("recorded: which of the five kinds takes which places; the bytes follow the pointers")
def every_kind_and_place(lab: Lab) -> None:
    places = ("device", "pinned", "pageable")
    blocks: dict[str, tuple[Any, ...]] = {
        "device": (lab.device(N), lab.device(N)),
        "pinned": tuple(lab.pinned(N) for _ in range(2)),
        "pageable": tuple(lab.pageable(N) for _ in range(2)),
    }

    def address(block: Any) -> int:
        return block if isinstance(block, int) else int(block.ctypes.data)

    def fill(block: Any, value: int) -> None:
        if isinstance(block, int):
            lab.ok(lab.rt.cudaMemset(block, value, N))
        else:
            block[:] = value

    for kind, (to_device, from_device) in NEEDS_DEVICE.items():
        for to in places:
            for source in places:
                destination, origin = blocks[to][0], blocks[source][1]
                fill(destination, 1)
                fill(origin, 2)
                name = f"{cudaMemcpyKind(kind).name}, {source} to {to}"
                answer = lab.rt.cudaMemcpy(address(destination), address(origin), N, kind)
                refused = (to_device and to == "pageable") or (from_device and source == "pageable")
                lab.refused(answer, INVALID_VALUE if refused else 0, name)
                lab.ok(lab.rt.cudaDeviceSynchronize())
                seen = lab.get(destination, N) if to == "device" else destination
                lab.same_bytes(seen, 1 if refused else 2, name)


@FACTS.fact("cudaMemcpy: host arguments are addresses or objects with the buffer protocol")
def buffers_are_arguments(lab: Lab) -> None:
    device, data = lab.device(16), lab.pattern(16)
    raw = data.tobytes()
    for source in (raw, bytearray(raw), memoryview(raw), data):
        lab.ok(lab.rt.cudaMemset(device, 0, 16))
        lab.ok(lab.rt.cudaMemcpy(device, source, 16, H2D))
        lab.same_bytes(lab.get(device, 16), data, f"the bytes of a {type(source).__name__}")
    for back in (bytearray(16), lab.pageable(16)):
        lab.ok(lab.rt.cudaMemcpy(back, device, 16, D2H))
        lab.same(bytes(back), raw, f"the bytes in a {type(back).__name__}")


@FACTS.fact("cudaMemcpy from pageable memory: when it returns, the source may be changed")
def the_source_may_be_changed_after_return(lab: Lab) -> None:
    for size in (N, 1 << 20, LARGE):
        device, source = lab.device(size), lab.pattern(size)
        before = source.copy()
        lab.put(device, source)
        source[:] = 0
        lab.same_bytes(lab.get(device, size), before, f"{size} bytes on the device")
        lab.ok(lab.rt.cudaFree(device))


@FACTS.fact("cudaMemcpy from pinned memory: when it returns, the copy is done")
def pinned_source_may_be_changed_after_return(lab: Lab) -> None:
    device, source = lab.device(PINNED_SIZE), lab.pinned(PINNED_SIZE, 7)
    lab.put(device, source)
    source[:] = 0
    lab.same_bytes(lab.get(device, PINNED_SIZE), 7, "the bytes on the device")


@FACTS.fact("cudaMemcpy, device to device: between blocks, and onto itself")
def device_to_device(lab: Lab) -> None:
    first, second, data = lab.device(N), lab.device(N, 0xEE), lab.pattern(N)
    lab.put(first, data)
    lab.ok(lab.rt.cudaMemcpy(second + 1, first + 5, N - 7, D2D))
    back = lab.get(second, N)
    lab.same_bytes(back[1 : N - 6], data[5 : N - 2], "the copy")
    lab.same_bytes(back[N - 6 :], 0xEE, "the bytes behind it")
    lab.ok(lab.rt.cudaMemcpy(first, first, N, D2D))
    lab.same_bytes(lab.get(first, N), data, "a block copied onto itself")


@FACTS.fact("recorded: overlapping device ranges are no error (their bytes are undefined)")
def device_ranges_may_overlap(lab: Lab) -> None:
    device = lab.device(N, 3)
    lab.ok(lab.rt.cudaMemcpy(device + 1, device, N - 1, D2D))
    lab.same_bytes(lab.get(device, N), 3, "equal bytes copied over themselves")


@FACTS.fact("recorded: memory that was freed is neither source nor destination")
def freed_memory_is_refused(lab: Lab) -> None:
    device, host = lab.device(N), lab.pageable(N, 5)
    lab.ok(lab.rt.cudaFree(device))
    address = host.ctypes.data
    lab.refused(lab.rt.cudaMemcpy(device, address, N, H2D), INVALID_VALUE, "to freed memory")
    lab.refused(lab.rt.cudaMemcpy(address, device, N, D2H), INVALID_VALUE, "from freed memory")
    lab.ok(lab.rt.cudaDeviceSynchronize())
    lab.same_bytes(host, 5, "the host's memory")


@FACTS.fact("cudaMemset: the value is converted to unsigned char")
def memset_takes_the_low_byte(lab: Lab) -> None:
    device = lab.device(16)
    for value, byte in MEMSET_VALUES.items():
        lab.ok(lab.rt.cudaMemset(device, 77, 16))
        lab.ok(lab.rt.cudaMemset(device, value, 16))
        lab.same_bytes(lab.get(device, 16), byte, f"cudaMemset({value})")


@FACTS.fact("cudaMemset: count bytes, at any address, and none beside them")
def memset_of_every_size(lab: Lab) -> None:
    for offset, size in ((0, N), (1, 1), (3, 1023), (N - 1, 1), (1, N - 1)):
        device = lab.device(N, 0xEE)
        lab.ok(lab.rt.cudaMemset(device + offset, 6, size))
        wanted = lab.pageable(N, 0xEE)
        wanted[offset : offset + size] = 6
        lab.same_bytes(lab.get(device, N), wanted, f"{size} bytes at {offset}")


@FACTS.fact("recorded: cudaMemset past the end is refused, and no byte is set")
def memset_past_the_end(lab: Lab) -> None:
    device = lab.device(N, 1)
    for size in (N + 1, 2 << 20, (2 << 20) + 1, 1 << 30):
        lab.refused(lab.rt.cudaMemset(device, 0, size), INVALID_VALUE, f"{size} bytes")
    lab.same_bytes(lab.get(device, N), 1, "the block")


@FACTS.fact("recorded: cudaMemset takes pinned memory but not pageable memory")
def memset_of_host_memory(lab: Lab) -> None:
    pinned, pageable = lab.pinned(N, 1), lab.pageable(N, 1)
    lab.ok(lab.rt.cudaMemset(pinned.ctypes.data + 1, 8, N - 2))
    lab.same_bytes(pinned[1:-1], 8, "pinned memory, at return")
    lab.same((int(pinned[0]), int(pinned[-1])), (1, 1), "its neighbours")
    lab.refused(lab.rt.cudaMemset(pageable.ctypes.data, 8, N), INVALID_VALUE, "pageable memory")
    lab.same_bytes(pageable, 1, "pageable memory")
