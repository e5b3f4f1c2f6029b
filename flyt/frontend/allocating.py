# SPDX-License-Identifier: Apache-2.0
"""Device memory, at addresses that this process does not use for anything else.

An interrupt loses no block: one that nobody got is freed at the next call, and one that was to be
freed is freed, then or at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flyt.errors import DeviceError, ProtocolError
from flyt.frontend.inflight import Make, Pending
from flyt.frontend.pointers import Allocation, Space
from flyt.frontend.reservations import GRANULE
from flyt.frontend.streams import Stream
from flyt.rpc import messages as m

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
        sent: list[Pending] = []
        reserved = False
        try:
            address = _address(session.connection.call(make(wanted, taken), sent=sent))
            with session.connection.lock:
                reserved = session.reservations.take(address, size)
                if reserved:
                    session.pointers.add(Allocation(Space.DEVICE, address, size, device, pool=pool))
                    return address
        except BaseException:
            with session.connection.lock:
                if reserved and session.pointers.find(address) is None:
                    session.reservations.give(address, size)
                _abandon(session, sent)
            raise
        taken = address
    raise DeviceError(
        MEMORY_ALLOCATION,
        f"{ADDRESS_TRIES} device addresses were all in use in this process, last {taken:#x}",
    )


def _address(answer: Pending) -> int:
    if len(answer.values) != 1:
        raise ProtocolError(f"the backend's answer to {answer.name} holds no address")
    return answer.values[0]


def _abandon(session: Session, sent: list[Pending]) -> None:
    """Under the lock: nobody gets the block of this command; the next call frees it."""

    def discard(answer: Pending) -> None:
        if answer.status or len(answer.values) != 1:
            return  # there is none
        address = answer.values[0]
        known = session.pointers.find(address) is not None
        session.leave(type(session).free if known else _discard, address)

    for pending in sent:
        if pending.done:
            discard(pending)
        else:
            pending.finish = discard


def _discard(session: Session, address: int) -> None:
    """Free a block that was never in the pointers."""
    session.connection.call(lambda number: m.Free(number, address))


def _giver(session: Session, address: int, size: int) -> Callable[[Pending], None]:
    """Ends a block's reservation; once, however often it is told."""
    left = [size]

    def give(_: Pending) -> None:
        if left:
            session.reservations.give(address, left.pop())

    return give


def free(
    session: Session,
    address: int,
    make: Make,
    *,
    block: Allocation | None = None,
    posted: bool = False,
    stream: Stream | None = None,
) -> Pending:
    """Send what frees a block; see `PointerMap.remove`.

    The reservation ends after the block, whatever its answer is: no host mapping may slip in
    before.
    """
    gone: Allocation | None = None
    sent: list[Pending] = []
    try:
        with session.connection.lock:
            gone = found = session.pointers.remove(address, Space.DEVICE, block)
        return session.connection.submit(
            make,
            size=found.size,
            finish=_giver(session, address, found.size),
            posted=posted,
            stream=stream,
            sent=sent,
        )
    except BaseException:
        with session.connection.lock:
            if gone is not None and not sent and session.connection.lost is None:
                session.pointers.add(gone)  # it is still there; the next call frees it
                session.leave(type(session).free, address)
        raise
