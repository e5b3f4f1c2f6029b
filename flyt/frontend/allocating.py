# SPDX-License-Identifier: Apache-2.0
"""New device memory, at an address that this process does not use for anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flyt.errors import DeviceError, ProtocolError
from flyt.frontend.inflight import Make
from flyt.frontend.pointers import Allocation, Space
from flyt.frontend.reservations import GRANULE

if TYPE_CHECKING:
    from flyt.frontend.session import Session

MEMORY_ALLOCATION = 2

ADDRESS_TRIES = 8
"""Device blocks that may collide with host memory of this process before cudaMalloc fails."""


def allocate(
    session: Session, size: int, device: int, make: Callable[[int, int], Make], pool: int = 0
) -> int:
    """Address of ``size`` > 0 bytes.

    Parameters
    ----------
    make : callable
        Gets how many bytes to ask for, and the address of the answer before, which was taken, or
        0; returns what makes the command.
    pool : int
        The handle of the pool that it comes from; 0 for cudaMalloc.
    """
    taken = 0
    for _ in range(ADDRESS_TRIES):
        # After a collision a whole granule: a smaller block would come from the same one.
        wanted = max(size, GRANULE) if taken else size
        answer = session.connection.call(make(wanted, taken))
        if len(answer.values) != 1:
            raise ProtocolError(f"the backend's answer to {answer.name} holds no address")
        address = answer.values[0]
        with session.connection.lock:
            if session.reservations.take(address, size):
                session.pointers.add(Allocation(Space.DEVICE, address, size, device, pool=pool))
                return address
        taken = address
    raise DeviceError(
        MEMORY_ALLOCATION,
        f"{ADDRESS_TRIES} device addresses were all in use in this process, last {taken:#x}",
    )
