# SPDX-License-Identifier: Apache-2.0
"""New memory: of the device, at an address that this process uses for nothing else; and pinned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flyt.errors import DeviceError, ProtocolError
from flyt.frontend.inflight import Make
from flyt.frontend.lost import CLOSED, DEVICES_UNAVAILABLE, Lost
from flyt.frontend.pointers import Allocation, Space
from flyt.frontend.reservations import GRANULE
from flyt.shm import memory

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


def allocate_pinned(
    session: Session, size: int, flags: int, device: int, *, lasting: bool = False
) -> Allocation:
    """``size`` > 0 bytes, in the window, else (inline) in private memory.

    Parameters
    ----------
    lasting : bool
        It is an array's: it stays when the session is closed.

    Raises
    ------
    DeviceError
        cudaErrorMemoryAllocation.
    Lost
        The session is closed, or was while the memory was made: nobody would keep it.
    """
    with session.users:
        held = session.memory
        if session.is_closed:
            raise Lost(DEVICES_UNAVAILABLE, CLOSED)
        try:
            address, index, vpn = (
                held.allocate(session.connection, size) if held else (memory.anonymous(size), -1, 0)
            )
        except MemoryError as exc:
            raise DeviceError(MEMORY_ALLOCATION, str(exc)) from exc
        block = Allocation(Space.PINNED, address, size, device, index=index, vpn=vpn, flags=flags)
        if session.take_in(block, lasting=lasting):
            return block
        if index < 0:
            memory.release(address, memory.whole_pages(size))
        raise Lost(DEVICES_UNAVAILABLE, CLOSED)
