# SPDX-License-Identifier: Apache-2.0
"""The copy engine: memmove by several threads.

One core moves 8 to 14 GB/s, a PCIe 5 link takes 55. The threads are the compiled library's
(`flyt/shm/native/copy.c`); without it one memmove, on the caller's thread, moves the same bytes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable

from flyt.environment import MAX_COPY_THREADS
from flyt.errors import RegionError
from flyt.shm import memory
from flyt.shm.layout import KIB, MIB
from flyt.shm.native import Native, native

PARALLEL_FROM = MIB
"""Below this size one memmove is done before another thread is awake."""
PIECE = 256 * KIB
"""Some 50 microseconds of copying: large against the cost of fetching a piece, small against a
slot, whose first bytes should not wait for the last thread."""
STREAMED_FROM = 2 * MIB
"""So much is written past the caches: from memory to memory 22 GB/s instead of 14 on two cores of
an EPYC, 134 instead of 87 with 12 threads of a Xeon. What is smaller may be read again soon."""
FEW_THREADS = 4
"""With more, what is read soon stays in the caches: slots of 64 MiB were filled at 118 GB/s by 12
threads of the Xeon, at 62 when streamed. On the EPYC's two cores streaming won there too."""
STEP = 256 * MIB
"""After so many bytes a Ctrl-C gets its turn: nothing interrupts the compiled library."""
SPIN_NS = 100_000
"""Idle threads look for the next slot of the same copy for so long, where cores are to spare."""
CORES_TO_SPIN = 8


def move(dst: int, src: int, size: int) -> None:
    """memmove on the caller's thread, streamed where it is large and the ranges don't overlap."""
    library = native() if size >= STREAMED_FROM and abs(dst - src) >= size else None
    if library is None:
        memory.copy(dst, src, size)
    else:
        library.stream(dst, src, size)


def default_threads(cores: int) -> int:
    """Measured on 16 cores: 4 threads move 20 GB/s, 8 move 36 and 12 move 43, against the 55 of
    the link; the rest is left to the session, the driver and the program itself."""
    return cores if cores <= 4 else max(4, min(12, cores * 3 // 4))


class Job:
    """A copy that `CopyEngine.post` queued; what it reads and writes stays until it was waited for.

    Who is interrupted twice may lose one: it ends before it is forgotten.
    """

    __slots__ = ("_ticket", "_wait")

    def __init__(self, native: Native, handle: int) -> None:
        self._ticket = ctypes.create_string_buffer(native.engine_job_size)
        self._wait: Callable[[], object] = functools.partial(
            native.engine_wait, handle, self._ticket
        )

    def begin(
        self, native: Native, handle: int, dst: int, src: int, size: int, *, streams: bool
    ) -> None:
        """To be called once. Where the engine has no place for it, the copy is made here."""
        if not native.engine_post(handle, self._ticket, dst, src, size, PIECE, streams):
            (native.stream if streams else memory.copy)(dst, src, size)

    def wait(self) -> None:
        """Help until it is complete; at once if it was waited for, or has not begun."""
        self._wait()
        self._wait = _nothing  # the engine may end now

    __del__ = wait


def _nothing() -> None:
    pass


class CopyEngine:
    """Copies memory with up to ``threads`` threads, the caller's included.

    Threads start with the first large copy and live until `close`. Any thread may copy; in a
    forked child the engine starts afresh.

    Parameters
    ----------
    threads : int
        0 for the default (`default_threads` of the cores that this process may use).
    """

    def __init__(self, threads: int = 0) -> None:
        if not 0 <= threads <= MAX_COPY_THREADS:
            raise RegionError(
                f"a copy engine with {threads} threads: 1 to {MAX_COPY_THREADS} can be"
            )
        cores = len(os.sched_getaffinity(0))
        self.threads = threads or default_threads(cores)
        self._spin_ns = SPIN_NS if cores >= CORES_TO_SPIN else 0
        self._native = native() if self.threads > 1 else None
        self._closed = False
        self.start_afresh()
        _all.add(self)

    def start_afresh(self) -> None:
        """Forget the threads: in a forked child they are the parent's."""
        self._mutex = threading.RLock()  # as in `flyt.frontend.users`
        self._handle: int | None = None
        self._users = 0

    def copy(self, dst: int, src: int, size: int) -> None:
        """Copy ``size`` bytes from address ``src`` to address ``dst``; the ranges may overlap.

        An interrupt (Ctrl-C) comes when no thread writes any more.
        """
        for at in range(0, size, STEP):
            jobs = list[Job]()
            try:
                self.post(jobs, dst + at, src + at, min(STEP, size - at), whole=size)
                self.wait(jobs)
            except BaseException:
                self.wait(jobs)
                raise

    def post(
        self,
        jobs: list[Job],
        dst: int,
        src: int,
        size: int,
        whole: int = 0,
        *,
        read_soon: bool = False,
    ) -> None:
        """Copy ``size`` bytes, or have the engine's threads do it, and append the job to ``jobs``.

        Parameters
        ----------
        jobs : list of Job
            To be waited for, whatever happens. An interrupt leaves the job there, or starts none.
        whole : int
            The size of what this is a part of.
        read_soon : bool
            Somebody, or a DMA, reads the destination at once.
        """
        parallel = size >= PARALLEL_FROM and abs(dst - src) >= max(size, whole)
        if self._native is None or not parallel or (handle := self._enter()) is None:
            memory.copy(dst, src, size)
            return
        jobs.append(job := Job(self._native, handle))
        streams = size >= STREAMED_FROM and not (read_soon and self.threads > FEW_THREADS)
        job.begin(self._native, handle, dst, src, size, streams=streams)

    def wait(self, jobs: list[Job]) -> None:
        """Help until the copies of all ``jobs`` are complete; empties the list."""
        while jobs:
            jobs[0].wait()
            del jobs[0]
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
