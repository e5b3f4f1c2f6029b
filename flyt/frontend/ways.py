# SPDX-License-Identifier: Apache-2.0
"""The two ways of pageable memory: staged through the window, or inline on the session's socket.

When a way returns, host memory that it read may be changed and host memory that it wrote is
complete.
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable
from typing import Protocol

import numpy as np

from flyt.errors import DeviceError
from flyt.frontend.connection import Connection
from flyt.frontend.copy_commands import copied_in, copied_out, pulled, pushed
from flyt.frontend.express import Express
from flyt.frontend.inflight import Pending
from flyt.frontend.rows import Row, Rows, move
from flyt.frontend.staging import Slot, StagingSlots
from flyt.frontend.staging_ring import StagingRing
from flyt.frontend.statistics import Statistics
from flyt.frontend.streams import Stream
from flyt.shm import memory
from flyt.shm.copy import PARALLEL_FROM, CopyEngine, Job

INLINE_DEPTH = 4
"""Inline payloads in flight: enough to hide a round trip, few enough to leave room for others."""

FIRST_BYTES = PARALLEL_FROM
"""Of a long copy: its DMA begins when so much is in a slot, and goes on while the next ones, each
twice as large, are filled."""

FILLING = 2
"""Slots that are filled at once: while the first one's last pieces are under way the engine's
threads are at the next one."""


class Way(Protocol):
    """Moves pageable bytes to and from the device."""

    def to_device(self, rows: Rows, stream: Stream) -> None: ...

    def to_host(self, rows: Rows, stream: Stream) -> None: ...


class _Flight:
    """One slot's way: what it holds, what was queued and what was sent tell, after an interrupt,
    how far it came."""

    __slots__ = ("held", "jobs", "part", "sent")

    def __init__(self, part: Rows) -> None:
        self.part = part
        self.held: list[Slot] = []
        self.jobs: list[Job] = []
        self.sent: list[Pending] = []


class StagedWay:
    """Through the staging slots of the window: while one slot's DMA runs, the next is filled.

    A copy in the middle of another one of its thread is made by a signal's handler. What it has
    interrupted may have all the slots, and goes on when the handler is back: so it goes inline.
    """

    def __init__(
        self,
        connection: Connection,
        slots: StagingSlots,
        ring: StagingRing,
        engine: CopyEngine,
        pid: int,
        statistics: Statistics,
        express: Express | None,
        inline: InlineWay,
    ) -> None:
        self._connection = connection
        self._express = express
        self._inline = inline
        self._slots = slots
        self._ring = ring
        self._engine = engine
        self._pid = pid
        self._statistics = statistics

    def to_device(self, rows: Rows, stream: Stream) -> None:
        """Posted slot by slot; the source may be changed as soon as this returns."""
        if rows.size <= self._ring.largest:
            self._small_to_device(rows, stream)
        elif self._is_within_another():
            self._inline.to_device(rows, stream)
        else:
            self._fill_slots(rows, stream)

    def _fill_slots(self, rows: Rows, stream: Stream) -> None:
        filling: collections.deque[_Flight] = collections.deque()
        flight: _Flight | None = None
        if (link := self._connection.link) is not None:
            link.rouse()
        try:
            for part in rows.parts(self._slots.size, FIRST_BYTES):
                flight = _Flight(part)
                while filling and not self._slots.try_take(flight.held):
                    # Whoever fills a slot must not wait for another: all threads may.
                    self._post(filling[0], stream)
                    filling.popleft()
                filling.append(flight)
                if not flight.held:
                    self._slots.take(self._connection, flight.held)
                self._pack(flight)
                while len(filling) > FILLING:
                    self._post(filling[0], stream)
                    filling.popleft()
            while filling:
                self._post(filling[0], stream)
                filling.popleft()
        except BaseException:
            for begun in (*filling, *([flight] if flight else [])):
                self._engine.wait(begun.jobs)
                if not begun.sent:  # else the answer gives it back
                    self._slots.give_back(begun.held)
            raise
        self._statistics.add("staged_h2d_bytes", rows.size)

    def _post(self, flight: _Flight, stream: Stream) -> None:
        """Send what the slot holds, once it holds it."""
        slot, size = flight.held[0], flight.part.size
        self._engine.wait(flight.jobs)
        if self._is_lent(flight, stream):
            return
        self._slots.hold(slot, flight.sent)
        self._connection.submit(
            copied_in(flight.part, slot.at, self._pid, stream),
            size=size,
            pages=(slot.at, size),
            finish=_giver(self._slots, slot),
            posted=True,
            stream=stream,
            sent=flight.sent,
        )

    def _is_lent(self, flight: _Flight, stream: Stream) -> bool:
        """Whether the short way has sent it."""
        express, link, part = self._express, self._connection.link, flight.part
        if express is None or link is None or part.height > 1:
            return False
        slot = flight.held[0]
        what = part.device, slot.at, part.width, stream.number, slot.sent
        return self._slots.lend(link, flight.held, lambda: express.send_part(*what))

    def _small_to_device(self, rows: Rows, stream: Stream) -> None:
        """Place, bytes and command under one lock: an interrupt finds all of them or none."""
        connection, ring, size = self._connection, self._ring, rows.size
        sent: list[Pending] = []
        while True:
            with connection.lock:
                slot = ring.place(size) if connection.has_credit() else None
                if slot is not None:
                    if rows.height == 1:
                        memory.copy(slot.address, rows.host, size)
                    else:
                        _gather(slot.address, rows)
                    pages, make = (slot.at, size), copied_in(rows, slot.at, self._pid, stream)
                    try:
                        connection.submit(
                            make, size=size, pages=pages, posted=True, stream=stream, sent=sent
                        )
                    finally:  # an interrupt may come behind the command
                        for pending in sent:
                            ring.hold(pending, size)
                    break
                oldest = ring.oldest if connection.has_credit() else None
            if oldest is not None:
                connection.wait(oldest)
            else:
                connection.room.wait(connection.has_credit, None)
        self._statistics.add("staged_h2d_bytes", size)

    def to_host(self, rows: Rows, stream: Stream) -> None:
        """Requests for as many slots as are free; each is drained as its DMA ends, while the DMA of
        the next ones goes on."""
        if self._is_within_another():
            self._inline.to_host(rows, stream)
        else:
            self._drain_slots(rows, stream)

    def _drain_slots(self, rows: Rows, stream: Stream) -> None:
        flying: collections.deque[_Flight] = collections.deque()
        draining: collections.deque[_Flight] = collections.deque()
        parts = rows.parts(self._slots.size)
        part = next(parts, None)
        try:
            while part is not None or flying or draining:
                while part is not None:
                    # Whoever has a request in flight must not wait for a slot: others may too.
                    flight = _Flight(part)
                    waits = not (flying or draining)
                    flying.append(flight)  # before it has anything: so an interrupt loses nothing
                    if waits:
                        self._slots.take(self._connection, flight.held)
                    elif not self._slots.try_take(flight.held):
                        flying.pop()
                        break
                    self._request(flight, stream)
                    part = next(parts, None)
                if flying and (not draining or self._has_come(flying[0])):
                    draining.append(flying[0])
                    flying.popleft()
                    self._drain(draining[-1])
                else:
                    self._engine.wait(draining[0].jobs)
                    self._slots.give_back(draining[0].held)
                    draining.popleft()
        except BaseException:
            for flight in (*draining, *flying):
                self._recover(flight)
            raise
        self._statistics.add("staged_d2h_bytes", rows.size)

    def _has_come(self, flight: _Flight) -> bool:
        self._connection.refresh()
        return flight.sent[0].done

    def _request(self, flight: _Flight, stream: Stream) -> None:
        at, size = flight.held[0].at, flight.part.size
        self._connection.submit(
            copied_out(flight.part, at, self._pid, stream),
            size=size,
            pages=(at, size),
            stream=stream,
            sent=flight.sent,
        )

    def _drain(self, flight: _Flight) -> None:
        pending = flight.sent[0]
        self._connection.wait(pending)
        self._connection.checked(pending)
        self._unpack(flight)

    def _pack(self, flight: _Flight) -> None:
        part, slot = flight.part, flight.held[0].address
        if part.height == 1:
            self._engine.post(flight.jobs, slot, part.host, part.width, read_soon=True)
        else:
            _gather(slot, part)

    def _unpack(self, flight: _Flight) -> None:
        part, slot = flight.part, flight.held[0].address
        if part.height == 1:
            self._engine.post(flight.jobs, part.host, slot, part.width)
        else:
            _scatter(part, slot)

    def _recover(self, flight: _Flight) -> None:
        """After an interrupt: a request that is on its way writes into its slot until it is
        answered, and that gives the slot back."""
        self._engine.wait(flight.jobs)
        with self._connection.lock:
            if flight.held and flight.sent and not flight.sent[0].done:
                pending, slot = flight.sent[0], flight.held[0]
                pending.finish = _giver(self._slots, slot)
                self._slots.hold(slot, flight.sent)
                return
        self._slots.give_back(flight.held)

    @classmethod
    def _is_within_another(cls) -> bool:
        """Whether this thread is in a copy already: its stack tells, whatever interrupts."""
        staged = cls._fill_slots.__code__, cls._drain_slots.__code__
        frame = inspect.currentframe()
        while frame is not None and frame.f_code not in staged:
            frame = frame.f_back
        return frame is not None


class InlineWay:
    """On the session's socket, in chunks: for sessions without a window."""

    def __init__(self, connection: Connection, chunk: int, statistics: Statistics) -> None:
        self._connection = connection
        self._chunk = chunk
        self._statistics = statistics

    def to_device(self, rows: Rows, stream: Stream) -> None:
        flying: collections.deque[Pending] = collections.deque()
        for part in rows.parts(self._chunk):
            if len(flying) == INLINE_DEPTH:
                self._settle(flying.popleft())
            flying.append(
                self._connection.submit(
                    pushed(part, stream), size=part.size, stream=stream, payload=_packed(part)
                )
            )
        while flying:
            self._settle(flying.popleft())
        self._statistics.add("inline_h2d_bytes", rows.size)

    def to_host(self, rows: Rows, stream: Stream) -> None:
        flying: collections.deque[tuple[Pending, Rows]] = collections.deque()
        parts = rows.parts(self._chunk)
        part = next(parts, None)
        while part is not None or flying:
            while part is not None and len(flying) < INLINE_DEPTH:
                pending = self._connection.submit(
                    pulled(part, stream), size=part.size, stream=stream
                )
                flying.append((pending, part))
                part = next(parts, None)
            pending, here = flying.popleft()
            self._settle(pending)
            if pending.payload is None or len(pending.payload) != here.size:
                raise DeviceError(999, "the backend's inline answer has not the size asked for")
            packed = np.frombuffer(pending.payload, np.uint8)
            _scatter(here, packed.ctypes.data)
        self._statistics.add("inline_d2h_bytes", rows.size)

    def _settle(self, pending: Pending) -> None:
        self._connection.wait(pending)
        self._connection.checked(pending)


def _gather(packed: int, part: Rows) -> None:
    """Rows of host memory, to an address where they lie without gaps."""
    move(Row(packed, part.width), Row(part.host, part.host_pitch), part.width, part.height)


def _scatter(part: Rows, packed: int) -> None:
    """The way back."""
    move(Row(part.host, part.host_pitch), Row(packed, part.width), part.width, part.height)


def _packed(part: Rows) -> bytes:
    if part.height == 1:
        return bytes(memory.view(part.host, part.width))
    packed = np.empty(part.size, np.uint8)
    _gather(packed.ctypes.data, part)
    return packed.tobytes()


def _giver(slots: StagingSlots, slot: Slot) -> Callable[[Pending], None]:
    return lambda pending: slots.give(slot, pending)
