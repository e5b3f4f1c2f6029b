# SPDX-License-Identifier: Apache-2.0
"""Taking frames: each is owned once, whoever races, dies or lies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flyt.errors import RegionError, RegionFull
from flyt.shm import runs
from flyt.shm.frames import FrameTaker
from flyt.shm.layout import FrameState
from flyt.shm.locks import FrameLocks
from flyt.shm.region import Region
from flyt.shm.table import FrameTable

ALL = 63


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "region.lock"


@pytest.fixture
def locks(path: Path) -> Iterator[FrameLocks]:
    locks = FrameLocks(path)
    yield locks
    locks.close()


@pytest.fixture
def others(path: Path) -> Iterator[FrameLocks]:
    """The locks as another process would have them."""
    locks = FrameLocks(path)
    yield locks
    locks.close()


@pytest.fixture
def taker(table: FrameTable, locks: FrameLocks) -> FrameTaker:
    return FrameTaker(table, locks, 77, 1234)


def test_first_fit_contiguous(taker: FrameTaker, table: FrameTable, others: FrameLocks) -> None:
    assert taker.take(3, 0) == ((0, 3),)
    assert taker.take(2, 3) == ((3, 2),)
    assert table.snapshot() == [(f, FrameState.OWNED, 77, 1234, f) for f in range(5)]
    assert not any(others.lock(frame, 1) for frame in range(5))
    # A gap of two is too small for three.
    table.set_state(1, FrameState.FREE)
    table.set_state(2, FrameState.FREE)
    taker.drop(((1, 2),))
    assert taker.take(3, 100) == ((5, 3),)
    assert taker.take(2, 200) == ((1, 2),)
    assert table.owner(2) == (77, 1234, 201)


def test_scattered_when_it_must_be(taker: FrameTaker, table: FrameTable) -> None:
    for frame in range(0, ALL, 2):
        table.set_state(frame, FrameState.OWNED)
    table.set_state(10, FrameState.FREE)
    assert taker.take(5, 40) == ((1, 1), (3, 1), (5, 1), (7, 1), (9, 1))
    assert table.owner(9) == (77, 1234, 44)
    table.set_state(2, FrameState.FREE)
    assert taker.take(3, 0) == ((2, 1), (10, 2))


def test_frames_that_others_lock_are_passed_over(
    taker: FrameTaker, table: FrameTable, others: FrameLocks
) -> None:
    """A stopped process still maps frames whose words say FREE."""
    assert others.lock(2, 1)
    assert others.lock(4, 58)
    assert taker.take(3, 0) == ((0, 2), (3, 1))
    assert table.state(2) == FrameState.FREE
    assert taker.take(1, 3) == ((62, 1),)
    with pytest.raises(RegionFull, match="locked by processes"):
        taker.take(1, 4)
    others.unlock(40, 1)
    assert taker.take(1, 4) == ((40, 1),)


def test_the_word_is_read_again_under_the_lock(
    taker: FrameTaker, table: FrameTable, locks: FrameLocks, others: FrameLocks
) -> None:
    """Between the look and the lock another takes the frame and dies: no lock, but OWNED."""
    plain = locks.lock

    def late(first: int, count: int) -> bool:
        if first <= 1 < first + count:
            table.mark_owned(1, 5, 6, 7)
        return plain(first, count)

    locks.lock = late  # type: ignore[method-assign]
    assert taker.take(3, 0) == ((0, 1), (2, 2))
    assert table.owner(1) == (5, 6, 7)
    assert others.lock(1, 1)


def test_region_full_takes_nothing(
    taker: FrameTaker, table: FrameTable, others: FrameLocks
) -> None:
    taker.take(60, 0)
    before = table.snapshot()
    with pytest.raises(RegionFull, match=r"4 page frames of 65536 bytes .* 3 of 63 are free"):
        taker.take(4, 60)
    assert table.snapshot() == before
    assert others.lock(60, 3)
    others.unlock(60, 3)
    assert taker.take(3, 60) == ((60, 3),)
    with pytest.raises(RegionFull, match="0 of 63 are free and 0"):
        taker.take(1, 63)


@pytest.mark.parametrize(("count", "vpn"), [(0, 0), (-1, 0), (1, -1), (2, 2**32 - 1)])
def test_absurd_wishes(taker: FrameTaker, count: int, vpn: int) -> None:
    with pytest.raises(RegionError, match="can't be taken"):
        taker.take(count, vpn)


def test_the_last_virtual_page(taker: FrameTaker, table: FrameTable) -> None:
    ((frame, _),) = taker.take(1, 2**32 - 1)
    assert table.owner(frame).vpn == 2**32 - 1


def test_avoid(taker: FrameTaker) -> None:
    assert taker.take(3, 0, avoid={0, 2, 3}) == ((4, 3),)
    with pytest.raises(RegionFull):
        taker.take(58, 3, avoid={0, 2, 3})
    assert taker.take(57, 3, avoid={0, 2, 3}) == ((1, 1), (7, 56))


def test_give_up(taker: FrameTaker, table: FrameTable, others: FrameLocks) -> None:
    taken = taker.take(4, 0)
    table.set_state(1, FrameState.QUARANTINED)  # the backend is at it
    table.mark_owned(2, 5, 6, 7)  # forged: not ours to write
    taker.give_up(taken)
    assert table.states()[:4] == [
        FrameState.FREE,
        FrameState.QUARANTINED,
        FrameState.OWNED,
        FrameState.FREE,
    ]
    assert others.lock(0, 4)


def test_drop_leaves_the_words_to_the_backend(
    taker: FrameTaker, table: FrameTable, others: FrameLocks
) -> None:
    taker.drop(taker.take(4, 0))
    assert [table.state(frame) for frame in range(4)] == [FrameState.OWNED] * 4
    assert others.lock(0, 4)


def test_waits_for_frames_that_are_being_cleaned(taker: FrameTaker, table: FrameTable) -> None:
    for frame in range(ALL):
        table.set_state(frame, FrameState.QUARANTINED)

    def clean() -> None:
        time.sleep(0.05)  # so that the taker finds none at first
        table.set_state(33, FrameState.FREE)
        table.set_state(34, FrameState.FREE)

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    assert taker.take(2, 0, wait=60) == ((33, 2),)
    cleaner.join(60)
    started = time.monotonic()
    with pytest.raises(RegionFull, match="61 are being cleaned"):
        taker.take(1, 2, wait=0.05)
    assert 0.05 <= time.monotonic() - started < 30


def test_a_forged_free_word_does_not_give_us_a_frame_twice(
    taker: FrameTaker, table: FrameTable, locks: FrameLocks
) -> None:
    taker.take(3, 0)
    table.set_state(1, FrameState.FREE)
    assert taker.take(2, 3) == ((3, 2),)
    second = FrameTaker(table, locks, 78, 1234)  # another session of this process
    assert second.take(58, 0) == ((5, 58),)
    with pytest.raises(RegionFull):
        second.take(1, 58)


def test_forged_states_are_not_free(taker: FrameTaker, table: FrameTable, region: Region) -> None:
    os.pwrite(region.fd, b"\xff" * 32 * 62, 4096)
    assert taker.take(1, 0) == ((62, 1),)
    with pytest.raises(RegionFull):
        taker.take(1, 1)


def test_a_killed_holder_s_frames_stay_owned_but_unlocked(
    table: FrameTable, region: Region, path: Path, others: FrameLocks, python: Callable[..., Any]
) -> None:
    child = python(
        TAKER_PRELUDE + "print(taker.take(4, 9), flush=True)\ninput()\n", *_args(region, path, 5)
    )
    assert child.line() == "((0, 4),)"
    assert not others.lock(0, 1)
    child.end()
    assert others.lock(0, 4)
    others.unlock(0, 4)
    assert table.snapshot() == [(f, 1, 5, child.pid, 9 + f) for f in range(4)]


TAKER_PRELUDE = """
import mmap, os, random, sys
from flyt.errors import RegionFull
from flyt.shm import runs
from flyt.shm.frames import FrameTaker
from flyt.shm.locks import FrameLocks
from flyt.shm.region import Region
from flyt.shm.table import FrameTable
region = Region.open(sys.argv[1])
table = FrameTable(region.fd, region.size)
locks = FrameLocks(sys.argv[2])
session = int(sys.argv[3])
taker = FrameTaker(table, locks, session, os.getpid())
"""

RACER = (
    TAKER_PRELUDE
    + """
claims = mmap.mmap(os.open(sys.argv[4], os.O_RDWR), 63)
rng = random.Random(session)
mine, rounds, full = [], 0, 0
print('ready', flush=True)
input()
while rounds < 400:
    rounds += 1
    try:
        got = taker.take(rng.randint(1, 20), 0, wait=0.0)
    except RegionFull:
        full += 1
    else:
        for frame in runs.frames_of(got):
            if claims[frame]:
                sys.exit(f'frame {frame} is taken by {claims[frame]} and by {session}')
            claims[frame] = session
        mine.append(got)
    while mine and (len(mine) > 2 or rng.random() < 0.4):
        got = mine.pop(rng.randrange(len(mine)))
        for frame in runs.frames_of(got):
            if claims[frame] != session:
                sys.exit(f'frame {frame} of {session} was taken by {claims[frame]}')
            claims[frame] = 0
        taker.give_up(got)
print(*sorted(f for got in mine for f in runs.frames_of(got)), flush=True)
input()
"""
)


def _args(region: Region, path: Path, session: int) -> tuple[object, ...]:
    return region.path, path, session


def test_four_processes_race(
    table: FrameTable, region: Region, path: Path, tmp_path: Path, python: Callable[..., Any]
) -> None:
    """Each frame is claimed in a file of its own kind too; no two claims ever meet."""
    claims = tmp_path / "claims"
    claims.write_bytes(bytes(ALL))
    racers = [python(RACER, *_args(region, path, n), claims) for n in (1, 2, 3, 4)]
    assert [racer.line() for racer in racers] == ["ready"] * 4
    for racer in racers:
        racer.go()
    held = [[int(word) for word in racer.line().split()] for racer in racers]
    owners = {entry.frame: entry.session for entry in table.snapshot()}
    assert owners == {frame: n for n, frames in enumerate(held, 1) for frame in frames}
    assert len(owners) == sum(map(len, held))
    with closing(FrameLocks(path)) as others:
        for frame in range(ALL):
            assert others.lock(frame, 1) == (frame not in owners)
    for racer in racers:
        racer.go()
        racer.finish()


def test_threads_of_one_process_race(taker: FrameTaker, table: FrameTable) -> None:
    got: list[runs.Run] = []

    def work() -> None:
        for _ in range(5):
            got.extend(taker.take(3, 0))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(runs.frames_of(got)) == list(range(60))
    assert table.counts()[FrameState.OWNED] == 60
