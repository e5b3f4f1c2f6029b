# SPDX-License-Identifier: Apache-2.0
"""Pinned memory of a session: segments of its window, or private memory where it has none.

An interrupt loses no segment: what nobody got, or what was to be freed, is freed at the next call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyt.errors import DeviceError
from flyt.frontend.pointers import Allocation, Space
from flyt.frontend.segments import Late, Segment, Segments
from flyt.shm import memory

if TYPE_CHECKING:
    from flyt.frontend.session import Session

MEMORY_ALLOCATION = 2


def allocate(session: Session, size: int, flags: int, device: int) -> int:
    """The address of ``size`` > 0 bytes."""
    segments = _segments(session)
    if segments is None:
        return _add(session, Segment(_anonymous(size), -1, 0), size, flags, device)
    segment: Segment | None = None
    try:
        with session.users:
            segment = segments.allocate(size, _later(session))
        return _add(session, segment, size, flags, device)
    except BaseException:
        if segment is not None:
            with session.connection.lock:
                if session.pointers.find(segment.address) is not None:
                    session.pointers.remove(segment.address, Space.PINNED)
                _later(session)(segment.vpn)
        raise


def _anonymous(size: int) -> int:
    try:
        return memory.anonymous(size)
    except MemoryError as exc:
        raise DeviceError(MEMORY_ALLOCATION, str(exc)) from exc


def _add(session: Session, segment: Segment, size: int, flags: int, device: int) -> int:
    address, offset, vpn = segment
    with session.connection.lock:
        session.pointers.add(
            Allocation(Space.PINNED, address, size, device, index=offset, vpn=vpn, flags=flags)
        )
    return address


def free(session: Session, address: int) -> None:
    """Give back what `allocate` gave."""
    block: Allocation | None = None
    try:
        with session.connection.lock:
            block = found = session.pointers.remove(address, Space.PINNED)
        if found.index >= 0:
            free_segment(session, found.vpn)
        else:
            memory.release(address, -(-found.size // memory.OS_PAGE) * memory.OS_PAGE)
    except BaseException:
        if block is not None and block.index >= 0:
            _postpone(session, block.vpn)
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
