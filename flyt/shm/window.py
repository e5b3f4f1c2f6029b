# SPDX-License-Identifier: Apache-2.0
"""A window: scattered page frames of the region at one contiguous address range.

The MMU realises the page table. Frontend and worker reserve the very same range and map the same
frames in the same order, so an index (an offset into the window) is plain arithmetic and a pinned
address means the same on both sides. A window consists of segments: the control page with the
staging area, and one segment per pinned allocation.
"""

from __future__ import annotations

import os
import random
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from flyt.errors import AddressTaken, RegionError
from flyt.shm import memory, runs
from flyt.shm.layout import GIB, MAX_PAGE_SIZE, Geometry, align_up
from flyt.shm.runs import Run

LOWEST_BASE = 0x1000_0000_0000
END_OF_BASES = 0x2000_0000_0000
"""Windows lie below the device addresses, which begin here on the emulated device."""
MIN_RESERVE = GIB
MAX_RESERVE = 1 << 40
"""A sixteenth of the addresses for windows: a random base seldom meets another window."""
CONTROL_VPN = 0
"""The segment at virtual page 0 is the control page, alone: in a guest it is mapped uncached."""
RESERVE_FACTOR = 4
"""Virtual pages are not reused at once, so a window wants more addresses than frames."""


def pick_base(reserve: int, rng: random.Random) -> int:
    """A random base for a reservation of ``reserve`` bytes, aligned to the largest page."""
    if not 0 < reserve <= MAX_RESERVE:
        raise RegionError(f"a window can't reserve {reserve} bytes; the limit is {MAX_RESERVE}")
    return rng.randrange(LOWEST_BASE, END_OF_BASES - reserve + 1, MAX_PAGE_SIZE)


def reserve_length(geometry: Geometry) -> int:
    """How many bytes of addresses a window of this region reserves."""
    wanted = align_up(RESERVE_FACTOR * geometry.size, MAX_PAGE_SIZE)
    return min(max(wanted, MIN_RESERVE), MAX_RESERVE)


class Window:
    """Page frames mapped at ``base``; made by `reserve_at`. Methods may be called from any thread.

    The window owns no descriptor. It must be closed before its frames are unlocked.
    """

    def __init__(
        self, fd: int, geometry: Geometry, base: int, reserve: int, control_fd: int
    ) -> None:
        self.fd = fd
        self.control_fd = control_fd
        self.geometry = geometry
        self.base = base
        self.reserve = reserve
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._segments: dict[int, int] = {}
        self._tables: dict[int, tuple[Run, ...]] = {}
        self._retired: set[int] = set()
        self._kept: list[tuple[int, int]] = []
        # Read by `contains` without the lock, hence replaced as a whole.
        self._bounds: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @classmethod
    def reserve_at(
        cls,
        fd: int,
        geometry: Geometry,
        base: int,
        reserve: int,
        *,
        control_fd: int | None = None,
    ) -> Window:
        """Reserve the range and return an empty window.

        Parameters
        ----------
        fd : int
            The region.
        geometry : Geometry
        base, reserve : int
            The address range.
        control_fd : int, optional
            The region as the control page is mapped, where that differs (`Region.control_fd`).

        Raises
        ------
        AddressTaken
            Something else of this process lies there: pick another base.
        RegionError
            The range is misaligned or outside the addresses that windows may use.
        """
        page = geometry.page_size
        if base % page or reserve % page or not 0 < reserve <= MAX_RESERVE:
            raise RegionError(
                f"a window of {reserve} bytes at {base:#x} is not made of pages of {page} bytes "
                f"or exceeds {MAX_RESERVE} bytes"
            )
        if base < LOWEST_BASE or base + reserve > END_OF_BASES:
            raise RegionError(
                f"a window at {base:#x} lies outside {LOWEST_BASE:#x} to {END_OF_BASES - 1:#x}"
            )
        if not memory.reserve(base, reserve):
            raise AddressTaken(f"{reserve} bytes at {base:#x} are in use in this process")
        return cls(fd, geometry, base, reserve, fd if control_fd is None else control_fd)

    @property
    def segments(self) -> Mapping[int, int]:
        """Number of pages of each mapped segment by its first virtual page."""
        with self._lock:
            return MappingProxyType(dict(self._segments))

    def address(self, vpn: int) -> int:
        """Address of a virtual page."""
        if not 0 <= vpn < self.reserve // self.geometry.page_size:
            raise RegionError(f"virtual page {vpn} lies outside the window's reservation")
        return self.base + vpn * self.geometry.page_size

    def contains(self, index: int, size: int) -> bool:
        """Whether ``size`` bytes at offset ``index`` of the window lie inside one segment."""
        starts, ends = self._bounds
        at = bisect_right(starts, index) - 1
        return at >= 0 and size >= 0 and index + size <= ends[at]

    def segment_of(self, index: int) -> tuple[int, int] | None:
        """First index, and the one behind the last, of the segment that ``index`` lies in."""
        starts, ends = self._bounds
        at = bisect_right(starts, index) - 1
        return (starts[at], ends[at]) if at >= 0 and index < ends[at] else None

    @property
    def version(self) -> object:
        """Another one whenever a segment comes or goes."""
        return self._bounds

    def overlaps(self, vpn: int, pages: int) -> bool:
        """Whether any of these virtual pages is mapped, retired segments included."""
        with self._lock:
            return self._overlapped(vpn, pages) is not None

    def table(self, vpn: int) -> tuple[Run, ...] | None:
        """The frames of the segment that starts at ``vpn``; None if none does or it is retired."""
        with self._lock:
            return None if vpn in self._retired else self._tables.get(vpn)

    def retire(self, vpn: int) -> int:
        """Close a segment to copies while it stays mapped; returns its address.

        Its frames may get another owner before CUDA lets go of the mapping, so from now on
        `contains` does not know it.
        """
        with self._lock:
            self._check_open()
            if vpn not in self._segments:
                raise RegionError(f"no segment of the window starts at virtual page {vpn}")
            self._retired.add(vpn)
            self._publish()
            return self.address(vpn)

    def map(self, vpn: int, table: Sequence[Run], *, fork_safe: bool = True) -> int:
        """Map frames at virtual page ``vpn`` as one segment, one mmap per run.

        Parameters
        ----------
        vpn : int
        table : sequence of Run
            The frames, in the order of the virtual pages.
        fork_safe : bool
            Leave the segment out of forked children.

        Returns
        -------
        int
            The segment's address.

        Raises
        ------
        RegionError
            The table is unsound, or the pages are outside the reservation or mapped already.
        MemoryError
            The kernel has no room for the mappings; the window is as before.
        """
        geometry = self.geometry
        if not table:
            raise RegionError("a segment needs at least one page frame")
        runs.check(table, geometry.page_count)
        pages = runs.length(table)
        with self._lock:
            self._check_free(vpn, pages)
            start = self.address(vpn)
            size = pages * geometry.page_size
            try:
                self._map_runs(self.control_fd if vpn == CONTROL_VPN else self.fd, start, table)
                if fork_safe:
                    memory.exclude_from_fork(start, size)
            except (RegionError, MemoryError):
                memory.unmap_reserved(start, size)
                raise
            self._segments[vpn] = pages
            self._tables[vpn] = tuple(table)
            self._publish()
        return start

    def unmap(self, vpn: int) -> None:
        """Unmap the segment that starts at ``vpn``; its addresses stay reserved."""
        with self._lock:
            self._check_open()
            pages = self._segments.get(vpn)
            if pages is None:
                raise RegionError(f"no segment of the window starts at virtual page {vpn}")
            memory.unmap_reserved(self.address(vpn), pages * self.geometry.page_size)
            del self._segments[vpn], self._tables[vpn]
            self._retired.discard(vpn)
            self._publish()

    def keep(self, vpn: int, size: int) -> None:
        """Make the first ``size`` bytes of a segment private memory, in one step, and let go of it.

        Whole pages of the OS are the caller's from now on, `close` leaves them where they are. The
        rest of the segment stays mapped until then. See `memory.make_private`.
        """
        with self._lock:
            self._check_open()
            start, size = self.address(vpn), memory.whole_pages(size)
            if not 0 < size <= self._segments.get(vpn, 0) * self.geometry.page_size:
                raise RegionError(f"no segment at virtual page {vpn} has {size} bytes")
            memory.make_private(start, size)
            self._kept.append((start, size))
            del self._segments[vpn], self._tables[vpn]
            self._retired.discard(vpn)
            self._publish()

    def close(self) -> None:
        """Unmap all but what was kept, and give the addresses back. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._segments.clear()
            self._tables.clear()
            self._retired.clear()
            self._publish()
            # A forked child never had the segments; by now something of its own may lie there.
            if os.getpid() == self._pid:
                self._release_rest()

    def _release_rest(self) -> None:
        at, end = self.base, self.base + self.reserve
        for start, size in (*sorted(self._kept), (end, 0)):
            if start > at:
                memory.release(at, start - at)
            at = start + size

    def _check_open(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise RegionError("the window is closed, or belongs to the process that forked this")

    def _check_free(self, vpn: int, pages: int) -> None:
        self._check_open()
        reserved = self.reserve // self.geometry.page_size
        if vpn < 0 or vpn >= reserved or pages > reserved - vpn:
            raise RegionError(
                f"{pages} pages at virtual page {vpn} lie outside the window's {reserved} pages"
            )
        other = self._overlapped(vpn, pages)
        if other is not None:
            raise RegionError(
                f"{pages} pages at virtual page {vpn} overlap the segment of "
                f"{self._segments[other]} pages at virtual page {other}"
            )

    def _overlapped(self, vpn: int, pages: int) -> int | None:
        """First virtual page of a segment that has some of these pages."""
        for other, count in self._segments.items():
            if vpn < other + count and other < vpn + pages:
                return other
        return None

    def _map_runs(self, fd: int, start: int, table: Sequence[Run]) -> None:
        geometry = self.geometry
        address = start
        for first, count in table:
            size = count * geometry.page_size
            memory.map_shared(address, fd, geometry.offset(first), size)
            address += size

    def _publish(self) -> None:
        page = self.geometry.page_size
        ordered = sorted(s for s in self._segments.items() if s[0] not in self._retired)
        self._bounds = (
            tuple(vpn * page for vpn, _ in ordered),
            tuple((vpn + count) * page for vpn, count in ordered),
        )
