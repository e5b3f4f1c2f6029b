# SPDX-License-Identifier: Apache-2.0
"""The pointer map: what an address means to CUDA, known without asking the backend.

Guarded by the connection's lock, like all tables of a session.
"""

from __future__ import annotations

import bisect
import dataclasses
from enum import IntEnum

from flyt.errors import DeviceError

INVALID_VALUE = 1


class Space(IntEnum):
    """Whose memory an address lies in; the values are cudaMemoryType's."""

    PAGEABLE = 0
    PINNED = 1
    DEVICE = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """One block that Flyt handed out.

    Attributes
    ----------
    index : int
        Of pinned memory: its offset in the window, or -1 where there is no window (inline).
    flags : int
        cudaHostAlloc's.
    """

    space: Space
    address: int
    size: int
    device: int
    index: int = -1
    vpn: int = 0
    flags: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """An address and what it belongs to; ``allocation`` is None for pageable memory."""

    address: int
    space: Space
    allocation: Allocation | None = None

    @property
    def index(self) -> int:
        """Offset of the address in the window; -1 when it is not there."""
        if self.allocation is None or self.allocation.index < 0:
            return -1
        return self.allocation.index + self.address - self.allocation.address


class PointerMap:
    """Allocations by address, with interior look-up."""

    def __init__(self) -> None:
        self._allocations: dict[int, Allocation] = {}
        self._addresses: list[int] = []

    def add(self, allocation: Allocation) -> None:
        self._allocations[allocation.address] = allocation
        bisect.insort(self._addresses, allocation.address)

    def remove(self, address: int, space: Space) -> Allocation:
        """Take out the allocation that starts at ``address``.

        Raises
        ------
        DeviceError
            cudaErrorInvalidValue: freed already, an interior pointer, or memory of another kind
            (oracle: free_twice, free_interior, free_of_pinned, freeHost_twice, freeHost_interior).
        """
        allocation = self._allocations.get(address)
        if allocation is None or allocation.space != space:
            raise DeviceError(
                INVALID_VALUE,
                f"{address:#x} is not the start of an allocation that can be freed so",
            )
        del self._allocations[address]
        del self._addresses[bisect.bisect_left(self._addresses, address)]
        return allocation

    def find(self, address: int) -> Allocation | None:
        """The allocation that ``address`` lies in."""
        at = bisect.bisect_right(self._addresses, address) - 1
        if at < 0:
            return None
        allocation = self._allocations[self._addresses[at]]
        return allocation if address < allocation.address + allocation.size else None

    def place(self, address: int, size: int) -> Place:
        """Where ``[address, address + size)`` lies.

        Raises
        ------
        DeviceError
            cudaErrorInvalidValue when it leaves its allocation (oracle: memcpy_H2D_oob_by_1), or
            is host memory that runs into an allocation.
        """
        allocation = self.find(address)
        if allocation is None:
            at = bisect.bisect_left(self._addresses, address)
            if at < len(self._addresses) and self._addresses[at] < address + size:
                raise DeviceError(
                    INVALID_VALUE,
                    f"{size} bytes at {address:#x} run into the allocation at "
                    f"{self._addresses[at]:#x}",
                )
            return Place(address, Space.PAGEABLE)
        excess = address + size - allocation.address - allocation.size
        if excess > 0:
            raise DeviceError(
                INVALID_VALUE,
                f"{size} bytes at {address:#x} end {excess} bytes behind the allocation of "
                f"{allocation.size} bytes at {allocation.address:#x}",
            )
        return Place(address, allocation.space, allocation)

    def all(self) -> list[Allocation]:
        """Every allocation, by address."""
        return [self._allocations[address] for address in self._addresses]
