# SPDX-License-Identifier: Apache-2.0
"""Facts about copies and fills in two and three dimensions, pitched memory, peers and batches."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.bindings.runtime import (
    cudaError_t,
    cudaExtent,
    cudaMemcpy3DParms,
    cudaMemcpyAttributes,
    cudaMemcpyKind,
    cudaMemcpySrcAccessOrder,
    cudaPitchedPtr,
    cudaPos,
)

from flyt.testing._facts import Facts
from flyt.testing._lab import D2D, D2H, DEFAULT, H2D, H2H, INVALID_VALUE, Bytes, Lab

FACTS = Facts("rows")

INVALID_PITCH = int(cudaError_t.cudaErrorInvalidPitchValue)
INVALID_DIRECTION = int(cudaError_t.cudaErrorInvalidMemcpyDirection)
INVALID_DEVICE = int(cudaError_t.cudaErrorInvalidDevice)

SHAPES = ((1, 1), (7, 5), (64, 33), (1000, 300), (3, 20_000), (5 << 20, 3))
"""Widths and heights: one byte, odd ones, many short rows, rows longer than a staging buffer."""

MOST_PINNED = 1 << 20

NO_DEVICE = 1000


def _grid(data: Bytes, pitch: int, width: int) -> Bytes:
    return data.reshape(-1, pitch)[:, :width].reshape(-1)


def _pitched(address: int, pitch: int, width: int, height: int) -> Any:
    made = cudaPitchedPtr()
    made.ptr, made.pitch, made.xsize, made.ysize = address, pitch, width, height
    return made


def _extent(width: int, height: int, depth: int) -> Any:
    made = cudaExtent()
    made.width, made.height, made.depth = width, height, depth
    return made


def _pos(x: int, y: int, z: int) -> Any:
    made = cudaPos()
    made.x, made.y, made.z = x, y, z
    return made


@FACTS.fact("cudaMemcpy2D: height rows of width bytes, at the pitch of either side")
def rows_of_every_shape(lab: Lab) -> None:
    for width, height in SHAPES:
        wide, narrow = width + 9, width + 2
        sources = [lab.pattern(narrow * height)]
        if narrow * height < MOST_PINNED:
            sources.append(lab.pinned(narrow * height))
        for source in sources:
            source[:] = lab.pattern(narrow * height, width)
            device = lab.device(wide * height, 0xEE)
            lab.ok(
                lab.rt.cudaMemcpy2D(device, wide, source.ctypes.data, narrow, width, height, H2D)
            )
            seen = lab.get(device, wide * height)
            name = f"{height} rows of {width} bytes"
            lab.same_bytes(_grid(seen, wide, width), _grid(source, narrow, width), name)
            lab.same_bytes(seen.reshape(-1, wide)[:, width:].reshape(-1), 0xEE, "the gaps")
            back = source
            back[:] = 0x55
            answer = lab.rt.cudaMemcpy2D(back.ctypes.data, narrow, device, wide, width, height, D2H)
            lab.ok(answer)
            lab.same_bytes(_grid(back, narrow, width), _grid(seen, wide, width), f"{name}, back")
            lab.same_bytes(back.reshape(-1, narrow)[:, width:].reshape(-1), 0x55, "the gaps")
            lab.ok(lab.rt.cudaFree(device))


@FACTS.fact("cudaMemcpy2D: from device to device and from host to host")
def rows_between_equals(lab: Lab) -> None:
    first, second, data = lab.device(40 * 10), lab.device(50 * 10, 0xEE), lab.pattern(400)
    lab.put(first, data)
    lab.ok(lab.rt.cudaMemcpy2D(second, 50, first, 40, 30, 10, D2D))
    seen = lab.get(second, 500)
    lab.same_bytes(_grid(seen, 50, 30), _grid(data, 40, 30), "device to device")
    lab.same_bytes(seen.reshape(10, 50)[:, 30:].reshape(-1), 0xEE, "the gaps")
    for back in (lab.pageable(500, 0x55), lab.pinned(500, 0x55)):
        lab.ok(lab.rt.cudaMemcpy2D(back.ctypes.data, 50, data.ctypes.data, 40, 30, 10, H2H))
        lab.same_bytes(_grid(back, 50, 30), _grid(data, 40, 30), "host to host")
        lab.same_bytes(back.reshape(10, 50)[:, 30:].reshape(-1), 0x55, "the gaps")


@FACTS.fact("cudaMemcpy2D: the last row ends with its width, not its pitch")
def the_last_row_has_no_gap(lab: Lab) -> None:
    device, host = lab.device(64 * 9 + 10, 1), lab.pageable(64 * 9 + 10, 2)
    lab.ok(lab.rt.cudaMemcpy2D(device, 64, host.ctypes.data, 64, 10, 10, H2D))
    lab.ok(lab.rt.cudaMemset2D(device, 64, 3, 10, 10))
    lab.ok(lab.rt.cudaMemcpy2D(host.ctypes.data, 64, device, 64, 10, 10, D2H))
    lab.same_bytes(host[-10:], 3, "the last row")


@FACTS.fact("cudaMemcpy2D: width must not exceed a pitch (cudaErrorInvalidPitchValue)")
def rows_may_not_overlap(lab: Lab) -> None:
    device, host = lab.device(4096, 1), lab.pageable(4096, 2)
    address = host.ctypes.data
    copy = lab.rt.cudaMemcpy2D
    lab.refused(copy(device, 9, address, 16, 10, 4, H2D), INVALID_PITCH, "the destination's")
    lab.refused(copy(device, 16, address, 9, 10, 4, H2D), INVALID_PITCH, "the source's")
    lab.same_bytes(lab.get(device, 4096), 1, "the device's block")


@FACTS.fact("cudaMemcpy2D: one byte past the end is cudaErrorInvalidValue, and no byte moves")
def rows_stay_inside(lab: Lab) -> None:
    device, host, other = lab.device(4096, 1), lab.pageable(8192, 2), lab.device(4096, 3)
    # More than a driver maps for so small a block.
    height = (64 << 20) // 64
    address = lab.pageable(64 << 20, 2).ctypes.data
    for name, answer in (
        ("to the device", lab.rt.cudaMemcpy2D(device, 64, address, 64, 64, height, H2D)),
        ("to the host", lab.rt.cudaMemcpy2D(address, 64, device, 64, 64, height, D2H)),
        ("source NULL", lab.rt.cudaMemcpy2D(device, 64, 0, 64, 64, 4, H2D)),
        ("destination NULL", lab.rt.cudaMemcpy2D(0, 64, device, 64, 64, 4, D2H)),
        ("D2D from the host", lab.rt.cudaMemcpy2D(device, 64, host.ctypes.data, 64, 64, 4, D2D)),
    ):
        lab.refused(answer, INVALID_VALUE, name)
    answer = lab.rt.cudaMemcpy2D(device, 64, host.ctypes.data, 64, 64, 4, 99)
    lab.refused(answer, INVALID_DIRECTION, "kind 99")
    lab.same_bytes(lab.get(device, 4096), 1, "the block")
    lab.same_bytes(lab.get(other, 4096), 3, "another block")


@FACTS.fact("cudaMemcpy2D: no rows, or rows without bytes, are success")
def no_rows(lab: Lab) -> None:
    device, host = lab.device(64, 1), lab.pageable(64, 2).ctypes.data
    for width, height in ((0, 4), (16, 0), (0, 0)):
        lab.ok(lab.rt.cudaMemcpy2D(device, 16, host, 16, width, height, H2D))
        lab.ok(lab.rt.cudaMemset2D(device, 16, 5, width, height))
    lab.same_bytes(lab.get(device, 64), 1, "the block")


@FACTS.fact("cudaMemcpy2DAsync: from pinned memory in the order of its stream, and at once")
def rows_in_the_order_of_a_stream(lab: Lab) -> None:
    device, source, back = lab.device(4096), lab.pinned(4096, 4), lab.pinned(4096)
    stream, copy = lab.stream(), lab.rt.cudaMemcpy2DAsync

    def observe() -> tuple[int, ...]:
        back[:] = 0
        up = copy(device, 64, source.ctypes.data, 64, 32, 64, H2D, stream)
        fill = lab.rt.cudaMemset2DAsync(device, 64, 9, 16, 64, stream)
        down = copy(back.ctypes.data, 64, device, 64, 32, 64, D2H, stream)
        return int(up[0]), int(fill[0]), int(down[0]), int(back[0])

    lab.same(lab.while_busy(stream, observe), (0, 0, 0, 0), "codes, and a byte not yet there")
    rows = back.reshape(64, 64)
    lab.same_bytes(rows[:, :16].reshape(-1), 9, "what was filled")
    lab.same_bytes(rows[:, 16:32].reshape(-1), 4, "what was copied")
    lab.same_bytes(rows[:, 32:].reshape(-1), 0, "the gaps")


@FACTS.fact("cudaMemcpy2DAsync and pageable memory: complete to the host, taken from it, at return")
def pageable_rows_are_done_at_return(lab: Lab) -> None:
    size, stream = 20 << 20, lab.stream()
    device, source, back = lab.device(size), lab.pattern(size), lab.pageable(size)
    before = source.copy()
    pitch, height = 1 << 10, size >> 10
    copy = lab.rt.cudaMemcpy2DAsync
    lab.ok(copy(device, pitch, source.ctypes.data, pitch, 1000, height, H2D, stream))
    source[:] = 0
    lab.ok(copy(back.ctypes.data, pitch, device, pitch, 1000, height, D2H, stream))
    lab.same_bytes(_grid(back, pitch, 1000), _grid(before, pitch, 1000), "the rows")


@FACTS.fact("cudaMemset2D: the low byte of value in height rows of width bytes")
def rows_are_filled(lab: Lab) -> None:
    for value, byte in ((7, 7), (0x1FF, 255), (-1, 255)):
        device = lab.device(64 * 16, 0xEE)
        lab.ok(lab.rt.cudaMemset2D(device + 3, 64, value, 20, 15))
        wanted = lab.pageable(64 * 16, 0xEE)
        wanted.reshape(16, 64)[:15, 3:23] = byte
        lab.same_bytes(lab.get(device, 64 * 16), wanted, f"cudaMemset2D({value})")
    pinned = lab.pinned(64 * 16, 1)
    lab.ok(lab.rt.cudaMemset2D(pinned.ctypes.data, 64, 8, 20, 16))
    lab.same_bytes(_grid(pinned, 64, 20), 8, "pinned memory, at return")
    lab.refused(
        lab.rt.cudaMemset2D(lab.pageable(1024).ctypes.data, 64, 8, 20, 16),
        INVALID_VALUE,
        "pageable",
    )


@FACTS.fact("cudaMallocPitch: rows at a pitch of at least width; cudaMalloc3D says so in a struct")
def pitched_memory(lab: Lab) -> None:
    for width, height in ((1, 1), (100, 7), (513, 3)):
        address, pitch = (int(v) for v in lab.ok(lab.rt.cudaMallocPitch(width, height)))
        data = lab.pattern(width * height)
        answer = lab.rt.cudaMemcpy2D(address, pitch, data.ctypes.data, width, width, height, H2D)
        back = lab.pageable(width * height)
        other = lab.rt.cudaMemcpy2D(back.ctypes.data, width, address, pitch, width, height, D2H)
        lab.ok(lab.rt.cudaFree(address))
        lab.ok(answer)
        lab.ok(other)
        lab.same(pitch >= width, True, f"a pitch of {pitch} for {width} bytes")
        lab.same_bytes(back, data, "the rows")
    made = lab.ok(lab.rt.cudaMalloc3D(_extent(100, 7, 3)))
    seen = (int(made.xsize), int(made.ysize), int(made.pitch) >= 100)
    answer = lab.rt.cudaMemset3D(made, 5, _extent(100, 7, 3))
    lab.ok(lab.rt.cudaFree(int(made.ptr)))
    lab.ok(answer)
    lab.same(seen, (100, 7, True), "xsize, ysize and pitch")


def _parameters(to: Any, source: Any, extent: Any, kind: Any) -> Any:
    p = cudaMemcpy3DParms()
    p.dstPtr, p.srcPtr, p.extent, p.kind = to, source, extent, cudaMemcpyKind(int(kind))
    return p


@FACTS.fact("cudaMemcpy3D: a box of bytes, from and to positions in pitched memory")
def boxes(lab: Lab) -> None:
    shape, size = (6, 5, 32), 6 * 5 * 32
    data = lab.pattern(size)
    for source in (data, lab.pinned(size)):
        source[:] = data
        device = lab.device(8 * 7 * 48, 0xEE)
        to = _pitched(device, 48, 48, 7)
        p = _parameters(to, _pitched(source.ctypes.data, 32, 32, 5), _extent(20, 3, 4), H2D)
        p.srcPos, p.dstPos = _pos(2, 1, 1), _pos(5, 2, 3)
        lab.ok(lab.rt.cudaMemcpy3D(p))
        wanted = np.full((8, 7, 48), 0xEE, np.uint8)
        part = data.reshape(shape)[1:5, 1:4, 2:22]
        wanted[3:7, 2:5, 5:25] = part
        lab.same_bytes(lab.get(device, wanted.size), wanted.reshape(-1), "the box")
        back = lab.pageable(4 * 3 * 20)
        p = _parameters(_pitched(back.ctypes.data, 20, 20, 3), to, _extent(20, 3, 4), DEFAULT)
        p.srcPos = _pos(5, 2, 3)
        lab.ok(lab.rt.cudaMemcpy3DAsync(p, lab.stream()))
        lab.ok(lab.rt.cudaDeviceSynchronize())
        lab.same_bytes(back, part.reshape(-1), "the box, back")


@FACTS.fact("cudaMemset3D: a box of bytes at the start of pitched memory")
def boxes_are_filled(lab: Lab) -> None:
    device = lab.device(6 * 5 * 32, 0xEE)
    lab.ok(lab.rt.cudaMemset3D(_pitched(device, 32, 32, 5), 0x107, _extent(20, 3, 4)))
    wanted = np.full((6, 5, 32), 0xEE, np.uint8)
    wanted[:4, :3, :20] = 7
    lab.same_bytes(lab.get(device, wanted.size), wanted.reshape(-1), "the box")


@FACTS.fact("cudaMemcpyPeer: device memory by device; cudaErrorInvalidDevice for none")
def peers(lab: Lab) -> None:
    device = int(lab.ok(lab.rt.cudaGetDevice()))
    first, second = lab.device(4096, 5), lab.device(4096, 6)
    lab.ok(lab.rt.cudaMemcpyPeer(second, device, first, device, 4000))
    lab.ok(lab.rt.cudaMemcpyPeerAsync(second + 4000, device, first, device, 50, lab.stream()))
    lab.ok(lab.rt.cudaDeviceSynchronize())
    seen = lab.get(second, 4096)
    lab.same_bytes(seen[:4050], 5, "what was copied")
    lab.same_bytes(seen[4050:], 6, "the rest")
    for to, origin in ((NO_DEVICE, device), (device, -1)):
        answer = lab.rt.cudaMemcpyPeer(second, to, first, origin, 16)
        lab.refused(answer, INVALID_DEVICE, f"devices {to} and {origin}")


@FACTS.fact("cudaMemcpyBatchAsync: every copy, with attributes for each (cudaErrorInvalidValue)")
def batches(lab: Lab) -> None:
    device, pinned, back = lab.device(4096, 1), lab.pinned(4096, 2), lab.pinned(4096, 0)
    stream, attributes = lab.stream(1), cudaMemcpyAttributes()
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    dsts = (device, back.ctypes.data)
    srcs = (pinned.ctypes.data, device + 2048)
    batch = lab.rt.cudaMemcpyBatchAsync
    lab.ok(batch(dsts, srcs, (1000, 500), 2, (attributes,), (0,), 1, stream))
    lab.ok(lab.rt.cudaStreamSynchronize(stream))
    lab.same_bytes(lab.get(device, 1000), 2, "the first copy")
    lab.same_bytes(back[:500], 1, "the second copy")
    lab.same_bytes(back[500:], 0, "what lies behind it")
    answer = batch(dsts, srcs, (1000, 500), 2, (attributes,), (1,), 1, stream)
    lab.refused(answer, INVALID_VALUE, "attrsIdxs that don't start at 0")
    answer = batch(dsts, srcs, (1000, 500), 2, (cudaMemcpyAttributes(),), (0,), 1, stream)
    lab.refused(answer, INVALID_VALUE, "attributes without an order")
