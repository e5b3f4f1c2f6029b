# SPDX-License-Identifier: Apache-2.0
"""The copy engine's queue: its places, tickets and threads that sleep."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flyt.shm import copy
from flyt.shm.copy import PIECE, SPIN_NS, Job
from flyt.shm.layout import KIB, MIB
from flyt.shm.native import Native

pytestmark = pytest.mark.skipif(copy.native() is None, reason="no C compiler was there")

PLACES = 64
"""As in copy.c."""
LIMIT = 60.0

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@pytest.fixture
def library() -> Native:
    found = copy.native()
    assert found is not None
    return found


@pytest.fixture
def opened(library: Native) -> Iterator[Callable[[int, int], int]]:
    """Opens engines with so many threads and so much spinning; without threads a job stays queued
    until somebody waits."""
    handles: list[int] = []

    def open_one(helpers: int, spin_ns: int = 0) -> int:
        handles.append(library.engine_open(helpers, spin_ns))
        return handles[-1]

    yield open_one
    _in_time(*(functools.partial(library.engine_close, handle) for handle in handles))


def _source(size: int) -> Bytes:
    return np.random.default_rng(size).integers(1, 256, size, dtype=np.uint8)


def _ticket(library: Native) -> Any:
    return ctypes.create_string_buffer(library.engine_job_size)


def _until(condition: Callable[[], object]) -> bool:
    end = time.monotonic() + LIMIT
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return bool(condition())


def _in_time(*works: Callable[[], object]) -> None:
    """Each on a thread of its own: nothing interrupts a call of the library that hangs."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    end = time.monotonic() + LIMIT
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("streams", [False, True])
def test_jobs_beyond_the_places_are_done_by_who_posts_them(
    library: Native, opened: Callable[[int, int], int], streams: bool
) -> None:
    handle, source = opened(0, 0), _source(PIECE + 77)
    targets = np.zeros((PLACES + 6, source.size), np.uint8)
    jobs: list[Job] = []

    def post() -> None:
        jobs.append(Job(library, handle))
        target = targets[len(jobs) - 1].ctypes.data
        jobs[-1].begin(library, handle, target, source.ctypes.data, source.size, streams=streams)

    def done() -> list[int]:
        return [n for n in range(len(jobs)) if np.array_equal(targets[n], source)]

    for _ in range(10):  # so that the first place is not the first job's
        post()
        jobs.pop().wait()
    targets[:] = 0
    for _ in range(PLACES):
        post()
    assert done() == []
    post()
    post()
    assert done() == [PLACES, PLACES + 1]
    jobs[10].wait()  # helps with what is in front of it, no further
    ready = [*range(11), PLACES, PLACES + 1]
    assert done() == ready
    for _ in range(4):  # there are places again
        post()
    assert done() == ready
    _in_time(lambda: [job.wait() for job in jobs])
    assert done() == list(range(len(jobs)))


def test_a_second_wait_does_not_see_the_next_job_of_the_place(
    library: Native, opened: Callable[[int, int], int]
) -> None:
    handle, source, target = opened(0, 0), _source(100), np.zeros(100, np.uint8)
    first, unposted = _ticket(library), _ticket(library)
    post = functools.partial(library.engine_post, handle)
    assert post(first, target.ctypes.data, source.ctypes.data, 100, 30, 0)
    library.engine_wait(handle, first)
    assert np.array_equal(target, source)
    later = [_ticket(library) for _ in range(PLACES)]  # one is where the first was
    others = np.zeros((PLACES, 100), np.uint8)
    for ticket, other in zip(later, others, strict=True):
        assert post(ticket, other.ctypes.data, source.ctypes.data, 100, 30, 0)
    _in_time(lambda: library.engine_wait(handle, first))
    _in_time(lambda: library.engine_wait(handle, unposted))
    assert not others.any()
    library.engine_wait(handle, later[-1])
    assert (others == source).all()


def test_nothing_to_copy(library: Native, opened: Callable[[int, int], int]) -> None:
    handle, ticket = opened(0, 0), _ticket(library)
    _in_time(lambda: library.engine_wait(handle, ticket))  # never posted, nor anything else
    for _ in range(2 * PLACES):  # and no place is lost
        assert library.engine_post(handle, ticket, 0, 0, 0, PIECE, 0)
        _in_time(lambda: library.engine_wait(handle, ticket))


@pytest.mark.parametrize("spin_ns", [0, SPIN_NS])
@pytest.mark.parametrize("helpers", [1, 3])
def test_many_threads_post_and_wait_in_any_order(
    library: Native, opened: Callable[[int, int], int], helpers: int, spin_ns: int
) -> None:
    """More jobs than places, of odd sizes; nobody's bytes are missing, or written again later."""
    handle, source = opened(helpers, spin_ns), _source(40_000)
    good: list[int] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        targets = np.zeros((20, source.size), np.uint8)
        for _ in range(200):
            sizes = [rng.randrange(source.size + 1) for _ in range(rng.choice((1, 2, 20)))]
            tickets = [_ticket(library) for _ in sizes]
            order = rng.sample(range(len(sizes)), len(sizes))
            for n, size in enumerate(sizes):
                where = targets[n].ctypes.data, source.ctypes.data
                piece = rng.randrange(1000, 9000)
                if not library.engine_post(handle, tickets[n], *where, size, piece, n % 2):
                    library.stream(*where, size)
            for n in order:
                library.engine_wait(handle, tickets[n])
                if not np.array_equal(targets[n, : sizes[n]], source[: sizes[n]]):
                    return
                targets[n] = 0
            for ticket in tickets:
                library.engine_wait(handle, ticket)
            if targets.any():
                return
        good.append(number)

    _in_time(*(functools.partial(work, n) for n in range(6)))
    assert sorted(good) == list(range(6))


@pytest.mark.parametrize("helpers", [0, 2])
def test_close_finishes_what_is_queued(library: Native, helpers: int) -> None:
    source = _source(30_001)
    for count in (1, 7, PLACES):
        handle = library.engine_open(helpers, 0)
        targets = np.zeros((count, source.size), np.uint8)
        for target in targets:
            to = target.ctypes.data
            assert library.engine_post(
                handle, _ticket(library), to, source.ctypes.data, source.size, 1000, 0
            )
        library.engine_close(handle)
        assert (targets == source).all()


@pytest.mark.parametrize("spin_ns", [0, SPIN_NS])
def test_threads_without_work_sleep_and_wake_up_for_a_job(
    library: Native, opened: Callable[[int, int], int], spin_ns: int
) -> None:
    before = set(os.listdir("/proc/self/task"))
    handle, source, target = opened(2, spin_ns), _source(MIB), np.zeros(MIB, np.uint8)
    threads = set(os.listdir("/proc/self/task")) - before
    assert len(threads) == 2

    def asleep() -> bool:
        told = [Path(f"/proc/self/task/{n}/stat").read_text() for n in threads]
        return all(stat.rpartition(")")[2].split()[0] == "S" for stat in told)

    for _ in range(20):
        assert _until(asleep)
        target[:] = 0
        ticket = _ticket(library)
        where = target.ctypes.data, source.ctypes.data
        assert library.engine_post(handle, ticket, *where, source.size, 64 * KIB, 0)
        assert _until(lambda: np.array_equal(target, source))  # nobody waits, so nobody helps
        library.engine_wait(handle, ticket)


@pytest.mark.parametrize("spin_ns", [0, SPIN_NS])
def test_who_waits_for_the_last_piece_sleeps_until_it_is_there(
    library: Native, opened: Callable[[int, int], int], spin_ns: int
) -> None:
    handle, source = opened(1, spin_ns), _source(64 * MIB)
    target, ticket = np.zeros(source.size, np.uint8), _ticket(library)
    good: list[bool] = []

    def wait() -> None:
        library.engine_wait(handle, ticket)
        good.append(np.array_equal(target, source))

    for _ in range(3):
        good.clear()
        target[:] = 0
        where = target.ctypes.data, source.ctypes.data
        assert library.engine_post(handle, ticket, *where, source.size, source.size, 1)
        assert _until(lambda: target[0])  # the thread has the only piece
        _in_time(wait, wait, wait)
        assert good == [True] * 3
