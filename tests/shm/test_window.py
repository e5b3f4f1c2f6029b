# SPDX-License-Identifier: Apache-2.0
"""Windows: scattered frames at one range, the same range in two processes."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from flyt.errors import AddressTaken, RegionError
from flyt.shm import memory
from flyt.shm.layout import GIB, KIB, MIB, Geometry
from flyt.shm.region import Region
from flyt.shm.runs import Run
from flyt.shm.window import (
    END_OF_BASES,
    LOWEST_BASE,
    MAX_RESERVE,
    Window,
    pick_base,
    reserve_length,
)

PAGE = 64 * KIB
RESERVE = 16 * MIB
Maps = Callable[..., list[tuple[int, int, str, str]]]


def _window(region: Region, geometry: Geometry) -> Window:
    base = pick_base(RESERVE, random.Random())
    return Window.reserve_at(region.fd, geometry, base, RESERVE)


@pytest.fixture
def window(region: Region, geometry: Geometry) -> Iterator[Window]:
    window = _window(region, geometry)
    yield window
    window.close()


def _mark(window: Window, frames: list[int]) -> None:
    """Write each frame's number into its first byte, at its place in the file."""
    for frame in frames:
        os.pwrite(window.fd, bytes([frame]), window.geometry.offset(frame))


def test_scattered_frames_look_contiguous(window: Window, maps: Maps) -> None:
    _mark(window, [3, 4, 9, 20, 21, 60])
    start = window.map(2, ((20, 2), (3, 1), (60, 1), (9, 1), (4, 1)))
    assert start == window.base + 2 * PAGE == window.address(2)
    assert list(memory.view(start, 6 * PAGE)[::PAGE]) == [20, 21, 3, 60, 9, 4]
    # Bytes across the borders of pages land at the ends and starts of the right frames.
    memory.view(start, 6 * PAGE)[2 * PAGE - 2 : 2 * PAGE + 2] = b"abcd"
    at = window.geometry.offset
    assert os.pread(window.fd, 2, at(21) + PAGE - 2) == b"ab"
    assert os.pread(window.fd, 2, at(3)) == b"cd"
    parts = maps(start, start + 6 * PAGE)
    assert [part[2] for part in parts] == ["rw-s"] * 5
    assert [(part[1] - part[0]) // PAGE for part in parts] == [2, 1, 1, 1, 1]


def test_two_mappings_of_the_same_frames(
    window: Window, region: Region, geometry: Geometry
) -> None:
    with closing(_window(region, geometry)) as other:
        here = memory.view(window.map(0, ((7, 2),)), 2 * PAGE)
        there = memory.view(other.map(1, ((8, 1), (7, 1))), 2 * PAGE)
        here[PAGE + 1] = 42
        assert there[1] == 42
        there[2 * PAGE - 1] = 43
        assert here[PAGE - 1] == 43


def test_another_process_maps_the_same_frames_at_the_same_address(
    window: Window, region: Region, python: Callable[..., Any], maps: Maps
) -> None:
    table = ((30, 1), (11, 2))
    start = window.map(0, table)
    memory.view(start, 3 * PAGE)[PAGE : PAGE + 4] = b"ping"
    child = python(
        "import sys, time\n"
        "from flyt.shm import memory\n"
        "from flyt.shm.region import Region\n"
        "from flyt.shm.layout import Geometry\n"
        "from flyt.shm.window import Window\n"
        "path, base, reserve = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])\n"
        "region = Region.open(path)\n"
        "window = Window.reserve_at(region.fd, Geometry.plan(region.size), base, reserve)\n"
        f"view = memory.view(window.map(0, {table!r}), {3 * PAGE})\n"
        f"print(bytes(view[{PAGE}:{PAGE + 4}]).decode(), flush=True)\n"
        f"view[{2 * PAGE}:{2 * PAGE + 4}] = b'pong'\n"
        "print('written', flush=True)\n"
        "input()\n"
        "window.close()\n",
        region.path,
        window.base,
        window.reserve,
    )
    assert child.line() == "ping"
    assert child.line() == "written"
    assert bytes(memory.view(start, 3 * PAGE)[2 * PAGE : 2 * PAGE + 4]) == b"pong"
    ours, theirs = (maps(start, start + 3 * PAGE, pid) for pid in ("self", child.pid))
    assert [p[:2] for p in ours] == [p[:2] for p in theirs]
    assert {p[3] for p in ours + theirs} == {region.path}
    child.go()
    child.finish()


@pytest.mark.parametrize(
    ("vpn", "table", "word"),
    [
        (255, ((0, 2),), "outside"),
        (256, ((0, 1),), "outside"),
        (-1, ((0, 1),), "outside"),
        (2**63, ((0, 1),), "outside"),
        (9, ((0, 2),), "overlap"),
        (10, ((0, 1),), "overlap"),
        (12, ((0, 5),), "overlap"),
        (8, ((0, 20),), "overlap"),
        (20, (), "at least one"),
        (20, ((63, 1),), "frames 0 to 62"),
        (20, ((0, 2**63),), "frames 0 to 62"),
        (20, ((5, 2), (6, 1)), "frame 6 twice"),
    ],
)
def test_map_refuses(window: Window, vpn: int, table: tuple[Run, ...], word: str) -> None:
    window.map(10, ((40, 3),))
    memory.view(window.address(10), 1)[0] = 99
    with pytest.raises(RegionError, match=word):
        window.map(vpn, table)
    assert dict(window.segments) == {10: 3}
    assert memory.view(window.address(10), 1)[0] == 99


def test_a_segment_may_be_mapped_right_beside_another(window: Window) -> None:
    window.map(10, ((40, 3),))
    window.map(13, ((43, 1),))
    window.map(9, ((39, 1),))
    assert dict(window.segments) == {9: 1, 10: 3, 13: 1}


def test_unmap_leaves_the_reservation(window: Window, maps: Maps) -> None:
    window.map(0, ((1, 1),))
    start = window.map(4, ((2, 1), (5, 1)))
    with pytest.raises(RegionError, match="virtual page 5"):
        window.unmap(5)
    window.unmap(4)
    assert [part[2] for part in maps(start, start + 2 * PAGE)] == ["---p"]
    assert dict(window.segments) == {0: 1}
    with pytest.raises(RegionError, match="virtual page 4"):
        window.unmap(4)
    window.map(4, ((9, 2),))


def test_contains(window: Window) -> None:
    window.map(1, ((0, 2),))
    window.map(3, ((5, 1),))
    window.map(10, ((9, 1),))
    inside = [(PAGE, 2 * PAGE), (PAGE, 0), (3 * PAGE - 1, 1), (3 * PAGE, PAGE), (10 * PAGE, PAGE)]
    outside = [
        (0, 1),
        (PAGE - 1, 1),
        (PAGE - 1, 2),
        (PAGE, 2 * PAGE + 1),  # two neighbours are two registrations
        (3 * PAGE - 1, 2),
        (4 * PAGE, 1),
        (10 * PAGE, PAGE + 1),
        (11 * PAGE, 1),
        (2**64 - 1, 2),
        (-1, 1),
        (PAGE, -1),
    ]
    assert all(window.contains(*span) for span in inside)
    assert not any(window.contains(*span) for span in outside)
    window.unmap(3)
    assert not window.contains(3 * PAGE, 1)


def test_a_map_that_fails_half_way_leaves_the_window_as_it_was(
    window: Window, geometry: Geometry, maps: Maps
) -> None:
    """The second run lies where no file can have bytes, so the kernel refuses it."""
    last = (1 << 47) - 2
    window.geometry = Geometry(1 << 63, PAGE, 1 << 47, PAGE)
    with pytest.raises(RegionError, match="too large"):
        window.map(0, ((0, 4), (last, 1)))
    assert [p[2] for p in maps(window.base, window.base + RESERVE)] == ["---p"]
    assert not window.segments
    window.geometry = geometry
    window.map(0, ((0, 4),))


def test_close_gives_the_addresses_back(region: Region, geometry: Geometry, maps: Maps) -> None:
    window = _window(region, geometry)
    window.map(0, ((0, 4),))
    window.close()
    window.close()
    assert not maps(window.base, window.base + RESERVE)
    assert not window.contains(0, 1)
    for call in (lambda: window.map(0, ((0, 1),)), lambda: window.unmap(0)):
        with pytest.raises(RegionError, match="closed"):
            call()


def test_what_is_kept_stays_when_the_window_closes(
    region: Region, geometry: Geometry, maps: Maps
) -> None:
    window = _window(region, geometry)
    _mark(window, [3, 4, 9, 20])
    window.map(0, ((1, 1),))
    first = window.map(2, ((4, 1), (3, 1), (9, 1)))
    second = window.map(RESERVE // PAGE - 1, ((20, 1),))  # the last page of all
    window.keep(RESERVE // PAGE - 1, PAGE)
    window.keep(2, PAGE + 1)
    assert dict(window.segments) == {0: 1}
    assert window.table(2) is None
    for call in (
        lambda: window.unmap(2),
        lambda: window.keep(2, 1),
        lambda: window.keep(0, PAGE + 1),
    ):
        with pytest.raises(RegionError, match="segment"):
            call()
    window.close()
    window.close()
    length = memory.whole_pages(PAGE + 1)
    assert [entry[:3] for entry in maps(window.base, window.base + RESERVE)] == [
        (first, first + length, "rw-p"),
        (second, second + PAGE, "rw-p"),
    ]
    memory.view(first, length)[1] = 7
    assert list(memory.view(first, length)[::PAGE]) == [4, 3]
    assert list(memory.view(second, PAGE)[:2]) == [20, 0]
    assert os.pread(region.fd, 2, geometry.offset(4)) == b"\4\0"
    memory.release(first, length)
    memory.release(second, PAGE)


def test_an_address_that_is_taken(window: Window, region: Region, geometry: Geometry) -> None:
    with pytest.raises(AddressTaken):
        Window.reserve_at(region.fd, geometry, window.base + RESERVE - PAGE, RESERVE)


@pytest.mark.parametrize(
    ("base", "reserve"),
    [
        (LOWEST_BASE + 4096, RESERVE),
        (LOWEST_BASE, RESERVE + 4096),
        (LOWEST_BASE, 0),
        (LOWEST_BASE, -PAGE),
        (LOWEST_BASE, MAX_RESERVE + PAGE),
        (LOWEST_BASE - PAGE, RESERVE),
        (END_OF_BASES - RESERVE + PAGE, RESERVE),
        (0x2000_0000_0000, RESERVE),
        (2**64 - RESERVE, RESERVE),
        (0, RESERVE),
    ],
)
def test_a_peer_s_absurd_range(region: Region, geometry: Geometry, base: int, reserve: int) -> None:
    with pytest.raises(RegionError) as caught:
        Window.reserve_at(region.fd, geometry, base, reserve)
    assert not isinstance(caught.value, AddressTaken)


def test_a_forked_child_has_no_window(region: Region, python: Callable[..., Any]) -> None:
    child = python(
        "import os, sys\n"
        "from flyt.errors import RegionError\n"
        "from flyt.shm import memory\n"
        "from flyt.shm.region import Region\n"
        "from flyt.shm.layout import Geometry\n"
        "from flyt.shm.window import Window, LOWEST_BASE\n"
        "region = Region.open(sys.argv[1])\n"
        "window = Window.reserve_at(region.fd, Geometry.plan(region.size), LOWEST_BASE, 1 << 24)\n"
        "hidden = window.map(0, ((0, 2),))\n"
        "shown = window.map(9, ((4, 1),), fork_safe=False)\n"
        "mapped = lambda at: any(l.startswith(f'{at:x}-') for l in open('/proc/self/maps'))\n"
        "assert mapped(hidden) and mapped(shown)\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    code = mapped(hidden) * 1 + (not mapped(shown)) * 2\n"
        "    assert memory.reserve(hidden, 65536)\n"
        "    try:\n"
        "        window.map(20, ((9, 1),))\n"
        "        code += 4\n"
        "    except RegionError:\n"
        "        pass\n"
        "    window.close()\n"
        "    code += (not mapped(hidden)) * 8\n"
        "    os._exit(code)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), mapped(hidden))\n",
        region.path,
    )
    assert child.finish() == "0 True"


def test_threads_map_and_look_at_once(window: Window) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        for _ in range(60):
            start = window.map(4 * number, ((2 * number, 2),))
            memory.view(start, 1)[0] = number
            if not window.contains(4 * number * PAGE, 2 * PAGE) or window.contains(
                (4 * number + 2) * PAGE, 1
            ):
                wrong.append(f"thread {number}")
            window.unmap(4 * number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not window.segments
    assert os.pread(window.fd, 1, window.geometry.offset(6)) == b"\x03"


def test_bases() -> None:
    rng = random.Random(1)
    bases = [pick_base(MAX_RESERVE, rng) for _ in range(200)]
    assert all(base % (2 * MIB) == 0 for base in bases)
    assert min(bases) >= 0x1000_0000_0000
    assert max(bases) + MAX_RESERVE <= 0x2000_0000_0000
    assert len(set(bases)) > 190
    for bad in (0, MAX_RESERVE + 1):
        with pytest.raises(RegionError):
            pick_base(bad, rng)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(4 * MIB, GIB), (GIB, 4 * GIB), (10 * GIB + 4096, 40 * GIB + 2 * MIB), (1 << 40, 1 << 40)],
)
def test_reserve_length(size: int, expected: int) -> None:
    assert reserve_length(Geometry.plan(size)) == expected
