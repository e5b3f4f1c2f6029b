# SPDX-License-Identifier: Apache-2.0
"""A connection against a real ROUTER: answers, credits, errors, ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from flyt.errors import CommandTimeout, DeviceError, ProtocolError
from flyt.frontend.connection import Connection, Lost
from flyt.frontend.inflight import Pending
from flyt.rpc import messages as m
from flyt.rpc.patience import Deadline

LIMIT = 20.0
DEVICES_UNAVAILABLE = 46
ILLEGAL_ADDRESS = 700


def _copy_in(number: int) -> m.CopyIn:
    return m.CopyIn(number, 1 << 45, 4096, 100, 1)


def _settle(connection: Connection, server: Any) -> None:
    """A round trip: whatever the server said before is dispatched after it."""
    pending = connection.submit(m.Ping)
    server.answer(server.take()[0])
    connection.wait(pending)


# --- answers ---------------------------------------------------------------------------------


def test_a_command_and_its_answer(connection: Connection, server: Any) -> None:
    pending = connection.submit(lambda number: m.Malloc(number, 0, 4096, 0), size=4096)
    command = server.take()[0]
    assert command == m.Malloc(pending.id, 0, 4096, 0)
    line = connection.inflight.snapshot()[0]
    assert (line.id, line.name, line.size, line.pages) == (pending.id, "Malloc", 4096, (0, 0))
    server.answer(command, values=(1 << 45,), text="fine")
    connection.wait(pending)
    assert (pending.status, pending.values, pending.text) == (0, (1 << 45,), "fine")
    assert (pending.done, pending.ended) == (True, False)
    assert len(connection.inflight) == 0
    assert Connection.checked(pending) is pending


def test_commands_arrive_in_order(connection: Connection, server: Any) -> None:
    sent = [connection.submit(m.Ping, posted=True) for _ in range(50)]
    assert server.take(50) == [m.Ping(pending.id) for pending in sent]
    assert [pending.id for pending in sent] == list(range(1, 51))


def test_answers_out_of_order(connection: Connection, server: Any) -> None:
    sent = [connection.submit(m.Ping) for _ in range(40)]
    commands = server.take(40)
    order = [*range(1, 40, 2), *reversed(range(0, 40, 2))]
    for at in order:
        server.answer(commands[at], values=(at,))
    for pending in reversed(sent):
        connection.wait(pending)
    assert [pending.values for pending in sent] == [(at,) for at in range(40)]


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 4096])
def test_payloads_both_ways(connection: Connection, server: Any, payload: bytes) -> None:
    size = len(payload)
    pending = connection.submit(
        lambda number: m.Push(number, 1 << 45, size), size=size, payload=payload
    )
    command, frames = server.poll(LIMIT)
    assert (command, frames) == (m.Push(pending.id, 1 << 45, size), [payload])
    server.answer(command)
    pull = connection.submit(lambda number: m.Pull(number, 1 << 45, size), size=size)
    server.answer(server.take()[0], payload=payload)
    connection.wait(pull)
    assert pull.payload == payload
    connection.wait(pending)
    assert pending.payload is None


def test_finish_runs_once_with_the_answer(connection: Connection, server: Any) -> None:
    seen: list[tuple[int, bool, int]] = []
    pending = connection.submit(
        m.Ping, finish=lambda p: seen.append((p.id, p.done, p.status)), posted=True
    )
    command = server.take()[0]
    assert seen == []
    server.answer(command, values=(5,))
    server.answer(command, status=1)  # a second answer belongs to nothing
    _settle(connection, server)
    assert seen == [(pending.id, True, 0)]
    assert pending.values == (5,)
    connection.raise_deferred()


def test_settle(connection: Connection, server: Any) -> None:
    connection.settle(Deadline.after(0.0))  # nothing was sent
    first, second = connection.submit(m.Ping), connection.submit(m.Ping)
    connection.settle(Deadline.after(0.05))
    assert not first.done
    one, two = server.take()[0], server.take()[0]
    server.answer(two)
    connection.settle(Deadline.after(0.05))
    assert (first.done, second.done) == (False, True)
    server.answer(one)
    connection.settle(Deadline.after(LIMIT))
    assert first.done


def test_close_under_threads_that_wait_for_credit(
    connect: Callable[..., Connection], background: Any
) -> None:
    """Each hears that it is over; the wake-up's descriptor is closed once (EBADF otherwise)."""
    connection = connect(credits=1)
    connection.submit(m.Ping)
    for _ in range(4):
        background.start(lambda: connection.room.wait(connection.has_credit, None))
    time.sleep(0.1)
    connection.close()
    errors = background.finish()
    assert [type(error) for error in errors] == [Lost] * 4


def test_asking_alone_makes_a_lost_wake_up_good(
    connect: Callable[..., Connection], server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect(heartbeat_ms=2000)
    nudges: list[float] = []
    monkeypatch.setattr(connection._wire, "nudge", lambda: nudges.append(time.monotonic()))
    connection.submit(m.Ping)
    until = time.monotonic() + 1.8
    while time.monotonic() < until:
        connection.refresh()
        time.sleep(0.01)
    server.answer(server.take()[0])
    assert 1 <= len(nudges) <= 3  # one each half second: a quarter of the heartbeat's limit


def test_waiting_for_what_is_done(connection: Connection, server: Any) -> None:
    pending = connection.submit(m.Ping)
    server.answer(server.take()[0])
    for _ in range(3):
        connection.wait(pending)


# --- errors in answers -----------------------------------------------------------------------


def test_call_raises_what_the_device_answered(
    connection: Connection, server: Any, background: Any
) -> None:
    background.start(connection.call, lambda number: m.Malloc(number, 0, 1 << 60, 0))
    server.answer(server.take()[0], status=2, text="1 EiB were asked for")
    (error,) = background.finish()
    assert isinstance(error, DeviceError)
    assert (error.code, error.detail) == (2, "1 EiB were asked for")
    connection.raise_deferred()  # a call's error is its own
    background.start(connection.call, m.Ping)
    server.answer(server.take()[0], status=999)
    (error,) = background.finish()
    assert (error.code, error.detail) == (999, "Ping")


@pytest.mark.parametrize(
    "status", [m.Status.ADDRESS_TAKEN, m.Status.FRAMES_REFUSED, m.Status.PROOF_FAILED]
)
def test_other_statuses_are_the_callers(
    connection: Connection, server: Any, background: Any, status: int
) -> None:
    background.start(connection.call, m.Ping)
    server.answer(server.take()[0], status=status, values=(3,))
    (pending,) = background.finish()
    assert isinstance(pending, Pending)
    assert (pending.status, pending.values) == (status, (3,))


def test_a_refusal_of_the_protocol(connection: Connection, server: Any, background: Any) -> None:
    background.start(connection.call, _copy_in)
    server.answer(server.take()[0], status=m.Status.PROTOCOL, text="index 4096 is no staging")
    (error,) = background.finish()
    assert isinstance(error, ProtocolError)
    assert "refused CopyIn: index 4096 is no staging" in str(error)


def test_an_error_of_a_post_is_reported_once(connection: Connection, server: Any) -> None:
    for _ in range(4):
        connection.submit(_copy_in, posted=True)
    commands = server.take(4)
    server.answer(commands[0])
    server.answer(commands[1], status=1, text="first")
    server.answer(commands[2], status=719, text="second")
    server.answer(commands[3])
    _settle(connection, server)  # itself no error: only a call that may report it does
    with pytest.raises(DeviceError) as caught:
        connection.raise_deferred()
    assert (caught.value.code, caught.value.detail) == (1, "first")
    connection.raise_deferred()
    connection.submit(_copy_in, posted=True)
    server.answer(server.take()[0], status=2)
    _settle(connection, server)
    with pytest.raises(DeviceError) as caught:
        connection.raise_deferred()
    assert (caught.value.code, caught.value.detail) == (2, "CopyIn")


@pytest.mark.parametrize("order", ["post first", "call first"])
def test_a_call_that_fails_as_a_post_before_it_reports_both(
    connection: Connection, server: Any, background: Any, order: str
) -> None:
    """Work that shares a mark of the device has one error; what comes later has its own."""
    connection.submit(_copy_in, posted=True)
    background.start(connection.call, m.Ping)
    commands = server.take(2)
    for command in commands if order == "post first" else reversed(commands):
        server.answer(command, status=999)
    (error,) = background.finish()
    assert isinstance(error, DeviceError)
    assert (error.code, error.detail) == (999, "Ping")
    _settle(connection, server)
    if order == "call first":
        with pytest.raises(DeviceError, match="999"):
            connection.raise_deferred()
    connection.raise_deferred()


def test_a_call_that_fails_otherwise_leaves_the_error_of_a_post(
    connection: Connection, server: Any, background: Any
) -> None:
    connection.submit(_copy_in, posted=True)
    background.start(connection.call, m.Ping)
    for command, status in zip(server.take(2), (999, 2), strict=True):
        server.answer(command, status=status)
    (error,) = background.finish()
    assert isinstance(error, DeviceError)
    assert error.code == 2
    with pytest.raises(DeviceError, match="999"):
        connection.raise_deferred()


def test_an_error_of_a_post_is_reported_to_one_thread(
    connection: Connection, server: Any, background: Any
) -> None:
    connection.submit(_copy_in, posted=True)
    server.answer(server.take()[0], status=1)
    _settle(connection, server)
    for _ in range(8):
        background.start(connection.raise_deferred)
    results = background.finish()
    assert sum(isinstance(result, DeviceError) for result in results) == 1
    assert results.count(None) == 7


# --- credits ---------------------------------------------------------------------------------


def test_never_more_untaken_commands_than_credits(
    connect: Any, server: Any, background: Any
) -> None:
    connection = connect(credits=4)
    connection.submit(m.Ping, posted=True)
    background.start(lambda: [connection.submit(m.Ping, posted=True).id for _ in range(19)])
    assert [command.id for command in server.take(4)] == [1, 2, 3, 4]
    assert server.poll(0.2) is None
    for taken in (1, 3, 3, 4):  # credits come back as they are taken, in messages of their own …
        server.say(m.Credit(taken))
        server.take(taken + 4 - server.taken)
        assert server.poll(0.1) is None
    assert server.taken == 8
    server.answer(m.Ping(1), taken=6)  # … or with a result, whichever it is for
    server.take(2)
    assert server.poll(0.1) is None
    server.say(m.Credit(10))
    server.take(4)
    server.say(m.Credit(14))
    server.take(4)
    server.say(m.Credit(18))
    server.take(2)
    assert background.finish() == [list(range(2, 21))]
    assert server.poll(0.1) is None
    server.say(m.Credit(20))
    server.say(m.Credit(2))  # an older word takes no credit away
    background.start(lambda: [connection.submit(m.Ping, posted=True) for _ in range(4)])
    server.take(4)


def test_a_thread_without_credits_dispatches_answers(
    connect: Any, server: Any, background: Any
) -> None:
    connection = connect(credits=2)
    ends: list[int] = []
    for _ in range(2):
        connection.submit(m.Ping, finish=lambda p: ends.append(p.id), posted=True)
    background.start(connection.submit, m.Ping)
    commands = server.take(2)
    server.answer(commands[1], taken=0)
    server.answer(commands[0], taken=0)  # still no credit: the thread keeps waiting, and reading
    deadline = time.monotonic() + LIMIT
    while len(ends) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)  # bounded by LIMIT: another thread dispatches
    assert ends == [2, 1]
    assert server.poll(0.1) is None
    server.say(m.Credit(1))
    assert server.take() == [m.Ping(3)]
    (pending,) = background.finish()
    assert pending.id == 3


def test_credits_hold_for_all_threads_together(connect: Any, server: Any, background: Any) -> None:
    connection = connect(credits=3)
    for _ in range(4):
        background.start(lambda: [connection.submit(m.Ping, posted=True) for _ in range(50)])
    for taken in range(1, 201):
        server.take()
        server.say(m.Credit(taken))
        # 3 may be out, and this one is taken
        assert connection.flow.sent <= taken + 3
    assert len(background.finish()) == 4
    assert server.poll(0.05) is None


# --- the end ---------------------------------------------------------------------------------


def _all_pending(connection: Connection, count: int) -> tuple[list[Pending], list[int]]:
    ends: list[int] = []
    sent = [
        connection.submit(_copy_in, size=100, finish=lambda p: ends.append(p.id), posted=True)
        for _ in range(count)
    ]
    return sent, ends


def _is_over(connection: Connection, code: int, sent: list[Pending], ends: list[int]) -> None:
    """All that was in flight ended once, and every further call says why."""
    assert [p.ended for p in sent] == [True] * len(sent)
    assert [p.status for p in sent] == [code] * len(sent)
    assert sorted(ends) == [p.id for p in sent]
    assert len(connection.inflight) == 0
    for attempt in (
        lambda: connection.submit(m.Ping),
        lambda: connection.submit(m.Ping, posted=True),
        lambda: connection.call(m.Ping),
        lambda: connection.wait(sent[0]),
    ):
        with pytest.raises(Lost) as caught:
            attempt()
        assert caught.value.code == code
        assert caught.value is connection.lost


def test_a_sticky_error_ends_the_session_with_its_code(
    connection: Connection, server: Any, background: Any
) -> None:
    sent, ends = _all_pending(connection, 3)
    background.start(connection.call, m.Ping)
    server.take(4)
    server.say(m.Sticky(ILLEGAL_ADDRESS, "a kernel went astray"))
    (error,) = background.finish()
    assert isinstance(error, Lost)
    assert error.code == ILLEGAL_ADDRESS
    assert "a kernel went astray" in str(error)
    assert "CopyIn #1 (100 bytes" in str(error)
    server.close()
    _is_over(connection, ILLEGAL_ADDRESS, sent, ends)


def test_a_sticky_error_is_the_last_word_though_nobody_waited(
    connection: Connection, server: Any
) -> None:
    sent, ends = _all_pending(connection, 3)
    server.take(3)
    server.say(m.Sticky(ILLEGAL_ADDRESS, "a kernel went astray"))
    time.sleep(0.1)  # bounded: the client computes while its backend says it and ends
    server.close()
    time.sleep(0.2)
    with pytest.raises(Lost) as caught:
        connection.wait(sent[0])
    assert caught.value.code == ILLEGAL_ADDRESS
    _is_over(connection, ILLEGAL_ADDRESS, sent, ends)


def test_an_answer_before_the_end_is_an_answer(connection: Connection, server: Any) -> None:
    sent = [connection.submit(m.Ping) for _ in range(2)]
    server.answer(server.take(2)[0], values=(7,))
    time.sleep(0.1)  # bounded: as above
    server.close()
    time.sleep(0.2)
    connection.wait(sent[0])
    assert sent[0].values == (7,)
    with pytest.raises(Lost):
        connection.wait(sent[1])


def test_a_lost_connection_fails_all(connection: Connection, server: Any, background: Any) -> None:
    sent, ends = _all_pending(connection, 5)
    for _ in range(3):
        background.start(connection.call, m.Ping)
    server.take(8)
    server.close()
    errors = background.finish()
    assert [type(error) for error in errors] == [Lost] * 3
    assert all(error.code == DEVICES_UNAVAILABLE for error in errors)
    text = str(connection.lost)
    assert "closed the connection, or it died" in text
    assert "CopyIn #1 (100 bytes" in text
    assert text.count("#") == 4
    assert "and 4 more" in text
    _is_over(connection, DEVICES_UNAVAILABLE, sent, ends)


def test_a_lost_connection_ends_the_wait_for_credits(
    connect: Any, server: Any, background: Any
) -> None:
    connection = connect(credits=1)
    sent, ends = _all_pending(connection, 1)
    for _ in range(3):
        background.start(connection.submit, m.Ping)
    server.take()
    server.close()
    assert [type(error) for error in background.finish()] == [Lost] * 3
    _is_over(connection, DEVICES_UNAVAILABLE, sent, ends)


def test_nobody_listens(connect: Any, server: Any) -> None:
    server.close()
    connection = connect()
    with pytest.raises(Lost, match="nobody listens there") as caught:
        connection.call(m.Ping)
    assert caught.value.code == DEVICES_UNAVAILABLE


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"garbage"], [b"\x93\x01\x01"], [m.COMMANDS.encode(m.Free(1, 2))], [b"\xc1", b"x"]],
    ids=["empty", "text", "cut", "a-command", "two"],
)
def test_a_backend_that_breaks_the_protocol_is_left(
    connection: Connection, server: Any, frames: list[bytes]
) -> None:
    sent, ends = _all_pending(connection, 2)
    server.take(2)
    server.raw(frames)
    with pytest.raises(Lost, match="the backend sent") as caught:
        connection.wait(sent[1])
    assert caught.value.code == DEVICES_UNAVAILABLE
    _is_over(connection, DEVICES_UNAVAILABLE, sent, ends)


def test_close(connection: Connection, server: Any, background: Any) -> None:
    sent, ends = _all_pending(connection, 2)
    background.start(connection.call, m.Ping)
    commands = server.take(3)
    source = server.listener
    connection.close("the application is done")
    connection.close("once more")
    (error,) = background.finish()
    assert isinstance(error, Lost)
    assert "the application is done" in str(error)
    _is_over(connection, DEVICES_UNAVAILABLE, sent, ends)
    deadline = time.monotonic() + LIMIT
    while not source.gone() and time.monotonic() < deadline:
        time.sleep(0.005)  # bounded by LIMIT: libzmq's own thread ends the connection
    assert not source.send(server._identity, [m.REPLIES.encode(m.Credit(commands[0].id))])


# --- silence ---------------------------------------------------------------------------------


def test_a_silent_backend_is_asked_and_then_given_up(
    connect: Any, server: Any, background: Any
) -> None:
    connection = connect(heartbeat_ms=100)
    sent, ends = _all_pending(connection, 1)
    background.start(connection.call, lambda number: m.Malloc(number, 0, 5, 0))
    background.start(connection.wait, sent[0])
    errors = background.finish()
    assert {type(error) for error in errors} <= {CommandTimeout, Lost}
    assert CommandTimeout in [type(error) for error in errors]
    for error in errors:
        assert "is connected but has not answered for" in str(error)
        assert "CopyIn #1 (100 bytes" in str(error)
        assert "Malloc #2 (0 bytes" in str(error)
        assert str(server.listener.endpoint) in str(error)
    commands = server.take(server.poll(0) is not None and 2)
    assert any(isinstance(command, m.Ping) for command in commands)
    _is_over(connection, DEVICES_UNAVAILABLE, sent, ends)


def test_a_slow_backend_that_answers_pings_is_waited_for(
    connect: Any, server: Any, background: Any
) -> None:
    connection = connect(heartbeat_ms=100)
    done = threading.Event()
    asked: list[Any] = []
    pings = 0

    def handle(batch: list[tuple[Any, list[bytes]]]) -> None:
        nonlocal pings
        for command, _ in batch:
            if isinstance(command, m.Ping):
                pings += 1
                server.answer(command)
            else:
                asked.append(command)
        if done.is_set() and asked:
            server.answer(asked.pop(), values=(5,))

    server.serve(handle)
    background.start(connection.call, lambda number: m.MemInfo(number, 0))
    time.sleep(4.5)  # the point of the test: longer than three limits of a second
    done.set()
    (pending,) = background.finish()
    assert pending.values == (5,)
    assert pings >= 2
    assert len(connection.inflight) == 0


def test_an_idle_session_is_left_alone(connect: Any, server: Any) -> None:
    connection = connect(heartbeat_ms=100)
    _settle(connection, server)
    time.sleep(3.5)  # longer than all limits together, with nothing in flight
    _settle(connection, server)
    assert server.taken == 2  # and no PING


# --- interrupts ------------------------------------------------------------------------------


@contextmanager
def _interruptible() -> Iterator[None]:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _interrupt_when(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)  # bounded by LIMIT: the main thread gets there
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGUSR1)


def test_ctrl_c_orphans_a_command_and_no_more(
    connection: Connection, server: Any, background: Any
) -> None:
    ends: list[int] = []
    with _interruptible():
        background.start(_interrupt_when, lambda: len(connection.inflight) > 0)
        with pytest.raises(KeyboardInterrupt):
            connection.call(m.Ping, finish=lambda p: ends.append(p.id), pages=(4096, 100))
        background.finish()
    assert [line.pages for line in connection.inflight.snapshot()] == [(4096, 100)]
    assert not connection.room._leading
    (orphan,) = server.take()
    _settle(connection, server)
    assert ends == []
    server.answer(orphan)  # the late answer gives its pages back
    _settle(connection, server)
    assert ends == [orphan.id]
    assert len(connection.inflight) == 0
    assert connection.lost is None


def test_ctrl_c_while_another_thread_leads(
    connection: Connection, server: Any, background: Any
) -> None:
    with _interruptible():
        background.start(connection.call, m.Ping)
        (first,) = server.take()
        deadline = time.monotonic() + LIMIT
        while not connection.room._leading and time.monotonic() < deadline:
            time.sleep(0.005)  # bounded by LIMIT: the other thread begins to wait
        background.start(_interrupt_when, lambda: len(connection.inflight) > 1)
        with pytest.raises(KeyboardInterrupt):
            connection.call(m.Ping)
    # Nobody sleeps for the orphan: as an heir it would let the true followers sleep on.
    with connection.lock:
        heir = connection.inflight.waiting()
    server.answer(first)
    results = background.finish()
    assert heir is None
    assert sum(isinstance(result, Pending) for result in results) == 1
    server.answer(server.take()[0])
    _settle(connection, server)
    assert len(connection.inflight) == 0


def test_ctrl_c_out_of_credits(connect: Any, server: Any, background: Any) -> None:
    connection = connect(credits=1)
    connection.submit(m.Ping, posted=True)
    with _interruptible():
        background.start(_interrupt_when, lambda: connection.room._leading)
        with pytest.raises(KeyboardInterrupt):
            connection.submit(m.Ping)
        background.finish()
    (first,) = server.take()
    assert server.poll(0.05) is None  # what was interrupted was never sent
    server.answer(first)
    _settle(connection, server)
    assert server.taken == 2


def test_many_interrupts_at_any_moment(
    connection: Connection, server: Any, background: Any
) -> None:
    def echo(batch: list[tuple[Any, list[bytes]]]) -> None:
        for command, _ in batch:
            server.answer(command, values=(command.id,))

    server.serve(echo)
    stop = threading.Event()
    armed = False

    def interrupt(number: int, frame: object) -> None:
        if armed:
            raise KeyboardInterrupt

    def tease() -> None:
        main = threading.main_thread().ident
        moment = 0
        while not stop.wait(0.0003 + moment % 97 * 1e-5):
            moment += 31
            signal.pthread_kill(main or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    interrupts = calls = 0
    try:
        background.start(tease)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            try:
                armed = True
                pending = connection.call(m.Ping)
                armed = False
                assert pending.values == (pending.id,)
                calls += 1
            except KeyboardInterrupt:
                armed = False
                interrupts += 1
    finally:
        armed = False
        stop.set()
        background.finish()
        signal.signal(signal.SIGUSR1, before)
    assert interrupts > 100
    assert connection.lost is None, connection.lost
    assert not connection.room._leading
    for _ in range(200):
        pending = connection.call(m.Ping)
        assert pending.values == (pending.id,)
