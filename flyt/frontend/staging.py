# SPDX-License-Identifier: Apache-2.0
"""Staging slots: where pageable memory passes through the window.

A slot is free, in the hands of the thread that fills or drains it, or held by a command: one whose
answer gives it back, or one that the compiled library has sent and whose answer is looked for when
a slot is wanted. Nobody waits for a slot while holding one.
"""

from __future__ import annotations

import ctypes
import operator
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from flyt.frontend.inflight import Pending
from flyt.shm import memory

if TYPE_CHECKING:
    from flyt.frontend.connection import Connection
    from flyt.frontend.express_link import ExpressLink

_WORD = 8

_HANDOVER_SECONDS = 0.05
"""A lost wake-up costs at most this much."""

_LAST, _FIRST = (-1,), (0,)
_KEY = operator.itemgetter(0)
"""``one.extend(map(other.pop, _LAST))`` moves a slot in one call, which no interrupt tears."""


class Slot(NamedTuple):
    """``address`` in this process, ``at`` in the window; ``sent`` is the address of a word: the
    number of the command that the library has sent from it, or 0."""

    address: int
    at: int
    sent: int = 0


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
        numbers = self._numbers = (ctypes.c_uint64 * self.count)()
        first = ctypes.addressof(numbers)
        self._free = [
            Slot(base + i * self.size, index + i * self.size, first + i * _WORD)
            for i in reversed(range(self.count))
        ]
        self._awaited = 0
        self._held: dict[Slot, tuple[Slot, list[Pending]]] = {}
        self._lent: list[Slot] = []
        self._link: ExpressLink | None = None
        self._lock = threading.RLock()  # a signal's handler may make a call while it is held
        self._freed = threading.Condition(self._lock)

    def try_take(self, held: list[Slot]) -> bool:
        """Put a free slot into ``held``, if there is one."""
        if not self._free:
            self._collect()
        with self._lock:
            held.extend(map(self._free.pop, _LAST if self._free else ()))
            if held:
                memory.store_word(held[-1].sent, 0)
            return bool(held)

    def _collect(self) -> None:
        """Free those whose commands are answered, the oldest first; and those that an interrupt has
        kept an answer from giving back."""
        with self._lock:
            for slot, sent in list(self._held.values()):
                if sent and sent[0].done:
                    self.give(slot, sent[0])
        while self._link is not None and (number := self._oldest()):
            if not self._link.is_answered(number):  # without the lock here: its holders want ours
                return
            with self._lock:
                if number == self._oldest():
                    self._free.extend(map(self._lent.pop, _FIRST))

    def _oldest(self) -> int:
        """The number of the oldest command that the library has sent from a slot, or 0."""
        with self._lock:
            return memory.load_word(self._lent[0].sent) if self._lent else 0

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
                lent = self._oldest()
                oldest = next((sent[0] for _, sent in self._held.values() if sent), None)
                # Other threads fill or drain them all.
                if not lent and oldest is None and not self._free:
                    self._awaited += 1
                    try:
                        self._freed.wait(_HANDOVER_SECONDS)
                    finally:
                        self._awaited -= 1
            if oldest is not None:
                connection.wait(oldest)
            elif lent and self._link is not None:
                self._link.await_answer(lent)
            else:
                connection.refresh()
        return held[-1]

    def give_back(self, held: list[Slot]) -> None:
        """What is in ``held``, if anything is, is free again: at once, or, if an interrupt has come
        behind `lend`'s command, with its answer."""
        with self._lock:
            sent = bool(held) and memory.load_word(held[-1].sent)
            if held:
                self._held.pop(held[-1], None)
            (self._lent if sent else self._free).extend(map(held.pop, _LAST if held else ()))
            if self._awaited:
                self._freed.notify()

    def give(self, slot: Slot, pending: Pending) -> None:
        """The command is answered: its slot is free, if it holds one yet. From any thread; who is
        interrupted in an answer is told once more, when the slot may be another's."""
        with self._lock:
            _, sent = self._held.get(slot, (slot, []))
            if sent and sent[0] is pending:
                self._free.extend(map(_KEY, map(self._held.pop, (slot,))))
            if self._awaited:
                self._freed.notify()

    def lend(self, link: ExpressLink, held: list[Slot], send: Callable[[], bool]) -> bool:
        """Let ``send`` post what is in the slot; then that is its command's until it is answered.

        Parameters
        ----------
        link : ExpressLink
            Knows that.
        held : list of Slot
            Is empty afterwards.
        send : callable
            See `Express.send_part`. If it declines, nothing has changed.
        """
        self._link = link
        if not send():
            return False
        self.give_back(held)
        return True

    def hold(self, slot: Slot, sent: list[Pending]) -> None:
        """Note that the answer to the command that is, or will be, in ``sent`` gives the slot back.
        Who sends none calls `give_back`."""
        with self._lock:
            if not (sent and sent[0].done):
                self._held[slot] = slot, sent
