# SPDX-License-Identifier: Apache-2.0
"""What a session does with device memory: allocate, free, copy, fill, ask, wait.

A handler checks every number against the session's own tables, gives the work to the device and
arranges the answer; it never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flyt.backend.blocks import Block
from flyt.backend.devices.base import Device
from flyt.backend.registry import locate
from flyt.errors import DeviceError, ProtocolError
from flyt.rpc import messages as m
from flyt.shm import memory

if TYPE_CHECKING:
    from flyt.backend.session import Session

MAX_ASIDE = 64
"""Blocks a session may have put aside because their addresses were taken on the other side: eight
tries a cudaMalloc are allowed, and that they fail often means a client that plays with us."""


def malloc(session: Session, command: m.Malloc, _: list[bytes]) -> None:
    device = session.holdings.device(command.device)
    if command.size == 0:
        raise ProtocolError("a MALLOC of 0 bytes: cudaMalloc(0) is answered by the frontend")
    if command.taken:
        session.holdings.blocks.find(command.taken, 1)
        session.holdings.aside.add(command.taken)
        if len(session.holdings.aside) > MAX_ASIDE:
            raise DeviceError(
                2, f"more than {MAX_ASIDE} device addresses were in use in the client"
            )
    session.holdings.blocks.reserve(command.size)
    stream = session.holdings.stream(device)
    try:
        address = device.allocate(command.size, session.holdings.pool(device), stream)
    except DeviceError:
        session.holdings.blocks.restore(command.size)
        raise
    session.holdings.blocks.add(Block(address, command.size, device))
    # CUDA does not clear memory, so another session's bytes would show.
    device.fill(address, 0, command.size, stream)
    session.complete(command.id, [device], [address])


def free(session: Session, command: m.Free, _: list[bytes]) -> None:
    block = session.holdings.blocks.remove(command.address)
    block.device.free(block.address, session.holdings.stream(block.device))
    session.holdings.blocks.restore(block.size)
    session.complete(command.id, [block.device])


def copy_in(session: Session, command: m.CopyIn, _: list[bytes]) -> None:
    source = locate(session.entry, command.pid, command.index, command.size)
    device = session.holdings.blocks.find(command.address, command.size).device
    device.copy(command.address, source, command.size, session.holdings.stream(device))
    session.complete(command.id, [device])


def copy_out(session: Session, command: m.CopyOut, _: list[bytes]) -> None:
    destination = locate(session.entry, command.pid, command.index, command.size)
    device = session.holdings.blocks.find(command.address, command.size).device
    device.copy(destination, command.address, command.size, session.holdings.stream(device))
    session.complete(command.id, [device])


def copy_on(session: Session, command: m.CopyOn, _: list[bytes]) -> None:
    device = session.holdings.blocks.find(command.source, command.size).device
    session.holdings.blocks.find(command.destination, command.size)
    device.copy(command.destination, command.source, command.size, session.holdings.stream(device))
    session.complete(command.id, [device])


def fill(session: Session, command: m.Memset, _: list[bytes]) -> None:
    device = session.holdings.blocks.find(command.address, command.size).device
    device.fill(command.address, command.value, command.size, session.holdings.stream(device))
    session.complete(command.id, [device])


def push(session: Session, command: m.Push, payload: list[bytes]) -> None:
    if len(payload) != 1 or len(payload[0]) != command.size:
        raise ProtocolError("a PUSH whose payload is not of the size it names")
    device = session.holdings.blocks.find(command.address, command.size).device
    slot = _slot(session, command.size)
    memory.view(slot, command.size)[:] = payload[0]
    _inline(session, command.id, device, (command.address, slot, command.size), slot, None)


def pull(session: Session, command: m.Pull, _: list[bytes]) -> None:
    device = session.holdings.blocks.find(command.address, command.size).device
    slot = _slot(session, command.size)

    def payload() -> bytes:
        return bytes(memory.view(slot, command.size))

    _inline(session, command.id, device, (slot, command.address, command.size), slot, payload)


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
    number: int,
    device: Device,
    copy: tuple[int, int, int],
    slot: int,
    payload: Callable[[], bytes] | None,
) -> None:
    """Run one copy through a bounce slot and answer with its payload."""
    bounce = session.holdings.bounce_buffer()

    def done(code: int) -> None:
        data = payload() if payload is not None and not code else None
        bounce.give(slot)
        if code:
            session.fail(number, DeviceError(code, "an inline copy failed"))
        else:
            session.answer(number, payload=data)

    try:
        device.copy(*copy, session.holdings.stream(device))
    except DeviceError:
        bounce.give(slot)
        raise
    session.holdings.when_done([device], done)


def mem_info(session: Session, command: m.MemInfo, _: list[bytes]) -> None:
    free_bytes, total = session.holdings.device(command.device).memory()
    if session.holdings.blocks.limit:
        total = min(total, session.holdings.blocks.limit)
        free_bytes = min(free_bytes, session.holdings.blocks.limit - session.holdings.blocks.used)
    session.answer(command.id, 0, [free_bytes, total])


def synchronize(session: Session, command: m.Synchronize, _: list[bytes]) -> None:
    session.complete(command.id, [session.holdings.device(command.device)])


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
    m.Synchronize: synchronize,
    m.Ping: ping,
    m.Bye: bye,
}
