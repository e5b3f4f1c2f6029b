# SPDX-License-Identifier: Apache-2.0
"""The device memory of one session: which blocks it has, and how much it may have.

Every address that a client sends is looked up here, and nowhere else: what is not in the table of
its own session does not exist for it.
"""

from __future__ import annotations

import bisect
import dataclasses

from flyt.backend.devices.base import Device
from flyt.backend.quota import Quota
from flyt.errors import DeviceError

INVALID_VALUE = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """One allocation: ``size`` bytes at ``address`` of ``device``, which count in the quota of its
    pool too if it has one; or, ``lent``, a module's global variable, which goes with the module and
    is no part of any quota."""

    address: int
    size: int
    device: Device
    pool: Quota | None = None
    lent: bool = False


class BlockTable(Quota):
    """Blocks by address, with interior look-up, and the session's quota.

    Parameters
    ----------
    limit : int
        Bytes the session may hold over all devices; 0 means no limit.
    """

    def __init__(self, limit: int = 0) -> None:
        super().__init__(limit, "the session's limit (--memory-limit)")
        self.version = 0
        """Another one whenever a block is gone."""
        self._blocks: dict[int, Block] = {}
        self._addresses: list[int] = []

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
        """Take a block out and restore its part of the quotas."""
        self.take_out(block)
        if block.lent:
            return
        self.restore(block.size)
        if block.pool is not None:
            block.pool.restore(block.size)

    def take_out(self, block: Block) -> None:
        """Take a block out that still counts."""
        self.version += 1
        del self._blocks[block.address]
        del self._addresses[bisect.bisect_left(self._addresses, block.address)]

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
