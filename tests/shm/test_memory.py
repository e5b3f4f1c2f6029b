# SPDX-License-Identifier: Apache-2.0
"""Raw memory: reservations, mappings at an address, words, copies."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flyt.errors import RegionError
from flyt.shm import memory
from flyt.shm.region import Region

BASE = 0x1100_0000_0000
SPAN = 1 << 20
PAGE = mmap.PAGESIZE
Maps = Callable[..., list[tuple[int, int, str, str]]]


@pytest.fixture
def reserved() -> Iterator[int]:
    assert memory.reserve(BASE, SPAN)
    yield BASE
    memory.release(BASE, SPAN)


def test_a_reservation_has_no_access_and_keeps_others_out(reserved: int, maps: Maps) -> None:
    assert [entry[:3] for entry in maps(reserved, reserved + SPAN)] == [
        (reserved, reserved + SPAN, "---p")
    ]
    assert not memory.reserve(reserved, SPAN)
    assert not memory.reserve(reserved + SPAN - PAGE, 4 * PAGE)
    assert not maps(reserved + SPAN, reserved + SPAN + 3 * PAGE)


def test_a_kernel_that_takes_the_address_for_a_hint(
    reserved: int, maps: Maps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux before 4.17 doesn't know MAP_FIXED_NOREPLACE and maps elsewhere."""
    monkeypatch.setattr(memory, "MAP_FIXED_NOREPLACE", 0)

    def without_access() -> int:
        return sum(end - start for start, end, mode, _ in maps(0, 1 << 63) if mode == "---p")

    before = without_access()
    assert not memory.reserve(reserved, SPAN)
    assert without_access() == before
    assert memory.reserve(reserved + SPAN, PAGE)
    memory.release(reserved + SPAN, PAGE)


def test_release_gives_the_addresses_back(maps: Maps) -> None:
    assert memory.reserve(BASE, SPAN)
    memory.release(BASE, SPAN)
    assert not maps(BASE, BASE + SPAN)
    assert memory.reserve(BASE, SPAN)
    memory.release(BASE, SPAN)


def test_map_shared_shows_the_file_and_unmap_keeps_the_reservation(
    reserved: int, region: Region, maps: Maps
) -> None:
    with mmap.mmap(region.fd, region.size) as file:
        file[2 * PAGE : 2 * PAGE + 5] = b"hello"
        memory.map_shared(reserved + PAGE, region.fd, 2 * PAGE, PAGE)
        view = memory.view(reserved + PAGE, PAGE)
        assert bytes(view[:5]) == b"hello"
        view[0:1] = b"J"
        assert file[2 * PAGE : 2 * PAGE + 5] == b"Jello"
    assert [entry[2] for entry in maps(reserved, reserved + SPAN)] == ["---p", "rw-s", "---p"]
    memory.unmap_reserved(reserved + PAGE, PAGE)
    assert [entry[2] for entry in maps(reserved, reserved + SPAN)] == ["---p"]


def test_map_shared_read_only(reserved: int, region: Region, maps: Maps) -> None:
    memory.map_shared(reserved, region.fd, 0, PAGE, writable=False)
    assert maps(reserved, reserved + 1)[0][2] == "r--s"


def test_private_memory_takes_the_place_of_a_file_s(
    reserved: int, region: Region, maps: Maps
) -> None:
    for page in (3, 1, 2):  # several mappings, scattered in the file
        os.pwrite(region.fd, bytes([page]) * PAGE, page * PAGE)
    for at, page in enumerate((3, 1, 2)):
        memory.map_shared(reserved + at * PAGE, region.fd, page * PAGE, PAGE)
    memory.make_private(reserved, 2 * PAGE)
    expected = bytes([3]) * PAGE + bytes([1]) * PAGE + bytes([2]) * PAGE
    assert bytes(memory.view(reserved, 3 * PAGE)) == expected
    memory.view(reserved, 3 * PAGE)[::PAGE] = b"abc"
    assert [os.pread(region.fd, 1, page * PAGE) for page in (3, 1, 2)] == [b"\3", b"\1", b"c"]
    kinds = [(entry[1] - entry[0], entry[2]) for entry in maps(reserved, reserved + SPAN)]
    assert kinds == [(2 * PAGE, "rw-p"), (PAGE, "rw-s"), (SPAN - 3 * PAGE, "---p")]


@pytest.mark.parametrize("step", ["anonymous", "_mremap"])
def test_what_can_not_be_made_private_stays_as_it_was(
    reserved: int, region: Region, maps: Maps, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: int) -> int:
        ctypes.set_errno(errno.ENOMEM)
        if step == "anonymous":
            raise MemoryError
        return memory.MAP_FAILED

    memory.map_shared(reserved, region.fd, 0, PAGE)
    before = maps(0, 1 << 63)
    monkeypatch.setattr(memory, step, fail)
    with pytest.raises(MemoryError):
        memory.make_private(reserved, PAGE)
    monkeypatch.undo()
    assert memory.view(reserved, PAGE).nbytes == PAGE
    assert maps(reserved, reserved + SPAN) == [
        e for e in before if reserved <= e[0] < reserved + SPAN
    ]


def test_exclude_from_fork_marks_the_mapping(reserved: int, region: Region) -> None:
    def flags() -> list[str]:
        lines = Path("/proc/self/smaps").read_text().splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{reserved:x}-"))
        return next(line for line in lines[at:] if line.startswith("VmFlags")).split()

    memory.map_shared(reserved, region.fd, 0, PAGE)
    assert "dc" not in flags()
    memory.exclude_from_fork(reserved, PAGE)
    assert "dc" in flags()


@pytest.mark.parametrize(
    "call",
    [
        lambda: memory.reserve(BASE + 1, PAGE),
        lambda: memory.reserve(BASE, 0),
        lambda: memory.reserve(0, PAGE),
        lambda: memory.reserve(-PAGE, PAGE),
        lambda: memory.reserve(BASE, 1 << 64),
        lambda: memory.release(BASE, -1),
        lambda: memory.map_shared(BASE + (1 << 64), 0, 0, PAGE),
        lambda: memory.unmap_reserved(BASE + 8, PAGE),
        lambda: memory.exclude_from_fork(BASE, 0),
        lambda: memory.make_private(BASE + 8, PAGE),
    ],
)
def test_what_is_no_range_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(RegionError, match="no page-aligned address range"):
        call()


def test_failures_carry_the_system_s_words(reserved: int) -> None:
    with pytest.raises(RegionError, match="Bad file descriptor"):
        memory.map_shared(reserved, 1_000_000, 0, PAGE)
    with pytest.raises(MemoryError, match="reserving"):
        memory.reserve(PAGE * 16, (1 << 63) - PAGE * 16)
    with pytest.raises(MemoryError):
        memory.anonymous(1 << 60)
    with pytest.raises(MemoryError):
        memory.anonymous(0)


def test_anonymous_memory_copies_and_fills() -> None:
    address = memory.anonymous(2 * PAGE)
    assert address % PAGE == 0
    view = memory.view(address, 2 * PAGE)
    assert not any(view)
    assert (view.format, view.readonly, view.nbytes) == ("B", False, 2 * PAGE)
    memory.fill(address + 1, 0xAB, 3)
    assert bytes(view[:5]) == b"\0\xab\xab\xab\0"
    memory.copy(address + 2, address + 1, 3)  # overlapping
    assert bytes(view[:6]) == b"\0\xab\xab\xab\xab\0"
    memory.copy(address, address + 1, 0)
    assert view[0] == 0
    memory.release(address, 2 * PAGE)


def test_view_of_nothing() -> None:
    assert memory.view(0, 0).nbytes == 0


def test_words() -> None:
    words = (ctypes.c_uint64 * 3)()
    address = ctypes.addressof(words)
    memory.store_word(address + 8, 0xFEDCBA9876543210)
    assert list(words) == [0, 0xFEDCBA9876543210, 0]
    assert memory.load_word(address + 8) == 0xFEDCBA9876543210
    for bad in (address + 1, address + 4, 0, -8):
        with pytest.raises(RegionError, match="aligned"):
            memory.load_word(bad)
        with pytest.raises(RegionError, match="aligned"):
            memory.store_word(bad, 1)
    assert list(words) == [0, 0xFEDCBA9876543210, 0]
