# SPDX-License-Identifier: Apache-2.0
"""Pinned memory that outlived its session: private by now, and given back with its last array."""

from __future__ import annotations

from collections.abc import Mapping

from flyt.shm import memory

_private: dict[int, int] = {}


def keep(arrays: Mapping[int, bytes]) -> None:
    """Put private memory with these bytes at these addresses, which are free now."""
    for address, data in arrays.items():
        memory.map_private(address, len(data))
        memory.view(address, len(data))[:] = data
        _private[address] = -(-len(data) // memory.OS_PAGE) * memory.OS_PAGE


def drop(address: int) -> None:
    """The last array over this address is gone."""
    size = _private.pop(address, 0)
    if size:
        memory.release(address, size)
