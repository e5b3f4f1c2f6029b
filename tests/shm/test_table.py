# SPDX-License-Identifier: Apache-2.0
"""The inverted page table: its bytes, and what readers make of forged ones."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from flyt.errors import RegionError
from flyt.shm.layout import FrameState, Geometry
from flyt.shm.region import Region
from flyt.shm.table import Entry, FrameTable, Owner


def _entry(fd: int, frame: int) -> bytes:
    return os.pread(fd, 32, 4096 + 32 * frame)


def test_format(region: Region, geometry: Geometry) -> None:
    os.pwrite(region.fd, b"\xff" * 65536, 0)
    with closing(FrameTable(region.fd, region.size, geometry)) as table:
        with pytest.raises(RegionError, match="no Flyt superblock"):
            table.superblock()
        with pytest.raises(RegionError, match="no Flyt superblock"):
            FrameTable(region.fd, region.size, None)
        table.format(geometry, 0xABCDEF)
        superblock = table.superblock()
        assert (superblock.geometry, superblock.epoch) == (geometry, 0xABCDEF)
        assert os.pread(region.fd, 56, 0) == superblock.pack()
        assert not any(os.pread(region.fd, 4096 - 56 + 63 * 32, 56))
        assert table.counts() == {0: 63, 1: 0, 2: 0}
        assert table.snapshot() == []
        with pytest.raises(RegionError, match="mapped for"):
            table.format(Geometry.plan(region.size, 128 * 1024), 1)
    with closing(FrameTable(region.fd, region.size, None)) as reader:
        assert reader.geometry == geometry


def test_golden_entries(table: FrameTable, region: Region) -> None:
    table.mark_owned(62, 0x1122334455667788, 0xAABBCCDD, 0x01020304)
    assert _entry(region.fd, 62) == bytes.fromhex(
        "01000000000000008877665544332211ddccbbaa040302010000000000000000"
    )
    assert not any(_entry(region.fd, 61))
    table.set_state(0, FrameState.QUARANTINED)
    assert _entry(region.fd, 0) == struct.pack("<Q24x", 2)
    assert table.owner(62) == Owner(0x1122334455667788, 0xAABBCCDD, 0x01020304)


def test_two_readers_see_one_table(table: FrameTable, region: Region) -> None:
    with closing(FrameTable(region.fd, region.size, None)) as other:
        table.mark_owned(5, 9, 1234, 2)
        table.mark_owned(3, 9, 1234, 7)
        table.set_state(40, FrameState.QUARANTINED)
        assert other.state(5) == FrameState.OWNED
        assert other.states()[:6] == [0, 0, 0, 1, 0, 1]
        assert other.snapshot() == [
            Entry(3, 1, 9, 1234, 7),
            (5, 1, 9, 1234, 2),
            (40, 2, 0, 0, 0),
        ]
        assert other.counts() == {
            FrameState.FREE: 60,
            FrameState.OWNED: 2,
            FrameState.QUARANTINED: 1,
        }
        other.set_state(5, FrameState.FREE)
        assert table.state(5) == FrameState.FREE


def test_forged_entries_are_read_as_they_are(table: FrameTable, region: Region) -> None:
    os.pwrite(region.fd, b"\xff" * 32 * 63, 4096)
    assert table.state(0) == 2**64 - 1
    assert table.owner(0) == (2**64 - 1, 2**32 - 1, 2**32 - 1)
    assert table.counts() == {0: 0, 1: 0, 2: 0, 2**64 - 1: 63}
    assert len(table.snapshot()) == 63
    assert table.snapshot()[62] == (62, 2**64 - 1, 2**64 - 1, 2**32 - 1, 2**32 - 1)


def test_a_forged_superblock_moves_nothing(table: FrameTable, region: Region) -> None:
    os.pwrite(region.fd, struct.pack("<Q", 2**40), 16)
    with pytest.raises(RegionError, match="damaged"):
        table.superblock()
    assert table.geometry.page_count == 63
    assert len(table.states()) == 63


@pytest.mark.parametrize("frame", [-1, 63, 2**63])
def test_frames_out_of_range(table: FrameTable, frame: int) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: table.state(frame),
        lambda: table.owner(frame),
        lambda: table.set_state(frame, FrameState.OWNED),
        lambda: table.mark_owned(frame, 1, 2, 3),
    ]
    for call in calls:
        with pytest.raises(RegionError, match="63 frames"):
            call()
    assert table.snapshot() == []


def test_a_truncated_file(table: FrameTable, region: Region, geometry: Geometry) -> None:
    os.ftruncate(region.fd, 4096)
    with pytest.raises(RegionError, match="truncated"):
        FrameTable(region.fd, region.size, geometry)
    with pytest.raises(RegionError, match="truncated"):
        FrameTable(region.fd, region.size, None)
    os.ftruncate(region.fd, region.size)


def test_close_twice(region: Region, geometry: Geometry) -> None:
    table = FrameTable(region.fd, region.size, geometry)
    table.close()
    table.close()
    with pytest.raises(ValueError, match="released"):
        table.state(0)


def test_state_words_are_written_in_one_access(table: FrameTable, region: Region) -> None:
    """A torn word shows too seldom to be waited for, so this looks at how it is stored.

    Items of a memoryview of native 8-byte words are one access; struct.pack_into goes byte by
    byte. With the view replaced by a list, no other way to the table may be left.
    """
    view = table._states
    assert (view.format, view.itemsize, view.strides, len(view)) == ("Q", 8, (32,), 63)
    table._states = [0] * 63  # type: ignore[assignment]
    table.set_state(7, FrameState.QUARANTINED)
    table.mark_owned(8, 0, 0, 0)
    assert table._states[7:9] == [2, 1]
    table._states = view
    assert table.states() == [0] * 63
