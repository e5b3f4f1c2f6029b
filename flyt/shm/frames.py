# SPDX-License-Identifier: Apache-2.0
"""Taking page frames out of the region: the frontend's way from FREE to OWNED.

A frame is taken only if its word says FREE, *and* the lock on its byte is got, *and* the word,
read again under the lock, still says FREE. Nothing is mapped here: whoever takes frames maps
them and then fills them with zeros before use, since their bytes may be another session's.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Container, Iterable, Sequence
from itertools import islice

from flyt.errors import RegionError, RegionFull
from flyt.shm import runs
from flyt.shm.layout import FrameState
from flyt.shm.locks import FrameLocks
from flyt.shm.private import OwnFrames
from flyt.shm.runs import Run
from flyt.shm.table import FrameTable

DEFAULT_WAIT = 2.0
"""Seconds: a dead session's frames are back within that time."""
STEP = 0.001
"""Seconds between two looks at frames that are being cleaned or taken."""
CONTENTION_STEPS = 20
"""Looks at frames that say FREE but are locked. Somebody who is just taking them needs
microseconds; who still holds them after that may be stopped for hours."""
VPN_LIMIT = 1 << 32
"""Virtual page numbers are 32-bit fields of the table."""


class FrameTaker:
    """Takes frames for one session. Methods may be called from any thread.

    Parameters
    ----------
    table : FrameTable
    locks : FrameLocks or OwnFrames
        Hold what was taken until `give_up` or `drop`, or until this process dies.
    session, pid : int
        Written into the table as the owner.
    """

    def __init__(
        self, table: FrameTable, locks: FrameLocks | OwnFrames, session: int, pid: int
    ) -> None:
        self._table = table
        self._locks = locks
        self._session = session
        self._pid = pid
        self._mutex = threading.Lock()
        self._random = random.Random(os.urandom(8))

    def take(
        self,
        count: int,
        vpn: int,
        *,
        wait: float = DEFAULT_WAIT,
        avoid: Container[int] = frozenset(),
    ) -> tuple[Run, ...]:
        """Take ``count`` frames for the virtual pages from ``vpn``: contiguous if possible.

        Parameters
        ----------
        count, vpn : int
            Frame i of the result backs virtual page ``vpn + i``.
        wait : float
            Seconds to wait at most for frames that the backend is cleaning, or will clean since
            their owner has let go of them.
        avoid : container of int
            Frames to pass over, since the backend refused them.

        Raises
        ------
        RegionFull
            There are too few; nothing was taken.
        """
        if count <= 0 or not 0 <= vpn <= VPN_LIMIT - count:
            raise RegionError(f"{count} frames for virtual page {vpn} can't be taken")
        deadline = time.monotonic() + wait
        contended = 0
        while True:
            taken, free = self._attempt(count, vpn, avoid)
            if taken:
                return taken
            cleaning = self._coming()
            if free >= count:
                contended += 1
            worth_it = cleaning > 0 or (free >= count and contended < CONTENTION_STEPS)
            if not worth_it or time.monotonic() >= deadline:
                raise self._full(count, free, cleaning)
            # No one signals that a frame came free; the deadline bounds the steps. The random
            # part parts two takers that met over the last frames.
            time.sleep(STEP * (0.5 + self._random.random()))

    def give_up(self, table: Iterable[Run]) -> None:
        """Undo a `take` whose frames were never granted or mapped: FREE again, then unlocked."""
        for first, count in table:
            for frame in range(first, first + count):
                ours = self._table.owner(frame).session == self._session
                # Any other word is the backend's: it is cleaning the frame by now.
                if ours and self._table.state(frame) == FrameState.OWNED:
                    self._table.set_state(frame, FrameState.FREE)
            self._locks.unlock(first, count)

    def drop(self, table: Iterable[Run]) -> None:
        """Unlock frames that were granted, once they are unmapped. The backend sets them FREE, but
        for those of a region that is this process's own: nobody but it sees their bytes."""
        if self._locks.private:
            self.give_up(table)
            return
        for first, count in table:
            self._locks.unlock(first, count)

    def _attempt(self, count: int, vpn: int, avoid: Container[int]) -> tuple[tuple[Run, ...], int]:
        """One pass: the runs, or () and how many frames say FREE."""
        with self._mutex:
            free = [
                frame
                for frame, state in enumerate(self._table.states())
                if state == FrameState.FREE and frame not in avoid
            ]
            if len(free) < count:
                return (), len(free)
            claimed: list[Run] = []
            complete = False
            try:
                if not self._claim(runs.from_frames(free), count, claimed):
                    return (), len(free)
                for page, frame in enumerate(runs.frames_of(claimed), vpn):
                    self._table.mark_owned(frame, self._session, self._pid, page)
                complete = True
            finally:
                if not complete:
                    self.give_up(claimed)
        return runs.from_frames(runs.frames_of(claimed)), len(free)

    def _coming(self) -> int:
        """How many frames will be FREE soon: those being cleaned, and those of a session that has
        ended without the backend having noticed yet. Their word says OWNED, but no one holds
        their lock."""
        owned: list[int] = []
        cleaning = 0
        for frame, state in enumerate(self._table.states()):
            cleaning += state == FrameState.QUARANTINED
            if state == FrameState.OWNED:
                owned.append(frame)
        for first, count in runs.from_frames(owned):
            for frame in range(first, first + count):
                if self._locks.lock(frame, 1):
                    self._locks.unlock(frame, 1)
                    cleaning += 1
        return cleaning

    def _claim(self, free: Sequence[Run], count: int, claimed: list[Run]) -> bool:
        """Lock ``count`` frames, adding them to ``claimed``; False if others are faster."""
        for first, length in free:
            if length >= count and self._lock(first, count):
                claimed.append((first, count))
                return True
        missing = count
        for first, length in free:
            part = min(length, missing)
            if self._lock(first, part):
                claimed.append((first, part))
                missing -= part
            else:
                single = (f for f in range(first, first + length) if self._lock(f, 1))
                for frame in islice(single, missing):
                    claimed.append((frame, 1))
                    missing -= 1
            if not missing:
                return True
        return False

    def _lock(self, first: int, count: int) -> bool:
        """Lock these frames if all are FREE under the lock."""
        if not self._locks.lock(first, count):
            return False
        states = (self._table.state(frame) for frame in range(first, first + count))
        if all(state == FrameState.FREE for state in states):
            return True
        self._locks.unlock(first, count)
        return False

    def _full(self, count: int, free: int, cleaning: int) -> RegionFull:
        geometry = self._table.geometry
        locked = " (but some are still locked by processes that map them)" if free >= count else ""
        return RegionFull(
            f"{count} page frames of {geometry.page_size} bytes are needed, {free} of "
            f"{geometry.page_count} are free{locked} and {cleaning} are being cleaned: free pinned "
            "memory, end a client, or start flyt-backend with a larger --size"
        )
