# SPDX-License-Identifier: Apache-2.0
"""Windows: which part of the address space each half has. Checked before anything is mapped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from flyt.errors import ConfigurationError
from flyt.split.build import LOADER_BASE

GIB = 1 << 30
GRANULE = 4 * GIB
"""Windows are whole multiples: the filter on system calls tells them by an address's upper word."""

LOWEST = GRANULE
"""Below lie programs that are not position-independent."""

HIGHEST = 0x7000_0000_0000
"""Above, the kernel puts what it places itself: the loader's stack, the vdso."""

SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
WINDOW = re.compile(r"^(0x[0-9a-fA-F]+):(\d+)([KMGT]?)$")

TIB = 1 << 40
UPPER = "upper"
ARENA = "arena"
FIRST_LOWER = 0x1000_0000_0000
DEFAULT_UPPER = 0x3000_0000_0000
DEFAULT_ARENA = 0x4000_0000_0000


@dataclass(frozen=True)
class Window:
    """A range of addresses that one half has to itself."""

    base: int
    size: int

    @classmethod
    def parse(cls, text: str) -> Window:
        """Read ``0xBASE:SIZE``, the size with K, M, G or T."""
        found = WINDOW.match(text)
        if found is None:
            raise ConfigurationError(
                f"{text!r} is no window: write 0xBASE:SIZE, as 0x100000000000:1T"
            )
        return cls(int(found[1], 16), int(found[2]) * SIZES[found[3]])

    @property
    def end(self) -> int:
        return self.base + self.size

    def __contains__(self, address: int) -> bool:
        return self.base <= address < self.end

    def __str__(self) -> str:
        return f"{self.base:#x}-{self.end:#x}"


def default_windows(lower: Iterable[str]) -> dict[str, Window]:
    """1 TiB each: the upper half's, each lower half's, and the arena of device memory."""
    found = {name: Window(FIRST_LOWER + index * 2 * TIB, TIB) for index, name in enumerate(lower)}
    found[UPPER] = Window(DEFAULT_UPPER, TIB)
    found[ARENA] = Window(DEFAULT_ARENA, TIB)
    return found


def check(windows: dict[str, Window], needed: dict[str, int]) -> None:
    """Refuse windows that overlap, lie where they can't, or are too small for what is known.

    Parameters
    ----------
    needed
        Bytes that a half takes at least: its files, and a stack.
    """
    for name, window in windows.items():
        if window.base % GRANULE or window.size % GRANULE or window.size <= 0:
            raise ConfigurationError(
                f"the window of {name}, {window}, is too small or off the grid: base and size must "
                f"be multiples of {GRANULE // GIB} GiB"
            )
        if window.base < LOWEST or window.end > HIGHEST:
            raise ConfigurationError(
                f"the window of {name}, {window}, must lie in {LOWEST:#x}-{HIGHEST:#x}"
            )
        if needed.get(name, 0) > window.size:
            raise ConfigurationError(
                f"the window of {name}, {window}, is too small: its files and stack take "
                f"{needed[name]} bytes"
            )
    every = {**windows, "the loader": Window(LOADER_BASE, GRANULE)}
    in_order = sorted(every.items(), key=lambda item: item[1].base)
    for (name, window), (other, following) in pairwise(in_order):
        if following.base < window.end:
            raise ConfigurationError(
                f"the windows of {name} ({window}) and {other} ({following}) overlap"
            )
