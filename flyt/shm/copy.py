# SPDX-License-Identifier: Apache-2.0
"""The copy engine: memmove by several threads.

One core moves 8 to 14 GB/s, a PCIe 5 link takes 55. The threads are the compiled library's
(`flyt/shm/native/copy.c`); without it one memmove, on the caller's thread, moves the same bytes.
"""

from __future__ import annotations

import os
import threading
import weakref

from flyt.errors import RegionError
from flyt.shm import memory
from flyt.shm.layout import KIB, MIB
from flyt.shm.native import native

PARALLEL_FROM = MIB
"""Below this size one memmove is done before another thread is awake."""
PIECE = 512 * KIB
"""Some 50 microseconds of copying: large against the cost of fetching a piece, small against a
4-MiB slot."""
STEP = 256 * MIB
"""After so many bytes a Ctrl-C gets its turn: nothing interrupts the compiled library."""
DEFAULT_THREADS = 4
"""Measured: more than four bring nothing."""
MAX_THREADS = 64
SPIN_NS = 100_000
"""Idle threads look for the next slot of the same copy for so long, where cores are to spare."""
CORES_TO_SPIN = 8


class CopyEngine:
    """Copies memory with up to ``threads`` threads, the caller's included.

    Threads start with the first large copy and live until `close`. Any thread may copy; in a
    forked child the engine starts afresh.

    Parameters
    ----------
    threads : int
        0 for the default: 4, or the number of cores this process may use if that is less.
    """

    def __init__(self, threads: int = 0) -> None:
        if not 0 <= threads <= MAX_THREADS:
            raise RegionError(f"a copy engine with {threads} threads: 1 to {MAX_THREADS} can be")
        cores = len(os.sched_getaffinity(0))
        self.threads = threads or min(DEFAULT_THREADS, cores)
        self._spin_ns = SPIN_NS if cores >= CORES_TO_SPIN else 0
        self._native = native() if self.threads > 1 else None
        self._closed = False
        self.start_afresh()
        _all.add(self)

    def start_afresh(self) -> None:
        """Forget the threads: in a forked child they are the parent's."""
        self._mutex = threading.Lock()
        self._handle: int | None = None
        self._users = 0

    def copy(self, dst: int, src: int, size: int) -> None:
        """Copy ``size`` bytes from address ``src`` to address ``dst``; the ranges may overlap.

        An interrupt (Ctrl-C) comes when no thread writes any more.
        """
        parallel = self._native is not None and size >= PARALLEL_FROM and abs(dst - src) >= size
        if self._native is None or not parallel or (handle := self._enter()) is None:
            memory.copy(dst, src, size)
            return
        try:
            for at in range(0, size, STEP):
                self._native.engine_copy(handle, dst + at, src + at, min(STEP, size - at), PIECE)
        finally:
            self._leave()

    def _enter(self) -> int | None:
        """The library's engine, made at the first call; None after `close`."""
        with self._mutex:
            if self._native is None or self._closed:
                return None
            if self._handle is None:
                self._handle = self._native.engine_open(self.threads - 1, self._spin_ns)
            if self._handle is not None:
                self._users += 1
            return self._handle

    def _leave(self) -> None:
        with self._mutex:
            self._users -= 1
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._closed and not self._users and self._native is not None and self._handle:
            self._native.engine_close(self._handle)
            self._handle = None

    def close(self) -> None:
        """End the threads, if need be after the copy that another thread is at. May be called
        again; later copies run on the caller's thread alone."""
        with self._mutex:
            self._closed = True
            self._end_if_idle()


_all: weakref.WeakSet[CopyEngine] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for engine in _all:
        engine.start_afresh()


os.register_at_fork(after_in_child=_after_fork_in_child)
