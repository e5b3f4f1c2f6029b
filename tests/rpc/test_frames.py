# SPDX-License-Identifier: Apache-2.0
"""Whole messages, also where a signal's handler raises in the midst of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from flyt.rpc import frames
from flyt.rpc.frames import Inbox, Outbox
from flyt.rpc.sockets import open_context

LIMIT = 60.0
"""Seconds."""

INTERRUPTED = """
import signal, sys, threading, time
import zmq
from flyt.rpc.frames import Outbox
from flyt.rpc.sockets import open_context

context = open_context()
to, end = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
for one in (to, end):
    one.setsockopt(zmq.SNDHWM, 0)
    one.setsockopt(zmq.RCVHWM, 0)
end.bind("inproc://pair")
to.connect("inproc://pair")
outbox, armed, ended, caught, noted = Outbox(to), False, False, 0, []

def interrupt(number, frame):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

def run():  # the handler runs in the main thread, wherever that is
    while not ended:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        time.sleep(0.0001)

signal.signal(signal.SIGUSR1, interrupt)
thread = threading.Thread(target=run)
thread.start()
more = [bytes(100_000)] * (int(sys.argv[1]) - 1)
n = -1
while n < 3000 or caught <= 20:  # on a busy machine few come in time
    n += 1
    before = outbox.sent
    try:
        armed = True
        outbox.send([b"%d" % n, *more])
        armed = False
    except KeyboardInterrupt:
        caught += 1
    if outbox.sent > before:
        noted.append([b"%d" % n, *more])
ended = True
thread.join()
for message in noted:
    assert end.recv_multipart(zmq.NOBLOCK) == message
assert not end.poll(0)
assert 0 < len(noted)
to.close()
end.close()
context.term()
print(caught)
"""


@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupted_message_is_sent_or_not_and_one_can_tell(count: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(count)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 20, "it was hardly interrupted"


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Two connected sockets."""
    context = open_context()
    here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    here.bind("inproc://pair")
    there.connect("inproc://pair")
    yield here, there
    for end in (here, there):
        end.close(0)
    context.term()


def test_what_was_received_when_an_interrupt_came_is_given_next(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = Inbox(pair[0])
    assert inbox.next() is None
    for message in ([b"a", b"", b"c" * 100_000], [b"d"]):
        pair[1].send_multipart(message)

    def interrupted(_: int) -> int:
        raise KeyboardInterrupt

    for name in ("_data", "_more"):
        with monkeypatch.context() as patch:
            patch.setattr(frames, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                inbox.next()
    assert inbox.next() == [b"a", b"", b"c" * 100_000]
    assert inbox.next() == [b"d"]
    assert inbox.next() is None
    inbox.close()


def test_nobody_there_is_no_error_and_a_closed_socket_is(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    alone = pair[0].context.socket(zmq.DEALER)
    outbox, inbox = Outbox(alone), Inbox(alone)
    assert not outbox.send([b"a", b"b"])
    assert outbox.sent == 0
    assert inbox.next() is None
    alone.close(0)
    for end in (outbox, inbox):
        end.close()
    with pytest.raises(zmq.ZMQError):
        outbox.send([b"a"])
    with pytest.raises(zmq.ZMQError):
        inbox.next()


def test_bytes_of_any_kind_are_sent(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    outbox = Outbox(pair[0])
    assert outbox.send([b"\0a", bytearray(b"bc"), memoryview(b"0123456789ab").cast("I")])
    assert outbox.sent == 1
    assert Inbox(pair[1]).next() == [b"\0a", b"bc", b"0123456789ab"]


@pytest.mark.parametrize("name", ["_data", "_more"])
def test_a_read_in_the_middle_of_another_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As by a signal's handler: each message is given out once, and whole."""
    context = open_context()
    with context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://here")
        other.connect("inproc://here")
        messages = [[b"%d" % n, bytes(100)] for n in range(4)]
        for message in messages:
            one.send_multipart(message)
        inbox = Inbox(other)
        function = getattr(frames, name)
        got: list[list[bytes] | None] = []
        nested = [True]

        def interrupted(*given: Any) -> Any:
            said = function(*given)
            if nested:
                nested.clear()
                got.append(inbox.next())
            return said

        monkeypatch.setattr(frames, name, interrupted)
        while (message := inbox.next()) is not None:
            got.append(message)
        inbox.close()
    assert got == messages
