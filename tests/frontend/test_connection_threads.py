# SPDX-License-Identifier: Apache-2.0
"""Several threads on one connection: one leads, the others follow, each gets its own answer."""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from flyt.frontend.connection import Connection
from flyt.frontend.inflight import Pending
from flyt.rpc import messages as m

THREADS, CALLS = 4, 200
LIMIT = 20.0


@pytest.fixture
def shuffler(server: Any) -> Any:
    """A server that answers what is there in any order, some of it later."""
    dice = random.Random(7)
    held: list[Any] = []

    def handle(batch: list[tuple[Any, list[bytes]]]) -> None:
        held.extend(command for command, _ in batch)
        dice.shuffle(held)
        while held and (not batch or dice.random() < 0.8):
            command = held.pop()
            server.answer(command, values=(command.id, getattr(command, "size", 0)))

    server.serve(handle)
    return server


def test_each_call_gets_its_own_answer(
    connection: Connection, shuffler: Any, background: Any
) -> None:
    def caller(thread: int) -> int:
        for call in range(CALLS):
            size = thread * CALLS + call
            pending = connection.call(lambda number, n=size: m.Malloc(number, 0, n, 0))
            assert pending.values == (pending.id, size)
        return thread

    for thread in range(THREADS):
        background.start(caller, thread)
    assert sorted(background.finish()) == list(range(THREADS))
    assert len(connection.inflight) == 0
    assert not connection.room._leading
    assert connection.flow.sent == connection.flow.taken == THREADS * CALLS


def test_no_answer_is_slept_over(connection: Connection, server: Any, background: Any) -> None:
    connection.room._step = 2 * LIMIT  # a wake-up that gets lost is made up for after a step

    def echo(batch: list[tuple[Any, list[bytes]]]) -> None:
        for command, _ in batch:
            server.answer(command)

    server.serve(echo)

    def caller() -> None:
        for _ in range(CALLS * 2):
            connection.submit(m.Ping, posted=True)
            connection.call(m.Ping)

    for _ in range(THREADS):
        background.start(caller)
    assert background.finish() == [None] * THREADS


def test_a_wake_up_waits_for_its_leader(
    connection: Connection, server: Any, background: Any, led: tuple[Pending, Any]
) -> None:
    pending, command = led
    deadline = time.monotonic() + LIMIT
    with connection.lock:  # as a thread that sends, then waits: it drains twice
        server.answer(command)
        while not pending.done and time.monotonic() < deadline:
            connection.drain()
        connection.drain()
        assert select.select([connection.room._wake], [], [], 0)[0] == [connection.room._wake]
    assert background.finish() == [None]
    connection.wait(pending)
    assert select.select([connection.room._wake], [], [], 0)[0] == []  # and leaves with it


class _Gated(threading.Event):
    """An event whose sleeper is scheduled late: not before the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep, self.gate = threading.Event(), threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.asleep.set()
        woken = super().wait(timeout)
        self.gate.wait(LIMIT)
        return woken


def test_an_heir_whose_answer_came_first_passes_the_lead_on(
    connection: Connection, server: Any, background: Any
) -> None:
    connection.room._step = 2 * LIMIT
    first, heir, last = (connection.submit(m.Ping) for _ in range(3))
    heir.event = gated = _Gated()
    commands = server.take(3)
    leader = background.start(connection.wait, first)
    _soon(lambda: connection.room._leading)
    background.start(connection.wait, heir)
    assert gated.asleep.wait(LIMIT)
    background.start(connection.wait, last)
    _soon(lambda: last.event is not None)
    server.answer(commands[0])  # the leader leaves and wakes its heir …
    leader.join(LIMIT)
    assert gated.is_set()
    server.answer(commands[1])  # … whose own answer is there before it runs
    _soon(lambda: _readable(connection))
    gated.gate.set()
    assert _soon(lambda: heir.done, LIMIT / 2)
    led = _soon(lambda: connection.room._leading, LIMIT / 10)
    server.answer(commands[2])
    connection.wait(last)  # whatever came of it, nobody sleeps on
    background.finish()
    assert led, "nobody leads, though one waits"


def _soon(condition: Callable[[], bool], limit: float = LIMIT) -> bool:
    deadline = time.monotonic() + limit
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)  # bounded by the deadline: other threads act
    return condition()


def _readable(connection: Connection) -> bool:
    """Whether something came. Not by asking the socket: that takes the news from its descriptor,
    for which whoever leads next waits."""
    return bool(select.select(connection._wire.filenos(), [], [], 0)[0])


def test_few_credits_for_many_threads(connect: Any, shuffler: Any, background: Any) -> None:
    connection = connect(credits=2)

    def caller() -> list[Pending]:
        return [connection.submit(m.Ping, posted=True) for _ in range(CALLS)]

    for _ in range(THREADS):
        background.start(caller)
    sent = [pending for part in background.finish() for pending in part]
    assert sorted(pending.id for pending in sent) == list(range(1, THREADS * CALLS + 1))
    for pending in sent:
        connection.wait(pending)
        assert pending.values == (pending.id, 0)


def test_many_wait_for_one(connection: Connection, server: Any, background: Any) -> None:
    pending = connection.submit(m.Ping)
    for _ in range(THREADS):
        background.start(connection.wait, pending)
    (command,) = server.take()
    time.sleep(0.05)  # bounded: let them begin to wait
    server.answer(command, values=(1,))
    assert background.finish() == [None] * THREADS


def test_a_follower_takes_the_lead(connection: Connection, server: Any, background: Any) -> None:
    connection.room._step = 2 * LIMIT
    for _ in range(THREADS):
        background.start(connection.call, m.Ping)
    commands = server.take(THREADS)
    for left, command in enumerate(commands):  # each time it may be the leader's answer
        server.answer(command)
        assert _soon(lambda left=left: len(background.results) == left + 1)
    assert all(isinstance(result, Pending) for result in background.finish())
