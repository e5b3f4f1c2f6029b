# SPDX-License-Identifier: Apache-2.0
"""The inverted page table: for each page frame of the region, its state and its owner.

Everyone who maps the region can write here, so what it says is a hint: readers accept any bits,
and who really owns a frame is decided by the frame's lock and the supervisor's ledger.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from flyt.errors import RegionError
from flyt.shm.layout import (
    ENTRY,
    ENTRY_SIZE,
    MAGIC_OFFSET,
    OWNER,
    OWNER_OFFSET,
    STATE_OFFSET,
    SUPERBLOCK,
    TABLE_OFFSET,
    FrameState,
    Geometry,
    Superblock,
)

_WORD = 8


class Owner(NamedTuple):
    """Who took a frame, and where it lies in the owner's page table."""

    session: int
    pid: int
    vpn: int


class Entry(NamedTuple):
    """One frame of a snapshot. ``state`` is a `FrameState`, or whatever a forger wrote."""

    frame: int
    state: int
    session: int
    pid: int
    vpn: int


class FrameTable:
    """The mapped header of a region: superblock and table, no page frame.

    Parameters
    ----------
    region_fd : int
        Stays the caller's.
    size : int
        Bytes of the region.
    geometry : Geometry, optional
        None reads it from the superblock, once; given, the region need not be formatted yet.

    Raises
    ------
    RegionError
        There is no sound superblock, or the file is shorter than its header.
    """

    def __init__(self, region_fd: int, size: int, geometry: Geometry | None = None) -> None:
        self.size = size
        if geometry is None:
            with _map(region_fd, TABLE_OFFSET) as head:
                geometry = Superblock.unpack(head[: SUPERBLOCK.size], size).geometry
        self.geometry = geometry
        self._map = _map(region_fd, geometry.header_size)
        self._bytes = memoryview(self._map)
        # Items of a view cast to "Q" are read and written as one aligned 8-byte access;
        # struct.pack_into goes byte by byte.
        self._words = self._bytes.cast("Q")
        first = (TABLE_OFFSET + STATE_OFFSET) // _WORD
        step = ENTRY_SIZE // _WORD
        self._states = self._words[first : first + geometry.page_count * step : step]

    def superblock(self) -> Superblock:
        """What the superblock says now. Raises RegionError if it is unsound."""
        return Superblock.unpack(bytes(self._bytes[: SUPERBLOCK.size]), self.size)

    def format(self, geometry: Geometry, epoch: int, owned: Iterable[int] = ()) -> None:
        """Write a fresh superblock and an empty table: all frames FREE but those that are still
        ``owned``, by nobody who could be named. The magic comes last."""
        if geometry != self.geometry:
            raise RegionError(f"the table was mapped for {self.geometry}, not for {geometry}")
        data = Superblock(geometry, epoch).pack()
        self._words[MAGIC_OFFSET // _WORD] = 0
        self._bytes[_WORD:] = bytes(len(self._bytes) - _WORD)
        for frame in owned:
            self._states[frame] = FrameState.OWNED
        self._bytes[_WORD : len(data)] = data[_WORD:]
        self._words[MAGIC_OFFSET // _WORD] = int.from_bytes(data[:_WORD], "little")

    def state(self, frame: int) -> int:
        """The frame's state word: a `FrameState`, or whatever a forger wrote."""
        return self._states[self._check(frame)]

    def states(self) -> list[int]:
        """The state words of all frames."""
        return self._states.tolist()

    def owner(self, frame: int) -> Owner:
        """Who took the frame last."""
        return Owner(*OWNER.unpack_from(self._bytes, self._offset(frame) + OWNER_OFFSET))

    def mark_owned(self, frame: int, session: int, pid: int, vpn: int) -> None:
        """Write the owner, then OWNED. Only for who holds the frame's lock."""
        OWNER.pack_into(self._bytes, self._offset(frame) + OWNER_OFFSET, session, pid, vpn)
        self._states[frame] = FrameState.OWNED

    def set_state(self, frame: int, state: FrameState) -> None:
        """Write the state word, in one access."""
        self._states[self._check(frame)] = state

    def snapshot(self) -> list[Entry]:
        """All frames that are not FREE, in ascending order."""
        end = TABLE_OFFSET + self.geometry.page_count * ENTRY_SIZE
        copied = bytes(self._bytes[TABLE_OFFSET:end])
        return [
            Entry(frame, *fields)
            for frame, fields in enumerate(ENTRY.iter_unpack(copied))
            if fields[0] != FrameState.FREE
        ]

    def counts(self) -> dict[int, int]:
        """Number of frames in each state: every `FrameState`, and forged words if there are any."""
        counted = Counter(self.states())
        return {**dict.fromkeys(FrameState, 0), **counted}

    def close(self) -> None:
        """Unmap. May be called again."""
        for view in (self._states, self._words, self._bytes):
            view.release()
        self._map.close()

    def _check(self, frame: int) -> int:
        if not 0 <= frame < self.geometry.page_count:
            raise RegionError(
                f"frame {frame} is not among the region's {self.geometry.page_count} frames"
            )
        return frame

    def _offset(self, frame: int) -> int:
        return TABLE_OFFSET + self._check(frame) * ENTRY_SIZE


def _map(fd: int, length: int) -> mmap.mmap:
    there = os.fstat(fd).st_size
    if there < length:
        raise RegionError(
            f"the region has {there} bytes, its header needs {length}: it was truncated"
        )
    try:
        return mmap.mmap(fd, length, mmap.MAP_SHARED)
    except (OSError, ValueError) as exc:
        raise RegionError(f"can't map the region's header: {exc}") from exc
