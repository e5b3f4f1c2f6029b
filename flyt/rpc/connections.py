# SPDX-License-Identifier: Apache-2.0
"""The connections of one listener, by descriptor: when each was last heard, and the way to cut one.

libzmq reads a connection on a thread of its own for as long as the peer sends, so a peer that sends
nothing, or never ends its message, is seen here only. Cutting shuts the kernel's socket down;
libzmq then ends the connection as if the peer had.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """Where a message came from, as the kernel says; -1 where it can't (TCP). ``key`` is the
    CURVE key that the peer has proven, "" where none is asked for."""

    address: str
    uid: int = -1
    pid: int = -1
    key: str = ""

    @property
    def proven(self) -> str:
        """The uid or the key, as text; "" for somebody who proved nothing."""
        return str(self.uid) if self.uid >= 0 else self.key

    @classmethod
    def parse(cls, text: str, key: str = "") -> Peer:
        # libzmq writes "host:uid:gid:pid" for ipc, from SO_PEERCRED at accept.
        parts = text.rsplit(":", 3)
        if len(parts) == 4 and all(p.isdigit() for p in parts[1:]):
            return cls("local", int(parts[1]), int(parts[3]))
        return cls(text, key=key)


def inode_of(descriptor: int) -> int:
    """What a descriptor stands for; 0 when it is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return 0


class Connections:
    """Who is connected. Used by the listener's thread alone."""

    def __init__(self) -> None:
        self._heard: dict[int, float] = {}  # the one that was heard longest ago comes first
        self._inodes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def began(self, descriptor: int) -> None:
        """libzmq accepted it."""
        self._inodes[descriptor] = inode_of(descriptor)
        self._heard[descriptor] = time.monotonic()

    def ended(self, descriptor: int) -> None:
        """libzmq closed it, or it is nobody's business here any more: it is not counted, timed or
        cut from now on."""
        self._heard.pop(descriptor, None)
        self._inodes.pop(descriptor, None)

    def heard(self, descriptor: int) -> None:
        """It has said something of use."""
        if self._heard.pop(descriptor, None) is not None:
            self._heard[descriptor] = time.monotonic()

    def silent(self, seconds: float) -> list[int]:
        """Those not heard for so long, the most silent first."""
        since = time.monotonic() - seconds
        return [descriptor for descriptor, heard in self._heard.items() if heard <= since]

    def cut(self, descriptors: Iterable[int]) -> int:
        """End these; how many there were. Call with the listener's events read: a descriptor may
        be another file's by now, which is left alone."""
        return sum(self._cut(descriptor) for descriptor in list(descriptors))

    def _cut(self, descriptor: int) -> bool:
        inode = self._inodes.get(descriptor, 0)
        self.ended(descriptor)
        try:
            copy = os.dup(descriptor)
        except OSError:
            return False  # it has ended meanwhile
        if inode_of(copy) != inode:
            os.close(copy)
            return False
        with socket.socket(fileno=copy) as connection:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                return False  # the peer was faster
        return True
