# SPDX-License-Identifier: Apache-2.0
"""The session's part of the region: its page frames, its page table, its window.

This is where the frontend partitions the region. Virtual page 0 is the control page, the staging
area follows, and every pinned allocation is a segment of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable

from flyt.errors import AddressTaken, DeviceError, RegionError, RegionFull
from flyt.frontend.connection import Connection
from flyt.frontend.inflight import Pending
from flyt.rpc import messages as m
from flyt.shm import layout, memory, runs
from flyt.shm.doorbell import Doorbell
from flyt.shm.frames import FrameTaker
from flyt.shm.layout import Geometry
from flyt.shm.locks import FrameLocks
from flyt.shm.native import Native
from flyt.shm.private import OwnFrames
from flyt.shm.region import Region
from flyt.shm.runs import Run
from flyt.shm.table import FrameTable
from flyt.shm.window import Window, pick_base, reserve_length

MEMORY_ALLOCATION = 2

TRIES = 8
"""Bases, or sets of frames, that are offered before the session gives up on the region."""

ATTACH_WAIT = 2.0
"""Seconds to wait at attach for frames that are being cleaned; after that: less staging, inline."""


class NotShared(RegionError):
    """There is a region, but the two sides don't share it; payloads go inline."""


class WindowMemory:
    """The frames of one session, mapped.

    Parameters
    ----------
    region : Region
        As this process finds it; closed with this object.
    welcome : Welcome
        Names the session, the epoch and the lock file.
    locks : FrameLocks or OwnFrames
        Closed with this object.

    Raises
    ------
    RegionError
        The region is unsound, or not the one with the backend's epoch.
    """

    def __init__(self, region: Region, welcome: m.Welcome, locks: FrameLocks | OwnFrames) -> None:
        self._locks = locks
        self._region = region
        with contextlib.ExitStack() as undo:
            undo.callback(locks.close)
            undo.callback(region.close)
            self._table = FrameTable(region.control_fd, region.size)
            undo.callback(self._table.close)
            self._check_epoch(welcome.epoch)
            undo.pop_all()
        self.geometry: Geometry = self._table.geometry
        self.window: Window | None = None
        self.staging = (0, 0)
        self.is_heard = False
        """Whether the backend has heard the doorbell."""
        self._taker = FrameTaker(self._table, self._locks, welcome.session, os.getpid())
        self._refused: set[int] = set()
        self._used: dict[int, int] = {}
        self._next = 0
        self._random = random.Random(os.urandom(8))

    def _check_epoch(self, wanted: int) -> None:
        found = self._table.superblock().epoch
        if found != wanted:
            raise NotShared(
                f"the region {self._region.path} has epoch {found:016x}, the backend's has "
                f"{wanted:016x}: it is another backend's region (FLYT_REGION, or QEMU's "
                "memory-backend-file), or memory that the two sides don't share"
            )

    # --- attach ---

    def attach(
        self,
        connection: Connection,
        token: bytes,
        pages: int,
        native: Native | None,
        doorbell: Doorbell | None = None,
    ) -> int:
        """Take frames for the control page and ``pages`` staging pages, and attach with them.

        Returns the window's base. With ``native``, commands go through rings from then on, and if
        the backend hears the ``doorbell``, that wakes it; else the doorbell stays the caller's.

        On success ``staging`` is the index and the length in bytes of the staging area.

        Raises
        ------
        RegionFull
            Not even two staging pages are to be had.
        NotShared
            The proof failed: the backend sees other memory.
        """
        table, pages = self._take_staging(pages)
        for _ in range(TRIES):
            window = self._reserve()
            try:
                answer = self._offer(connection, token, window, table, native, doorbell)
            except BaseException:
                window.close()
                raise
            if answer is None:
                self.window = window
                self.staging = (self.geometry.page_size, pages * self.geometry.page_size)
                self._used = {0: 1 + pages}
                self._next = 1 + pages
                return window.base
            window.close()
            if answer.status == m.Status.ADDRESS_TAKEN:
                continue
            if answer.status == 0:
                self._taker.drop(table)  # granted: the backend frees them when we go inline
                raise NotShared("the backend's word is not in the control page")
            self._taker.give_up(table)
            if answer.status == m.Status.FRAMES_REFUSED:
                self._refused.update(answer.values)
                table, pages = self._take_staging(pages)
                continue
            if answer.status == m.Status.PROOF_FAILED:
                raise NotShared(answer.text)
            connection.checked(answer)
        self._taker.give_up(table)
        raise RegionError(f"no window after {TRIES} tries: addresses or frames were always taken")

    def _offer(
        self,
        connection: Connection,
        token: bytes,
        window: Window,
        table: tuple[Run, ...],
        native: Native | None,
        doorbell: Doorbell | None,
    ) -> Pending | None:
        """Map the frames and attach with them; None on success, else the backend's answer."""
        control, rest = runs.split_first(table)
        page = self._map(window, 0, control)
        self._map(window, 1, rest)
        proof = int.from_bytes(os.urandom(8), "little") | 1
        memory.store_word(page + layout.FRONTEND_PROOF, proof)
        rings = native is not None
        if doorbell is not None:
            doorbell.ring()
        answer = connection.submit(_attach(token, window, (*control, *rest), proof, rings))
        connection.wait(answer)
        if answer.status or not self._proven(page, answer.values):
            return answer
        if native is not None:
            self.is_heard = doorbell is not None and bool(answer.values[1])
            connection.use_rings(native, page, doorbell if self.is_heard else None)
        return None

    def _take_staging(self, pages: int) -> tuple[tuple[Run, ...], int]:
        """Frames for the control page and up to ``pages`` more; fewer in a crowded region."""
        wanted = pages
        while True:
            last = wanted <= 2
            try:
                wait = ATTACH_WAIT if last else 0.0
                return self._taker.take(1 + wanted, 0, wait=wait, avoid=self._refused), wanted
            except RegionFull:
                if last:
                    raise
                wanted = max(2, wanted // 2)

    def _reserve(self) -> Window:
        reserve = reserve_length(self.geometry)
        for _ in range(TRIES):
            base = pick_base(reserve, self._random)
            try:
                return Window.reserve_at(
                    self._region.fd,
                    self.geometry,
                    base,
                    reserve,
                    control_fd=self._region.control_fd,
                )
            except AddressTaken:
                continue
        raise RegionError(
            f"no range of {reserve} bytes is free in this process after {TRIES} tries"
        )

    def _map(self, window: Window, vpn: int, table: tuple[Run, ...]) -> int:
        address = window.map(vpn, table)
        # Whoever takes a frame zeroes it once more: a stopped process may have written late.
        memory.fill(address, 0, runs.length(table) * self.geometry.page_size)
        return address

    @staticmethod
    def _proven(page: int, values: tuple[int, ...]) -> bool:
        return len(values) == 2 and memory.load_word(page + layout.BACKEND_PROOF) == values[0]

    # --- pinned segments ---

    def allocate(self, connection: Connection, size: int) -> tuple[int, int, int]:
        """A segment of at least ``size`` bytes: its address, index and first virtual page.

        Raises
        ------
        DeviceError
            cudaErrorMemoryAllocation when the region has too little left.
        """
        window = self._attached()
        pages = -(-size // self.geometry.page_size)
        self._refused.clear()
        for _ in range(TRIES):
            with connection.lock:
                vpn = self._find(pages)
                self._used[vpn] = pages
            pending = self._grow(connection, window, vpn, pages)
            if pending.status == 0:
                return window.address(vpn), vpn * self.geometry.page_size, vpn
            if pending.status not in (m.Status.ADDRESS_TAKEN, m.Status.FRAMES_REFUSED):
                connection.checked(pending)
        raise DeviceError(MEMORY_ALLOCATION, f"no place in the window after {TRIES} tries")

    def _grow(self, connection: Connection, window: Window, vpn: int, pages: int) -> Pending:
        try:
            table = self._taker.take(pages, vpn, avoid=self._refused)
        except RegionFull as exc:
            with connection.lock:
                self._used.pop(vpn, None)
            raise DeviceError(MEMORY_ALLOCATION, str(exc)) from exc
        let_go: Callable[[tuple[Run, ...]], None] | None = (
            self._taker.drop
        )  # until the answer is there, they may be granted
        try:
            self._map(window, vpn, table)
            pending = connection.submit(_grow(vpn, table))
            connection.wait(pending)
            let_go = None if pending.status == 0 else self._taker.give_up
            if pending.status == m.Status.FRAMES_REFUSED:
                self._refused.update(pending.values)
            return pending
        except MemoryError as exc:
            raise DeviceError(MEMORY_ALLOCATION, str(exc)) from exc
        finally:
            if let_go is not None:
                self._forget(connection, window, vpn, table, let_go)

    def free(self, connection: Connection, vpn: int) -> None:
        """Give a segment back: the backend lets go first, then this process unmaps and unlocks."""
        window = self._attached()
        table = window.table(vpn) or ()
        try:
            connection.call(lambda number: m.Shrink(number, vpn))
        finally:
            self._forget(connection, window, vpn, table, self._taker.drop)

    def _forget(
        self,
        connection: Connection,
        window: Window,
        vpn: int,
        table: tuple[Run, ...],
        let_go: Callable[[tuple[Run, ...]], None],
    ) -> None:
        if window.table(vpn) is not None:
            window.unmap(vpn)
        let_go(table)
        with connection.lock:
            self._used.pop(vpn, None)

    def _find(self, pages: int) -> int:
        """First of ``pages`` free virtual pages, searched from where the last one was found: an
        address comes back late, so a stale pointer hits nothing, and the backend has time to let
        go of the old mapping."""
        limit = self._attached().reserve // self.geometry.page_size
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
        raise DeviceError(MEMORY_ALLOCATION, f"the window has no {pages} adjacent free pages")

    def _attached(self) -> Window:
        if self.window is None:
            raise RegionError("the session has no window")
        return self.window

    # --- the end ---

    def keep(self, vpn: int, size: int) -> None:
        """Make the first bytes of a segment private memory where they are; see `Window.keep`."""
        self._attached().keep(vpn, size)

    def close(self) -> None:
        """Unmap all but what was kept, then unlock the frames."""
        window, self.window = self.window, None
        if window is not None:
            window.close()
        self.abandon()

    def abandon(self) -> None:
        """Let go of locks and descriptors without touching the mapped memory."""
        self._locks.close()
        self._table.close()
        self._region.close()


def _attach(
    token: bytes, window: Window, table: tuple[Run, ...], proof: int, rings: bool
) -> Callable[[int], m.Attach]:
    return lambda number: m.Attach(
        number, token, False, window.base, window.reserve, table, proof, rings
    )


def _grow(vpn: int, table: tuple[Run, ...]) -> Callable[[int], m.Grow]:
    return lambda number: m.Grow(number, vpn, table)
