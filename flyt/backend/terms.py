# SPDX-License-Identifier: Apache-2.0
"""`Terms`: what the daemon offers to every session, and what it answers for the handshake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from flyt.backend.orders import Opened
from flyt.rpc.connections import Peer
from flyt.rpc.handshake import Feature
from flyt.rpc.messages import Refused, StatusReport, Welcome


class Terms(Protocol):
    """What the daemon offers to every session."""

    @property
    def memory_limit(self) -> int:
        """Bytes of device memory; 0 for no limit."""

    @property
    def sessions_per_user(self) -> int:
        """How many sessions one principal may have."""

    @property
    def session_ports(self) -> str:
        """TCP ports of session sockets: ``*`` or ``A-B``."""

    def welcome(
        self, opened: Opened, token: bytes, snapshot: dict[str, Any], features: frozenset[Feature]
    ) -> Welcome:
        """The words of welcome to a session that has its socket."""

    def report(self, peer: Peer, then: Callable[[StatusReport | Refused], object]) -> None:
        """Call ``then`` with the answer to AskStatus, at once or soon."""
