# SPDX-License-Identifier: Apache-2.0
"""`WorkerPool`: which worker serves whom.

One worker serves all sessions of a principal and has a successor after its death, or
(``--isolation process``) each session has a worker of its own and a spare one is kept ready.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from flyt.backend.loop import EventLoop, Timer
from flyt.backend.principals import Principal
from flyt.backend.processes import KILL_LIMIT
from flyt.backend.workers import DEVICES_UNAVAILABLE, Launch, PoolOwner, WorkerProcess
from flyt.errors import DeviceError

log = logging.getLogger(__name__)

SPARE_RETRY = 10.0
"""Seconds after which a spare that died, or could not be started, is tried again: whatever it was
short of, trying at once would only burn the processor."""


LAST_IDLE_SECONDS = 1.0
"""Between two looks whether the last worker, which nobody uses, is still the last one."""


class WorkerPool:
    """All workers.

    Parameters
    ----------
    loop : EventLoop
    owner : PoolOwner
    launch : Launch
    per_session : bool
        Whether each session has a worker of its own; else each principal has one.
    limit : int
        How many may serve at once, spare ones included. Those on their way out don't count, so
        that whoever lost a session gets the next one at once; `EXIT_LIMIT` bounds their stay.
    idle_seconds : float
        How long a principal without sessions keeps its worker. The last worker stays for ever.
    """

    def __init__(
        self,
        loop: EventLoop,
        owner: PoolOwner,
        launch: Launch,
        *,
        per_session: bool,
        limit: int,
        idle_seconds: float = 0.0,
    ) -> None:
        self._loop = loop
        self._owner = owner
        self._launch = launch
        self._per_session = per_session
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._idle: dict[WorkerProcess, Timer] = {}
        self._workers: list[WorkerProcess] = []
        self._spare_timer: Timer | None = None
        self._ending = False

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(list(self._workers))

    def hear(self) -> None:
        """Take note of what the workers have said: sessions that ended leave room."""
        for worker in self:
            worker.hear()

    @property
    def session_count(self) -> int:
        """Sessions of all workers."""
        return sum(len(worker.sessions) for worker in self._workers)

    def sessions_of(self, principal: Principal) -> int:
        """Sessions that one principal has."""
        return sum(len(w.sessions) for w in self._workers if w.principal == principal)

    def start(self) -> WorkerProcess:
        """Start a worker that is nobody's yet.

        Raises
        ------
        OSError
            The system has no room for one more process.
        """
        worker = WorkerProcess(self._loop, self._owner, self._launch)
        self._workers.append(worker)
        return worker

    def assign(self, principal: Principal) -> WorkerProcess:
        """A worker for one more session: the principal's own, a spare one, or one that now starts.

        Raises
        ------
        DeviceError
            When there are too many workers, or the system has no room for one more process.
        """
        worker = self._find(principal)
        if worker is None:
            self._check_limit()
            try:
                worker = self.start()
            except OSError as exc:
                raise DeviceError(
                    DEVICES_UNAVAILABLE, f"can't start another process: {exc.strerror}"
                ) from exc
        worker.principal = principal
        self._busy(worker)
        self._want_spare()
        return worker

    def settle(self, worker: WorkerProcess) -> None:
        """A session of the worker ended, or was not wanted after all.

        One that was a session's own goes with it; one that never had any is a spare again.
        """
        if worker.leaving or worker.sessions:
            return
        if not self._per_session:
            self._busy(worker)
            self._idle[worker] = self._loop.call_later(
                self._idle_seconds, lambda: self._too_idle(worker)
            )
            return
        if worker.used:
            worker.retire()
        else:
            worker.principal = None
            for extra in self._spares()[1:]:
                extra.leave()
        self._want_spare()

    def forget(self, worker: WorkerProcess) -> None:
        """A worker that has ended."""
        self._busy(worker)
        self._workers.remove(worker)
        self._want_spare(SPARE_RETRY if worker.principal is None else 0.0)

    def _busy(self, worker: WorkerProcess) -> None:
        if (timer := self._idle.pop(worker, None)) is not None:
            timer.cancel()

    def _too_idle(self, worker: WorkerProcess) -> None:
        del self._idle[worker]
        if worker.sessions:
            return
        if len(self._fit()) > 1:
            self._dismiss(worker)
        else:  # the last one: whoever comes next finds it ready, if it is the same user
            self._idle[worker] = self._loop.call_later(
                max(self._idle_seconds, LAST_IDLE_SECONDS), lambda: self._too_idle(worker)
            )

    def _dismiss(self, worker: WorkerProcess) -> None:
        self._busy(worker)
        log.info("ending worker %d of %s: it has no sessions", worker.pid, worker.principal)
        worker.retire()

    def _fit(self) -> list[WorkerProcess]:
        return [w for w in self._workers if w.running and not w.leaving]

    def _spares(self) -> list[WorkerProcess]:
        """Those that are nobody's, the ready ones first."""
        spares = [w for w in self._fit() if w.principal is None]
        return sorted(spares, key=lambda worker: worker.snapshot is None)

    def _find(self, principal: Principal) -> WorkerProcess | None:
        own = [] if self._per_session else [w for w in self._fit() if w.principal == principal]
        return next(iter([*own, *self._spares()]), None)

    def _check_limit(self) -> None:
        if len(self._fit()) < self._limit:
            return
        for worker in self._idle:  # in the order in which they became so
            if not worker.sessions:
                self._dismiss(worker)
                return
        whom = "sessions" if self._per_session else "users"
        raise DeviceError(
            DEVICES_UNAVAILABLE,
            f"this backend serves {self._limit} {whom} already, each with a process of its own "
            "(--max-workers); try again when one has left",
        )

    def _want_spare(self, seconds: float = 0.0) -> None:
        """Start one ahead, from the event loop: whoever took the last one does not wait for it."""
        if self._spare_timer is not None:
            if self._spare_timer.due <= time.monotonic() + seconds:
                return
            self._spare_timer.cancel()
        self._spare_timer = self._loop.call_later(seconds, self._keep_spare)

    def _keep_spare(self) -> None:
        self._spare_timer = None
        fit = self._fit()
        wanted = self._per_session and not self._ending and len(fit) < self._limit
        if not wanted or any(worker.principal is None for worker in fit):
            return
        try:
            self.start()
        except OSError as exc:
            log.warning("can't start a spare process: %s", exc.strerror)
            self._want_spare(SPARE_RETRY)

    def leave(self, seconds: float, hurry: Callable[[], bool]) -> None:
        """End all workers: in order for ``seconds`` (or until ``hurry()``), then by SIGKILL."""
        self._ending = True
        for worker in self:
            worker.leave()
        self._loop.turn_until(lambda: not self._workers or hurry(), seconds)
        for worker in self:
            if worker.sessions:
                log.warning("worker %d still works; killing it", worker.pid)
            worker.kill()
        if not self._loop.turn_until(lambda: not self._workers, KILL_LIMIT):
            log.error("workers %s do not end, not even by SIGKILL", [w.pid for w in self])
