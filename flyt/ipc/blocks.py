# SPDX-License-Identifier: Apache-2.0
"""`BlockTable`: which block of shareable memory an address of this process lies in.

A block is one contiguous range that was allocated or imported as a whole. The table holds blocks
weakly: whoever uses the memory keeps it.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Callable
from typing import Protocol


class Block(Protocol):
    """What the table knows of a block (`flyt.ipc.memory.Buffer` is one)."""

    @property
    def handle(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def key(self) -> bytes: ...


Finder = Callable[[int], "Block | None"]
"""Looks for memory that this table did not hand out: that of a C allocator, say."""


class BlockTable:
    """Blocks by address, and who wants to know of their end."""

    def __init__(self) -> None:
        # Re-entrant: the garbage collector may end a block while its own thread holds the lock.
        self._lock = threading.RLock()
        self._starts: list[int] = []
        self._blocks: dict[int, weakref.ref[Block]] = {}
        self._own: weakref.WeakValueDictionary[bytes, Block] = weakref.WeakValueDictionary()
        self._finders: list[Finder] = []
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()

    def add(self, block: Block, *, own: bool) -> None:
        """Enter a block; its owner calls `remove` before the range is given back.

        One that was allocated here (``own``) is found by its name too, when it comes back from a
        process that it was shared with.
        """
        with self._lock:
            bisect.insort(self._starts, block.handle)
            self._blocks[block.handle] = weakref.ref(block)
            if own:
                self.name(block)

    def name(self, block: Block) -> None:
        """Find a block by its name only."""
        self._own[block.key] = block

    def remove(self, start: int, key: bytes) -> None:
        """Take a block out and tell the watchers that it is no more."""
        with self._lock:
            self._starts.remove(start)
            del self._blocks[start]
        self.ended(key)

    def ended(self, key: bytes) -> None:
        """Tell the watchers that a block is no more."""
        for watcher in list(self._watchers):
            watcher.block_ended(key)

    def find(self, address: int) -> Block | None:
        """The block that holds this address."""
        with self._lock:
            place = bisect.bisect_right(self._starts, address) - 1
            if place >= 0:
                start = self._starts[place]
                block = self._blocks[start]()
                if block is not None and address < start + block.size:
                    return block
        for finder in self._finders:
            if (found := finder(address)) is not None:
                return found
        return None

    def own(self, key: bytes) -> Block | None:
        """The block of this name that this process allocated."""
        return self._own.get(key)

    def add_finder(self, finder: Finder) -> None:
        """Ask this one too, after the table itself."""
        if finder not in self._finders:
            self._finders.append(finder)

    def watch(self, watcher: Watcher) -> None:
        """Tell this one, as long as it lives, of every block that ends."""
        self._watchers.add(watcher)

    def __len__(self) -> int:
        return len(self._starts)


class Watcher(Protocol):
    """Is told of blocks that end; from any thread, at any point, so it may only take a note."""

    def block_ended(self, key: bytes) -> None: ...


blocks = BlockTable()
"""Of this process."""
