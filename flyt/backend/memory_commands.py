# SPDX-License-Identifier: Apache-2.0
"""What a session does with device memory: allocate, free, copy, fill, ask, wait.

A handler checks every number against the session's own tables, gives the work to the device and
arranges the answer; it never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flyt.backend.blocks import Block
from flyt.errors import DeviceError, ProtocolError
from flyt.rpc import messages as m
from flyt.shm import memory

if TYPE_CHECKING:
    from flyt.backend.session import Session

BRIEF_BYTES = 64 << 10
"""Work of so many bytes is done within microseconds: several share a mark."""

MAX_ASIDE = 64
"""Blocks a session may have put aside because their addresses were taken on the other side: eight
tries a cudaMalloc are allowed, and that they fail often means a client that plays with us."""


def malloc(session: Session, command: m.Malloc, _: list[bytes]) -> None:
    holdings = session.holdings
    device = holdings.streams.device(command.device)
    if command.size == 0:
        raise ProtocolError("a MALLOC of 0 bytes: cudaMalloc(0) is answered by the frontend")
    if command.taken:
        holdings.blocks.find(command.taken, 1)
        holdings.aside.add(command.taken)
        if len(holdings.aside) > MAX_ASIDE:
            raise DeviceError(
                2, f"more than {MAX_ASIDE} device addresses were in use in the client"
            )
    # Not the legacy stream: cudaMalloc does not wait for what the program has in flight.
    stream, pool = holdings.streams.own(device), holdings.pool(device)
    holdings.blocks.reserve(command.size)
    try:
        address = device.allocate(command.size, pool, stream.handle)
    except DeviceError:
        holdings.blocks.restore(command.size)
        raise
    block = Block(address, command.size, device)
    holdings.blocks.add(block)

    def done(code: int) -> None:
        if not code:
            session.answer(command.id, 0, [address])
            return
        session.fail(command.id, DeviceError(code, "new memory could not be cleared"))
        holdings.take_back(block)

    try:
        # CUDA does not clear memory, so another session's bytes would show.
        device.fill(address, 0, command.size, stream.handle)
    except DeviceError:
        holdings.take_back(block)
        raise
    holdings.when_done([stream], done)


def free(session: Session, command: m.Free, _: list[bytes]) -> None:
    block = session.holdings.blocks.start(command.address)
    session.complete(command.id, session.holdings.free(block))


def _located(session: Session, command: m.CopyIn | m.CopyOut) -> int:
    """The address of the window bytes that a copy names."""
    registry = session.services.registry
    return registry.locate(session.id, command.pid, command.index, command.size)


def copy_in(session: Session, command: m.CopyIn, _: list[bytes]) -> None:
    source = _located(session, command)
    block = session.holdings.blocks.find(command.address, command.size)
    _copy(session, command, command.address, source, [block])


def copy_out(session: Session, command: m.CopyOut, _: list[bytes]) -> None:
    destination = _located(session, command)
    block = session.holdings.blocks.find(command.address, command.size)
    _copy(session, command, destination, command.address, [block])


def copy_on(session: Session, command: m.CopyOn, _: list[bytes]) -> None:
    blocks = [
        session.holdings.blocks.find(address, command.size)
        for address in (command.source, command.destination)
    ]
    _copy(session, command, command.destination, command.source, blocks)


def _copy(
    session: Session,
    command: m.CopyIn | m.CopyOut | m.CopyOn,
    destination: int,
    source: int,
    blocks: list[Block],
) -> None:
    """Put a copy between checked addresses on the command's stream."""
    streams = session.holdings.streams
    stream = streams.get(command.stream)
    brief = command.size <= BRIEF_BYTES
    if not brief:
        session.holdings.mark_before(stream)
    handle = streams.use(stream)
    others = streams.across(stream, {block.device for block in blocks})
    stream.device.copy(destination, source, command.size, handle)
    streams.behind(others, stream)
    session.holdings.moved += command.size
    session.complete(command.id, [stream], brief=brief)


def fill(session: Session, command: m.Memset, _: list[bytes]) -> None:
    session.holdings.blocks.find(command.address, command.size)
    streams = session.holdings.streams
    stream = streams.get(command.stream)
    brief = command.size <= BRIEF_BYTES
    if not brief:
        session.holdings.mark_before(stream)
    stream.device.fill(command.address, command.value, command.size, streams.use(stream))
    session.complete(command.id, [stream], brief=brief)


def push(session: Session, command: m.Push, payload: list[bytes]) -> None:
    if len(payload) != 1 or len(payload[0]) != command.size:
        raise ProtocolError("a PUSH whose payload is not of the size it names")
    session.holdings.blocks.find(command.address, command.size)
    slot = _slot(session, command.size)
    memory.view(slot, command.size)[:] = payload[0]
    _inline(session, command, (command.address, slot), slot, None)


def pull(session: Session, command: m.Pull, _: list[bytes]) -> None:
    session.holdings.blocks.find(command.address, command.size)
    slot = _slot(session, command.size)

    def payload() -> bytes:
        return bytes(memory.view(slot, command.size))

    _inline(session, command, (slot, command.address), slot, payload)


class Stall(Exception):
    """A command can't be taken yet: it is tried again after the next completion."""


def _slot(session: Session, size: int) -> int:
    """A slot of the bounce buffer for ``size`` bytes."""
    if not 0 < size <= m.INLINE_CHUNK:
        raise ProtocolError(f"an inline payload of {size} bytes; 1 to {m.INLINE_CHUNK} are allowed")
    slot = session.holdings.bounce_buffer().take()
    if slot is None:
        raise Stall
    return slot


def _inline(
    session: Session,
    command: m.Push | m.Pull,
    copy: tuple[int, int],
    slot: int,
    payload: Callable[[], bytes] | None,
) -> None:
    """Run one copy through a bounce slot and answer with its payload."""
    bounce = session.holdings.bounce_buffer()
    streams = session.holdings.streams

    def done(code: int) -> None:
        data = payload() if payload is not None and not code else None
        bounce.give(slot)
        if code:
            session.fail(command.id, DeviceError(code, "an inline copy failed"))
        else:
            session.answer(command.id, payload=data)

    try:
        stream = streams.get(command.stream)
        stream.device.copy(*copy, command.size, streams.use(stream))
    except DeviceError:
        bounce.give(slot)
        raise
    session.holdings.moved += command.size
    session.holdings.when_done([stream], done)


def mem_info(session: Session, command: m.MemInfo, _: list[bytes]) -> None:
    blocks = session.holdings.blocks
    free_bytes, total = session.holdings.streams.device(command.device).memory()
    if blocks.limit:
        total = min(total, blocks.limit)
        free_bytes = min(free_bytes, blocks.limit - blocks.used)
    session.answer(command.id, 0, [free_bytes, total])


def ping(session: Session, command: m.Ping, _: list[bytes]) -> None:
    session.answer(command.id)


def bye(session: Session, command: m.Bye, _: list[bytes]) -> None:
    session.leave(command.id)


HANDLERS: dict[type, Callable[[Any, Any, list[bytes]], None]] = {
    m.Malloc: malloc,
    m.Free: free,
    m.CopyIn: copy_in,
    m.CopyOut: copy_out,
    m.CopyOn: copy_on,
    m.Push: push,
    m.Pull: pull,
    m.Memset: fill,
    m.MemInfo: mem_info,
    m.Ping: ping,
    m.Bye: bye,
}
