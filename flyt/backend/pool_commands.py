# SPDX-License-Identifier: Apache-2.0
"""What a session does with stream-ordered memory and its pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flyt.backend.blocks import Block
from flyt.backend.memory_commands import put_aside
from flyt.backend.pools import SessionPool
from flyt.backend.streams import SessionStream
from flyt.errors import DeviceError, ProtocolError
from flyt.rpc import messages as m

if TYPE_CHECKING:
    from flyt.backend.session import Session

INVALID_VALUE = 1


def malloc_async(session: Session, command: m.MallocAsync, _: list[bytes]) -> None:
    holdings, streams = session.holdings, session.holdings.streams
    if command.size == 0:
        raise ProtocolError("a MALLOC_ASYNC of 0 bytes is answered by the frontend")
    put_aside(session, command.taken)
    asked, pool = streams.get(command.stream), holdings.pools.get(command.pool)
    # A pool of another device than the stream's: there the stream has no place, and waits.
    stream = asked if asked.device is pool.device else streams.own(pool.device)
    address = _allocated(session, pool, command.size, stream)
    block = Block(address, command.size, pool.device, pool.quota)
    holdings.blocks.add(block)

    def born(code: int) -> None:
        if holdings.newborn.get(address) is stream:
            del holdings.newborn[address]
        if code:
            session.end(f"new memory could not be cleared (error {code})")

    try:
        # CUDA does not clear memory, so another session's bytes would show.
        pool.device.fill(address, 0, command.size, stream.handle)
    except DeviceError:
        holdings.take_back(block)
        raise
    if stream is not asked:
        streams.behind([asked], stream)
    holdings.newborn[address] = stream
    holdings.when_done([stream], born)
    session.answer(command.id, 0, [address])


def _allocated(session: Session, pool: SessionPool, size: int, stream: SessionStream) -> int:
    """The address of new memory that counts in both quotas."""
    quotas = (session.holdings.blocks, pool.quota)
    reserved = []
    handle = session.holdings.streams.use(stream)
    session.holdings.mark_before(stream)
    try:
        for quota in quotas:
            reserved.append((quota, quota.reserve(size, stream)))
        return pool.device.allocate(size, pool.handle, handle)
    except DeviceError:
        for quota, borrowed in reserved:
            quota.restore(size, borrowed)
        raise


def free_async(session: Session, command: m.FreeAsync, _: list[bytes]) -> None:
    holdings, streams = session.holdings, session.holdings.streams
    block, asked = holdings.blocks.start(command.address), streams.get(command.stream)
    if block.pool is None:
        raise DeviceError(INVALID_VALUE, f"{command.address:#x} is not of a pool")
    streams.use(asked)
    stream = asked
    if asked.device is not block.device:
        stream = streams.legacy(block.device)
        streams.behind([stream], asked)
    holdings.wait_for_birth(stream, [block])
    holdings.mark_before(stream)
    block.device.free(block.address, stream.handle)
    holdings.blocks.take_out(block)
    dying = [(quota, quota.let_die(block.size, stream)) for quota in (holdings.blocks, block.pool)]

    def done(code: int) -> None:
        for quota, one in dying:
            quota.bury(one)
        if code:
            session.fail(command.id, DeviceError(code, "work before a cudaFreeAsync failed"))
        else:
            session.answer(command.id)

    holdings.when_done([stream], done)


def pool_create(session: Session, command: m.PoolCreate, _: list[bytes]) -> None:
    session.holdings.pools.create(command.pool, command.device, command.limit)
    session.answer(command.id)


def pool_destroy(session: Session, command: m.PoolDestroy, _: list[bytes]) -> None:
    session.holdings.pools.remove(command.pool)
    session.answer(command.id)


def pool_trim(session: Session, command: m.PoolTrim, _: list[bytes]) -> None:
    pool = session.holdings.pools.get(command.pool)
    session.holdings.settle(pool.device)
    pool.device.trim_pool(pool.handle, command.keep)
    session.answer(command.id)


def pool_get(session: Session, command: m.PoolGet, _: list[bytes]) -> None:
    value = session.holdings.pools.attribute(command.pool, command.attribute)
    session.answer(command.id, 0, [value])


def pool_set(session: Session, command: m.PoolSet, _: list[bytes]) -> None:
    session.holdings.pools.set_attribute(command.pool, command.attribute, command.value)
    session.answer(command.id)


HANDLERS: dict[type, Callable[[Any, Any, list[bytes]], None]] = {
    m.MallocAsync: malloc_async,
    m.FreeAsync: free_async,
    m.PoolCreate: pool_create,
    m.PoolDestroy: pool_destroy,
    m.PoolTrim: pool_trim,
    m.PoolGet: pool_get,
    m.PoolSet: pool_set,
}
