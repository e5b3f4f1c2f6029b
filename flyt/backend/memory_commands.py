# SPDX-License-Identifier: Apache-2.0
"""What a session does with device memory: allocate, free, copy, fill, ask, wait.

A handler checks every number against the session's own tables, gives the work to the device and
arranges the answer; it never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from flyt.backend.blocks import Block
from flyt.backend.completions import Finished
from flyt.backend.devices.base import Device, Handle
from flyt.errors import DeviceError, ProtocolError
from flyt.rpc import messages as m
from flyt.shm import memory

if TYPE_CHECKING:
    from flyt.backend.session import Session

Issue = Callable[[Device, Handle], None]
"""Puts work on a stream of a device."""

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
    put_aside(session, command.taken)
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


def put_aside(session: Session, taken: int) -> None:
    """Keep a block whose address the frontend could not reserve; 0 names none."""
    holdings = session.holdings
    if taken:
        holdings.blocks.find(taken, 1)
        holdings.aside.add(taken)
        if len(holdings.aside) > MAX_ASIDE:
            raise DeviceError(
                2, f"more than {MAX_ASIDE} device addresses were in use in the client"
            )


def free(session: Session, command: m.Free, _: list[bytes]) -> None:
    holdings = session.holdings
    block = holdings.blocks.start(command.address)

    def done(code: int) -> None:
        if code:
            session.fail(command.id, DeviceError(code, "an operation of the session failed"))
            return
        try:
            holdings.freed(block)
        except DeviceError as exc:
            session.fail(command.id, exc)
        else:
            session.answer(command.id)

    holdings.when_done(holdings.free(block), done)


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
    size = command.size
    session.holdings.moved += size
    put(session, command, size, blocks, lambda d, s: d.copy(destination, source, size, s))
    if session.plain is not None and len(blocks) == 1 and not isinstance(command, m.CopyOn):
        stream = session.holdings.streams.get(command.stream)
        session.plain.note(command.stream, stream, blocks[0], command.index)


def fill(session: Session, command: m.Memset, _: list[bytes]) -> None:
    address, size = command.address, command.size
    block = session.holdings.blocks.find(address, size)
    put(session, command, size, [block], lambda d, s: d.fill(address, command.value, size, s))
    if session.plain is not None:
        session.plain.note(command.stream, session.holdings.streams.get(command.stream), block)


class OnStream(Protocol):
    """A command that names a stream."""

    @property
    def id(self) -> int: ...
    @property
    def stream(self) -> int: ...


def put(
    session: Session,
    command: OnStream,
    size: int,
    blocks: list[Block],
    issue: Issue,
    done: Finished | None = None,
) -> None:
    """Put work with checked memory on the command's stream, and answer when it is done, if not told
    what to do then."""
    holdings, streams = session.holdings, session.holdings.streams
    stream = streams.get(command.stream)
    brief = size <= BRIEF_BYTES
    if not brief:
        holdings.mark_before(stream)
    handle = streams.use(stream)
    if holdings.newborn:
        holdings.wait_for_birth(stream, blocks)
    others = streams.across(stream, {block.device for block in blocks})
    issue(stream.device, handle)
    streams.behind(others, stream)
    if done is None:
        session.complete(command.id, [stream], brief=brief)
    else:
        holdings.when_done([stream], done, brief=brief)


def push(session: Session, command: m.Push, payload: list[bytes]) -> None:
    address, size = command.address, command.size
    if len(payload) != 1 or len(payload[0]) != size:
        raise ProtocolError("a PUSH whose payload is not of the size it names")
    block = session.holdings.blocks.find(address, size)

    def issue(slot: int, device: Device, handle: Handle) -> None:
        device.copy(address, slot, size, handle)

    inline(session, command, size, block, issue, payload[0])


def pull(session: Session, command: m.Pull, _: list[bytes]) -> None:
    address, size = command.address, command.size
    block = session.holdings.blocks.find(address, size)

    def issue(slot: int, device: Device, handle: Handle) -> None:
        device.copy(slot, address, size, handle)

    inline(session, command, size, block, issue)


class Stall(Exception):
    """A command can't be taken yet: it is tried again after the next completion."""


def inline(
    session: Session,
    command: OnStream,
    size: int,
    block: Block,
    issue: Callable[[int, Device, Handle], None],
    payload: bytes | None = None,
) -> None:
    """Run one copy through a slot of the bounce buffer, whose address ``issue`` gets first: of the
    payload, or without one of the bytes that become the answer's."""
    if not 0 < size <= m.INLINE_CHUNK:
        raise ProtocolError(f"an inline payload of {size} bytes; 1 to {m.INLINE_CHUNK} are allowed")
    holdings = session.holdings
    stream, bounce = holdings.streams.get(command.stream), holdings.bounce_buffer()
    slot = bounce.take()
    if slot is None:
        raise Stall
    if payload is not None:
        memory.view(slot, size)[:] = payload

    def done(code: int) -> None:
        data = bytes(memory.view(slot, size)) if payload is None and not code else None
        bounce.give(slot)
        if code:
            session.fail(command.id, DeviceError(code, "an inline copy failed"))
        else:
            session.answer(command.id, payload=data)

    try:
        put(session, command, size, [block], lambda d, s: issue(slot, d, s), done)
    except DeviceError:  # perhaps behind the copy
        holdings.when_done([stream], lambda _: bounce.give(slot))
        raise
    holdings.moved += size


def mem_info(session: Session, command: m.MemInfo, _: list[bytes]) -> None:
    holdings, blocks = session.holdings, session.holdings.blocks
    device = holdings.streams.device(command.device)

    holdings.trim(device)  # so that what was freed counts as free
    free_bytes, total = device.memory()
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
