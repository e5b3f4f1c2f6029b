# SPDX-License-Identifier: Apache-2.0
"""Words in pinned host memory that streams wait for (cuStreamWaitValue32).

Unlike a host function that blocks, a waiting stream holds up no thread of the driver, so one
client's callback delays no other's. A word only ever grows, so that it can serve again at once: who
still waits for its older value goes on all the same.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable

WORD = 4

_LIMIT = 1 << 32
"""The comparison is cyclic, so words may overflow."""


_pages: list[mmap.mmap] = []
"""Never unmapped: streams may still wait for a word when their device is let go of, and the driver
goes on having the pages registered."""


class Gates:
    """Words for the gates of one device; the memory stays until the process ends.

    Parameters
    ----------
    pin : callable
        Registers host memory, by address and size, with the device.
    """

    def __init__(self, pin: Callable[[int, int], None]) -> None:
        self._pin = pin
        self._lock = threading.Lock()
        self._idle: list[int] = []

    def take(self) -> tuple[int, int]:
        """The address of a word, and the value that opens the gate."""
        with self._lock:
            if not self._idle:
                self._add_page()
            address = self._idle.pop()
        return address, (_word(address).value + 1) % _LIMIT

    def open(self, address: int, value: int) -> None:
        """Store the value; the word may serve again."""
        _word(address).value = value
        with self._lock:
            self._idle.append(address)

    def _add_page(self) -> None:
        page = mmap.mmap(-1, mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(page))
        self._pin(start, mmap.PAGESIZE)
        _pages.append(page)
        self._idle.extend(range(start, start + mmap.PAGESIZE, WORD))


def _word(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)
