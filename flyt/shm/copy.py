# SPDX-License-Identifier: Apache-2.0
"""The copy engine: memmove by several threads.

One core moves 8 to 14 GB/s, a PCIe 5 link takes 55. A large copy is cut into pieces that the
caller and the engine's threads fetch one by one, so a thread that wakes late costs nothing. The
GIL is released while bytes move. `CopyEngine.copy` returns when the last byte is in place.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import weakref

from flyt.errors import RegionError
from flyt.shm import memory
from flyt.shm.layout import KIB, MIB

PARALLEL_FROM = MIB
"""Below this size one memmove is done before another thread is awake."""
PIECE = 512 * KIB
"""Some 50 microseconds of copying: large against the cost of fetching a piece, small against a
4-MiB slot."""
DEFAULT_THREADS = 4
"""Measured: more than four bring nothing."""
JOIN_SECONDS = 5.0
"""An engine thread ends after the piece it is at; only a stopped process takes longer."""


class _Job:
    """One large copy: pieces to fetch, and who is at work on them."""

    def __init__(self, dst: int, src: int, size: int) -> None:
        self._dst, self._src, self._size = dst, src, size
        self._offsets = itertools.count(0, PIECE)  # next() is atomic
        self._changed = threading.Condition(threading.Lock())
        self._helpers = 0
        self._over = False

    def work(self) -> None:
        """Copy pieces until none is left."""
        while not self._over and (at := next(self._offsets)) < self._size:
            memory.copy(self._dst + at, self._src + at, min(PIECE, self._size - at))

    def help(self) -> None:
        """`work`, on another thread than the caller's."""
        with self._changed:
            if self._over:
                return
            self._helpers += 1
        self.work()
        with self._changed:
            self._helpers -= 1
            self._changed.notify()

    def finish(self) -> None:
        """Wait for the pieces that helpers are at: they may write until then.

        An interrupt (Ctrl-C) is put off until then too: after it the caller may unmap the bytes.
        """
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                with self._changed:
                    self._over = True
                    # Bounded by one memmove of one piece per helper.
                    self._changed.wait_for(lambda: self._helpers == 0)
                break
            except KeyboardInterrupt as exc:
                interrupt = exc
        if interrupt is not None:
            raise interrupt


_Queue = queue.SimpleQueue[_Job | None]


def _serve(jobs: _Queue) -> None:
    while (job := jobs.get()) is not None:
        job.help()


class CopyEngine:
    """Copies memory with up to ``threads`` threads, the caller's included.

    Threads start with the first large copy and live until `close`. Any thread may copy; in a
    forked child the engine starts afresh.

    Parameters
    ----------
    threads : int, optional
        By default 4, or the number of cores this process may use if that is less.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is None:
            threads = min(DEFAULT_THREADS, len(os.sched_getaffinity(0)))
        if threads < 1:
            raise RegionError(f"a copy engine with {threads} threads can't copy")
        self.threads = threads
        self._closed = False
        self.start_afresh()
        _all.add(self)

    def start_afresh(self) -> None:
        """Forget threads and jobs: in a forked child they are the parent's."""
        self._mutex = threading.Lock()
        self._jobs: _Queue = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []

    def copy(self, dst: int, src: int, size: int) -> None:
        """Copy ``size`` bytes from address ``src`` to address ``dst``; the ranges may overlap."""
        if size < PARALLEL_FROM or self.threads == 1 or abs(dst - src) < size:
            memory.copy(dst, src, size)
            return
        job = _Job(dst, src, size)
        try:
            self._call_helpers(job, -(-size // PIECE) - 1)
            job.work()
        finally:
            job.finish()

    def _call_helpers(self, job: _Job, useful: int) -> None:
        with self._mutex:
            if self._closed:
                return
            while len(self._helpers) < self.threads - 1:
                # Daemons: an engine that nobody closed must not hold up the interpreter's exit.
                thread = threading.Thread(
                    target=_serve, args=(self._jobs,), name="flyt-copy", daemon=True
                )
                thread.start()
                self._helpers.append(thread)
            for _ in range(min(useful, len(self._helpers))):
                self._jobs.put(job)

    def close(self) -> None:
        """End the threads. May be called again; later copies run on the caller's thread alone."""
        with self._mutex:
            self._closed = True
            helpers, self._helpers = self._helpers, []
            for _ in helpers:
                self._jobs.put(None)
        for thread in helpers:
            thread.join(JOIN_SECONDS)


_all: weakref.WeakSet[CopyEngine] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for engine in _all:
        engine.start_afresh()


os.register_at_fork(after_in_child=_after_fork_in_child)
