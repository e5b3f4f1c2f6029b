# SPDX-License-Identifier: Apache-2.0
"""The copy engine: every byte, nothing beside them, and no thread left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from flyt.errors import RegionError
from flyt.shm.copy import PARALLEL_FROM, PIECE, CopyEngine

ROOM = 64


@pytest.fixture
def engine() -> Iterator[CopyEngine]:
    engine = CopyEngine(3)
    yield engine
    engine.close()


def _threads() -> int:
    return sum(thread.name == "flyt-copy" for thread in threading.enumerate())


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


def test_threads_start_with_the_first_large_copy_and_end_with_close() -> None:
    engine = CopyEngine(3)
    source, target = _random(4 * PIECE), np.zeros(4 * PIECE, np.uint8)
    engine.copy(target.ctypes.data, source.ctypes.data, PARALLEL_FROM - 1)
    assert _threads() == 0
    for _ in range(3):
        engine.copy(target.ctypes.data, source.ctypes.data, source.size)
        assert _threads() == 2
    engine.close()
    engine.close()
    assert _threads() == 0
    target[:] = 0
    engine.copy(target.ctypes.data, source.ctypes.data, source.size)
    assert np.array_equal(source, target)
    assert _threads() == 0


def test_one_thread_and_the_default() -> None:
    source, target = _random(4 * PIECE), np.zeros(4 * PIECE, np.uint8)
    engine = CopyEngine(1)
    engine.copy(target.ctypes.data, source.ctypes.data, source.size)
    assert np.array_equal(source, target)
    assert _threads() == 0
    engine.close()
    assert 1 <= CopyEngine().threads <= 4
    with pytest.raises(RegionError, match="0 threads"):
        CopyEngine(0)


def test_helpers_do_help(engine: CopyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the caller held in its first piece, the others must copy the rest."""
    from flyt.shm import memory

    plain, workers = memory.copy, set()
    others_done = threading.Event()
    size = 8 * PIECE
    copied: list[int] = []

    def watched(dst: int, src: int, count: int) -> None:
        name = threading.current_thread().name
        workers.add(name)
        if name != "flyt-copy":
            assert others_done.wait(60)
        plain(dst, src, count)
        copied.append(count)
        if sum(copied) == size - PIECE:
            others_done.set()

    monkeypatch.setattr(memory, "copy", watched)
    source, target = _random(size), np.zeros(size, np.uint8)
    engine.copy(target.ctypes.data, source.ctypes.data, size)
    assert np.array_equal(source, target)
    assert "flyt-copy" in workers


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
"""


def test_a_forked_child_starts_afresh(python: Callable[..., Any]) -> None:
    child = python(
        SCRIPT + "pid = os.fork()\n"
        "target[:] = 0\n"
        "copy()\n"
        "good = bool(target.all()) and sum(\n"
        "    t.name == 'flyt-copy' and t.is_alive() for t in threading.enumerate()) == 3\n"
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
        "for _ in range(100):\n"
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
        "print(hits > 10, late, bool((target == 1).all()))\n"
        "engine.close()\n"
    )
    assert child.finish() == "True 0 True"


def test_an_interrupt_waits_for_the_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while the caller waits for a helper's last piece."""
    from flyt.shm import memory

    size = 4 * PIECE
    plain, finished = memory.copy, []
    helper_has_one, caller_is_done = threading.Event(), threading.Event()
    left = [3]

    def staged(dst: int, src: int, count: int) -> None:
        if threading.current_thread().name != "flyt-copy":
            assert helper_has_one.wait(60)
            plain(dst, src, count)
            left[0] -= 1
            if not left[0]:
                caller_is_done.set()
            return
        helper_has_one.set()
        assert caller_is_done.wait(60)
        time.sleep(0.1)  # so that the caller is in its wait
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)  # so that a caller that left early is seen
        plain(dst, src, count)
        finished.append(count)

    monkeypatch.setattr(memory, "copy", staged)
    source, target = _random(size), np.zeros(size, np.uint8)
    with closing(CopyEngine(2)) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.copy(target.ctypes.data, source.ctypes.data, size)
        assert finished == [PIECE]
    assert np.array_equal(source, target)


def test_an_engine_that_nobody_closed_does_not_hold_up_the_exit(
    python: Callable[..., Any],
) -> None:
    assert python(SCRIPT + "print('end')\n").finish() == "end"
