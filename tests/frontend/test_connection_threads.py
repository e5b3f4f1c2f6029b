# SPDX-License-Identifier: Apache-2.0
"""Several threads on one connection: one leads, the others follow, each gets its own answer."""

from __future__ import annotations

import random
import select
import time
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
    assert not connection._leading
    assert connection._sent == connection._taken == THREADS * CALLS


def test_no_answer_is_slept_over(connection: Connection, server: Any, background: Any) -> None:
    connection._step = 2 * LIMIT  # a wake-up that gets lost is made up for after a step

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
    connection: Connection, server: Any, background: Any
) -> None:
    pending = connection.submit(m.Ping)
    background.start(connection.wait, pending)
    (command,) = server.take()
    deadline = time.monotonic() + LIMIT
    while not connection._leading and time.monotonic() < deadline:
        time.sleep(0.002)  # bounded by LIMIT: the thread begins to wait
    with connection.lock:  # as a thread that sends, then waits: it drains twice
        server.answer(command)
        while not pending.done and time.monotonic() < deadline:
            connection._drain()
        connection._drain()
        assert select.select([connection._wake], [], [], 0)[0] == [connection._wake]
    assert background.finish() == [None]
    connection.wait(pending)
    assert select.select([connection._wake], [], [], 0)[0] == []  # and leaves with it


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
    connection._step = 2 * LIMIT
    for _ in range(THREADS):
        background.start(connection.call, m.Ping)
    commands = server.take(THREADS)
    for left, command in enumerate(commands):  # each time it may be the leader's answer
        server.answer(command)
        deadline = time.monotonic() + LIMIT
        while len(background.results) <= left and time.monotonic() < deadline:
            time.sleep(0.002)  # bounded by LIMIT: its thread gets its answer
        assert len(background.results) == left + 1
    assert all(isinstance(result, Pending) for result in background.finish())
