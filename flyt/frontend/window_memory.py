# SPDX-License-Identifier: Apache-2.0
"""The session's part of the region: its page frames, its page table, its window.

This is where the frontend partitions the region. Virtual page 0 is the control page, the staging
area follows, and every pinned allocation is a segment of its own (`flyt.frontend.segments`).
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable

from flyt.errors import AddressTaken, RegionError, RegionFull
from flyt.frontend.connection import Connection
from flyt.frontend.inflight import Pending
from flyt.frontend.segments import Segments, map_zeroed
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

    Attributes
    ----------
    path : str
        The region's here: a file, or ``pci:SLOT``.
    """

    def __init__(self, region: Region, welcome: m.Welcome, locks: FrameLocks | OwnFrames) -> None:
        self._locks = locks
        self._region = region
        self.path = region.path
        with contextlib.ExitStack() as undo:
            undo.callback(locks.close)
            undo.callback(region.close)
            self._table = FrameTable(region.control_fd, region.size)
            undo.callback(self._table.close)
            self._check_epoch(welcome.epoch)
            undo.pop_all()
        self.geometry: Geometry = self._table.geometry
        self.window: Window | None = None
        self.segments: Segments | None = None
        self.staging = (0, 0)
        self.is_heard = False
        """Whether the backend has heard the doorbell."""
        self._taker = FrameTaker(self._table, self._locks, welcome.session, os.getpid())
        self._refused: set[int] = set()
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
                self.segments = Segments(connection, window, self._taker, 1 + pages)
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
        page = map_zeroed(window, 0, control)
        map_zeroed(window, 1, rest)
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

    @staticmethod
    def _proven(page: int, values: tuple[int, ...]) -> bool:
        return len(values) == 2 and memory.load_word(page + layout.BACKEND_PROOF) == values[0]

    # --- the end ---

    def keep(self, vpn: int, size: int) -> None:
        """Make the first bytes of a segment private memory where they are; see `Window.keep`."""
        if self.window is None:
            raise RegionError("the session has no window")
        self.window.keep(vpn, size)

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
