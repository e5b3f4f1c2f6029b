# SPDX-License-Identifier: Apache-2.0
"""The region as a guest finds it, on a sysfs tree that looks like a guest's."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flyt.errors import ConfigurationError, RegionError
from flyt.shm import ivshmem, memory
from flyt.shm.layout import MIB, Geometry
from flyt.shm.table import FrameTable
from flyt.shm.window import Window, pick_base, reserve_length

SIZE = 4 * MIB


class Tree:
    """A folder that looks like /sys/bus/pci/devices."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.add("0000:00:00.0", vendor="0x8086", device="0x1237", size=0)
        self.add("0000:00:03.0", vendor="0x1af4", device="0x1000", size=SIZE)

    def add(
        self,
        slot: str,
        *,
        size: int = SIZE,
        vendor: str = "0x1af4",
        device: str = "0x1110",
        enabled: str = "0",
    ) -> Path:
        place = self.folder / slot
        place.mkdir()
        for name, text in (("vendor", vendor), ("device", device), ("enable", enabled)):
            (place / name).write_text(text + "\n")
        if size:
            for name in ("resource2", "resource2_wc"):
                with open(place / name, "wb") as file:
                    file.truncate(size)
        return place


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_device_is_found_by_its_pci_id(tree: Tree) -> None:
    assert ivshmem.bars(tree.folder) == []
    place = tree.add("0000:00:04.0")
    assert ivshmem.bars(tree.folder) == [("0000:00:04.0", SIZE, place)]


def test_a_machine_without_pci_has_none(tmp_path: Path) -> None:
    assert ivshmem.bars(tmp_path / "nothing") == []


def test_a_device_without_memory_is_none(tree: Tree) -> None:
    tree.add("0000:00:04.0", size=0)
    assert ivshmem.bars(tree.folder) == []


@pytest.mark.parametrize(
    "spec", ["pci:", "pci:0000:00:05.0", "pci:00:05.0", "pci:4M", "pci:4194304"]
)
def test_one_of_several_is_chosen_by_slot_or_size(tree: Tree, spec: str) -> None:
    tree.add("0000:00:04.0", size=2 * SIZE)
    tree.add("0000:00:05.0", size=SIZE)
    assert ivshmem.find(spec, SIZE, tree.folder).slot == "0000:00:05.0"


def test_a_domain_may_have_more_than_four_digits(tree: Tree) -> None:
    tree.add("0000:00:04.0")
    tree.add("10000:00:04.0")
    assert ivshmem.find("pci:10000:00:04.0", SIZE, tree.folder).slot == "10000:00:04.0"


@pytest.mark.parametrize("spec", ["pci:", "pci:4M"])
def test_two_of_one_size_are_ambiguous(tree: Tree, spec: str) -> None:
    tree.add("0000:00:04.0")
    tree.add("0000:00:05.0")
    with pytest.raises(RegionError, match=r"several .* 0000:00:04\.0 .*0000:00:05\.0.*FLYT_REGION"):
        ivshmem.find(spec, SIZE, tree.folder)
    assert ivshmem.find("pci:0000:00:04.0", SIZE, tree.folder).slot == "0000:00:04.0"


@pytest.mark.parametrize("spec", ["pci:", "pci:0000:00:09.0", "pci:64M"])
def test_a_missing_device_is_named_with_those_that_there_are(tree: Tree, spec: str) -> None:
    tree.add("0000:00:04.0", size=8 * MIB)
    with pytest.raises(RegionError, match=r"has not an ivshmem .*0000:00:04\.0 \(8388608 bytes\)"):
        ivshmem.find(spec, SIZE, tree.folder)


@pytest.mark.parametrize("spec", ["pci:0000:00:04.0", "pci:8M"])
def test_a_region_of_another_size_is_refused(tree: Tree, spec: str) -> None:
    tree.add("0000:00:04.0", size=8 * MIB)
    with pytest.raises(RegionError, match=r"has 8388608 bytes, the backend's region 4194304"):
        ivshmem.find(spec, SIZE, tree.folder)


@pytest.mark.parametrize(
    "spec", ["pci:4X", "pci:0000:00:04", "pci:-4M", "pci:4M4", "pci:" + "9" * 99]
)
def test_what_names_no_device_is_refused(tree: Tree, spec: str) -> None:
    with pytest.raises(ConfigurationError, match=r"slot like 0000:00:04\.0, a size like 64M"):
        ivshmem.find(spec, SIZE, tree.folder)


def test_the_device_is_enabled_once(tree: Tree) -> None:
    place = tree.add("0000:00:04.0")
    ivshmem.open_bar(ivshmem.find("pci:", SIZE, tree.folder)).close()
    assert (place / "enable").read_text() == "1"
    (place / "enable").write_text("3\n")  # others enabled it too: it is a count
    ivshmem.open_bar(ivshmem.find("pci:", SIZE, tree.folder)).close()
    assert (place / "enable").read_text() == "3\n"


def test_who_can_not_enable_it_is_told_how(tree: Tree) -> None:
    place = tree.add("0000:00:04.0")
    (place / "enable").unlink()
    (place / "enable").mkdir()  # can't be written, not even by root
    with pytest.raises(RegionError, match=r"0000:00:04\.0 is not enabled.*udev.*echo 1 > "):
        ivshmem.open_bar(ivshmem.find("pci:", SIZE, tree.folder))


def test_without_write_combining_there_is_no_region(tree: Tree) -> None:
    place = tree.add("0000:00:04.0", enabled="1")
    (place / "resource2_wc").unlink()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(RegionError, match="no write-combining"):
        ivshmem.open_bar(ivshmem.find("pci:", SIZE, tree.folder))
    (place / "resource2_wc").mkdir()
    with pytest.raises(RegionError, match=r"can't open .*resource2_wc.*udev"):
        ivshmem.open_bar(ivshmem.find("pci:", SIZE, tree.folder))
    assert os.listdir("/proc/self/fd") == before


def test_control_and_payload_are_mapped_through_different_files(
    tree: Tree, maps: Callable[..., list[tuple[int, int, str, str]]]
) -> None:
    place = tree.add("0000:00:04.0", enabled="1")
    geometry = Geometry.plan(SIZE)
    with closing(ivshmem.open_bar(ivshmem.find("pci:", SIZE, tree.folder))) as region:
        assert region.path == "pci:0000:00:04.0"
        assert region.size == SIZE
        with closing(FrameTable(region.control_fd, region.size, geometry)) as table:
            table.format(geometry, 7)
        base = pick_base(reserve_length(geometry), random.Random(1))
        window = Window.reserve_at(
            region.fd, geometry, base, reserve_length(geometry), control_fd=region.control_fd
        )
        with closing(window):
            control = window.map(0, ((3, 1),))
            payload = window.map(1, ((7, 2), (5, 1)))
            memory.store_word(control, 11)
            memory.store_word(payload, 22)
            mapped = [
                (start - base, end - base, path)
                for start, end, mode, path in maps(base, base + window.reserve)
                if "w" in mode
            ]
    page = geometry.page_size
    uncached, combining = str(place / "resource2"), str(place / "resource2_wc")
    assert mapped == [
        (0, page, uncached),
        (page, 3 * page, combining),
        (3 * page, 4 * page, combining),
    ]
    # The header and the control page are in one file, the payload in the other.
    assert (place / "resource2").read_bytes()[:7] == b"FLYTSHM"
    assert (place / "resource2").read_bytes()[geometry.offset(3)] == 11
    assert not any((place / "resource2_wc").read_bytes()[: geometry.offset(7)])
    assert (place / "resource2_wc").read_bytes()[geometry.offset(7)] == 22


def test_closing_a_region_closes_both_descriptors(tree: Tree) -> None:
    tree.add("0000:00:04.0", enabled="1")
    region = ivshmem.open_bar(ivshmem.find("pci:", SIZE, tree.folder))
    descriptors = {region.fd, region.control_fd}
    assert len(descriptors) == 2
    region.close()
    region.close()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
