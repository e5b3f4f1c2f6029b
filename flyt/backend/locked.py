# SPDX-License-Identifier: Apache-2.0
"""`LockedFrames`: frames whose session is over while a living process still has them locked.

That process may not know yet, and what it has in its pinned memory is its own: a session that ends
takes the device's memory along, not the program's. Nobody else can take a locked frame, so its
bytes may stay until the lock goes: with the last array, with the session object, or with the
process. A guest's locks are in the guest, and whoever maps nothing has none: such frames are
reclaimed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flyt.backend.loop import EventLoop, Timer
from flyt.shm.runs import Run

FIRST_STEP = 0.02
LAST_STEP = 0.25
"""Seconds between two looks, since no lock tells when it goes. Most go at once, with a client that
is just ending; others may stay for hours. Frames of the dead have to be back within 2 s."""


class LockedFrames:
    """Looks again and again, and has frames reclaimed as they are let go.

    Parameters
    ----------
    loop : EventLoop
    split : callable
        Divides runs into those that nobody has locked, and the others.
    reclaim : callable
        Gets those that nobody has locked any more.
    """

    def __init__(
        self,
        loop: EventLoop,
        split: Callable[[Sequence[Run]], tuple[tuple[Run, ...], tuple[Run, ...]]],
        reclaim: Callable[[Sequence[Run]], None],
    ) -> None:
        self._loop = loop
        self._split = split
        self._reclaim = reclaim
        self._runs: tuple[Run, ...] = ()
        self._step = FIRST_STEP
        self._timer: Timer | None = None

    def add(self, runs: Sequence[Run]) -> None:
        """Have these frames reclaimed: at once, or when nobody has them locked any more."""
        self._runs += tuple(runs)
        self._step = FIRST_STEP
        self.look()

    def look(self) -> None:
        """Look now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._runs:
            return
        unlocked, self._runs = self._split(self._runs)
        if self._runs:
            self._timer = self._loop.call_later(self._step, self.look)
            self._step = min(2 * self._step, LAST_STEP)
        if unlocked:
            self._reclaim(unlocked)
