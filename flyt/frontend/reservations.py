# SPDX-License-Identifier: Apache-2.0
"""Device addresses, kept free in this process.

Every block of device memory is reserved here without access, so that an address is either the
host's or the device's, never both (cudaMemcpyDefault relies on it), and a stray host access faults
instead of corrupting. CUDA hands out device addresses in granules of 2 MiB, and several blocks may
share one.
"""

from __future__ import annotations

from flyt.shm import memory

GRANULE = 2 << 20


class Reservations:
    """Reserved granules, counted by the blocks in them. Guarded by the connection's lock."""

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}

    def take(self, address: int, size: int) -> bool:
        """Reserve the granules of a block; False when host memory lies there already."""
        granules = range(address // GRANULE, -(-(address + size) // GRANULE))
        fresh: list[int] = []
        for granule in granules:
            if granule in self._uses:
                continue
            if not memory.reserve(granule * GRANULE, GRANULE):
                for reserved in fresh:
                    memory.release(reserved * GRANULE, GRANULE)
                return False
            # A forked child has a session of its own, if any, and the same device addresses.
            memory.exclude_from_fork(granule * GRANULE, GRANULE)
            fresh.append(granule)
        for granule in granules:
            self._uses[granule] = self._uses.get(granule, 0) + 1
        return True

    def give(self, address: int, size: int) -> None:
        """Release the granules that no other block uses."""
        for granule in range(address // GRANULE, -(-(address + size) // GRANULE)):
            self._uses[granule] -= 1
            if not self._uses[granule]:
                del self._uses[granule]
                memory.release(granule * GRANULE, GRANULE)

    def clear(self) -> None:
        """Release everything: the session is gone."""
        for granule in self._uses:
            memory.release(granule * GRANULE, GRANULE)
        self._uses.clear()
