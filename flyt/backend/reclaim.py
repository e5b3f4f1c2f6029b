# SPDX-License-Identifier: Apache-2.0
"""`Reclaimer`: gets frames zeroed and freed by the keeper, and the keeper replaced if it dies."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from flyt.backend.ledger import Ledger
from flyt.backend.locked import LockedFrames
from flyt.backend.loop import EventLoop
from flyt.backend.orders import (
    FROM_KEEPER,
    TO_KEEPER,
    Format,
    Formatted,
    Free,
    Leave,
    Owned,
    Reclaim,
    Reclaimed,
    Spare,
    Sweep,
)
from flyt.backend.processes import Child
from flyt.backend.served import ServedRegion
from flyt.errors import RegionError
from flyt.shm import runs as frame_runs
from flyt.shm.runs import Run

log = logging.getLogger(__name__)

IN_FLIGHT = 2
"""Reclaims that the keeper has at once: it is never idle, and its socket never full."""

PART_BYTES = 32 << 20
"""A larger job is done in parts of this size, in turn with others: one client's cudaFreeHost does
not wait until all the memory of a dead one is zeroed."""

PART_RUNS = 4096
"""Runs in one Reclaim: well below the limit of a message."""

RESTARTS = 3
RESTART_WINDOW = 60.0
"""A keeper that dies more than `RESTARTS` times in so many seconds will not get better."""

FORMAT_LIMIT = 60.0
FORMAT_BYTES_PER_SECOND = 256 << 20
"""Formatting may take `FORMAT_LIMIT` seconds, and longer for a region that takes longer to zero
at this rate, a tenth of what a slow machine does."""

LEAVE_LIMIT = 2.0
"""Seconds a keeper gets to end by itself."""


@dataclasses.dataclass(slots=True)
class _Job:
    parts: collections.deque[tuple[Run, ...]]
    left: int
    then: Callable[[], None]


class Reclaimer:
    """The only one that turns frames FREE.

    Parameters
    ----------
    loop : EventLoop
    served : ServedRegion
    ledger : Ledger
        `Ledger.reclaimed` is called for every frame that is done.
    """

    def __init__(
        self, loop: EventLoop, served: ServedRegion, ledger: Ledger, log_level: str = "WARNING"
    ) -> None:
        self._loop = loop
        self._served = served
        self._ledger = ledger
        self._log_level = log_level
        self._keeper: Child | None = None
        self._requests = itertools.count(1)
        self._waiting: collections.deque[_Job] = collections.deque()
        self._in_flight: dict[int, tuple[tuple[Run, ...], _Job]] = {}
        self._deaths: collections.deque[float] = collections.deque(maxlen=RESTARTS + 1)
        self._formatted: str | None = None
        self._leaving = False
        self._sweeping = False
        self._suspects: frozenset[tuple[int, int]] = frozenset()  # frame, and who says to have it
        self._locked = LockedFrames(
            loop, served.split, lambda runs: self.submit(runs, lambda: None)
        )

    # --- life ---

    def start(self) -> None:
        """Start the keeper and format the region.

        Raises
        ------
        RegionError
            When that fails.
        """
        self._launch(zeroed=self._served.region.created)
        _, locked = self._served.split([(0, self._ledger.page_count)])
        for part in _parts(locked, self._ledger.page_count):
            self._send(Spare(part))
        self._send(Format(self._served.epoch))
        limit = FORMAT_LIMIT + self._served.region.size / FORMAT_BYTES_PER_SECOND
        if not self._loop.turn_until(lambda: self._formatted is not None, limit):
            raise RegionError(f"{self._served.region.path} was not formatted within {limit:.0f} s")
        if self._formatted:
            raise RegionError(f"can't format {self._served.region.path}: {self._formatted}")
        self._locked.add(self._ledger.quarantine(frame_runs.frames_of(locked)))

    def _launch(self, zeroed: bool = False) -> None:
        self._keeper = Child(
            self._loop,
            self,
            "flyt.backend.keeper",
            [
                *self._served.child_arguments(),
                *(["--zeroed"] if zeroed else []),
                *("--log-level", self._log_level),
            ],
            sends=TO_KEEPER,
            receives=FROM_KEEPER,
            inherit=[self._served.region.fd],
        )

    @property
    def pid(self) -> int:
        """The keeper's pid; 0 while there is none."""
        return self._keeper.pid if self._keeper is not None else 0

    @property
    def busy(self) -> bool:
        """Whether frames are still to be reclaimed, and can be."""
        return self._keeper is not None and bool(self._waiting or self._in_flight)

    def leave(self, seconds: float) -> None:
        """Finish what is to be reclaimed, for at most ``seconds``, and end the keeper. Frames that
        are still locked keep their bytes: the next daemon sees to them."""
        self._locked.look()
        self._loop.turn_until(lambda: not self.busy, seconds)
        self._leaving = True
        if self._keeper is not None:
            self._send(Leave())
            self._keeper.end(LEAVE_LIMIT)

    def ended(self, reason: str) -> None:
        """The keeper is gone: start another one and tell it again, unless that is in vain."""
        self._keeper = None
        if self._leaving:
            return
        if self._formatted is None:
            self._formatted = f"the keeper ended with {reason}"
            return
        self._deaths.append(time.monotonic())
        if not self._served.is_whole():
            self._abandon()
            return
        if len(self._deaths) > RESTARTS and self._deaths[-1] - self._deaths[0] < RESTART_WINDOW:
            self._served.give_up(f"its keeper died {len(self._deaths)} times, last with {reason}")
            self._abandon()
            return
        log.warning("the keeper ended with %s; starting another", reason)
        for part, job in self._in_flight.values():
            if not job.parts:
                self._waiting.append(job)
            job.parts.append(part)
        self._in_flight.clear()
        self._sweeping = False
        try:
            self._launch()
        except OSError as exc:
            self._served.give_up(f"can't start another keeper: {exc.strerror}")
            self._abandon()
        self._feed()

    def _abandon(self) -> None:
        """No keeper any more: the frames stay out of use, but nobody waits for them."""
        jobs = {id(job): job for job in self._waiting}
        jobs.update((id(job), job) for _, job in self._in_flight.values())
        self._waiting.clear()
        self._in_flight.clear()
        for job in jobs.values():
            job.then()

    # --- work ---

    def submit(self, runs: Sequence[Run], then: Callable[[], None]) -> None:
        """Reclaim what the ledger counts as being reclaimed; drop it there, then call ``then``."""
        parts = list(_parts(runs, max(1, PART_BYTES // self._served.geometry.page_size)))
        if not parts or self._keeper is None:
            then()
            return
        self._waiting.append(_Job(collections.deque(parts), len(parts), then))
        self._feed()

    def submit_unlocked(self, runs: Sequence[Run]) -> None:
        """`submit`, but of frames that a process has locked only once it has let go of them."""
        self._locked.add(runs)

    def sweep(self) -> None:
        """Look for frames that are in use by nobody we know; those seen twice are reclaimed."""
        if self._keeper is not None and not self._sweeping:
            self._sweeping = True
            self._send(Sweep())

    def _feed(self) -> None:
        while self._keeper is not None and self._waiting and len(self._in_flight) < IN_FLIGHT:
            request = next(self._requests)
            job = self._waiting.popleft()
            part = job.parts.popleft()
            if job.parts:
                self._waiting.append(job)
            self._in_flight[request] = part, job
            self._send(Reclaim(request, part))

    def _send(self, order: Any) -> None:
        if self._keeper is not None:
            self._keeper.send(order)

    def heard(self, message: Any) -> None:
        """A word of the keeper."""
        match message:
            case Formatted():
                self._formatted = message.error
            case Reclaimed():
                self._part_done(message.request)
            case Owned():
                self._swept(zip(message.frames, message.sessions, strict=True))

    def _part_done(self, request: int) -> None:
        part, job = self._in_flight.pop(request)  # ours: the keeper only echoes it
        # In this order: who sees FREE in the table must not be refused by the ledger.
        self._ledger.reclaimed(part)
        self._send(Free(part))
        job.left -= 1
        if not job.left:
            job.then()
        self._feed()

    def _swept(self, owned: Iterable[tuple[int, int]]) -> None:
        self._sweeping = False
        strays = frozenset(one for one in owned if self._ledger.is_stray(one[0]))
        # A client may be between taking a frame and asking for it; it won't be for a whole period.
        # Several clients in a row may have the same frame just then.
        again = strays & self._suspects
        self._suspects = strays - again
        if again:
            log.info("reclaiming %d frames that a client took and never used", len(again))
            self.submit(self._ledger.quarantine(frame for frame, _ in again), lambda: None)


def _parts(runs: Sequence[Run], frames: int) -> Iterator[tuple[Run, ...]]:
    part: list[Run] = []
    room = frames
    for first, count in runs:
        start, end = first, first + count
        while start < end:
            taken = min(room, end - start)
            part.append((start, taken))
            start += taken
            room -= taken
            if not room or len(part) == PART_RUNS:
                yield tuple(part)
                part, room = [], frames
    if part:
        yield tuple(part)
