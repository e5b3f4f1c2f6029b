# SPDX-License-Identifier: Apache-2.0
"""`Principal`: who a client is, as far as that is proven. Two never share a worker."""

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
        ``"uid"`` (SO_PEERCRED), ``"key"`` (CURVE), or ``"anonymous"`` (whoever reaches a TCP
        endpoint without keys).
    name : str
        The uid, the public key in Z85, or the endpoint.
    """

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def proven(self) -> str:
        """What `flyt.rpc.connections.Peer` says of all its connections: uid, key, or ""."""
        return self.name if self.kind != "anonymous" else ""


def principal_of(peer: Peer, endpoint: Endpoint) -> Principal | None:
    """Who speaks from ``peer`` at our ``endpoint``; None when the kernel told nothing on ipc."""
    if endpoint.scheme != "ipc" and peer.key:
        return Principal("key", peer.key)
    if endpoint.scheme != "ipc":
        return Principal("anonymous", str(endpoint))
    if peer.uid < 0:
        return None  # the connection ended before its first message was read
    return Principal("uid", str(peer.uid))


def is_own_user(peer: Peer) -> bool:
    """Whether the peer is a process of the user who runs this daemon, on this machine."""
    return peer.uid == os.getuid()
