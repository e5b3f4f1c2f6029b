# SPDX-License-Identifier: Apache-2.0
"""A handler of a signal, or a finalizer, that waits for an answer while its thread waits."""

from __future__ import annotations

import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flyt.frontend.connection import Connection
from flyt.frontend.inflight import Pending
from flyt.rpc import messages as m

LIMIT = 20.0


@pytest.fixture
def connection(connection: Connection) -> Connection:
    """Where a wake-up that gets lost is made up for only after a long time."""
    connection.room._step = 2 * LIMIT
    return connection


@pytest.fixture
def in_time() -> Iterator[None]:
    """Nothing is timed: it bounds a hang."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < LIMIT


def _in_pairs(server: Any) -> None:
    """Answer commands two at a time: the first of them waits for the second."""
    held: list[Any] = []

    def handle(batch: list[tuple[Any, list[bytes]]]) -> None:
        held.extend(command for command, _ in batch)
        while len(held) > 1:
            server.answer(held.pop(0))
            server.answer(held.pop(0))

    server.serve(handle)


def _first(function: Callable[..., Any], before: Callable[[], object]) -> Callable[..., Any]:
    """The function, with a call in front of its first one, as a handler's may be."""
    left = [before]

    def called(*arguments: Any) -> Any:
        if left:
            left.pop()()
        return function(*arguments)

    return called


@pytest.mark.usefixtures("in_time")
def test_a_handler_while_its_thread_polls(connection: Connection, server: Any) -> None:
    _in_pairs(server)
    inner: list[Any] = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: inner.append(connection.call(m.Ping)))
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.start()
    try:
        outer = connection.call(m.Ping)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)
    assert outer.done
    assert [pending.done for pending in inner] == [True]


@pytest.mark.parametrize("where", ["_takes_the_lead", "_listen"])
@pytest.mark.usefixtures("in_time")
def test_what_the_inner_call_reads_is_told_to_who_leads(
    connection: Connection, server: Any, where: str
) -> None:
    """Also if that comes just before it leads."""
    _in_pairs(server)
    room = connection.room
    setattr(room, where, _first(getattr(room, where), lambda: connection.call(m.Ping)))
    assert connection.call(m.Ping).done
    assert not room.is_led


@pytest.mark.usefixtures("in_time")
def test_a_call_while_its_thread_holds_the_lock(
    connection: Connection, server: Any, background: Any, led: tuple[Pending, Any]
) -> None:
    """The thread that leads can't read for it, and leads on afterwards."""
    timer = threading.Timer(0.2, lambda: server.answer(*server.take()))
    timer.start()
    with connection.lock:
        assert connection.call(m.Ping).done
    timer.join()
    assert connection.room.is_led
    server.answer(led[1])
    assert background.finish() == [None]


@pytest.mark.parametrize("function", ["_calm", "_pass_on"])
def test_an_interrupt_as_it_takes_the_lead_or_steps_down(
    connection: Connection, server: Any, function: str
) -> None:
    """A signal's that another thread got. It leaves no leader that is none."""
    room = connection.room
    pending = connection.submit(m.Ping)
    server.answer(*server.take())

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(room, function, interrupted)
        with pytest.raises(KeyboardInterrupt):
            connection.wait(pending)
    assert not room.is_led
    connection.wait(pending)
    assert connection.submit(m.Ping).id == pending.id + 1


@pytest.mark.usefixtures("in_time")
def test_who_stops_leading_ends_nobody_elses_sleep(
    connection: Connection, background: Any, led: tuple[Pending, Any], server: Any
) -> None:
    """That of a call by who holds the lock, and has taken the lead meanwhile."""
    wire, other = connection._wire, led[0]
    ended: list[int] = []
    wake_up = wire.wake_up
    wire.wake_up = lambda: (ended.append(threading.get_ident()), wake_up())
    with connection.lock:
        server.answer(led[1])
        while not other.done:
            connection.drain()
        time.sleep(0.2)  # the leader is awake, and may go on when the lock is given back
        assert not ended
    assert background.finish() == [None]
    assert len(ended) == 1


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.usefixtures("in_time")
def test_a_wake_up_that_an_inner_call_has_taken_is_given_back(
    connection: Connection,
    server: Any,
    background: Any,
    led: tuple[Pending, Any],
    interrupted: bool,
) -> None:
    """It takes it so as to sleep itself."""
    room, (other, command) = connection.room, led
    listen, looks = room._listen, []

    def counted() -> None:
        looks.append(None)
        if interrupted:
            raise KeyboardInterrupt
        listen()

    with connection.lock:
        server.answer(command)
        while not other.done:
            connection.drain()  # the leader is told, and waits for the lock
        room._listen = counted
        inner = connection.submit(m.Ping)
        timer = threading.Timer(0.2, lambda: server.answer(*server.take()))
        timer.start()
        try:
            connection.wait(inner)
        except KeyboardInterrupt:
            assert interrupted
        assert select.select([room._wake], [], [], 0)[0] == [room._wake]
        assert 0 < len(looks) < 20
    timer.join()
    assert background.finish() == [None]
    assert not room.is_led
