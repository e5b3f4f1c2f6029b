# SPDX-License-Identifier: Apache-2.0
"""Pinned memory that outlived its session: private by now, and given back with its last array."""

from __future__ import annotations

from flyt.frontend.pointers import Allocation
from flyt.frontend.window_memory import WindowMemory
from flyt.shm import memory

_private: dict[Allocation, int] = {}
"""Bytes of each, in whole pages."""


def keep(block: Allocation, held: WindowMemory | None) -> None:
    """Make an array's memory private; without a window it is that already.

    Raises
    ------
    MemoryError
        There is none for it; the array lies in the window as before.
    """
    if held is not None:
        held.keep(block.vpn, block.size)
    _private[block] = memory.whole_pages(block.size)


def drop(block: Allocation) -> None:
    """The last array over this memory is gone."""
    size = _private.pop(block, 0)
    if size:
        memory.release(block.address, size)
