# SPDX-License-Identifier: Apache-2.0
"""The region as a guest finds it: BAR 2 of an ivshmem PCI device, through sysfs, without a driver.

Linux offers the BAR as two files. Mapped through ``resource2`` it is uncached, through
``resource2_wc`` write-combining: fast for bulk data, but a store may reach memory late. So page
frames with payload are mapped through the second, and whatever the two sides race on (superblock,
page table, control pages) through the first. A page may be mapped through one of them at a time:
of two types for one page the kernel silently takes the older.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from flyt.errors import ConfigurationError, RegionError
from flyt.shm.region import Region

SCHEME = "pci:"
"""What FLYT_REGION begins with when it names a PCI device."""
VENDOR, DEVICE = 0x1AF4, 0x1110
"""ivshmem's PCI id: plain and doorbell alike."""
SYSFS = Path("/sys/bus/pci/devices")
UNCACHED, WRITE_COMBINING = "resource2", "resource2_wc"
REGISTERS, INTERRUPTS = "resource0", "resource1"
"""BAR 1 holds the MSI-X table, which ivshmem-plain has not."""

_SLOT = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE)
_SIZE = re.compile(r"([0-9]{1,15})([KMGT]?)", re.IGNORECASE)
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


class Bar(NamedTuple):
    """The shared memory of one device: where it sits (``0000:00:04.0``), and its bytes."""

    slot: str
    size: int
    folder: Path

    def __str__(self) -> str:
        return f"{self.slot} ({self.size} bytes)"

    @property
    def has_interrupts(self) -> bool:
        """Whether it is an ivshmem-doorbell."""
        return (self.folder / INTERRUPTS).exists()

    @property
    def registers_on_page(self) -> bool:
        """Whether BAR 0 begins where a page does, so that a mapping of its file begins with it."""
        try:
            first = (self.folder / "resource").read_text().split(maxsplit=1)[0]
            return int(first, 16) % mmap.PAGESIZE == 0
        except (OSError, ValueError, IndexError) as exc:  # the device was just removed, say
            raise RegionError(
                f"the device {self.slot} does not say where its registers are"
            ) from exc


def bars(sysfs: Path = SYSFS) -> list[Bar]:
    """The shared memory of every ivshmem device of this machine, by slot."""
    try:
        folders = sorted(sysfs.iterdir())
    except OSError:  # a machine without PCI
        return []
    return [
        Bar(folder.name, (folder / UNCACHED).stat().st_size, folder)
        for folder in folders
        if (_number(folder / "vendor"), _number(folder / "device")) == (VENDOR, DEVICE)
        and (folder / UNCACHED).exists()
    ]


def find(spec: str, size: int, sysfs: Path = SYSFS) -> Bar:
    """The device that holds the region.

    Parameters
    ----------
    spec : str
        ``pci:`` takes the device whose size is the region's; ``pci:0000:00:04.0`` names the slot,
        ``pci:64M`` the size.
    size : int
        Bytes of the backend's region.

    Raises
    ------
    ConfigurationError
        ``spec`` has none of these forms.
    RegionError
        No device fits, or several do, or the one that was named has another size.
    """
    found = bars(sysfs)
    wanted = spec.removeprefix(SCHEME)
    if slot := _SLOT.fullmatch(wanted):
        name = f"{slot[1] or '0000'}:{slot[2]}".lower()
        fitting = [bar for bar in found if bar.slot == name]
        what = f"an ivshmem device at {name}"
    else:
        asked = _bytes(spec, wanted) if wanted else size
        fitting = [bar for bar in found if bar.size == asked]
        what = f"an ivshmem device of {asked} bytes"
    if not fitting:
        raise RegionError(
            f"this machine has not {what}; it has {_listed(found)}. Give QEMU a "
            f"memory-backend-file of size={size} (the region's) and an ivshmem-plain device on it"
        )
    if len(fitting) > 1:
        raise RegionError(
            f"several ivshmem devices have {fitting[0].size} bytes: {_listed(fitting)}; "
            f"set FLYT_REGION={SCHEME}SLOT to the one on the backend's region"
        )
    (bar,) = fitting
    if bar.size != size:
        raise RegionError(
            f"the ivshmem device {bar.slot} has {bar.size} bytes, the backend's region {size}: it "
            f"is another region, or QEMU's memory-backend-file lacks size={size}"
        )
    return bar


def open_bar(bar: Bar) -> Region:
    """Open a device's shared memory as a region.

    Raises
    ------
    RegionError
        The device can't be enabled or opened, with what to do about it.
    """
    _enable(bar)
    with contextlib.ExitStack() as undo:
        payload, control = (_open(bar.folder / name, undo) for name in (WRITE_COMBINING, UNCACHED))
        region = Region(payload, f"{SCHEME}{bar.slot}", bar.size, False, control_fd=control)
        undo.pop_all()
    return region


def _enable(bar: Bar) -> None:
    """Have the device answer to memory accesses. Until then its BAR reads as all ones."""
    enable = bar.folder / "enable"
    if _number(enable) > 0:  # it is a count; whoever enabled it never takes that back
        return
    try:
        enable.write_text("1")
    except OSError as exc:
        raise RegionError(
            f"the ivshmem device {bar.slot} is not enabled, and this user can't do it "
            f"({exc.strerror}): install the udev rule of docs/deploy-vm.md, or run once, as root: "
            f"echo 1 > {enable}"
        ) from exc


def _open(path: Path, undo: contextlib.ExitStack) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise RegionError(
            f"there is no {path}: the kernel offers no write-combining mapping of this device"
        ) from exc
    except OSError as exc:
        raise RegionError(
            f"can't open {path}: {exc.strerror}. Users other than root need the udev rule of "
            "docs/deploy-vm.md; a locked-down kernel (Secure Boot) lets nobody"
        ) from exc
    undo.callback(os.close, fd)
    return fd


def _number(path: Path) -> int:
    """What a sysfs attribute says, decimal or 0x…; -1 if it says nothing."""
    try:
        return int(path.read_text(), 0)
    except (OSError, ValueError):  # not readable, or the device was just removed
        return -1


def _bytes(spec: str, text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"FLYT_REGION={spec}: after {SCHEME} comes a slot like 0000:00:04.0, a size like 64M, "
            "or nothing"
        )
    return int(match[1]) << _UNITS[match[2].upper()]


def _listed(found: Iterable[Bar]) -> str:
    return ", ".join(map(str, found)) or "none at all"
