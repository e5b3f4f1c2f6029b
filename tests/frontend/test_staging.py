# SPDX-License-Identifier: Apache-2.0
"""Staging slots: each has one holder, and nobody waits for ever."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from flyt.errors import DeviceError, SessionLost
from flyt.frontend.connection import Connection
from flyt.frontend.inflight import Pending
from flyt.frontend.rows import Rows
from flyt.frontend.staging import Slot, StagingSlots
from flyt.frontend.staging_ring import StagingRing
from flyt.frontend.statistics import Statistics
from flyt.frontend.streams import Stream
from flyt.frontend.ways import StagedWay
from flyt.rpc import messages as m
from flyt.rpc.patience import Deadline
from flyt.shm import memory
from flyt.shm.copy import CopyEngine

LIMIT = 20.0
PAGE = 4096
NO_WAY: Any = None
"""Nobody copies in the middle of a copy here."""


def one_row(host: int, device: int, size: int) -> Rows:
    return Rows(host, size, device, size, size, 1)


def taken(slots: StagingSlots, connection: Connection) -> Slot:
    return slots.take(connection, [])


def tried(slots: StagingSlots) -> Slot | None:
    held: list[Slot] = []
    return held[0] if slots.try_take(held) else None


@pytest.mark.parametrize(
    ("length", "count", "size", "expected"),
    [
        (64 * PAGE, 4, 16 * PAGE, (4, 16 * PAGE)),
        (64 * PAGE, 4, 8 * PAGE, (4, 8 * PAGE)),
        (32 * PAGE, 4, 16 * PAGE, (4, 8 * PAGE)),  # less was to be had: smaller slots
        (16 * PAGE, 2, 16 * PAGE, (2, 8 * PAGE)),
        (15 * PAGE, 2, 16 * PAGE, (2, 7 * PAGE)),
        (2 * PAGE, 4, 16 * PAGE, (2, PAGE)),
        (PAGE, 2, PAGE, (2, PAGE // 2)),
    ],
)
def test_slots_fit_their_area(
    length: int, count: int, size: int, expected: tuple[int, int]
) -> None:
    slots = StagingSlots(0x10000, 0x500, length, count, size)
    assert (slots.count, slots.size) == expected
    taken = []
    while (slot := tried(slots)) is not None:
        taken.append(slot)
    assert len(taken) == slots.count
    for at, slot in enumerate(sorted(taken)):
        assert slot[:2] == (0x10000 + at * slots.size, 0x500 + at * slots.size)
    assert max(slot.address for slot in taken) + slots.size <= 0x10000 + length


def test_a_slot_comes_back_once(connection: Connection) -> None:
    slots = StagingSlots(0, 0, 2 * PAGE, 2, PAGE)
    first, second = taken(slots, connection), taken(slots, connection)
    assert first != second
    assert tried(slots) is None
    slots.give_back([first])
    assert tried(slots) == first
    assert tried(slots) is None
    slots.give_back([second])
    assert tried(slots) == second


def test_an_answer_gives_a_slot_back(connection: Connection, server: Any, background: Any) -> None:
    slots = StagingSlots(0, 0, 2 * PAGE, 2, PAGE)
    held = [taken(slots, connection) for _ in range(2)]
    for slot in held:
        pending = connection.submit(m.Ping, finish=partial(slots.give, slot), posted=True)
        slots.hold(slot, [pending])
    background.start(taken, slots, connection)
    commands = server.take(2)
    server.answer(commands[1])  # not the one that was waited for
    server.answer(commands[0])
    (got,) = background.finish()
    assert got in held
    assert tried(slots) in held


def test_an_answer_that_is_told_twice_takes_the_slot_from_nobody(connection: Connection) -> None:
    """Who is interrupted in the answer is told once more, when the slot may be another's."""
    slots = StagingSlots(0, 0, 2 * PAGE, 2, PAGE)
    slot, other = taken(slots, connection), taken(slots, connection)
    first, second = (Pending(number, "CopyIn", PAGE, (0, 0)) for number in (1, 2))
    slots.hold(slot, [first])
    first.done = True
    slots.give(slot, first)
    assert tried(slots) == slot
    slots.give(slot, first)  # in a thread's hands
    assert tried(slots) is None
    slots.hold(slot, [second])
    slots.give(slot, first)  # another command's
    assert tried(slots) is None
    slots.give(slot, second)
    assert tried(slots) == slot
    assert other != slot


def test_a_slot_in_another_threads_hands_is_waited_for(
    connection: Connection, background: Any
) -> None:
    slots = StagingSlots(0, 0, 2 * PAGE, 2, PAGE)
    first, _ = taken(slots, connection), taken(slots, connection)
    background.start(taken, slots, connection)
    background.start(slots.give_back, [first])
    assert first in background.finish()


def test_a_lost_session_ends_the_wait_for_slots(
    connection: Connection, server: Any, background: Any
) -> None:
    slots = StagingSlots(0, 0, 2 * PAGE, 2, PAGE)
    for _ in range(2):
        slot = taken(slots, connection)
        pending = connection.submit(m.Ping, posted=True)  # its end gives nothing back
        slots.hold(slot, [pending])
    for _ in range(3):
        background.start(taken, slots, connection)
    server.take(2)
    server.close()
    for result in background.finish():
        assert isinstance(result, SessionLost)


# --- with copies -----------------------------------------------------------------------------


class Device:
    """The window's other end: device memory of the server, and slots that must not be shared."""

    def __init__(self, server: Any, base: int, slots: int) -> None:
        self.memory = bytearray(1 << 20)
        self.base = base
        self.server = server
        self.held: list[Any] = []
        self.most = 0
        self.refuse: set[int] = set()
        self._slots = slots
        self._dice = random.Random(3)

    def handle(self, batch: list[tuple[Any, list[bytes]]]) -> None:
        for command, _ in batch:
            assert all(abs(command.index - c.index) >= PAGE for c in self.held), "a shared slot"
            self.held.append(command)
        self.most = max(self.most, len(self.held))
        assert len(self.held) <= self._slots
        # Work is done in order, as on a stream; how much of it at once is chance.
        for _ in range(self._dice.randint(1, self._slots)):
            if self.held:
                self._run(self.held.pop(0))

    def _run(self, command: Any) -> None:
        window = memory.view(self.base + command.index, command.size)
        place = slice(command.address, command.address + command.size)
        status = 1 if command.address in self.refuse else 0
        if status == 0 and isinstance(command, m.CopyIn):
            self.memory[place] = window
            window[:] = b"\xee" * command.size  # whoever reads it too late sees it
        elif status == 0:
            window[:] = self.memory[place]
        self.server.answer(command, status)


@pytest.fixture
def area() -> Iterator[int]:
    size = 16 * PAGE
    address = memory.anonymous(size)
    yield address
    memory.release(address, size)


@pytest.fixture
def engine() -> Iterator[CopyEngine]:
    engine = CopyEngine(2)
    yield engine
    engine.close()


@pytest.mark.parametrize("count", [2, 3])
def test_threads_share_few_slots(
    connect: Any, server: Any, background: Any, area: int, engine: CopyEngine, count: int
) -> None:
    connection = connect()
    device = Device(server, area, count)
    server.serve(device.handle)
    slots = StagingSlots(area, 0, count * PAGE, count, PAGE)
    assert (slots.count, slots.size) == (count, PAGE)
    ring = StagingRing(area, 0, 0)  # everything takes a slot
    way = StagedWay(connection, slots, ring, engine, 1, Statistics(), None, NO_WAY)

    def client(thread: int) -> int:
        stream = Stream(thread, 0)
        dice = np.random.default_rng(thread)
        at = thread * 65_536
        for turn in range(12):
            size = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5, 13 * PAGE)[turn % 6]
            data = dice.integers(0, 256, size, dtype=np.uint8)
            kept, back = data.copy(), np.zeros(size + 2, np.uint8)
            way.to_device(one_row(data.ctypes.data, at + turn, size), stream)
            data[:] = 0  # the source was taken
            way.to_host(one_row(back.ctypes.data + 1, at + turn, size), stream)
            assert np.array_equal(back[1:-1], kept)
            assert back[0] == back[-1] == 0
        return thread

    for thread in range(4):
        background.start(client, thread)
    assert set(background.finish()) == {0, 1, 2, 3}
    assert device.most == count
    left = {tried(slots) for _ in range(count)}
    assert {slot and slot.at for slot in left} == {i * PAGE for i in range(count)}
    assert tried(slots) is None


def test_an_error_in_the_midst_gives_every_slot_back(
    connect: Any, server: Any, area: int, engine: CopyEngine
) -> None:
    connection = connect()
    device = Device(server, area, 2)
    device.refuse = {3 * PAGE}
    server.serve(device.handle)
    slots = StagingSlots(area, 0, 2 * PAGE, 2, PAGE)
    ring = StagingRing(area, 0, 0)  # everything takes a slot
    way = StagedWay(connection, slots, ring, engine, 1, Statistics(), None, NO_WAY)
    target = np.zeros(10 * PAGE, np.uint8)
    with pytest.raises(DeviceError) as caught:
        way.to_host(one_row(target.ctypes.data, 0, target.size), Stream(0, 0))
    assert caught.value.code == 1
    held = {taken(slots, connection) for _ in range(2)}  # in flight or not: they come
    assert len(held) == 2
    for slot in held:
        slots.give_back([slot])
    device.refuse.clear()
    way.to_host(one_row(target.ctypes.data, 0, target.size), Stream(0, 0))
    connection.raise_deferred()


def test_a_lost_session_ends_copies(
    connect: Any, server: Any, background: Any, area: int, engine: CopyEngine
) -> None:
    connection = connect()
    slots = StagingSlots(area, 0, 2 * PAGE, 2, PAGE)
    ring = StagingRing(area, 0, 0)  # everything takes a slot
    way = StagedWay(connection, slots, ring, engine, 1, Statistics(), None, NO_WAY)
    source, target = np.zeros(8 * PAGE, np.uint8), np.zeros(8 * PAGE, np.uint8)
    stream = Stream(0, 0)
    ready = threading.Barrier(4)

    def copy(move: Any, *arguments: Any) -> None:
        ready.wait(LIMIT)
        move(*arguments)

    for _ in range(2):
        background.start(copy, way.to_device, one_row(source.ctypes.data, 0, source.size), stream)
        background.start(copy, way.to_host, one_row(target.ctypes.data, 0, target.size), stream)
    server.take(2)
    server.close()
    assert [isinstance(result, SessionLost) for result in background.finish()] == [True] * 4
    assert len({tried(slots) for _ in range(2)} - {None}) == 2
    assert tried(slots) is None


class Interrupted(Exception):
    pass


def test_interrupts_cost_no_slot(connect: Any, server: Any, area: int, engine: CopyEngine) -> None:
    """Signals that raise at any point of a copy: all slots are there in the end."""
    connection = connect()
    server.serve(Device(server, area, 2).handle)
    slots = StagingSlots(area, 0, 2 * PAGE, 2, PAGE)
    way = StagedWay(
        connection, slots, StagingRing(area, 0, 0), engine, 1, Statistics(), None, NO_WAY
    )
    array = np.zeros(3 * PAGE, np.uint8)
    armed, hits = False, 0

    def handler(*_: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interrupted

    # To this thread: what another one gets is not held back while a command is sent.
    over, me = threading.Event(), threading.get_ident()

    def interrupt() -> None:
        while not over.wait(0.0007):
            signal.pthread_kill(me, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, handler)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    until = time.monotonic() + 3.0
    try:
        while time.monotonic() < until:
            try:
                armed = True
                for size in (100, PAGE, 3 * PAGE) * 100:
                    way.to_host(one_row(array.ctypes.data, 0, size), Stream(0, 0))
                    way.to_device(one_row(array.ctypes.data, 0, size), Stream(0, 0))
            except Interrupted:
                hits += 1
    finally:
        armed = False
        over.set()
        interrupter.join()
        signal.signal(signal.SIGALRM, before)
    assert hits > 100
    connection.settle(Deadline.after(LIMIT))
    assert len({tried(slots), tried(slots)} - {None}) == 2
