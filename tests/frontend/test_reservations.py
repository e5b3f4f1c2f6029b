# SPDX-License-Identifier: Apache-2.0
"""Reserved device addresses, as the kernel shows them in /proc/self/maps."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from flyt.frontend.reservations import GRANULE, Reservations
from flyt.shm import memory

BASE = 0x3000_0000_0000
"""Far from all that Linux maps by itself, and from the addresses of both devices."""

ROOM = 8 * GRANULE


def _mapped() -> list[tuple[int, int, str]]:
    """(first granule, granules, protection) of what is mapped in the range of the test."""
    found: list[tuple[int, int, str]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode = line.split()[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if start < BASE + ROOM and end > BASE:
            first, count = divmod(start - BASE, GRANULE)[0], -(-(end - start) // GRANULE)
            if found and found[-1][2] == mode and sum(found[-1][:2]) == first:
                first, count = found[-1][0], found[-1][1] + count
                found.pop()
            found.append((first, count, mode))
    return found


@pytest.fixture
def reservations() -> Iterator[Reservations]:
    assert _mapped() == []
    reservations = Reservations()
    yield reservations
    reservations.clear()
    assert _mapped() == []


@pytest.mark.parametrize(
    ("offset", "size", "first", "count"),
    [
        (0, 1, 0, 1),
        (0, GRANULE, 0, 1),
        (0, GRANULE + 1, 0, 2),
        (GRANULE - 1, 1, 0, 1),
        (GRANULE - 1, 2, 0, 2),
        (GRANULE + 512, 512, 1, 1),
        (GRANULE, 3 * GRANULE, 1, 3),
        (GRANULE + 1, 3 * GRANULE, 1, 4),
    ],
)
def test_whole_granules_without_access(
    reservations: Reservations, offset: int, size: int, first: int, count: int
) -> None:
    assert reservations.take(BASE + offset, size)
    assert _mapped() == [(first, count, "---p")]
    reservations.give(BASE + offset, size)
    assert _mapped() == []


def test_blocks_share_a_granule(reservations: Reservations) -> None:
    blocks = [(BASE, 512), (BASE + 512, 512), (BASE + GRANULE - 512, 1024)]
    for block in blocks:
        assert reservations.take(*block)
    assert _mapped() == [(0, 2, "---p")]
    reservations.give(*blocks[0])
    assert _mapped() == [(0, 2, "---p")]
    reservations.give(*blocks[2])
    assert _mapped() == [(0, 1, "---p")]
    reservations.give(*blocks[1])
    assert _mapped() == []
    assert reservations.take(*blocks[0])  # and again


def _map_private(address: int, size: int) -> None:
    """Somebody else's memory."""
    assert memory.reserve(address, size)
    protect = ctypes.CDLL(None).mprotect
    both = mmap.PROT_READ | mmap.PROT_WRITE
    assert protect(ctypes.c_void_p(address), ctypes.c_size_t(size), both) == 0


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_taken_address_leaves_nothing(reservations: Reservations, at: int) -> None:
    size = 4096  # a small part of a granule is enough
    theirs = BASE + at * GRANULE + GRANULE // 2
    _map_private(theirs, size)
    try:
        memory.view(theirs, size)[:] = b"\x5a" * size
        assert not reservations.take(BASE, 3 * GRANULE)
        assert not reservations.take(theirs + 100, 1)
        assert _mapped() == [(at, 1, "rw-p")]
        assert bytes(memory.view(theirs, size)) == b"\x5a" * size
    finally:
        memory.release(theirs, size)
    assert reservations.take(BASE, 3 * GRANULE)


def test_a_taken_address_leaves_what_others_share(reservations: Reservations) -> None:
    assert reservations.take(BASE, 512)
    _map_private(BASE + 2 * GRANULE, 4096)
    try:
        assert not reservations.take(BASE + 512, 2 * GRANULE)
        assert _mapped() == [(0, 1, "---p"), (2, 1, "rw-p")]
    finally:
        memory.release(BASE + 2 * GRANULE, 4096)
    reservations.give(BASE, 512)  # counted once, not twice
    assert _mapped() == []


def test_clear(reservations: Reservations) -> None:
    assert reservations.take(BASE, 512)
    assert reservations.take(BASE + 512, 3 * GRANULE)
    reservations.clear()
    assert _mapped() == []
    reservations.clear()
    assert reservations.take(BASE, 512)
