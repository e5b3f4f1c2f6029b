# SPDX-License-Identifier: Apache-2.0
"""What the short way knows of a kernel: the launches of it that the driver is known to take."""

from __future__ import annotations

import ctypes

Three = tuple[int, int, int]

MAX_THREADS_PER_BLOCK, MAX_DYNAMIC_SHARED = 0, 8
"""CUfunction_attribute's values."""


class Fields(ctypes.Structure):
    """``kernel_t`` of launches.c."""

    _fields_ = (
        ("number", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("grid", ctypes.c_uint64 * 3),
        ("block", ctypes.c_uint64 * 3),
        ("threads", ctypes.c_uint64),
        ("shared", ctypes.c_uint64),
    )


class PlainKernel:
    """One function's limits, made once for all its launches.

    Parameters
    ----------
    number : int
        What commands call the function.
    size : int
        Bytes of its parameters.
    attributes : dict of int to int
        By CUfunction_attribute.
    grids, blocks : tuple of int
        The device's largest.

    Attributes
    ----------
    at : int
        Where the library finds it.
    """

    __slots__ = ("_blocks", "_fields", "_grids", "_shared", "_threads", "at")

    def __init__(
        self, number: int, size: int, attributes: dict[int, int], grids: Three, blocks: Three
    ) -> None:
        self._grids, self._blocks = grids, blocks
        self._threads = attributes.get(MAX_THREADS_PER_BLOCK, 0)
        self._shared = attributes.get(MAX_DYNAMIC_SHARED, 0)
        most = max(self._threads, 0), max(self._shared, 0)
        self._fields = Fields(number, size, grids, blocks, *most)
        self.at = ctypes.addressof(self._fields)

    def takes(self, grid: Three, block: Three, shared: int) -> bool:
        """Whether the driver is known to take it."""
        grids, blocks = self._grids, self._blocks
        return (
            0 < grid[0] <= grids[0]
            and 0 < grid[1] <= grids[1]
            and 0 < grid[2] <= grids[2]
            and 0 < block[0] <= blocks[0]
            and 0 < block[1] <= blocks[1]
            and 0 < block[2] <= blocks[2]
            and block[0] * block[1] * block[2] <= self._threads
            and 0 <= shared <= self._shared
        )
