# SPDX-License-Identifier: Apache-2.0
"""`Survey`: asks all workers what their sessions hold, for whoever wants the status.

Those who ask meanwhile hear the same answer, and a worker that has not answered is not asked again:
asking costs a stuck worker nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flyt.backend.loop import EventLoop, Timer
from flyt.backend.orders import Measure, Measured
from flyt.backend.workers import WorkerProcess

PATIENCE = 0.5
"""Seconds for the answers; a worker's main thread does nothing else, so one that takes longer is
stuck, and what it has is shown as unknown."""

Figures = dict[int, dict[str, Any]]
"""By session."""


class Survey:
    """At most one under way.

    Parameters
    ----------
    loop : EventLoop
    workers : iterable of WorkerProcess
    """

    def __init__(self, loop: EventLoop, workers: Iterable[WorkerProcess]) -> None:
        self._loop = loop
        self._workers = workers
        self._asked: set[WorkerProcess] = set()
        self._waiting: list[Callable[[Figures], None]] = []
        self._figures: Figures = {}
        self._limit: Timer | None = None

    def take(self, then: Callable[[Figures], None]) -> None:
        """Call ``then`` with the figures of all sessions whose workers answer in time."""
        self._waiting.append(then)
        if self._limit is not None:
            return
        self._figures = {}
        self._limit = self._loop.call_later(PATIENCE, self._finish)
        for worker in self._workers:
            if worker.sessions and not worker.leaving and worker not in self._asked:
                self._asked.add(worker)
                worker.send(Measure())
        self._finish_if_complete()

    def heard(self, worker: WorkerProcess, message: Measured) -> None:
        """A worker's answer. Only its own sessions count."""
        self._asked.discard(worker)
        for session in worker.sessions:
            figures = message.sessions.get(f"{session:016x}")
            if isinstance(figures, dict):
                self._figures[session] = figures
        self._finish_if_complete()

    def forget(self, worker: WorkerProcess) -> None:
        """It has ended."""
        self._asked.discard(worker)
        self._finish_if_complete()

    def close(self) -> None:
        """Nobody is answered any more."""
        self._waiting.clear()

    def _finish_if_complete(self) -> None:
        if not self._asked:
            self._finish()

    def _finish(self) -> None:
        if self._limit is None:
            return
        self._limit.cancel()
        self._limit = None
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(self._figures)
