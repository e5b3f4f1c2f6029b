# SPDX-License-Identifier: Apache-2.0
"""A doorbell, seen from a guest: one 32-bit register in BAR 0 of an ivshmem-doorbell device.

A store of ``peer << 16 | vector`` makes QEMU signal the eventfd that the peer has for the vector.
The peers are the daemon's sessions, each with one vector; no driver takes part. The register is
uncached, so the store comes after all that this thread stored in the region before.
"""

from __future__ import annotations

import mmap
import os

from flyt.errors import RegionError
from flyt.shm.ivshmem import REGISTERS, Bar

DOORBELL = 12
"""Offset of the register."""

LENGTH = 256
"""Bytes of BAR 0."""

_PEER_SHIFT = 16


class Doorbell:
    """The way to ring for one peer. One thread at a time.

    Parameters
    ----------
    bar : Bar
        The device that holds the region, enabled.
    peer : int
        Whom to ring for, as WELCOME says.

    Raises
    ------
    RegionError
        The device has no doorbell, or this user may not ring it.

    Attributes
    ----------
    rings : int
        How often it was rung.
    """

    def __init__(self, bar: Bar, peer: int) -> None:
        if not bar.has_interrupts:
            raise RegionError(
                f"the ivshmem device {bar.slot} has no doorbell: give QEMU an ivshmem-doorbell on "
                "the socket of flyt-backend --doorbell instead of an ivshmem-plain"
            )
        if not bar.registers_on_page:
            raise RegionError(
                f"the registers of {bar.slot} share a page with others, so they can't be mapped"
            )
        path = bar.folder / REGISTERS
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._map = mmap.mmap(fd, LENGTH)
            finally:
                os.close(fd)
        except (OSError, ValueError) as exc:  # ValueError: the file is shorter
            raise RegionError(
                f"can't map {path}: {exc}. Users other than root need the udev rule of "
                "docs/deploy-vm.md"
            ) from exc
        self._registers = memoryview(self._map).cast("I")
        self._word = peer << _PEER_SHIFT
        self.rings = 0

    def ring(self) -> None:
        """Wake the peer: one aligned 32-bit store."""
        self._registers[DOORBELL // 4] = self._word
        self.rings += 1

    def close(self) -> None:
        """Unmap the register."""
        self._registers.release()
        self._map.close()
