# SPDX-License-Identifier: Apache-2.0
"""The two ways of pageable memory: staged through the window, or inline on the session's socket.

When a way returns, host memory that it read may be changed and host memory that it wrote is
complete.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Protocol

from flyt.errors import DeviceError
from flyt.frontend.connection import Connection
from flyt.frontend.inflight import Pending
from flyt.frontend.staging import Slot, StagingSlots
from flyt.frontend.staging_ring import StagingRing
from flyt.frontend.statistics import Statistics
from flyt.frontend.streams import Stream
from flyt.rpc import messages as m
from flyt.shm import memory
from flyt.shm.copy import CopyEngine

INLINE_DEPTH = 4
"""Inline payloads in flight: enough to hide a round trip, few enough to leave room for others."""


class Way(Protocol):
    """Moves pageable bytes to and from the device."""

    def to_device(self, destination: int, source: int, size: int, stream: Stream) -> None: ...

    def to_host(self, destination: int, source: int, size: int, stream: Stream) -> None: ...


class StagedWay:
    """Through the staging slots of the window: while one slot's DMA runs, the next is filled."""

    def __init__(
        self,
        connection: Connection,
        slots: StagingSlots,
        ring: StagingRing,
        engine: CopyEngine,
        pid: int,
        statistics: Statistics,
    ) -> None:
        self._connection = connection
        self._slots = slots
        self._ring = ring
        self._engine = engine
        self._pid = pid
        self._statistics = statistics

    def to_device(self, destination: int, source: int, size: int, stream: Stream) -> None:
        """Posted slot by slot; the source may be changed as soon as this returns."""
        if size <= self._ring.largest:
            self._small_to_device(destination, source, size, stream)
            return
        slots, pid = self._slots, self._pid
        for offset in range(0, size, slots.size):
            length = min(slots.size, size - offset)
            slot, sent = slots.take(self._connection), list[Pending]()
            try:
                self._engine.copy(slot.address, source + offset, length)
                pending = self._connection.submit(
                    copy_in(destination + offset, slot.at, length, pid, stream),
                    size=length,
                    pages=(slot.at, length),
                    finish=_giver(slots, slot),
                    posted=True,
                    stream=stream,
                    sent=sent,
                )
            except BaseException:
                self._recover(slot, sent)
                raise
            slots.hold(slot, pending)
        self._statistics.add("staged_h2d_bytes", size)

    def _small_to_device(self, destination: int, source: int, size: int, stream: Stream) -> None:
        """Place, bytes and command under one lock: an interrupt finds all of them or none."""
        connection, ring = self._connection, self._ring
        while True:
            with connection.lock:
                slot = ring.place(size) if connection.has_credit() else None
                if slot is not None:
                    memory.copy(slot.address, source, size)
                    pending = connection.submit(
                        copy_in(destination, slot.at, size, self._pid, stream),
                        size=size,
                        pages=(slot.at, size),
                        posted=True,
                        stream=stream,
                    )
                    ring.hold(pending, size)
                    break
                oldest = ring.oldest if connection.has_credit() else None
            if oldest is not None:
                connection.wait(oldest)
            else:
                connection.wait_for_credit()
        self._statistics.add("staged_h2d_bytes", size)

    def to_host(self, destination: int, source: int, size: int, stream: Stream) -> None:
        """Requests for as many slots as are free; each is drained as its DMA ends."""
        slots = self._slots
        if size <= slots.size:
            self._small_to_host(destination, source, size, stream)
            return
        flying: collections.deque[tuple[Pending, Slot, int, int]] = collections.deque()
        offset = 0
        try:
            while offset < size or flying:
                while offset < size:
                    # Whoever has a request in flight must not wait for a slot: others may too.
                    slot = slots.try_take() if flying else slots.take(self._connection)
                    if slot is None:
                        break
                    length = min(slots.size, size - offset)
                    flying.append(self._request(slot, source, offset, length, stream))
                    offset += length
                self._drain(flying[0], destination)
                slots.give(flying.popleft()[1])
        except BaseException:
            # A request that is still in flight writes into its slot until it is answered.
            for pending, slot, _, _ in flying:
                self._abandon(pending, slot)
            raise
        self._statistics.add("staged_d2h_bytes", size)

    def _small_to_host(self, destination: int, source: int, size: int, stream: Stream) -> None:
        """What one slot holds."""
        slot = self._slots.take(self._connection)
        flight = self._request(slot, source, 0, size, stream)
        try:
            self._drain(flight, destination)
        except BaseException:
            self._abandon(flight[0], slot)
            raise
        self._slots.give(slot)
        self._statistics.add("staged_d2h_bytes", size)

    def _request(
        self, slot: Slot, source: int, offset: int, length: int, stream: Stream
    ) -> tuple[Pending, Slot, int, int]:
        sent: list[Pending] = []
        try:
            pending = self._connection.submit(
                copy_out(source + offset, slot.at, length, self._pid, stream),
                size=length,
                pages=(slot.at, length),
                stream=stream,
                sent=sent,
            )
        except BaseException:
            self._recover(slot, sent)
            raise
        return pending, slot, offset, length

    def _drain(self, flight: tuple[Pending, Slot, int, int], destination: int) -> None:
        pending, slot, offset, length = flight
        self._connection.wait(pending)
        self._connection.checked(pending)
        self._engine.copy(destination + offset, slot.address, length)

    def _recover(self, slot: Slot, sent: list[Pending]) -> None:
        """After an interrupt: a slot whose command is on its way comes back with the answer."""
        if sent:
            self._abandon(sent[0], slot)
        else:
            self._slots.give(slot)

    def _abandon(self, pending: Pending, slot: Slot) -> None:
        with self._connection.lock:
            if not pending.done:
                pending.finish = _giver(self._slots, slot)
                self._slots.hold(slot, pending)
                return
        self._slots.give(slot)


class InlineWay:
    """On the session's socket, in chunks: for sessions without a window."""

    def __init__(self, connection: Connection, chunk: int, statistics: Statistics) -> None:
        self._connection = connection
        self._chunk = chunk
        self._statistics = statistics

    def to_device(self, destination: int, source: int, size: int, stream: Stream) -> None:
        flying: collections.deque[Pending] = collections.deque()
        for offset in range(0, size, self._chunk):
            length = min(self._chunk, size - offset)
            if len(flying) == INLINE_DEPTH:
                self._settle(flying.popleft())
            flying.append(
                self._connection.submit(
                    _push(destination + offset, length, stream),
                    size=length,
                    stream=stream,
                    payload=bytes(memory.view(source + offset, length)),
                )
            )
        while flying:
            self._settle(flying.popleft())
        self._statistics.add("inline_h2d_bytes", size)

    def to_host(self, destination: int, source: int, size: int, stream: Stream) -> None:
        flying: collections.deque[tuple[Pending, int, int]] = collections.deque()
        offset = 0
        while offset < size or flying:
            while offset < size and len(flying) < INLINE_DEPTH:
                length = min(self._chunk, size - offset)
                pending = self._connection.submit(
                    _pull(source + offset, length, stream), size=length, stream=stream
                )
                flying.append((pending, offset, length))
                offset += length
            pending, at, length = flying.popleft()
            self._settle(pending)
            if pending.payload is None or len(pending.payload) != length:
                raise DeviceError(999, "the backend's inline answer has not the size asked for")
            memory.view(destination + at, length)[:] = pending.payload
        self._statistics.add("inline_d2h_bytes", size)

    def _settle(self, pending: Pending) -> None:
        self._connection.wait(pending)
        self._connection.checked(pending)


def copy_in(
    address: int, index: int, size: int, pid: int, stream: Stream
) -> Callable[[int], m.CopyIn]:
    """From the window to the device."""
    return lambda number: m.CopyIn(number, address, index, size, pid, stream.number)


def copy_out(
    address: int, index: int, size: int, pid: int, stream: Stream
) -> Callable[[int], m.CopyOut]:
    """From the device to the window."""
    return lambda number: m.CopyOut(number, address, index, size, pid, stream.number)


def _giver(slots: StagingSlots, slot: Slot) -> Callable[[Pending], None]:
    return lambda _: slots.give(slot)


def _push(address: int, size: int, stream: Stream) -> Callable[[int], m.Push]:
    return lambda number: m.Push(number, address, size, stream.number)


def _pull(address: int, size: int, stream: Stream) -> Callable[[int], m.Pull]:
    return lambda number: m.Pull(number, address, size, stream.number)
