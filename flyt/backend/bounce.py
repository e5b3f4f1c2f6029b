# SPDX-License-Identifier: Apache-2.0
"""Registered memory of the worker's own, for payloads that come inline.

A session without a window has no memory that the device could read; its payloads pass through
slots of this buffer. It is made at the first inline payload.
"""

from __future__ import annotations

from flyt.rpc.messages import INLINE_CHUNK
from flyt.shm import memory

SLOTS = 8
"""Inline payloads that one session may have in flight on the device."""


class BounceBuffer:
    """``SLOTS`` slots of ``INLINE_CHUNK`` bytes in one page-aligned block."""

    def __init__(self) -> None:
        self.size = SLOTS * INLINE_CHUNK
        self.address = memory.anonymous(self.size)
        self._free = list(range(SLOTS))

    def take(self) -> int | None:
        """Address of a free slot, or None when all are in flight."""
        return self.address + self._free.pop() * INLINE_CHUNK if self._free else None

    def give(self, address: int) -> None:
        self._free.append((address - self.address) // INLINE_CHUNK)

    def close(self) -> None:
        """Give the memory back; only after it was unregistered."""
        memory.release(self.address, self.size)
