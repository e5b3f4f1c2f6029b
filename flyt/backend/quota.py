# SPDX-License-Identifier: Apache-2.0
"""A limit on bytes, with CUDA's rule for memory that is freed in the order of a stream.

A block whose free a stream has not reached yet still takes up memory, so it counts. Only the same
stream may have those bytes again before: its order makes that safe, as in CUDA's pools.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable

from flyt.errors import DeviceError

MEMORY_ALLOCATION = 2


@dataclasses.dataclass(slots=True, eq=False)
class Dying:
    """``left`` bytes that count until ``stream`` has reached their free."""

    stream: Hashable
    left: int


class Quota:
    """Bytes that are in use, and how many may be.

    Parameters
    ----------
    limit : int
        0 means no limit.
    name : str
        Whose limit it is, for the error.
    """

    def __init__(self, limit: int, name: str) -> None:
        self.limit = limit
        self.used = 0
        self._name = name
        self._dying: dict[Hashable, list[Dying]] = collections.defaultdict(list)

    def reserve(self, size: int, stream: Hashable = None) -> list[tuple[Dying, int]]:
        """Set ``size`` bytes aside before the device is asked; those that die on ``stream`` count
        as free.

        Returns
        -------
        list
            For `restore`.

        Raises
        ------
        DeviceError
            cudaErrorMemoryAllocation when less is left.
        """
        borrowed: list[tuple[Dying, int]] = []
        fresh = size
        for dying in self._dying.get(stream, ()):
            if part := min(dying.left, fresh):
                borrowed.append((dying, part))
                fresh -= part
        if self.limit and self.used + fresh > self.limit:
            raise DeviceError(
                MEMORY_ALLOCATION,
                f"{size} bytes are more than the {self.limit - self.used} left of {self._name} of "
                f"{self.limit}",
            )
        for dying, part in borrowed:
            dying.left -= part
        self.used += fresh
        return borrowed

    def restore(self, size: int, borrowed: list[tuple[Dying, int]] | None = None) -> None:
        """Give reserved bytes back."""
        self.used -= size
        for dying, part in borrowed or ():
            dying.left += part
            self.used += part

    def let_die(self, size: int, stream: Hashable) -> Dying:
        """The free of ``size`` bytes was put on ``stream``."""
        dying = Dying(stream, size)
        self._dying[stream].append(dying)
        return dying

    def bury(self, dying: Dying) -> None:
        """The stream has reached it."""
        self.used -= dying.left
        dying.left = 0
        mourners = self._dying[dying.stream]
        mourners.remove(dying)
        if not mourners:
            del self._dying[dying.stream]
