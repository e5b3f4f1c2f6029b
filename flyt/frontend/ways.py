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
from flyt.shm.copy import CopyEngine, Job

INLINE_DEPTH = 4
"""Inline payloads in flight: enough to hide a round trip, few enough to leave room for others."""

FILLING = 2
"""Slots that are filled at once: while the first one's last pieces are under way the engine's
threads are at the next one."""


class Way(Protocol):
    """Moves pageable bytes to and from the device."""

    def to_device(self, destination: int, source: int, size: int, stream: Stream) -> None: ...

    def to_host(self, destination: int, source: int, size: int, stream: Stream) -> None: ...


class _Flight:
    """One slot's way: what it holds, what was queued and what was sent tell, after an interrupt,
    how far it came."""

    __slots__ = ("held", "jobs", "length", "offset", "sent")

    def __init__(self, offset: int, length: int) -> None:
        self.offset = offset
        self.length = length
        self.held: list[Slot] = []
        self.jobs: list[Job] = []
        self.sent: list[Pending] = []


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
        filling: collections.deque[_Flight] = collections.deque()
        flight = _Flight(0, 0)
        try:
            for offset in range(0, size, self._slots.size):
                flight = _Flight(offset, min(self._slots.size, size - offset))
                while filling and not self._slots.try_take(flight.held):
                    # Whoever fills a slot must not wait for another: all threads may.
                    self._post(filling[0], destination, stream)
                    filling.popleft()
                filling.append(flight)
                if not flight.held:
                    self._slots.take(self._connection, flight.held)
                at = flight.held[0].address
                self._engine.post(flight.jobs, at, source + offset, flight.length)
                while len(filling) > FILLING:
                    self._post(filling[0], destination, stream)
                    filling.popleft()
            while filling:
                self._post(filling[0], destination, stream)
                filling.popleft()
        except BaseException:
            for begun in (*filling, flight):
                self._engine.wait(begun.jobs)
                if not begun.sent:  # else the answer gives it back
                    self._slots.give_back(begun.held)
            raise
        self._statistics.add("staged_h2d_bytes", size)

    def _post(self, flight: _Flight, destination: int, stream: Stream) -> None:
        """Send what the slot holds, once it holds it."""
        slot = flight.held[0]
        self._engine.wait(flight.jobs)
        pending = self._connection.submit(
            copy_in(destination + flight.offset, slot.at, flight.length, self._pid, stream),
            size=flight.length,
            pages=(slot.at, flight.length),
            finish=_giver(self._slots, slot),
            posted=True,
            stream=stream,
            sent=flight.sent,
        )
        self._slots.hold(slot, pending)

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
        """Requests for as many slots as are free; each is drained as its DMA ends, while the DMA of
        the next ones goes on."""
        flying: collections.deque[_Flight] = collections.deque()
        draining: collections.deque[_Flight] = collections.deque()
        offset = 0
        try:
            while offset < size or flying or draining:
                while offset < size:
                    # Whoever has a request in flight must not wait for a slot: others may too.
                    flight = _Flight(offset, min(self._slots.size, size - offset))
                    waits = not (flying or draining)
                    flying.append(flight)  # before it has anything: so an interrupt loses nothing
                    if waits:
                        self._slots.take(self._connection, flight.held)
                    elif not self._slots.try_take(flight.held):
                        flying.pop()
                        break
                    self._request(flight, source, stream)
                    offset += flight.length
                if flying and (not draining or self._has_come(flying[0])):
                    draining.append(flying[0])
                    flying.popleft()
                    self._drain(draining[-1], destination)
                else:
                    self._engine.wait(draining[0].jobs)
                    self._slots.give_back(draining[0].held)
                    draining.popleft()
        except BaseException:
            for flight in (*draining, *flying):
                self._recover(flight)
            raise
        self._statistics.add("staged_d2h_bytes", size)

    def _has_come(self, flight: _Flight) -> bool:
        self._connection.refresh()
        return flight.sent[0].done

    def _request(self, flight: _Flight, source: int, stream: Stream) -> None:
        at = flight.held[0].at
        self._connection.submit(
            copy_out(source + flight.offset, at, flight.length, self._pid, stream),
            size=flight.length,
            pages=(at, flight.length),
            stream=stream,
            sent=flight.sent,
        )

    def _drain(self, flight: _Flight, destination: int) -> None:
        pending = flight.sent[0]
        self._connection.wait(pending)
        self._connection.checked(pending)
        at = flight.held[0].address
        self._engine.post(flight.jobs, destination + flight.offset, at, flight.length)

    def _recover(self, flight: _Flight) -> None:
        """After an interrupt: a request that is on its way writes into its slot until it is
        answered, and that gives the slot back."""
        self._engine.wait(flight.jobs)
        with self._connection.lock:
            if flight.held and flight.sent and not flight.sent[0].done:
                pending, slot = flight.sent[0], flight.held[0]
                pending.finish = _giver(self._slots, slot)
                self._slots.hold(slot, pending)
                return
        self._slots.give_back(flight.held)


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
