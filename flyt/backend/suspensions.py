# SPDX-License-Identifier: Apache-2.0
"""`Suspensions`: which sessions are suspended, and who waits for a suspension or its end.

Only in isolation ``process``: the driver suspends processes, and a shared one has the sessions of
others as well.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable

from flyt.backend import orders
from flyt.backend.devices.checkpoint import LIMIT as CHECKPOINT_LIMIT
from flyt.backend.devices.codes import INVALID_VALUE, NOT_PERMITTED, NOT_READY
from flyt.backend.loop import EventLoop, Timer
from flyt.backend.suspension import DRAIN_SECONDS
from flyt.backend.workers import WorkerProcess
from flyt.rpc.greetings import Obeyed, Refused, Resume, Suspend

log = logging.getLogger(__name__)

LIMIT = 2 * DRAIN_SECONDS + 2 * CHECKPOINT_LIMIT + 5.0
"""Seconds for the worker's answer: work that ends, memory that is let go of, the driver, and the
driver again where that failed."""

LONGEST_PATIENCE = 86_400
"""A day: a call that waits longer is a slip of the pen."""

Then = Callable[[Obeyed | Refused], object]


@dataclasses.dataclass(slots=True)
class _Change:
    """What somebody waits for."""

    wanted: bool
    then: Then
    limit: Timer


class Suspensions:
    """Of all sessions of a daemon.

    Parameters
    ----------
    loop : EventLoop
    workers : iterable of WorkerProcess
    per_session : bool
        Whether each session has a process of its own.

    Attributes
    ----------
    sessions : set of int
        Those that are suspended.
    """

    def __init__(
        self, loop: EventLoop, workers: Iterable[WorkerProcess], *, per_session: bool
    ) -> None:
        self._loop = loop
        self._workers = workers
        self._per_session = per_session
        self._changes: dict[int, _Change] = {}
        self.sessions: set[int] = set()

    def ask(self, wish: Suspend | Resume, then: Then) -> None:
        """Have a session suspended or resumed; ``then`` is called with the answer."""
        session = wish.session
        worker = next((w for w in self._workers if session in w.sessions), None)
        if worker is None:
            text = f"there is no session {session:016x} here: flyt status lists them"
            then(Refused(INVALID_VALUE, text))
        elif not self._per_session:
            text = (
                "sessions of a user share one process here, and the driver suspends processes as a "
                "whole: start flyt-backend with --isolation process"
            )
            then(Refused(NOT_PERMITTED, text))
        elif session in self._changes:
            text = f"another suspend or resume of session {session:016x} is under way"
            then(Refused(NOT_READY, text))
        else:
            self._begin(worker, wish, then)

    def _begin(self, worker: WorkerProcess, wish: Suspend | Resume, then: Then) -> None:
        session = wish.session
        limit = self._loop.call_later(LIMIT, lambda: self._too_slow(session))
        self._changes[session] = _Change(isinstance(wish, Suspend), then, limit)
        if isinstance(wish, Suspend):
            worker.send(orders.Suspend(session, min(wish.patience, LONGEST_PATIENCE)))
        else:
            worker.send(orders.Resume(session))

    def heard(self, worker: WorkerProcess, word: orders.Paused) -> None:
        """A worker's answer. Only its own sessions count."""
        if word.session not in worker.sessions:
            return
        if word.paused:
            self.sessions.add(word.session)
        else:
            self.sessions.discard(word.session)
        change = self._changes.pop(word.session, None)
        state = "suspended" if word.paused else "running"
        log.info("session %016x is %s%s", word.session, state, word.error and f": {word.error}")
        if change is None:
            return
        change.limit.cancel()
        if word.error or word.paused != change.wanted:
            change.then(Refused(NOT_PERMITTED, word.error or f"it is {state}"))
        else:
            change.then(Obeyed())

    def over(self, session: int) -> None:
        """The session has ended."""
        self.sessions.discard(session)
        self._give_up(session, "the session has ended meanwhile")

    def close(self) -> None:
        """Nobody is answered any more."""
        for session in list(self._changes):
            self._changes.pop(session).limit.cancel()

    def _too_slow(self, session: int) -> None:
        self._give_up(session, f"its process gave no answer within {LIMIT:.0f} s")

    def _give_up(self, session: int, text: str) -> None:
        change = self._changes.pop(session, None)
        if change is not None:
            change.limit.cancel()
            change.then(Refused(NOT_READY, text))
