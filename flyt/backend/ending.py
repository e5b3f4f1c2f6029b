# SPDX-License-Identifier: Apache-2.0
"""How a session's thread waits for the end of its own work, and the word that it is over."""

from __future__ import annotations

import logging

import zmq

from flyt.backend.answers import Answers
from flyt.backend.holdings import Holdings
from flyt.backend.inbox import Inbox
from flyt.errors import FlytError

log = logging.getLogger(__name__)


class Ended(Exception):
    """The session is over; the argument says why."""


class Drain:
    """Runs a session's inbox until no work of the session is in flight.

    Parameters
    ----------
    inbox : Inbox
    holdings : Holdings
    answers : Answers or None
        None where there is nobody to tell.
    """

    def __init__(self, inbox: Inbox, holdings: Holdings, answers: Answers | None) -> None:
        self._inbox = inbox
        self._holdings = holdings
        self._answers = answers
        self._idle = False
        self._poller = zmq.Poller()
        self._poller.register(inbox.fileno(), zmq.POLLIN)
        holdings.when_done(holdings.streams.all(), self._reached)

    def _reached(self, _: int) -> None:
        self._idle = True

    @property
    def is_done(self) -> bool:
        """Whether all is done that was put on the streams before, and all that came since."""
        return self._idle and self._holdings.waiting == 0

    def turn(self, patience_ms: int | None) -> None:
        """Do what there is to do; if that was not all, wait for more."""
        self._inbox.run()
        busy = self._holdings.look()
        if self._answers is not None:
            self._answers.tell()
        if not self.is_done:
            self._poller.poll(0 if busy else patience_ms)

    def finish(self, session: int) -> None:
        """Turn until it is done, whatever is raised meanwhile: the session is ending, and no work
        may be left uncounted.

        Bounded by the work itself: a kernel may run for an hour, and its memory can't be given
        back before.
        """
        while not self.is_done:
            try:
                self.turn(None)
            except (Ended, FlytError) as exc:
                log.warning("session %016x, ending: %s", session, exc)
                self._inbox.put(lambda: None)  # only wakes us up
