# SPDX-License-Identifier: Apache-2.0
"""The pinned segments of a session's window: page frames that come and go with each allocation.

Frames that the backend was asked to grant, or to let go of, stay mapped, locked and in their place
until its answer is there, also when nobody waits for that any more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from flyt.errors import DeviceError, RegionFull
from flyt.frontend.connection import Connection
from flyt.frontend.inflight import Pending
from flyt.rpc import messages as m
from flyt.shm import memory, runs
from flyt.shm.frames import FrameTaker
from flyt.shm.runs import Run
from flyt.shm.window import Window

MEMORY_ALLOCATION = 2

TRIES = 8
"""Places, or sets of frames, that are offered before an allocation fails."""

Late = Callable[[int], None]
"""Gets the first page of a segment that an interrupt has left to be freed, by `Segments.free`, at
the next call. May be called by whoever reads answers, so it sends nothing itself."""


class Segment(NamedTuple):
    """Where a segment begins: its address, its offset in the window and its first virtual page."""

    address: int
    offset: int
    vpn: int


class _Growth:
    """How far an allocation has come: what it holds, and the command once it may be on its way."""

    __slots__ = ("sent", "table", "vpn")

    def __init__(self) -> None:
        self.vpn = 0
        self.table: tuple[Run, ...] = ()
        self.sent: list[Pending] = []


class Segments:
    """Of one window. Methods may be called from any thread.

    Parameters
    ----------
    connection : Connection
    window : Window
        Attached.
    taker : FrameTaker
    first : int
        The first virtual page that segments may have.
    """

    def __init__(
        self, connection: Connection, window: Window, taker: FrameTaker, first: int
    ) -> None:
        self._connection = connection
        self._window = window
        self._taker = taker
        self._used = {0: first}
        self._next = first
        self._ungranted: dict[int, Callable[[], None]] = {}
        """Segments that are here but not at the backend, and what gives their frames back."""
        self._leaving: set[int] = set()

    def allocate(self, size: int, late: Late) -> Segment:
        """A segment of at least ``size`` bytes.

        Raises
        ------
        DeviceError
            cudaErrorMemoryAllocation when the region has too little left.
        """
        page = self._window.geometry.page_size
        refused: set[int] = set()
        for _ in range(TRIES):
            growth = _Growth()
            try:
                pending = self._grow(growth, -(-size // page), refused)
                if pending.status == 0:
                    vpn = growth.vpn
                    return Segment(self._window.address(vpn), vpn * page, vpn)
            except BaseException as exc:
                self._abandon(growth, late)
                if isinstance(exc, RegionFull | MemoryError):
                    raise DeviceError(MEMORY_ALLOCATION, str(exc)) from exc
                raise
            self._abandon(growth, late)
            if pending.status == m.Status.FRAMES_REFUSED:
                refused.update(pending.values)
            elif pending.status != m.Status.ADDRESS_TAKEN:
                self._connection.checked(pending)
        raise DeviceError(MEMORY_ALLOCATION, f"no place in the window after {TRIES} tries")

    def _grow(self, growth: _Growth, pages: int, refused: set[int]) -> Pending:
        with self._connection.lock:
            growth.vpn = vpn = self._find(pages)
            self._used[vpn] = pages
        growth.table = table = self._taker.take(pages, vpn, avoid=refused)
        map_zeroed(self._window, vpn, table)
        pending = self._connection.submit(
            lambda number: m.Grow(number, vpn, table), sent=growth.sent
        )
        self._connection.wait(pending)
        return pending

    def _abandon(self, growth: _Growth, late: Late) -> None:
        """The allocation was refused, or interrupted: nobody has its address."""
        vpn = growth.vpn
        if not vpn:
            return
        let_go: Callable[[tuple[Run, ...]], None] = self._taker.give_up
        with self._connection.lock:
            if growth.sent:
                pending = growth.sent[0]
                if not pending.done:
                    pending.finish = lambda answer: self._has_grown(growth, answer, late)
                    return
                if pending.status == 0:
                    late(vpn)
                    return
                if pending.ended:  # nobody knows whether they were granted
                    let_go = self._taker.drop
            self._ungranted[vpn] = partial(let_go, growth.table)
        self._forget(vpn, late)

    def _has_grown(self, growth: _Growth, answer: Pending, late: Late) -> None:
        """Under the lock: the late answer to a Grow."""
        if answer.ended:
            return  # the window goes with the session
        if answer.status:
            self._ungranted[growth.vpn] = partial(self._taker.give_up, growth.table)
        late(growth.vpn)

    def holds(self, vpn: int) -> bool:
        """Whether a segment begins there that nobody has begun to free."""
        return vpn in self._used and vpn not in self._leaving

    def free(self, vpn: int, late: Late) -> None:
        """Give a segment back: the backend lets go first, then this process unmaps and unlocks."""
        sent: list[Pending] = []
        try:
            self._leaving.add(vpn)
            if vpn not in self._ungranted:
                self._connection.call(lambda number: m.Shrink(number, vpn), sent=sent)
                self._has_gone(vpn)
            self._forget(vpn, late)
        except BaseException:
            with self._connection.lock:
                if sent and not sent[0].done:
                    sent[0].finish = lambda answer: self._has_shrunk(vpn, answer, late)
                elif vpn in self._ungranted:
                    self._postpone(vpn, late)
                elif self._window.table(vpn) is not None:  # else it is through
                    if sent or self._connection.lost is not None:
                        self._has_gone(vpn)
                    self._postpone(vpn, late)
            raise

    def _has_gone(self, vpn: int) -> None:
        self._ungranted[vpn] = partial(self._taker.drop, self._window.table(vpn) or ())

    def _has_shrunk(self, vpn: int, answer: Pending, late: Late) -> None:
        """Under the lock: the late answer to a Shrink."""
        if not answer.ended:
            self._has_gone(vpn)
            self._postpone(vpn, late)

    def _postpone(self, vpn: int, late: Late) -> None:
        self._leaving.discard(vpn)
        late(vpn)

    def _forget(self, vpn: int, late: Late) -> None:
        """The backend has it no more, or never had it."""
        try:
            if self._window.table(vpn) is not None:
                self._window.unmap(vpn)
            self._let_go(vpn)
        except BaseException:  # an interrupt: once more at the next call
            if vpn in self._ungranted:
                self._postpone(vpn, late)
            raise

    def _let_go(self, vpn: int) -> None:
        """Once: the frames may be another segment's at once."""
        with self._connection.lock:
            self._leaving.discard(vpn)
            self._ungranted.pop(vpn)()
            self._used.pop(vpn, None)

    def _find(self, pages: int) -> int:
        """First of ``pages`` free virtual pages, searched from where the last one was found: an
        address comes back late, so a stale pointer hits nothing, and the backend has time to let
        go of the old mapping."""
        limit = self._window.reserve // self._window.geometry.page_size
        for start in (self._next, 0):
            vpn = start
            while vpn + pages <= limit:
                clash = next(
                    (v + n for v, n in self._used.items() if v < vpn + pages and vpn < v + n), None
                )
                if clash is None:
                    self._next = vpn + pages
                    return vpn
                vpn = clash
        page = self._window.geometry.page_size
        raise DeviceError(
            MEMORY_ALLOCATION,
            f"no {pages * page} bytes in a row are free among the {limit * page} that a session "
            "has for pinned memory: free some, or start flyt-backend with a larger --size",
        )


def map_zeroed(window: Window, vpn: int, table: tuple[Run, ...]) -> int:
    """Map frames that were just taken; the address."""
    address = window.map(vpn, table)
    # Whoever takes a frame zeroes it once more: a stopped process may have written late.
    memory.fill(address, 0, runs.length(table) * window.geometry.page_size)
    return address
