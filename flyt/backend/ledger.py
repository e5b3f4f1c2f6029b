# SPDX-License-Identifier: Apache-2.0
"""`Ledger`: which page frame belongs to which session, in the supervisor's own memory.

The page table in the region can be forged by any guest; this book can't. A frame is in one of three
states here: nobody's, held by one session, or being reclaimed (nobody's, but not to be had).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flyt.errors import RegionError
from flyt.shm import runs as frame_runs
from flyt.shm.runs import Run

NAMED_LIMIT = 4096
"""A refusal names at most so many frames: it is for people, and must fit into one message."""

UNNAMEABLE = (0xFFFF_FFFF_FFFF_FFFF,)
"""Names the refusal of a request in which no frame exists."""


class Ledger:
    """Pure bookkeeping of one region's frames.

    Parameters
    ----------
    page_count : int
        Frames of the region.
    """

    def __init__(self, page_count: int) -> None:
        self.page_count = page_count
        self._holder: dict[int, int] = {}
        self._frames: dict[int, set[int]] = {}
        self._reclaiming: set[int] = set()

    def grant(self, session: int, runs: Sequence[Run]) -> tuple[int, ...]:
        """Enter all frames of ``runs`` for ``session``, or none.

        Returns
        -------
        tuple of int
            Empty when granted; else the frames that were in the way (a session's own count, too:
            a frame has one place in one page table), at most `NAMED_LIMIT` of them.

        Raises
        ------
        RegionError
            When the runs are no set of frames of this region.
        """
        frame_runs.check(runs, self.page_count)
        wanted = list(frame_runs.frames_of(runs))
        taken = [f for f in wanted if f in self._holder or f in self._reclaiming]
        if not taken:
            self._holder.update(dict.fromkeys(wanted, session))
            self._frames.setdefault(session, set()).update(wanted)
        return tuple(taken[:NAMED_LIMIT])

    def nameable(self, runs: Sequence[Run]) -> tuple[int, ...]:
        """The frames to name when `grant` raised: those that exist, else `UNNAMEABLE`."""
        frames: list[int] = []
        for first, count in runs:
            last = min(first + count, self.page_count, first + NAMED_LIMIT - len(frames))
            frames += range(first, last)
        return tuple(frames) or UNNAMEABLE

    def release(self, session: int, runs: Sequence[Run]) -> tuple[Run, ...]:
        """Take frames from a session that is done with them; they count as being reclaimed.

        Returns
        -------
        tuple of Run
            Those that the session really held.

        Raises
        ------
        RegionError
            When the runs are no set of frames of this region.
        """
        frame_runs.check(runs, self.page_count)
        return self._take(session, frame_runs.frames_of(runs))

    def release_all(self, session: int) -> tuple[Run, ...]:
        """`release` of everything a session held."""
        return self._take(session, sorted(self._frames.get(session, ())))

    def _take(self, session: int, frames: Iterable[int]) -> tuple[Run, ...]:
        held = [f for f in frames if self._holder.get(f) == session]
        for frame in held:
            del self._holder[frame]
        self._reclaiming.update(held)
        own = self._frames.get(session)
        if own is not None:
            own.difference_update(held)
            if not own:
                del self._frames[session]
        return frame_runs.from_frames(held)

    def quarantine(self, frames: Iterable[int]) -> tuple[Run, ...]:
        """Begin to reclaim frames that nobody holds; returns the runs of those."""
        strays = sorted(f for f in set(frames) if self.is_stray(f))
        self._reclaiming.update(strays)
        return frame_runs.from_frames(strays)

    def reclaimed(self, runs: Sequence[Run]) -> None:
        """These frames are zeroed and FREE: anybody may have them.

        Raises
        ------
        RegionError
            When one of them was not being reclaimed: a fault of our own.
        """
        frames = set(frame_runs.frames_of(runs))
        if not frames <= self._reclaiming:
            raise RegionError("frames were reported as reclaimed that were not being reclaimed")
        self._reclaiming -= frames

    def is_stray(self, frame: int) -> bool:
        """Whether the frame is in nobody's hands as far as this book knows."""
        return frame not in self._holder and frame not in self._reclaiming

    def holder(self, frame: int) -> int | None:
        """The session that holds a frame."""
        return self._holder.get(frame)

    def frames_of(self, session: int) -> frozenset[int]:
        """The frames of a session."""
        return frozenset(self._frames.get(session, ()))

    @property
    def granted(self) -> int:
        """How many frames are held by sessions."""
        return len(self._holder)

    @property
    def reclaiming(self) -> int:
        """How many frames are being reclaimed."""
        return len(self._reclaiming)
