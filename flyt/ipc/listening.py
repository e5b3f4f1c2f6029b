# SPDX-License-Identifier: Apache-2.0
"""How two processes find each other: a listener's abstract name, and `connect`."""

from __future__ import annotations

from flyt.ipc import sockets
from flyt.ipc.connection import TIMEOUT, Connection


class Listener(sockets.ListeningSocket):
    """An abstract socket name at which processes of this user can connect.

    Parameters
    ----------
    name : str, optional
        By default one that nobody can guess; tell it to the peer.
    """

    def connection(
        self, timeout: float = TIMEOUT, *, allowed_uids: frozenset[int] | None = None
    ) -> Connection:
        """Accept the next process; HandshakeError if it is a stranger's."""
        return Connection(self.accept(timeout), allowed_uids=allowed_uids)


def connect(
    name: str, timeout: float = sockets.CONNECT_LIMIT, *, allowed_uids: frozenset[int] | None = None
) -> Connection:
    """Connect to a `Listener` by its name."""
    return Connection(sockets.connect(name, timeout), allowed_uids=allowed_uids)
