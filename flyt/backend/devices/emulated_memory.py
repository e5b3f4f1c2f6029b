# SPDX-License-Identifier: Apache-2.0
"""The memory of an emulated device: an address range of its own and a first-fit allocator.

Freed blocks keep their bytes, as a GPU's do, and bounds are exact: a block ends at the byte that
was asked for, although the next one starts at a multiple of 512.
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import mmap
import os

from flyt.backend.devices import codes
from flyt.errors import ConfigurationError, DeviceError

BASE = 0x2000_0000_0000
"""Above every window (those lie from 0x1000_0000_0000), below what Linux gives to processes."""

SPACING = 1 << 40
SLOTS = 128
"""Places that are tried for an arena, `SPACING` apart, before the address space counts as full."""

ALIGNMENT = 512
"""What CUDA's pools align to (measured)."""

# mmap flags of Linux that Python's mmap module does not name everywhere.
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_MAP_FIXED_NOREPLACE = 0x10_0000
_MADV_HUGEPAGE = 14
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_arena(size: int, slot: int) -> int:
    """Maps ``size`` bytes in the first free slot from ``slot`` on; returns the address."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    error = 0
    for place in range(slot, SLOTS):
        wanted = BASE + place * SPACING
        address = _libc.mmap(wanted, size, protection, flags, -1, 0)
        if address == wanted:
            # Large blocks come into being by 2 MiB instead of 4 KiB; without huge pages nothing
            # is lost but speed, so the answer does not matter.
            _libc.madvise(wanted, size, _MADV_HUGEPAGE)
            return wanted
        if address == _MAP_FAILED:
            error = ctypes.get_errno()
        else:  # kernels before 4.17 take the address as a hint and map elsewhere
            unmap(address, size)
    raise ConfigurationError(
        f"emulated device: no {size} bytes of address space from {BASE:#x} on"
        f" ({os.strerror(error) if error else 'taken'}); try a smaller memory= option"
    )


def unmap(address: int, size: int) -> None:
    _libc.munmap(address, size)


def _remap(address: int, size: int, protection: int) -> None:
    """Fresh zero pages in place of all that is mapped there."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    if _libc.mmap(address, size, protection, flags, -1, 0) != address:
        reason = os.strerror(ctypes.get_errno())
        raise DeviceError(codes.OPERATING_SYSTEM, f"map {size} bytes at {address:#x}: {reason}")


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


class Pool:
    """The blocks that one session holds (cudaMemPool_t).

    Attributes
    ----------
    settings : dict of int to int
        cudaMemPoolAttr 1 to 4, which change nothing here: nothing unused is ever kept.
    used, used_high : int
        Bytes of its blocks now, and the most there were.
    reserved, reserved_high : int
        The same with blocks that were freed on a stream which has not got there yet.
    """

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self.blocks: set[int] = set()
        self.destroyed = False
        self.settings = {1: 1, 2: 1, 3: 1, 4: 0}
        self.used = self.used_high = self.reserved = self.reserved_high = 0

    def reserve(self, extent: int) -> None:
        self.reserved += extent
        self.reserved_high = max(self.reserved_high, self.reserved)

    def add(self, address: int, extent: int) -> None:
        self.blocks.add(address)
        self.used += extent
        self.used_high = max(self.used_high, self.used)

    def remove(self, address: int, extent: int) -> None:
        self.blocks.discard(address)
        self.used -= extent


@dataclasses.dataclass(slots=True)
class Block:
    """``size`` bytes that somebody asked for, inside ``extent`` bytes that it occupies."""

    address: int
    size: int
    extent: int
    pool: Pool


@dataclasses.dataclass(slots=True)
class Dying:
    """A block that was freed on a stream which has not got there yet."""

    address: int
    extent: int
    pool: Pool
    reused: bool = False
    """The same stream has allocated it again: its order makes that safe, as in CUDA's pools."""


class Memory:
    """The allocator of one device. Not thread-safe: the caller holds the context's lock.

    Parameters
    ----------
    base : int
        Address of the arena.
    size : int
        Its bytes.
    """

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.size = size
        self.free = size
        self._blocks: dict[int, Block] = {}
        self._starts: list[int] = []  # sorted addresses of the blocks
        self._holes: list[tuple[int, int]] = [(base, size)]  # sorted, never adjacent
        self._saved: dict[int, bytes] | None = None  # what blocks hold while it is suspended

    def __contains__(self, address: int) -> bool:
        return self.base <= address < self.base + self.size

    def overlaps(self, address: int, size: int) -> bool:
        return address < self.base + self.size and self.base < address + size

    def covers(self, address: int, size: int) -> bool:
        """Whether these bytes lie in one block."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return False
        block = self._blocks[self._starts[index]]
        return address + size <= block.address + block.size

    def allocate(self, size: int, pool: Pool, dying: list[Dying]) -> int:
        """Blocks ``dying`` on the same stream first, as a whole, as CUDA's pools do; else first
        fit."""
        if size <= 0:
            raise DeviceError(codes.INVALID_VALUE, f"allocate {size} bytes")
        need = -(-size // ALIGNMENT) * ALIGNMENT
        for block in dying:
            if block.extent >= need and not block.reused:
                block.reused = True
                block.pool.reserved -= block.extent
                pool.reserve(block.extent)
                return self._add(Block(block.address, size, block.extent, pool))
        for index, (start, length) in enumerate(self._holes):
            if length >= need:
                rest = [(start + need, length - need)] if length > need else []
                self._holes[index : index + 1] = rest
                self.free -= need
                pool.reserve(need)
                return self._add(Block(start, size, need, pool))
        raise DeviceError(
            codes.MEMORY_ALLOCATION, f"allocate {size} bytes, {self.free} of {self.size} are free"
        )

    def forget(self, address: int) -> Dying:
        """Takes a block from its owner; its bytes stay occupied until `reclaim`."""
        block = self._blocks.pop(address, None)
        if block is None:
            raise DeviceError(codes.INVALID_VALUE, f"free {address:#x}, where no block starts")
        del self._starts[bisect.bisect_left(self._starts, address)]
        block.pool.remove(address, block.extent)
        return Dying(address, block.extent, block.pool)

    def reclaim(self, block: Dying) -> None:
        """The bytes may serve anyone again; adjacent holes become one."""
        if block.reused:
            return
        start, end = block.address, block.address + block.extent
        self.free += block.extent
        block.pool.reserved -= block.extent
        index = bisect.bisect_left(self._holes, (start, 0))
        first = last = index
        if index < len(self._holes) and self._holes[index][0] == end:
            end += self._holes[index][1]
            last = index + 1
        if index > 0 and sum(self._holes[index - 1]) == start:
            start = self._holes[index - 1][0]
            first = index - 1
        self._holes[first:last] = [(start, end - start)]

    def suspend(self) -> None:
        """Moves the bytes of all blocks elsewhere, and gives all pages of the arena back: who
        touches it faults."""
        self._saved = {
            start: bytes(_view(start, self._blocks[start].size)) for start in self._starts
        }
        _remap(self.base, self.size, 0)
        self.free += self._occupied()

    def resume(self) -> None:
        """Brings the bytes back to their addresses. Those of free memory are gone."""
        if self._saved is None:
            return
        _remap(self.base, self.size, mmap.PROT_READ | mmap.PROT_WRITE)
        _libc.madvise(self.base, self.size, _MADV_HUGEPAGE)
        for start, data in self._saved.items():
            _view(start, len(data))[:] = data
        self._saved = None
        self.free -= self._occupied()

    def _occupied(self) -> int:
        return sum(block.extent for block in self._blocks.values())

    def _add(self, block: Block) -> int:
        self._blocks[block.address] = block
        bisect.insort(self._starts, block.address)
        block.pool.add(block.address, block.extent)
        return block.address
