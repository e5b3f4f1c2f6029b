# SPDX-License-Identifier: Apache-2.0
"""Staging slots: where pageable memory passes through the window.

A slot is free, in the hands of the thread that fills or drains it, or held by a command whose
answer gives it back. Nobody waits for a slot while holding one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from flyt.frontend.inflight import Pending

if TYPE_CHECKING:
    from flyt.frontend.connection import Connection

_HANDOVER_SECONDS = 0.05
"""A lost wake-up costs at most this much."""

_LAST = (-1,)
"""``one.extend(map(other.pop, _LAST))`` moves a slot in one call, which no interrupt tears."""


class Slot(NamedTuple):
    """``address`` in this process, ``at`` in the window."""

    address: int
    at: int


class StagingSlots:
    """Equal slots over the staging area.

    Parameters
    ----------
    base, index, length : int
        Address of the window's staging area, its index, its bytes.
    count, size : int
        Wanted slots; if the area is smaller, the slots are.
    """

    def __init__(self, base: int, index: int, length: int, count: int, size: int) -> None:
        self.size = min(size, length // count // 4096 * 4096) or length // 2
        self.count = max(2, min(count, length // self.size))
        self._free = [
            Slot(base + i * self.size, index + i * self.size) for i in reversed(range(self.count))
        ]
        self._awaited = 0
        self._held: dict[Slot, Pending] = {}
        self._lock = threading.RLock()  # a signal's handler may make a call while it is held
        self._freed = threading.Condition(self._lock)

    def try_take(self, held: list[Slot]) -> bool:
        """Put a free slot into ``held``, if there is one."""
        with self._lock:
            held.extend(map(self._free.pop, _LAST if self._free else ()))
            return bool(held)

    def take(self, connection: Connection, held: list[Slot]) -> Slot:
        """Put a free slot into ``held``, waiting for the oldest command that has one.

        An interrupt leaves it there or takes none: `give_back` then knows.

        Raises
        ------
        SessionLost
            The session ended meanwhile.
        """
        while not self.try_take(held):
            with self._lock:
                oldest = next(iter(self._held.values()), None)
                if oldest is None and not self._free:  # other threads fill or drain them all
                    self._awaited += 1
                    try:
                        self._freed.wait(_HANDOVER_SECONDS)
                    finally:
                        self._awaited -= 1
            if oldest is None:
                connection.refresh()
            else:
                connection.wait(oldest)
        return held[-1]

    def give_back(self, held: list[Slot]) -> None:
        """What is in ``held``, if anything is, is free again."""
        with self._lock:
            self._free.extend(map(held.pop, _LAST if held else ()))
            if self._awaited:
                self._freed.notify()

    def give(self, slot: Slot) -> None:
        """Back to the free ones; from any thread."""
        with self._lock:
            self._held.pop(slot, None)
            if slot not in self._free:  # a lost session's answers may come twice
                self._free.append(slot)
            if self._awaited:
                self._freed.notify()

    def hold(self, slot: Slot, pending: Pending) -> None:
        """Note that the answer to ``pending`` will give the slot back."""
        with self._lock:
            if not pending.done:
                self._held[slot] = pending
