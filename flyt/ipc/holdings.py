# SPDX-License-Identifier: Apache-2.0
"""`Holdings`: what a connection's peer shared and this process still has.

Arrays that live, and mappings that are kept idle for the next share while the peer's block exists.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial

from flyt.ipc.buffer import Buffer
from flyt.ipc.driver import Driver
from flyt.ipc.messages import MAX_RELEASED, Release


class _Held(weakref.ref[object]):
    """An owner that lives, and what is to be done when it does no more."""

    # weakref.finalize does more, and takes three times as long.
    __slots__ = ("end",)
    end: Callable[[], None]


class Holdings:
    """Arrays of the peer, and what is to be told of those that are gone.

    Parameters
    ----------
    lock, changed : threading.RLock, threading.Condition
        The connection's; told when there are fewer arrays.
    note : callable
        Has the link's thread do something, from any point (`flyt.ipc.link.Link.note`).
    """

    def __init__(
        self,
        lock: threading.RLock,
        changed: threading.Condition,
        note: Callable[[Callable[[], None]], None],
    ) -> None:
        self._lock = lock
        self._changed = changed
        self._note = note
        self._count = 0
        self._held: set[_Held] = set()
        self._lasting: dict[bytes, list[Buffer]] = {}
        self._over = False
        self._mapped: list[bytes] = []
        # Of the link's thread alone:
        self._gone: list[int] = []
        self._busy: set[tuple[Driver, int]] = set()

    @property
    def count(self) -> int:
        """Arrays that live here, or whose end the peer has not been told."""
        return self._count

    def hold(self, owner: object, ident: int, driver: Driver, devices: Iterable[int]) -> None:
        """Release the share once ``owner`` is garbage and the devices have done their work."""
        held = _Held(owner, self._let_go)
        held.end = partial(self._end, ident, [(driver, device) for device in devices])
        with self._lock:
            self._count += 1
            self._held.add(held)

    def _let_go(self, held: _Held) -> None:
        """An owner is garbage; from the garbage collector, at any point."""
        self._held.discard(held)
        self._note(held.end)

    def refuse(self, ident: int) -> None:
        """Let go of a share that can't be used here."""
        with self._changed:
            self._count += 1
        self._note(partial(self._end, ident, []))

    def _end(self, ident: int, busy: list[tuple[Driver, int]]) -> None:
        self._gone.append(ident)
        self._busy.update(busy)

    def keep_idle(self, key: bytes, buffer: Buffer) -> None:
        """Keep a mapping for the next share while the exporter's block exists."""
        kept = self._lasting.get(key)
        if kept is not None and buffer in kept:
            return
        with self._lock:
            if self._over:
                return
            kept = self._lasting.setdefault(key, [])
            if not kept:
                self._mapped.append(key)
            if buffer not in kept:
                kept.append(buffer)

    def forget(self, key: bytes) -> None:
        """The exporter's block is no more; its idle mappings go."""
        with self._changed:
            dropped = self._lasting.pop(key, [])
        del dropped  # unmapped here, if nobody uses it

    def releases(self) -> list[Release]:
        """On the link's thread: wait for the devices, and what to tell of arrays that are gone.

        One wait and one message serve many arrays. `told` when they are on their way.
        """
        for driver, device in self._busy:
            driver.synchronize(device)
        self._busy.clear()
        gone, self._gone = self._gone, []
        made = []
        for at in range(0, len(gone), MAX_RELEASED):
            with self._changed:
                mapped = tuple(self._mapped[:MAX_RELEASED])
                del self._mapped[: len(mapped)]
            made.append(Release(tuple(gone[at : at + MAX_RELEASED]), mapped))
        return made

    def told(self, release: Release) -> None:
        """The peer knows that these are gone, or will."""
        with self._changed:
            self._count -= len(release.ids)
            self._changed.notify_all()

    def end(self) -> None:
        """The connection is over: nothing is kept idle, nobody is told."""
        with self._changed:
            self._over = True
            self._count = 0
            lasting, self._lasting = self._lasting, {}
            self._changed.notify_all()
        lasting.clear()
