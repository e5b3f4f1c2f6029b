# SPDX-License-Identifier: Apache-2.0
"""Staging for small copies to the device: a ring of bytes, so that hundreds are in flight at once.

A slot for each would allow as many small copies as there are slots before the first has to be
answered. Places are given out one behind the other and come back in that order.
"""

from __future__ import annotations

import collections

from flyt.frontend.inflight import Pending
from flyt.frontend.staging import Slot

RING_BYTES = 5 << 18
"""With the short way's area, which is most of it: more copies of 4 KiB than a client may have
commands on their way."""

MIN_RING_BYTES = 64 << 10
"""With very small slots."""

SHARE_OF_STAGING = 8
"""In a small staging area the ring has this part of it, the slots the rest."""

SHARE_OF_RING = 5
"""Beside the short way's area, which few copies pass by, the ring has this part of both."""

_ALIGNMENT = 64
"""A cache line: two copies in flight share none."""


class StagingRing:
    """Bytes of the window that small copies pass through. Guarded by the connection's lock.

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
        self._held: collections.deque[tuple[Pending, int]] = collections.deque()

    def place(self, size: int) -> Slot | None:
        """Where the next ``size`` <= `largest` bytes go; None while `oldest` holds that place."""
        held = self._held
        while held and held[0][0].done:
            self._tail = held.popleft()[1]
        if not held:
            self._tail = self._head
        at = self._head % self._length
        if at + size > self._length:  # not across the end
            self._head += self._length - at
            at = 0
        if self._head + size - self._tail > self._length:
            return None
        return Slot(self._base + at, self._index + at)

    def hold(self, pending: Pending, size: int) -> None:
        """The last `place` is in the hands of a command, until it is answered."""
        self._head += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._held.append((pending, self._head))

    @property
    def oldest(self) -> Pending | None:
        """The command whose answer frees the next place."""
        return self._held[0][0] if self._held else None
