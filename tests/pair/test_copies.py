# SPDX-License-Identifier: Apache-2.0
"""Every byte arrives, and no other: sizes, offsets and bounds of cudaMemcpy and cudaMemset."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart

K = cudart.cudaMemcpyKind
H2D, D2H, D2D = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost, K.cudaMemcpyDeviceToDevice
OK = (cudart.cudaError_t.cudaSuccess,)
INVALID = (cudart.cudaError_t.cudaErrorInvalidValue,)

GUARD = 64
GIB = 1 << 30


def random_bytes(size: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def malloc(size: int) -> int:
    error, address = cudart.cudaMalloc(size)
    assert error == 0, flyt.last_failure()
    return int(address)


def ok(answer: tuple[Any, ...]) -> None:
    assert answer == OK, flyt.last_failure()


def sizes(session: flyt.Session) -> list[int]:
    facts = session.statistics()
    slot, window, region = facts["slot_size"], facts["window_size"], facts["region_size"]
    return [
        *(1, 3, 4095, 4096, 4097, slot - 1, slot, slot + 1, 2 * slot + 1),
        *(window - 1, window, window + 1, 10 * window, region),
    ]


def test_pageable_round_trips_of_all_sizes(session: flyt.Session) -> None:
    largest = max(sizes(session))
    source = random_bytes(largest + 2 * GUARD)
    device = malloc(largest + 2 * GUARD)
    for size in sizes(session):
        ok(cudart.cudaMemset(device, 0xA5, size + 2 * GUARD))
        ok(cudart.cudaMemcpy(device + GUARD, source[GUARD:], size, H2D))
        back = np.full(size + 2 * GUARD, 0x5A, np.uint8)
        ok(cudart.cudaMemcpy(back[GUARD:], device + GUARD, size, D2H))
        assert (back[:GUARD] == 0x5A).all()
        assert (back[GUARD + size :] == 0x5A).all()
        assert (back[GUARD : GUARD + size] == source[GUARD : GUARD + size]).all(), size
        whole = np.empty(size + 2 * GUARD, np.uint8)
        ok(cudart.cudaMemcpy(whole, device, whole.nbytes, D2H))
        assert (whole[:GUARD] == 0xA5).all()
        assert (whole[GUARD + size :] == 0xA5).all()
    ok(cudart.cudaFree(device))


def test_pinned_round_trips_of_all_sizes(session: flyt.Session) -> None:
    largest = 4 << 20
    pinned = flyt.pinned_empty(largest + 2 * GUARD, np.uint8)
    device = malloc(largest)
    staged = flyt.statistics()["staged_h2d_bytes"]
    for size in (1, 3, 4095, 4096, 4097, 65_535, 65_536, 65_537, largest):
        pinned[:] = 0x5A
        data = random_bytes(size, seed=size)
        pinned[GUARD : GUARD + size] = data
        ok(cudart.cudaMemcpy(device, pinned[GUARD:], size, H2D))
        pinned[:] = 0x5A
        ok(cudart.cudaMemcpy(pinned[GUARD:], device, size, D2H))
        assert (pinned[GUARD : GUARD + size] == data).all()
        assert (pinned[:GUARD] == 0x5A).all()
        assert (pinned[GUARD + size :] == 0x5A).all()
    assert flyt.statistics()["staged_h2d_bytes"] == staged
    assert flyt.statistics()["pinned_h2d_bytes"] > largest
    ok(cudart.cudaFree(device))


def test_size_0_is_success_before_anything_is_looked_at(session: flyt.Session) -> None:
    for kind in (H2D, D2H, D2D, K.cudaMemcpyDefault, K.cudaMemcpyHostToHost):
        for dst, src in itertools.product((0, 0xDEAD), repeat=2):
            ok(cudart.cudaMemcpy(dst, src, 0, kind))
    ok(cudart.cudaMemset(0, 1, 0))
    assert cudart.cudaMalloc(0) == (0, 0)
    assert cudart.cudaHostAlloc(0, 0) == (0, 0)


def test_odd_offsets_and_interior_pointers(session: flyt.Session) -> None:
    size = 3 * flyt.statistics()["slot_size"] + 77
    source, device = random_bytes(size), malloc(size)
    shadow = np.zeros(size, np.uint8)
    rng = np.random.default_rng(7)
    for _ in range(40):
        at, origin = (int(v) for v in rng.integers(0, size, 2))
        length = int(rng.integers(1, size - max(at, origin) + 1))
        ok(cudart.cudaMemcpy(device + at, source.ctypes.data + origin, length, H2D))
        shadow[at : at + length] = source[origin : origin + length]
    back = np.empty_like(shadow)
    ok(cudart.cudaMemcpy(back, device, size, D2H))
    assert (back == shadow).all()
    for at in (1, 4097, size - 1):
        part = np.empty(size - at, np.uint8)
        ok(cudart.cudaMemcpy(part, device + at, part.nbytes, D2H))
        assert (part == shadow[at:]).all()
    ok(cudart.cudaFree(device))


def test_one_past_the_end_is_refused_and_touches_nothing(session: flyt.Session) -> None:
    size = 4000  # the next block begins at 4096, so there is a gap to hit
    blocks = [malloc(size) for _ in range(3)]
    for n, block in enumerate(blocks):
        ok(cudart.cudaMemset(block, n + 1, size))
    source = np.full(2 * size, 0xEE, np.uint8)
    target = np.full(2 * size, 0xEE, np.uint8)
    for at, length in ((0, size + 1), (1, size), (size - 1, 2), (size, 1), (0, 1 << 40)):
        block = blocks[1] + at
        big_enough = length <= source.nbytes
        host = source if big_enough else source.ctypes.data
        assert cudart.cudaMemcpy(block, host, length, H2D) == INVALID
        assert cudart.cudaMemcpy(
            target if big_enough else target.ctypes.data, block, length, D2H
        ) == (INVALID)
        assert cudart.cudaMemset(block, 9, length) == INVALID
        assert cudart.cudaMemcpy(blocks[0], block, min(length, size + 1), D2D) == INVALID
        assert cudart.cudaMemcpy(block, blocks[0], length, D2D) == INVALID
    assert (target == 0xEE).all()
    for n, block in enumerate(blocks):
        back = np.empty(size, np.uint8)
        ok(cudart.cudaMemcpy(back, block, size, D2H))
        assert (back == n + 1).all()
        ok(cudart.cudaFree(block))


def test_last_byte(session: flyt.Session) -> None:
    device = malloc(4097)
    ok(cudart.cudaMemcpy(device + 4096, b"\x7b", 1, H2D))
    back = bytearray(1)
    ok(cudart.cudaMemcpy(back, device + 4096, 1, D2H))
    assert back == b"\x7b"
    ok(cudart.cudaFree(device))


def test_short_and_read_only_host_buffers_are_refused(session: flyt.Session) -> None:
    device = malloc(64)
    assert cudart.cudaMemcpy(device, b"1234", 5, H2D) == INVALID
    assert "4 bytes" in flyt.last_failure()
    small = bytearray(4)
    assert cudart.cudaMemcpy(small, device, 5, D2H) == INVALID
    frozen = np.full(8, 3, np.uint8)
    frozen.flags.writeable = False
    for target in (bytes(8), frozen, memoryview(bytes(8))):
        assert cudart.cudaMemcpy(target, device, 8, D2H) == INVALID
        assert "read-only" in flyt.last_failure()
    assert (frozen == 3).all()
    ok(cudart.cudaMemcpy(device, frozen, 8, H2D))  # as a source it is welcome (numba#2521)
    strided = np.zeros((4, 4), np.uint8)[:, ::2]
    with pytest.raises(ValueError, match="not contiguous"):
        cudart.cudaMemcpy(device, strided, 8, H2D)
    ok(cudart.cudaFree(device))


def test_a_source_changed_after_the_copy_leaves_the_old_bytes(session: flyt.Session) -> None:
    size = 5 * flyt.statistics()["window_size"] + 13
    source, device = random_bytes(size), malloc(size)
    wanted = source.copy()
    ok(cudart.cudaMemcpy(device, source, size, H2D))
    source[:] = 0
    back = np.empty_like(wanted)
    ok(cudart.cudaMemcpy(back, device, size, D2H))
    assert (back == wanted).all()
    ok(cudart.cudaFree(device))


def test_device_to_device(session: flyt.Session) -> None:
    size = 1 << 20
    data = random_bytes(size)
    one, two = malloc(size), malloc(size)
    ok(cudart.cudaMemcpy(one, data, size, H2D))
    ok(cudart.cudaMemcpy(two + 1, one, size - 1, D2D))
    ok(cudart.cudaMemcpy(one, one, size, D2D))
    back = np.empty_like(data)
    ok(cudart.cudaMemcpy(back, two, size, D2H))
    assert back[0] == 0
    assert (back[1:] == data[:-1]).all()
    ok(cudart.cudaFree(one))
    ok(cudart.cudaFree(two))


def test_host_to_host_and_default(session: flyt.Session) -> None:
    data, pinned = random_bytes(1 << 20), flyt.pinned_empty(1 << 20, np.uint8)
    out, device = np.zeros_like(data), malloc(1 << 20)
    for kind in (K.cudaMemcpyHostToHost, K.cudaMemcpyDefault):
        pinned[:] = 0
        out[:] = 0
        ok(cudart.cudaMemcpy(pinned, data, data.nbytes, kind))
        ok(cudart.cudaMemcpy(out, pinned, data.nbytes, kind))
        assert (out == data).all()
    for place in (data, pinned):
        ok(cudart.cudaMemset(device, 0, data.nbytes))
        ok(cudart.cudaMemcpy(device, place, data.nbytes, K.cudaMemcpyDefault))
        out[:] = 0
        ok(cudart.cudaMemcpy(out, device, data.nbytes, K.cudaMemcpyDefault))
        assert (out == data).all()
    ok(cudart.cudaFree(device))


def test_memset_of_device_and_pinned_memory(session: flyt.Session) -> None:
    device, pinned = malloc(4096), flyt.pinned_empty(4096, np.uint8)
    back = np.empty(4096, np.uint8)
    for value, byte in ((0, 0), (255, 255), (300, 300 & 0xFF), (-1, 255)):
        ok(cudart.cudaMemset(device, value, 4096))
        ok(cudart.cudaMemcpy(back, device, 4096, D2H))
        assert (back == byte).all()
        ok(cudart.cudaMemset(pinned, value, 4096))
        assert (pinned == byte).all()
    assert cudart.cudaMemset(back, 1, 4096) == INVALID
    ok(cudart.cudaFree(device))


def test_several_dtypes_and_buffers(session: flyt.Session) -> None:
    device = malloc(4096)
    array = np.arange(100, dtype=np.complex128).reshape(10, 10)
    for source in (
        array,
        np.asfortranarray(array),
        np.array(["2026-11-27", "1970-01-01"], "datetime64[s]"),
        np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i2"), ("b", "f8")]),
        np.array(7.25),
    ):
        back = np.empty_like(source)
        ok(cudart.cudaMemcpy(device, source, source.nbytes, H2D))
        ok(cudart.cudaMemcpy(back, device, source.nbytes, D2H))
        assert (back == source).all()
    with mmap.mmap(-1, 4096) as area:
        area[:] = os.urandom(4096)
        back = bytearray(4096)
        ok(cudart.cudaMemcpy(device, area, 4096, H2D))
        ok(cudart.cudaMemcpy(memoryview(back), device, 4096, D2H))
        assert back == area[:]
    ok(cudart.cudaFree(device))


def _available() -> int:
    with open("/proc/meminfo") as lines:
        return next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )


def test_five_gib_in_one_call(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    """Beyond 32 bits, from and to sparse memory; marks around every boundary."""
    if _available() < 13 * GIB:
        pytest.skip("needs 13 GiB of free memory: 5 GiB on the emulated device, 5 GiB here")
    connect(backend(), FLYT_SLOT_SIZE=str(4 << 20))  # a command for each slot
    size = 5 * GIB + 4097
    marks = [0, 1, 2 * GIB - 1, 2 * GIB, 4 * GIB - 1, 4 * GIB, 4 * GIB + 1, size - 1]
    device = malloc(size)
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as sparse:
        for n, mark in enumerate(marks):
            sparse[mark] = n + 1
        ok(cudart.cudaMemcpy(device, sparse, size, H2D))
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as target:
        target.madvise(mmap.MADV_HUGEPAGE)  # a million page faults fewer
        ok(cudart.cudaMemcpy(target, device, size, D2H))
        flat, found = np.frombuffer(target, np.uint8), {}
        for at in range(0, size, 64 << 20):
            part = flat[at : at + (64 << 20)]
            for place in np.flatnonzero(part) if part.any() else ():
                found[at + int(place)] = int(part[place])
        del flat, part
    assert found == {mark: n + 1 for n, mark in enumerate(marks)}
    ok(cudart.cudaFree(device))
