# SPDX-License-Identifier: Apache-2.0
"""The doorbell's register, on a sysfs tree that looks like a guest's."""

from __future__ import annotations

import mmap
import struct
from contextlib import closing
from pathlib import Path

import pytest

from flyt.errors import RegionError
from flyt.shm.doorbell import Doorbell
from flyt.shm.ivshmem import Bar

ROW = "0x{0:016x} 0x{1:016x} 0x0000000000040200\n"


@pytest.fixture
def bar(tmp_path: Path) -> Bar:
    """An ivshmem-doorbell device: BAR 0 of 256 bytes of registers, BAR 1 with the MSI-X table."""
    (tmp_path / "resource").write_text(ROW.format(0xFEBF1000, 0xFEBF10FF) + ROW.format(0, 0))
    (tmp_path / "resource0").write_bytes(bytes(256))
    (tmp_path / "resource1").write_bytes(bytes(4096))
    return Bar("0000:00:04.0", 1 << 20, tmp_path)


@pytest.mark.parametrize("peer", [1, 64, 0xFFFF])
def test_a_ring_is_one_word_in_the_register(bar: Bar, peer: int) -> None:
    expected = bytearray(256)
    # The ivshmem specification: register at 12; peer in bits 16-31, vector (0) in bits 0-15.
    struct.pack_into("<I", expected, 12, peer << 16)
    with closing(Doorbell(bar, peer)) as doorbell:
        registers = bar.folder / "resource0"
        assert registers.read_bytes() == bytes(256)
        doorbell.ring()
        assert registers.read_bytes() == expected
        doorbell.ring()
        assert doorbell.rings == 2


def test_a_plain_device_has_none(bar: Bar) -> None:
    (bar.folder / "resource1").unlink()
    with pytest.raises(RegionError, match=r"0000:00:04\.0 has no doorbell.*ivshmem-doorbell"):
        Doorbell(bar, 1)


def test_registers_that_share_a_page(bar: Bar) -> None:
    (bar.folder / "resource").write_text(ROW.format(0xFEBF1100, 0xFEBF11FF))
    with pytest.raises(RegionError, match="share a page"):
        Doorbell(bar, 1)


@pytest.mark.parametrize("said", [None, b"", b"none of it", b"\xff"])
def test_a_device_that_does_not_say_where_its_registers_are(bar: Bar, said: bytes | None) -> None:
    path = bar.folder / "resource"
    path.unlink()  # as when the device is removed
    if said is not None:
        path.write_bytes(said)
    with pytest.raises(RegionError, match=r"0000:00:04\.0 .*registers"):
        Doorbell(bar, 1)


@pytest.mark.parametrize("size", [None, 0, mmap.PAGESIZE // 64])
def test_registers_that_cannot_be_mapped(bar: Bar, size: int | None) -> None:
    path = bar.folder / "resource0"
    if size is None:
        path.unlink()
    else:
        path.write_bytes(bytes(size))
    with pytest.raises(RegionError, match=r"can't map .*resource0.*udev"):
        Doorbell(bar, 1)
