# SPDX-License-Identifier: Apache-2.0
"""Pinned memory of a session: segments of its window, or private memory where it has none.

An interrupt loses no segment: what nobody got, or what was to be freed, is freed at the next call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyt.errors import DeviceError
from flyt.frontend.lost import CLOSED, DEVICES_UNAVAILABLE, Lost
from flyt.frontend.pointers import Allocation, Space
from flyt.frontend.segments import Late, Segment, Segments
from flyt.shm import memory

if TYPE_CHECKING:
    from flyt.frontend.session import Session

MEMORY_ALLOCATION = 2


def allocate(
    session: Session, size: int, flags: int, device: int, *, lasting: bool = False
) -> Allocation:
    """``size`` > 0 bytes.

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
        if session.is_closed:
            raise Lost(DEVICES_UNAVAILABLE, CLOSED)
        segments = _segments(session)
        if segments is None:
            block = Allocation(Space.PINNED, _anonymous(size), size, device, flags=flags)
            try:
                return session.take_in(block, lasting=lasting)
            except Lost:
                memory.release(block.address, memory.whole_pages(size))
                raise
        segment: Segment | None = None
        try:
            segment = segments.allocate(size, _later(session))
            address, offset, vpn = segment
            block = Allocation(
                Space.PINNED, address, size, device, index=offset, vpn=vpn, flags=flags
            )
            return session.take_in(block, lasting=lasting)
        except BaseException:
            if segment is not None:
                with session.connection.lock:
                    if (found := session.pointers.find(segment.address)) is not None:
                        session.pointers.remove(segment.address, Space.PINNED)
                        session.arrays.pop(found, None)
                    _later(session)(segment.vpn)
            raise


def _anonymous(size: int) -> int:
    try:
        return memory.anonymous(size)
    except MemoryError as exc:
        raise DeviceError(MEMORY_ALLOCATION, str(exc)) from exc


def free(session: Session, address: int, block: Allocation | None = None) -> None:
    """Give back what `allocate` gave; see `PointerMap.remove`."""
    gone: Allocation | None = None
    try:
        with session.connection.lock:
            gone = found = session.pointers.remove(address, Space.PINNED, block)
            session.arrays.pop(found, None)
        if found.index >= 0:
            free_segment(session, found.vpn)
        else:
            memory.release(address, memory.whole_pages(found.size))
    except BaseException:
        if gone is not None and gone.index >= 0:
            _postpone(session, gone.vpn)
        raise


def free_segment(session: Session, vpn: int) -> None:
    """Give a segment back that is no allocation any more."""
    try:
        with session.users:
            segments = _segments(session)
            if segments is None:
                session.connection.refresh()  # the window went with the session: says so
            else:
                segments.free(vpn, _later(session))
    except BaseException:
        _postpone(session, vpn)
        raise


def _postpone(session: Session, vpn: int) -> None:
    """After an interrupt: the next call frees it, if nobody has begun to."""
    segments = _segments(session)
    if segments is not None and segments.holds(vpn):
        _later(session)(vpn)


def _segments(session: Session) -> Segments | None:
    return session.memory.segments if session.memory is not None else None


def _later(session: Session) -> Late:
    return lambda vpn: session.leave(free_segment, vpn)
