# SPDX-License-Identifier: Apache-2.0
"""`Operators`: what only the user who runs the daemon may ask at its main endpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flyt.backend.principals import is_own_user
from flyt.backend.suspensions import Suspensions
from flyt.backend.terms import NO_DEVICE
from flyt.rpc.connections import Peer
from flyt.rpc.greetings import AskStatus, Obeyed, Refused, Resume, StatusReport, Suspend

Survey = Callable[[Callable[[dict[str, Any]], object]], None]

Wish = AskStatus | Suspend | Resume


class Operators:
    """Answers them, or tells them who may ask.

    Parameters
    ----------
    survey : callable
        Calls its argument with what `flyt status` shows, at once or soon.
    suspensions : Suspensions
    """

    def __init__(self, survey: Survey, suspensions: Suspensions) -> None:
        self._survey = survey
        self._suspensions = suspensions

    def serve(
        self, peer: Peer, wish: Wish, then: Callable[[StatusReport | Obeyed | Refused], object]
    ) -> None:
        """Call ``then`` with the answer, at once or in a while."""
        if not is_own_user(peer):
            what = "for its status" if isinstance(wish, AskStatus) else "that"
            text = f"only the user who runs this backend may ask {what}"
            then(Refused(NO_DEVICE, text))
        elif isinstance(wish, AskStatus):
            self._survey(lambda report: then(StatusReport(report)))
        else:
            self._suspensions.ask(wish, then)
