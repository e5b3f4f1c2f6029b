# SPDX-License-Identifier: Apache-2.0
"""The device memory of one session: which blocks it has, and how much it may have.

Every address that a client sends is looked up here, and nowhere else: what is not in the table of
its own session does not exist for it.
"""

from __future__ import annotations

import bisect
import dataclasses

from flyt.backend.devices.base import Device
from flyt.errors import DeviceError

INVALID_VALUE = 1
MEMORY_ALLOCATION = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """One cudaMalloc: ``size`` bytes at ``address`` of ``device``; or, ``lent``, a module's global
    variable, which goes with the module and is no part of the quota."""

    address: int
    size: int
    device: Device
    lent: bool = False


class BlockTable:
    """Blocks by address, with interior look-up, and the session's quota.

    Parameters
    ----------
    limit : int
        Bytes the session may hold over all devices; 0 means no limit.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.used = 0
        self._blocks: dict[int, Block] = {}
        self._addresses: list[int] = []

    def reserve(self, size: int) -> None:
        """Set ``size`` bytes of the quota aside before the device is asked.

        Raises
        ------
        DeviceError
            cudaErrorMemoryAllocation when the quota has less left.
        """
        if self.limit and self.used + size > self.limit:
            raise DeviceError(
                MEMORY_ALLOCATION,
                f"{size} bytes are more than the {self.limit - self.used} left of the session's "
                f"limit of {self.limit} (--memory-limit)",
            )
        self.used += size

    def restore(self, size: int) -> None:
        """Give reserved bytes back to the quota."""
        self.used -= size

    def add(self, block: Block) -> None:
        if block.address in self._blocks:
            return  # a variable that was asked for before
        self._blocks[block.address] = block
        bisect.insort(self._addresses, block.address)

    def start(self, address: int) -> Block:
        """The block that begins at ``address``.

        Raises
        ------
        DeviceError
            cudaErrorInvalidValue for anything that is not the start of a block (oracle: free_twice,
            free_interior, free_garbage).
        """
        block = self._blocks.get(address)
        if block is None or block.lent:
            raise DeviceError(INVALID_VALUE, f"{address:#x} is no block of this session")
        return block

    def remove(self, block: Block) -> None:
        """Take a block out and restore its part of the quota."""
        del self._blocks[block.address]
        del self._addresses[bisect.bisect_left(self._addresses, block.address)]
        if not block.lent:
            self.restore(block.size)

    def find(self, address: int, size: int) -> Block:
        """The block in which ``[address, address + size)`` lies as a whole.

        Raises
        ------
        DeviceError
            cudaErrorInvalidValue when there is none.
        """
        place = bisect.bisect_right(self._addresses, address) - 1
        if place >= 0:
            block = self._blocks[self._addresses[place]]
            if address + size <= block.address + block.size:
                return block
        raise DeviceError(
            INVALID_VALUE, f"{size} bytes at {address:#x} are not within one block of this session"
        )

    def all(self) -> list[Block]:
        """Every block that is to be freed, in no particular order."""
        return [block for block in self._blocks.values() if not block.lent]
