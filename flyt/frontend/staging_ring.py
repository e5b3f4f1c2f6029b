# SPDX-License-Identifier: Apache-2.0
"""Staging for small copies to the device: a ring of bytes, so that hundreds are in flight at once.

A slot for each would allow as many small copies as there are slots before the first has to be
answered. Places are given out one behind the other and come back in that order.
"""

from __future__ import annotations

import collections
import threading
import time

from flyt.frontend.connection import Connection
from flyt.frontend.inflight import Pending
from flyt.frontend.staging import Slot

RING_BYTES = 1 << 20
"""As many copies of 4 KiB as a client may have commands on their way."""

MIN_RING_BYTES = 64 << 10
"""With very small slots."""

SHARE_OF_STAGING = 8
"""In a small staging area the ring has this part of it, the slots the rest."""

_ALIGNMENT = 64
"""A cache line: two copies in flight share none."""

_HANDOVER_SECONDS = 0.001
"""How long another thread may take between a place and its command."""


class Ticket:
    """A place in the ring. It is free again when `pending` is answered, or at once if `dropped`."""

    __slots__ = ("dropped", "end", "pending", "slot")

    def __init__(self, slot: Slot, end: int) -> None:
        self.slot = slot
        self.end = end
        self.pending: Pending | None = None
        self.dropped = False

    @property
    def is_over(self) -> bool:
        return self.dropped or (self.pending is not None and self.pending.done)


class StagingRing:
    """Bytes of the window that small copies pass through.

    Parameters
    ----------
    base, index, length : int
        Address, index in the window and bytes of the ring.

    Attributes
    ----------
    largest : int
        Bytes of the largest copy that goes this way.
    """

    def __init__(self, base: int, index: int, length: int) -> None:
        self.largest = length // 16
        self._base = base
        self._index = index
        self._length = length
        self._head = self._tail = 0  # positions count on for ever; a place is position % length
        self._tickets: collections.deque[Ticket] = collections.deque()
        self._lock = threading.Lock()

    def take(self, connection: Connection, size: int) -> Ticket:
        """A place of ``size`` <= `largest` bytes, waiting for the oldest command that holds one.

        Raises
        ------
        SessionLost
            The session ended meanwhile.
        """
        while True:
            with self._lock:
                ticket = self._try(size)
                if ticket is not None:
                    return ticket
                oldest = self._tickets[0].pending
            if oldest is not None:
                connection.wait(oldest)
            else:  # another thread is about to send it
                time.sleep(_HANDOVER_SECONDS)  # bounded by that thread, or by the session's end
                connection.refresh()

    def _try(self, size: int) -> Ticket | None:
        tickets = self._tickets
        while tickets and tickets[0].is_over:
            self._tail = tickets.popleft().end
        if not tickets:
            self._tail = self._head
        start = self._head
        place = start % self._length
        if place + size > self._length:  # not across the end
            start += self._length - place
            place = 0
        end = start + -(-size // _ALIGNMENT) * _ALIGNMENT
        if end - self._tail > self._length:
            return None
        self._head = end
        ticket = Ticket(Slot(self._base + place, self._index + place), end)
        tickets.append(ticket)
        return ticket
