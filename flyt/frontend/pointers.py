# SPDX-License-Identifier: Apache-2.0
"""The pointer map: what an address means to CUDA, known without asking the backend.

Guarded by the connection's lock, like all tables of a session.
"""

from __future__ import annotations

import bisect
import dataclasses
from enum import IntEnum
from typing import Protocol

from flyt.errors import DeviceError

INVALID_VALUE = 1
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713


class Space(IntEnum):
    """Whose memory an address lies in; the values are cudaMemoryType's."""

    PAGEABLE = 0
    PINNED = 1
    DEVICE = 2


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """One block that Flyt handed out, or that the caller registered. It equals itself alone: an
    address is another block's once it was freed.

    Attributes
    ----------
    index : int
        Of pinned memory: its offset in the window, or -1 where it is not in a window (inline, or
        registered).
    flags : int
        cudaHostAlloc's, or cudaHostRegister's.
    registered : bool
        The caller's own memory, pinned in name only.
    pool : int
        The handle of the pool that device memory came from; 0 for cudaMalloc.
    imported : bool
        Another process's memory, opened here: it is closed, not freed.
    lent : bool
        A module's global variable: it goes with the module, nobody frees it.
    """

    space: Space
    address: int
    size: int
    device: int
    index: int = -1
    vpn: int = 0
    flags: int = 0
    registered: bool = False
    pool: int = 0
    imported: bool = False
    lent: bool = False


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


class Mirror(Protocol):
    """A second map that follows the first."""

    def add(self, block: Allocation, /) -> None: ...

    def remove(self, address: int, /) -> None: ...


class PointerMap:
    """Allocations by address, with interior look-up."""

    def __init__(self) -> None:
        self._allocations: dict[int, Allocation] = {}
        self._addresses: list[int] = []
        self._mirror: Mirror | None = None

    def mirror(self, other: Mirror) -> None:
        """Let another map know of every allocation, those there are first."""
        for allocation in self.all():
            other.add(allocation)
        self._mirror = other

    def add(self, allocation: Allocation) -> None:
        if self._mirror is not None:  # first: what it takes for pageable memory it reads and writes
            self._mirror.add(allocation)
        self._allocations[allocation.address] = allocation
        bisect.insort(self._addresses, allocation.address)

    def remove(self, address: int, space: Space, block: Allocation | None = None) -> Allocation:
        """Take out the allocation that starts at ``address``; ``block`` alone, if one is given.

        Raises
        ------
        DeviceError
            cudaErrorInvalidValue: freed already, an interior pointer, or memory of another kind
            (oracle: free_twice, free_interior, free_of_pinned, freeHost_twice, freeHost_interior).
        """
        allocation = self._allocations.get(address)
        if (
            allocation is None
            or (block is not None and allocation is not block)
            or allocation.space != space
            or allocation.registered
            or allocation.imported
            or allocation.lent
        ):
            raise DeviceError(
                INVALID_VALUE,
                f"{address:#x} is not the start of an allocation that can be freed so",
            )
        return self._take_out(address)

    def register(self, block: Allocation) -> None:
        """Note the caller's own memory as pinned.

        Raises
        ------
        DeviceError
            cudaErrorHostMemoryAlreadyRegistered when some of it is registered,
            cudaErrorInvalidValue when some of it is an allocation (oracle: hostRegister_overlap;
            recorded: hostRegister_of_hostAlloc, hostRegister_of_device).
        """
        other = self.find(block.address) or self._next(block.address)
        if other is not None and other.address < block.address + block.size:
            raise DeviceError(
                ALREADY_REGISTERED if other.registered else INVALID_VALUE,
                f"{block.size} bytes at {block.address:#x} overlap the {other.size} "
                f"{'registered' if other.registered else 'allocated'} at {other.address:#x}",
            )
        self.add(block)

    def unregister(self, address: int) -> Allocation:
        """Take out the registration that starts at ``address``.

        Raises
        ------
        DeviceError
            cudaErrorHostMemoryNotRegistered where nothing is known, cudaErrorInvalidValue inside
            a registration and for allocations (oracle: hostUnregister_twice, _interior,
            _of_hostAlloc).
        """
        found = self.find(address)
        if found is None:
            raise DeviceError(NOT_REGISTERED, f"no registration at {address:#x}")
        if not found.registered or found.address != address:
            raise DeviceError(
                INVALID_VALUE, f"{address:#x} is not the start of a registration of host memory"
            )
        return self._take_out(address)

    def take_back(self, address: int) -> Allocation:
        """Take out what is not this process's own, or was lent and goes with its module."""
        return self._take_out(address)

    def _take_out(self, address: int) -> Allocation:
        del self._addresses[bisect.bisect_left(self._addresses, address)]
        taken = self._allocations.pop(address)
        if self._mirror is not None:
            self._mirror.remove(address)
        return taken

    def _next(self, address: int) -> Allocation | None:
        """The first allocation from ``address`` on."""
        at = bisect.bisect_left(self._addresses, address)
        return self._allocations[self._addresses[at]] if at < len(self._addresses) else None

    def find(self, address: int) -> Allocation | None:
        """The allocation that ``address`` lies in."""
        at = bisect.bisect_right(self._addresses, address) - 1
        if at < 0:
            return None
        allocation = self._allocations[self._addresses[at]]
        return allocation if address < allocation.address + allocation.size else None

    def is_free(self, address: int, size: int) -> bool:
        """Whether ``size`` > 0 bytes from ``address`` on touch no allocation: pageable memory."""
        at = bisect.bisect_left(self._addresses, address + size) - 1
        if at < 0:
            return True
        last = self._allocations[self._addresses[at]]
        return last.address + last.size <= address

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
            behind = self._next(address)
            if behind is not None and behind.address < address + size:
                raise DeviceError(
                    INVALID_VALUE,
                    f"{size} bytes at {address:#x} run into the allocation at {behind.address:#x}",
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
