# SPDX-License-Identifier: Apache-2.0
"""What a session does with its window: attach, grow, shrink, and give it up at the end.

Frames are granted by the supervisor alone; a frame is mapped only after its grant, and given back
only after the session's work on it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flyt.backend.orders import Granted, Reclaimed, Request, Returned
from flyt.errors import AddressTaken, DeviceError, ProtocolError, RegionError
from flyt.rpc import messages as m
from flyt.shm import layout, memory, ring, runs
from flyt.shm.window import END_OF_BASES, LOWEST_BASE, MAX_RESERVE, Window

if TYPE_CHECKING:
    from flyt.backend.session import Session

MEMORY_ALLOCATION = 2

Runs = tuple[tuple[int, int], ...]


def attach(session: Session, command: m.Attach, _: list[bytes]) -> None:
    if command.inline and session.window is not None:
        _detach(session, command)
        return
    if session.attached or session.reserved is not None:
        raise ProtocolError("a second ATTACH")
    if command.ring and ring.usable() is None:
        raise ProtocolError("the client asks for rings, which this backend did not offer")
    if command.inline:
        session.attached = True
        session.answer(command.id)
        return
    window = _reserve(session, command)
    if window is None:
        session.answer(
            command.id, m.Status.ADDRESS_TAKEN, text=f"{command.base:#x} is in use in the worker"
        )
        return

    session.reserved = window

    def granted(order: Granted | Reclaimed) -> None:
        session.reserved = None
        if isinstance(order, Granted) and order.refused:
            window.close()
            _refuse(session, command.id, order)
            return
        _map_and_prove(session, command, window)

    try:
        _request(session, command.table, granted)
    except RegionError:
        session.reserved = None
        window.close()
        raise


def _detach(session: Session, command: m.Attach) -> None:
    """The client does not see our word in the control page: it goes on without a window."""
    window = _window(session)
    tables = [window.table(vpn) for vpn in window.segments]
    table = tuple(run for one in tables if one is not None for run in one)
    # From here on no copy may touch it, and what is under way ends before its frames are another's.
    session.services.registry.drop(session.id)

    def done(_: int) -> None:
        release(session)
        _return(session, table, lambda _: session.answer(command.id))

    session.holdings.when_done(session.holdings.streams.all(), done)


def _reserve(session: Session, command: m.Attach) -> Window | None:
    """The window's address range in this process; None when it is taken."""
    if session.region is None:
        raise ProtocolError("the client attaches a region, but this backend serves without one")
    descriptor, geometry = session.region
    aligned = command.base % geometry.page_size == 0 == command.reserve % geometry.page_size
    inside = LOWEST_BASE <= command.base <= command.base + command.reserve <= END_OF_BASES
    if not (aligned and inside and 0 < command.reserve <= MAX_RESERVE):
        raise ProtocolError(
            f"a window of {command.reserve:#x} bytes at {command.base:#x}: it must be page-aligned "
            f"and lie between {LOWEST_BASE:#x} and {END_OF_BASES:#x}"
        )
    pages = runs.length(command.table)
    if not 2 <= pages <= command.reserve // geometry.page_size:
        raise ProtocolError(f"a page table of {pages} pages at ATTACH")
    try:
        return Window.reserve_at(descriptor, geometry, command.base, command.reserve)
    except AddressTaken:
        return None


def _map_and_prove(session: Session, command: m.Attach, window: Window) -> None:
    """Map the page table, check that both sides see the same memory, register the staging area."""
    control, staging = runs.split_first(command.table)
    page = window.map(0, control)
    seen = memory.load_word(page + layout.FRONTEND_PROOF)
    if seen != command.proof:
        window.close()

        def returned(_: Granted | Reclaimed) -> None:
            session.answer(
                command.id,
                m.Status.PROOF_FAILED,
                text="the word in the control page is not the one that was announced: the client's "
                "region is other memory than the backend's (QEMU without share=on?)",
            )

        _return(session, command.table, returned)
        return
    memory.store_word(page + layout.BACKEND_PROOF, session.proof)
    error = _map_registered(session, window, 1, staging)
    if error is not None:
        window.close()
        _return(session, command.table, lambda _: session.fail(command.id, error))
        return
    session.window = window
    rang = command.ring and session.use_rings(page, window)
    session.services.registry.bind(session.id, session.pid, window)
    session.attached = True
    session.answer(command.id, 0, [session.proof, int(rang)])


def _map_registered(session: Session, window: Window, vpn: int, table: Runs) -> DeviceError | None:
    """Map a segment and register it as a whole. The error, if that fails: then it is not mapped."""
    try:
        address = window.map(vpn, table)
    except MemoryError as exc:
        return DeviceError(MEMORY_ALLOCATION, str(exc))
    try:
        size = runs.length(table) * window.geometry.page_size
        session.services.devices[0].register(address, size)
    except DeviceError as exc:
        window.unmap(vpn)
        return exc
    return None


def grow(session: Session, command: m.Grow, _: list[bytes]) -> None:
    window = _window(session)
    geometry = window.geometry
    pages = runs.length(command.table)
    if not 0 < pages <= window.reserve // geometry.page_size - command.vpn:
        raise ProtocolError(
            f"GROW by {pages} pages at page {command.vpn} leaves the window's range"
        )

    def taken(_: Granted | Reclaimed | None) -> None:
        # Ours lingers there until the reaper has unregistered it, or the client is confused.
        session.answer(command.id, m.Status.ADDRESS_TAKEN, text="those pages are still in use")

    if window.overlaps(command.vpn, pages):
        taken(None)
        return

    def granted(order: Granted | Reclaimed) -> None:
        if isinstance(order, Granted) and order.refused:
            _refuse(session, command.id, order)
            return
        if window.overlaps(command.vpn, pages):  # a GROW to the same pages was granted first
            _return(session, command.table, taken)
            return
        error = _map_registered(session, window, command.vpn, command.table)
        if error is not None:
            _return(session, command.table, lambda _: session.fail(command.id, error))
            return
        session.answer(command.id)

    _request(session, command.table, granted)


def shrink(session: Session, command: m.Shrink, _: list[bytes]) -> None:
    window = _window(session)
    table = window.table(command.vpn)
    if command.vpn <= 1 or table is None:
        raise DeviceError(
            1, f"page {command.vpn} is not the start of a segment that can be given up"
        )
    # From here on no copy may touch it: its frames will be another's while it is still mapped.
    address = window.retire(command.vpn)

    def done(code: int) -> None:
        _reap(session, window, command.vpn, address)
        _return(session, table, lambda _: session.answer(command.id, code))

    session.holdings.when_done(session.holdings.streams.all(), done)


def release(session: Session) -> None:
    """Give the whole window up; the session's work is done. Its frames are reclaimed by the
    supervisor when it reads Closed."""
    if session.reserved is not None:  # an ATTACH that was not granted any more
        session.reserved.close()
        session.reserved = None
    window, session.window = session.window, None
    if window is None:
        return
    session.drop_rings()
    session.services.registry.drop(session.id)
    for vpn in list(window.segments):
        if vpn and window.table(vpn) is not None:  # else the reaper has it already
            _reap(session, window, vpn, window.retire(vpn))
    session.services.reaper.take(None, 0, window.close)


def _reap(session: Session, window: Window, vpn: int, address: int) -> None:
    """Have a retired segment unregistered and unmapped when no session is hurt by it."""
    device = session.services.devices[0]
    session.services.reaper.take(device, address, lambda: window.unmap(vpn))


def _window(session: Session) -> Window:
    if session.window is None:
        raise ProtocolError("GROW or SHRINK without an attached window")
    return session.window


def _request(session: Session, table: Runs, then: Callable[[Granted | Reclaimed], None]) -> None:
    region = session.region
    if region is None:
        raise ProtocolError("this backend serves without a region")
    runs.check(table, region[1].page_count)
    session.ask(lambda number: Request(session.id, number, table), then)


def _return(session: Session, table: Runs, then: Callable[[Granted | Reclaimed], None]) -> None:
    session.ask(lambda number: Returned(session.id, number, table), then)


def _refuse(session: Session, number: int, order: Granted) -> None:
    session.answer(
        number,
        m.Status.FRAMES_REFUSED,
        order.refused,
        text="these page frames belong to another session or are being cleaned",
    )


HANDLERS: dict[type, Callable[[Any, Any, list[bytes]], None]] = {
    m.Attach: attach,
    m.Grow: grow,
    m.Shrink: shrink,
}
