# SPDX-License-Identifier: Apache-2.0
"""The copy engine: every byte, nothing beside them, and no thread left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from flyt.errors import RegionError
from flyt.shm import copy
from flyt.shm.copy import PARALLEL_FROM, PIECE, CopyEngine, Job, default_threads

ROOM = 64


@pytest.fixture(params=[True, False], ids=["compiled", "fallback"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the compiled library, and without."""
    if not request.param:
        monkeypatch.setattr(copy, "native", lambda: None)
    elif copy.native() is None:
        pytest.skip("no C compiler was there when Flyt was installed")
    return bool(request.param)


@pytest.fixture
def engine(compiled: bool) -> Iterator[CopyEngine]:
    engine = CopyEngine(3)
    yield engine
    engine.close()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _settled(count: int) -> bool:
    """Whether there are so many threads; the kernel forgets one a moment after it was joined. Fewer
    do as well: a thread of an earlier test may end at any time."""
    deadline = time.monotonic() + 20
    while _threads() > count and time.monotonic() < deadline:
        time.sleep(0.001)
    return _threads() <= count


def _random(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(size).integers(1, 256, size, dtype=np.uint8)


@pytest.mark.parametrize(
    "size",
    [
        *(0, 1, 3, 4095, 4097, PARALLEL_FROM - 1, PARALLEL_FROM, PARALLEL_FROM + 1),
        *(3 * PIECE - 1, 3 * PIECE, 3 * PIECE + 1, 10_000_001),
    ],
)
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_exactly_these_bytes(engine: CopyEngine, size: int, offset: int) -> None:
    source = _random(size + ROOM)
    target = np.zeros(size + ROOM, np.uint8)
    engine.copy(target.ctypes.data + offset, source.ctypes.data + 3, size)
    assert np.array_equal(target[offset : offset + size], source[3 : 3 + size])
    assert not target[:offset].any()
    assert not target[offset + size :].any()


@pytest.mark.parametrize("shift", [1, PIECE, 3 * PIECE])
def test_ranges_that_overlap(engine: CopyEngine, shift: int) -> None:
    size = 4 * PIECE
    for forward in (True, False):
        data = _random(size + shift)
        expected = data[:size].copy() if forward else data[shift:].copy()
        low, high = data.ctypes.data, data.ctypes.data + shift
        engine.copy(*((high, low) if forward else (low, high)), size)
        assert np.array_equal(data[shift:] if forward else data[:size], expected)


def test_threads_start_with_the_first_large_copy_and_end_with_close(compiled: bool) -> None:
    before = _threads()
    engine = CopyEngine(3)
    source, target = _random(4 * PIECE), np.zeros(4 * PIECE, np.uint8)
    engine.copy(target.ctypes.data, source.ctypes.data, PARALLEL_FROM - 1)
    assert _settled(before)
    for _ in range(3):
        engine.copy(target.ctypes.data, source.ctypes.data, source.size)
        assert _settled(before + 2 * compiled)
        assert _threads() >= 1 + 2 * compiled
    engine.close()
    engine.close()
    assert _settled(before)
    target[:] = 0
    engine.copy(target.ctypes.data, source.ctypes.data, source.size)
    assert np.array_equal(source, target)
    assert _settled(before)


def test_one_thread_and_the_default() -> None:
    before = _threads()
    source, target = _random(4 * PIECE), np.zeros(4 * PIECE, np.uint8)
    engine = CopyEngine(1)
    engine.copy(target.ctypes.data, source.ctypes.data, source.size)
    assert np.array_equal(source, target)
    assert _settled(before)
    engine.close()
    assert CopyEngine().threads == default_threads(len(os.sched_getaffinity(0)))
    for threads in (-1, 65):
        with pytest.raises(RegionError, match=f"{threads} threads"):
            CopyEngine(threads)


@pytest.mark.parametrize(
    ("cores", "threads"),
    [(1, 1), (2, 2), (4, 4), (5, 4), (6, 4), (8, 6), (16, 12), (64, 12), (256, 12)],
)
def test_threads_leave_cores_to_others(cores: int, threads: int) -> None:
    assert default_threads(cores) == threads


def test_several_jobs_at_once_in_any_order(engine: CopyEngine) -> None:
    """Queued one behind the other; whoever waits helps with those before."""
    source = _random(40 * PIECE)
    target = np.zeros_like(source)
    part = 8 * PIECE
    jobs: list[list[Job]] = []
    for at in range(0, source.size, part):
        jobs.append([])
        engine.post(jobs[-1], target.ctypes.data + at, source.ctypes.data + at, part)
    for number in (3, 0, 1, 4, 2):
        engine.wait(jobs[number])
        piece = slice(number * part, (number + 1) * part)
        assert np.array_equal(target[piece], source[piece])
        assert jobs[number] == []
        engine.wait(jobs[number])


def test_a_job_that_was_waited_for_or_never_begun_ends_at_once(engine: CopyEngine) -> None:
    """An interrupt may strike between any two steps."""
    source, target = _random(8 * PIECE), np.zeros(8 * PIECE, np.uint8)
    jobs: list[Job] = []
    engine.post(jobs, target.ctypes.data, source.ctypes.data, source.size)
    kept = list(jobs)
    engine.wait(jobs)
    for job in kept:
        job.wait()
    if (native := copy.native()) is not None:
        Job(native, native.engine_open(1, 0)).wait()


def test_closed_under_a_copy(compiled: bool) -> None:
    """The threads end after the copy that is under way."""
    before = _threads()
    engine = CopyEngine(2)
    source, target = _random(64 * PIECE), np.zeros(64 * PIECE, np.uint8)
    copier = threading.Thread(
        target=lambda: [
            engine.copy(target.ctypes.data, source.ctypes.data, source.size) for _ in range(20)
        ]
    )
    copier.start()
    time.sleep(0.01)
    engine.close()
    copier.join(60)
    assert np.array_equal(source, target)
    assert _settled(before)


def test_copies_from_several_threads_at_once(engine: CopyEngine) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        source = np.full(5 * PIECE + number, number, np.uint8)
        for _ in range(8):
            target = np.zeros(source.size, np.uint8)
            engine.copy(target.ctypes.data, source.ctypes.data, source.size)
            if not np.array_equal(source, target):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


SCRIPT = """
import os, random, signal, sys, threading, time
import numpy as np
from flyt.shm.copy import CopyEngine
engine = CopyEngine(4)
source, target = np.full(8 << 20, 1, np.uint8), np.zeros(8 << 20, np.uint8)
copy = lambda: engine.copy(target.ctypes.data, source.ctypes.data, target.size)
copy()
threads = 4 if engine._native else 1  # OpenBLAS ends its own at a fork
"""


def test_a_forked_child_starts_afresh(python: Callable[..., Any]) -> None:
    child = python(
        SCRIPT + "pid = os.fork()\n"
        "target[:] = 0\n"
        "copy()\n"
        "good = bool(target.all()) and len(os.listdir('/proc/self/task')) == threads\n"
        "engine.close()\n"
        "if not pid:\n"
        "    os._exit(10 + good)\n"
        "print(good, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert child.finish() == "True 11"


def test_an_interrupted_copy_has_stopped_writing(python: Callable[..., Any]) -> None:
    """After KeyboardInterrupt the target may be unmapped, so no helper may be at it still."""
    child = python(
        SCRIPT + "rng = random.Random(1)\n"
        "def interrupt(*_): raise KeyboardInterrupt\n"
        "signal.signal(signal.SIGALRM, interrupt)\n"
        "hits = late = 0\n"
        "end = time.monotonic() + 60\n"
        "while hits < 20 and time.monotonic() < end:\n"  # fast copies are done before
        "    try:\n"
        "        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, 0.003))\n"
        "        copy()\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "    except KeyboardInterrupt:\n"
        "        hits += 1\n"
        "        target[:] = 7\n"
        "        time.sleep(0.002)\n"
        "        late += bool((target != 7).any())\n"
        "copy()\n"
        "print(hits, late, bool((target == 1).all()))\n"
        "engine.close()\n"
    )
    assert child.finish() == "20 0 True"


def test_an_engine_that_nobody_closed_does_not_hold_up_the_exit(
    python: Callable[..., Any],
) -> None:
    assert python(SCRIPT + "print('end')\n").finish() == "end"


# --- copies past the caches ---


@pytest.mark.skipif(copy.native() is None, reason="no C compiler was there")
@pytest.mark.parametrize("size", [*range(0, 200, 7), 255, 256, 257, 4095, 4096, 4097, PIECE + 1])
def test_streamed_bytes_at_every_place_of_a_line(size: int) -> None:
    library = copy.native()
    assert library is not None
    rng = np.random.default_rng(size)
    source = rng.integers(1, 256, size + 256, dtype=np.uint8)
    for to in (*range(0, 65, 5), 63, 64):
        for origin in (0, 1, 15, 16, 33, 64):
            target = np.zeros(size + 256, np.uint8)
            library.stream(target.ctypes.data + 64 + to, source.ctypes.data + origin, size)
            wanted = np.zeros_like(target)
            wanted[64 + to : 64 + to + size] = source[origin : origin + size]
            assert np.array_equal(target, wanted), (to, origin)


@pytest.mark.parametrize("shift", [-4096, -1, 1, 4096])
def test_a_move_may_overlap(shift: int) -> None:
    size = copy.STREAMED_FROM + 5
    data = _random(size + 8192)
    wanted = data.copy()
    wanted[4096 + shift : 4096 + shift + size] = data[4096 : 4096 + size]
    copy.move(data.ctypes.data + 4096 + shift, data.ctypes.data + 4096, size)
    assert np.array_equal(data, wanted)


@pytest.mark.skipif(copy.native() is None, reason="no C compiler was there")
@pytest.mark.parametrize(
    ("threads", "read_soon", "size", "streams"),
    [
        (2, False, copy.STREAMED_FROM, True),
        (2, True, copy.STREAMED_FROM, True),
        (12, False, copy.STREAMED_FROM, True),
        (12, True, copy.STREAMED_FROM, False),
        (2, False, copy.STREAMED_FROM - 1, False),
    ],
)
def test_what_goes_past_the_caches(
    monkeypatch: pytest.MonkeyPatch, threads: int, read_soon: bool, size: int, streams: bool
) -> None:
    engine, seen = CopyEngine(threads), []
    begin = Job.begin
    monkeypatch.setattr(
        Job, "begin", lambda *a, streams: (seen.append(streams), begin(*a, streams=streams))
    )
    source, target = _random(size), np.zeros(size, np.uint8)
    jobs: list[Job] = []
    engine.post(jobs, target.ctypes.data, source.ctypes.data, size, read_soon=read_soon)
    engine.wait(jobs)
    engine.close()
    assert seen == [streams]
    assert np.array_equal(source, target)
