# SPDX-License-Identifier: Apache-2.0
"""What a session does with memory and events that it shares with other sessions of its worker."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flyt.backend.blocks import Block
from flyt.errors import DeviceError, ProtocolError
from flyt.rpc import messages as m

if TYPE_CHECKING:
    from flyt.backend.session import Session

INVALID_VALUE = 1


def _halves(token: bytes) -> list[int]:
    return [int.from_bytes(half, "little") for half in (token[:8], token[8:])]


def share_memory(session: Session, command: m.ShareMemory, _: list[bytes]) -> None:
    holdings = session.holdings
    block = holdings.blocks.start(command.address)
    shared = holdings.shared.get(command.address)
    if shared is None:
        if block.pool is not None:
            raise DeviceError(INVALID_VALUE, "memory of a pool has no such handle: use cudaMalloc")
        shared = holdings.shared[command.address] = session.services.blocks.share(block, session.id)
    if shared.owner != session.id:
        raise DeviceError(INVALID_VALUE, "memory that another client shares can't be shared on")
    session.answer(command.id, 0, _halves(shared.token))


def open_memory(session: Session, command: m.OpenMemory, _: list[bytes]) -> None:
    holdings, exports = session.holdings, session.services.blocks
    shared = exports.open(command.token, session.id)
    theirs = shared.thing
    if theirs.address in holdings.shared:
        holdings.let_go(shared)
        raise ProtocolError("memory was opened twice: the frontend counts")
    try:
        holdings.blocks.reserve(theirs.size)  # who has it open pays for it, too
    except DeviceError:
        holdings.let_go(shared)
        raise
    holdings.blocks.add(Block(theirs.address, theirs.size, theirs.device))
    holdings.shared[theirs.address] = shared
    session.answer(command.id, 0, [theirs.address, theirs.size, theirs.device.ordinal])


def close_memory(session: Session, command: m.CloseMemory, _: list[bytes]) -> None:
    block = session.holdings.blocks.start(command.address)
    shared = session.holdings.shared.get(command.address)
    if shared is None or shared.owner == session.id:
        raise DeviceError(INVALID_VALUE, f"{command.address:#x} was not opened")
    session.complete(command.id, session.holdings.free(block))


def share_event(session: Session, command: m.ShareEvent, _: list[bytes]) -> None:
    streams, exports = session.holdings.streams, session.services.events
    if streams.is_shared(command.event):
        raise ProtocolError("an event was shared twice: the frontend keeps its handle")
    shared = exports.share(streams.event(command.event), session.id)

    def part() -> bool:
        exports.withdraw(shared)
        return exports.drop(shared)

    streams.share_event(command.event, part)
    session.answer(command.id, 0, _halves(shared.token))


def open_event(session: Session, command: m.OpenEvent, _: list[bytes]) -> None:
    exports = session.services.events
    shared = exports.open(command.token, session.id)
    device, handle = shared.thing
    part = functools.partial(exports.drop, shared)
    try:
        session.holdings.streams.adopt_event(command.event, device, handle, part)
    except (DeviceError, ProtocolError):
        if part():
            device.destroy_event(handle)
        raise
    session.answer(command.id, 0, [device.ordinal])


def event_query(session: Session, command: m.EventQuery, _: list[bytes]) -> None:
    device, handle = session.holdings.streams.event(command.event)
    session.answer(command.id, 0, [int(device.query(handle))])


HANDLERS: dict[type, Callable[[Any, Any, list[bytes]], None]] = {
    m.ShareMemory: share_memory,
    m.OpenMemory: open_memory,
    m.CloseMemory: close_memory,
    m.ShareEvent: share_event,
    m.OpenEvent: open_event,
    m.EventQuery: event_query,
}
