# SPDX-License-Identifier: Apache-2.0
"""`Principal`: who a client is, as far as the kernel can prove it. Two never share a worker."""

from __future__ import annotations

import dataclasses
import os

from flyt.rpc.connections import Peer
from flyt.rpc.endpoints import Endpoint


@dataclasses.dataclass(frozen=True, slots=True)
class Principal:
    """Somebody whose sessions may share a process.

    Attributes
    ----------
    kind : str
        ``"uid"`` (SO_PEERCRED) or ``"anonymous"`` (whoever reaches one TCP endpoint).
    name : str
        The uid, or the endpoint.
    """

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def uid(self) -> str:
        """What `flyt.backend.orders.Open` wants as peer: the uid, or "" where none is known."""
        return self.name if self.kind == "uid" else ""


def principal_of(peer: Peer, endpoint: Endpoint) -> Principal | None:
    """Who speaks from ``peer`` at our ``endpoint``; None when the kernel told nothing on ipc."""
    if endpoint.scheme != "ipc":
        return Principal("anonymous", str(endpoint))
    if peer.uid < 0:
        return None  # the connection ended before its first message was read
    return Principal("uid", str(peer.uid))


def is_own_user(peer: Peer) -> bool:
    """Whether the peer is a process of the user who runs this daemon, on this machine."""
    return peer.uid == os.getuid()
