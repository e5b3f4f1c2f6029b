# SPDX-License-Identifier: Apache-2.0
"""`FrameDesk`: what workers may ask about frames, answered from the ledger."""

from __future__ import annotations

import logging

from flyt.backend.ledger import Ledger
from flyt.backend.orders import Granted, Reclaimed, Request, Returned
from flyt.backend.reclaim import Reclaimer
from flyt.backend.workers import WorkerProcess
from flyt.errors import RegionError

log = logging.getLogger(__name__)


class FrameDesk:
    """Grants frames, takes them back.

    Parameters
    ----------
    ledger : Ledger
    reclaimer : Reclaimer
    """

    def __init__(self, ledger: Ledger, reclaimer: Reclaimer) -> None:
        self.ledger = ledger
        self.reclaimer = reclaimer

    def frames_of(self, session: int) -> int:
        """How many frames a session holds."""
        return len(self.ledger.frames_of(session))

    def figures(self) -> dict[str, int]:
        """For displays."""
        return {
            "total": self.ledger.page_count,
            "granted": self.ledger.granted,
            "reclaiming": self.ledger.reclaiming,
        }

    @property
    def keeper(self) -> int:
        """The keeper's pid; 0 while there is none."""
        return self.reclaimer.pid

    def request(self, worker: WorkerProcess, order: Request) -> None:
        """All of the frames or none."""
        refused: tuple[int, ...]
        if order.session in worker.sessions:
            try:
                refused = self.ledger.grant(order.session, order.frames)
            except RegionError as exc:
                log.warning("session %016x asks for impossible frames: %s", order.session, exc)
                refused = self.ledger.nameable(order.frames)
        else:
            refused = self.ledger.nameable(order.frames)  # it was ended meanwhile
        worker.send(Granted(order.session, order.request, refused))

    def returned(self, worker: WorkerProcess, order: Returned) -> None:
        """Reclaim what the session really held; then tell it."""

        def done() -> None:
            worker.send(Reclaimed(order.session, order.request))

        if order.session not in worker.sessions:
            return  # its Closed came first and covered these frames
        try:
            held = self.ledger.release(order.session, order.frames)
        except RegionError as exc:
            log.error("worker %d returns impossible frames: %s", worker.pid, exc)
            return
        self.reclaimer.submit(held, done)

    def release(self, session: int) -> None:
        """Reclaim everything of a session that is over, as its client lets go of it."""
        self.reclaimer.submit_unlocked(self.ledger.release_all(session))
