# SPDX-License-Identifier: Apache-2.0
"""`Visitors`: what strangers at the main endpoints may take before they are anybody's session.

A connection costs a descriptor, and libzmq keeps the frames of a message that has not ended where
nobody can count them. So connections are bounded in number and in silence, and while any is open,
the daemon looks at its own memory: when that grows, whoever has not ended a message is cut off.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable, Iterable

from flyt.backend.loop import EventLoop
from flyt.rpc.sockets import Listener

log = logging.getLogger(__name__)

MOST_VISITORS = 512
"""Connections of one main endpoint; a client needs one for the milliseconds of its handshake."""

SILENT_SECONDS = 30.0
"""A visitor that says nothing for so long is cut off; an honest HELLO comes at once."""

LOOK_SECONDS = 0.1
"""Between two looks while there are visitors: the bytes of this time come on top of `ROOM`."""

TRIMS = 5
"""Looks at which free memory goes back to the system once somebody was cut off: libzmq's thread
gives up what it kept for them in its own time, and they may be gone before."""

ROOM = 64 << 20
"""Bytes that the daemon may grow while it has visitors; an honest one costs a few hundred KiB."""

HELLO_BYTES = 64 << 10
"""The largest frame at a main endpoint: a HELLO has some hundred bytes."""

HELLO_BACKLOG = 64
"""Messages of one visitor that may wait; it gets an answer to each before it needs another."""

VISITOR_LIMITS = {"backlog": HELLO_BACKLOG, "unread": HELLO_BACKLOG, "largest": HELLO_BYTES}
"""Of the `Listener` of a main endpoint that no session passes through."""

_libc = ctypes.CDLL(None)


def resident_bytes() -> int:
    """The memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


class Visitors:
    """The connections of all main endpoints.

    Parameters
    ----------
    loop : EventLoop
    listeners : callable
        Those that are open.
    waiting : callable
        ``waiting(listener, descriptor)``: whether that connection waits for an answer of ours.
    others : callable
        Bytes that this process may hold for those who are visitors no more.
    """

    def __init__(
        self,
        loop: EventLoop,
        listeners: Callable[[], Iterable[Listener]],
        waiting: Callable[[Listener, int], bool],
        others: Callable[[], int] = lambda: 0,
    ) -> None:
        self._loop = loop
        self._listeners = listeners
        self._waiting = waiting
        self._others = others
        self._looking = False
        self._base = 0
        self._trims = 0

    def came(self, listener: Listener) -> None:
        """Something happened at this endpoint; its events have been read."""
        excess = len(listener.connections) - MOST_VISITORS
        if excess > 0:
            self._cut(listener, self._idle(listener, 0.0)[:excess], "there are too many")
        if not self._looking and len(listener.connections):
            self._looking = True
            self._base = resident_bytes()
            self._loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        listeners = [one for one in self._listeners() if len(one.connections)]
        self._looking = bool(listeners) or self._trims > 0
        if not self._looking:
            return
        for listener in listeners:
            self._cut(listener, self._idle(listener, SILENT_SECONDS), "they say nothing")
        if self._trims:
            _libc.malloc_trim(0)
            self._trims -= 1
            if not self._trims:  # what is still there now, stays
                self._base = resident_bytes()
        if resident_bytes() > self._base + ROOM + self._others():
            self._trims = self._trims or TRIMS
            self._make_room(listeners)
        self._loop.call_later(LOOK_SECONDS, self._look)

    def _make_room(self, listeners: Iterable[Listener]) -> None:
        for listener in listeners:
            silent = listener.connections.silent(LOOK_SECONDS)
            idle = [source for source in silent if not self._waiting(listener, source)]
            # One that waits for its answer may send on meanwhile; it is only the next to go.
            self._cut(listener, idle or silent, "one of them sends a message without end")

    def _idle(self, listener: Listener, seconds: float) -> list[int]:
        silent = listener.connections.silent(seconds)
        return [source for source in silent if not self._waiting(listener, source)]

    @staticmethod
    def _cut(listener: Listener, sources: list[int], why: str) -> None:
        if sources and (count := listener.connections.cut(sources)):
            log.warning("cutting %d connections at %s: %s", count, listener.endpoint, why)
