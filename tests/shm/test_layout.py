# SPDX-License-Identifier: Apache-2.0
"""The bytes of the region, as they are for every version 1 of the layout."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, strategies as st

from flyt.errors import ConfigurationError, RegionError
from flyt.shm import layout
from flyt.shm.layout import GIB, KIB, MIB, FrameState, Geometry, Superblock

GOLDEN = bytes.fromhex(
    "464c595453484d00"  # "FLYTSHM\0"
    "01000000"  # layout version 1
    "00000100"  # pages of 64 KiB
    "3f00000000000000"  # 63 of them
    "0000400000000000"  # in 4 MiB
    "0000010000000000"  # from 64 KiB
    "efcdab8967452301"  # epoch
    "0000000000000000"  # no features
)
SUPERBLOCK = Superblock(Geometry(4 * MIB, 64 * KIB, 63, 64 * KIB), 0x0123456789ABCDEF)


def test_superblock_golden_bytes() -> None:
    assert SUPERBLOCK.pack() == GOLDEN
    assert Superblock.unpack(GOLDEN, 4 * MIB) == SUPERBLOCK
    assert Superblock.unpack(GOLDEN, 5 * MIB) == SUPERBLOCK


def test_fixed_places() -> None:
    assert layout.SUPERBLOCK.size == 56
    assert (layout.TABLE_OFFSET, layout.ENTRY_SIZE) == (4096, 32)
    assert layout.ENTRY.pack(1, 2, 3, 4) == struct.pack("<QQIIQ", 1, 2, 3, 4, 0)
    assert (layout.STATE_OFFSET, layout.OWNER_OFFSET) == (0, 8)
    assert (layout.FRONTEND_PROOF, layout.BACKEND_PROOF) == (0, 8)
    assert [*FrameState] == [0, 1, 2]
    assert [state.name for state in FrameState] == ["FREE", "OWNED", "QUARANTINED"]


@pytest.mark.parametrize(
    ("size", "page_size", "expected"),
    [
        (256 * KIB, None, (64 * KIB, 3, 64 * KIB)),
        (4 * MIB, None, (64 * KIB, 63, 64 * KIB)),
        (GIB - 1, None, (64 * KIB, 16374, 576 * KIB)),
        (GIB, None, (2 * MIB, 511, 2 * MIB)),
        (64 * MIB, 2 * MIB, (2 * MIB, 31, 2 * MIB)),
        (64 * MIB + 5, 1 * MIB, (1 * MIB, 63, 1 * MIB)),
    ],
)
def test_plan(size: int, page_size: int | None, expected: tuple[int, int, int]) -> None:
    got = Geometry.plan(size, page_size)
    assert (got.page_size, got.page_count, got.data_offset) == expected
    assert got.size == size


@given(st.integers(256 * KIB, 64 * GIB), st.sampled_from([64 * KIB << n for n in range(6)]))
def test_frames_fill_the_region_and_no_more(size: int, page_size: int) -> None:
    try:
        g = Geometry.plan(size, page_size)
    except ConfigurationError:
        assert size < 4 * page_size
        return
    table_end = layout.TABLE_OFFSET + 32 * g.page_count
    assert table_end <= g.header_size <= g.data_offset < table_end + page_size
    assert g.data_offset % page_size == 0
    assert g.offset(0) == g.data_offset
    assert g.offset(g.page_count - 1) + page_size <= size
    with pytest.raises(RegionError):
        g.offset(g.page_count)
    more = layout.align_up(table_end + 32, page_size)
    assert more + (g.page_count + 1) * page_size > size


@pytest.mark.parametrize(
    ("size", "page_size", "word"),
    [
        (GIB, 32 * KIB, "power of two"),
        (GIB, 4 * MIB, "power of two"),
        (GIB, 96 * KIB, "power of two"),
        (GIB, 0, "power of two"),
        (GIB, -65536, "power of two"),
        (256 * KIB - 1, None, "too small"),
        (0, None, "too small"),
        (-5, None, "too small"),
        (6 * MIB, 2 * MIB, "at least 8388608"),
        (65 * GIB, 64 * KIB, "larger pages"),
    ],
)
def test_plan_refuses(size: int, page_size: int | None, word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        Geometry.plan(size, page_size)


def _with(offset: int, form: str, value: int) -> bytes:
    data = bytearray(GOLDEN)
    struct.pack_into(form, data, offset, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (bytes(56), "no Flyt superblock"),
        (_with(0, "<B", 0x47), "no Flyt superblock"),
        (_with(8, "<I", 2), "layout version 2, this Flyt has 1"),
        (_with(12, "<I", 0), "power of two"),
        (_with(12, "<I", 128 * KIB), "damaged"),
        (_with(16, "<Q", 62), "62 pages"),
        (_with(16, "<Q", 2**64 - 1), "damaged"),
        (_with(24, "<Q", 8 * MIB), "damaged"),
        (_with(24, "<Q", 0), "too small"),
        (_with(32, "<Q", 0), "from offset 0"),
        (GOLDEN[:-1], "no room"),
        (b"", "no room"),
    ],
)
def test_unpack_refuses(data: bytes, word: str) -> None:
    with pytest.raises(RegionError, match=word):
        Superblock.unpack(data, 4 * MIB)


def test_unpack_refuses_a_truncated_file() -> None:
    with pytest.raises(RegionError, match="truncated"):
        Superblock.unpack(GOLDEN, 4 * MIB - 1)


@given(st.binary(max_size=48).map(lambda tail: GOLDEN[:8] + tail) | st.binary(max_size=64))
def test_any_bytes_are_a_superblock_or_a_region_error(data: bytes) -> None:
    try:
        found = Superblock.unpack(data, 4 * MIB)
    except RegionError:
        return
    assert found.geometry == Geometry.plan(found.geometry.size, found.geometry.page_size)
