# SPDX-License-Identifier: Apache-2.0
"""Channel: whole messages in order, whatever the kernel cuts, and ends that are seen."""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from flyt.backend.channel import Channel, ChannelClosed
from flyt.backend.orders import FROM_WORKER, TO_WORKER, Closed, End, Granted, Leave
from flyt.errors import ProtocolError, SessionLost
from flyt.rpc.codec import MAX_MESSAGE_BYTES

Ends = tuple[Channel, socket.socket]


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Supervisor's end and worker's end."""
    ours, theirs = socket.socketpair()
    supervisor = Channel(ours, TO_WORKER, FROM_WORKER, send_limit=0.2)
    worker = Channel(theirs, FROM_WORKER, TO_WORKER)
    yield supervisor, worker
    supervisor.close()
    worker.close()


@pytest.fixture
def wire() -> Iterator[Ends]:
    """The worker's end, and bare bytes at the other."""
    ours, theirs = socket.socketpair()
    channel = Channel(theirs, FROM_WORKER, TO_WORKER)
    yield channel, ours
    channel.close()
    ours.close()


def packed(message: object) -> bytes:
    body = TO_WORKER.encode(message)
    return struct.pack("<I", len(body)) + body


def test_messages_arrive_whole_and_in_order(pair: tuple[Channel, Channel]) -> None:
    supervisor, worker = pair
    sent = [End(n, "x" * n) for n in range(200)]
    for message in sent:
        supervisor.send(message)
    assert [worker.receive(5) for _ in sent] == sent
    assert worker.receive(0) is None


def test_a_drain_yields_what_is_there_and_never_waits(pair: tuple[Channel, Channel]) -> None:
    supervisor, worker = pair
    assert list(worker.messages()) == []
    supervisor.send(Leave())
    supervisor.send(End(1, "bye"))
    select.select([worker], [], [], 5)
    assert list(worker.messages()) == [Leave(), End(1, "bye")]
    assert not worker.closed


def test_cut_anywhere(wire: Ends) -> None:
    channel, raw = wire
    data = packed(End(7, "why")) + packed(Leave())
    for offset in range(len(data)):
        raw.sendall(data[offset : offset + 1])
        if offset < len(data) - 1:
            heard = list(channel.messages())
            assert heard in ([], [End(7, "why")])
    assert channel.receive(5) == Leave()


def test_messages_before_the_end_are_heard(wire: Ends) -> None:
    channel, raw = wire
    raw.sendall(packed(Leave()))
    raw.close()
    assert channel.receive(5) == Leave()
    with pytest.raises(ChannelClosed):
        channel.receive(5)
    assert channel.closed


def test_half_a_message_before_the_end_is_no_message(wire: Ends) -> None:
    channel, raw = wire
    raw.sendall(packed(End(1, "cut"))[:-1])
    raw.close()
    assert list(channel.messages()) == []
    assert channel.closed


def test_an_end_with_unread_messages_is_an_end(pair: tuple[Channel, Channel]) -> None:
    supervisor, worker = pair
    supervisor.send(Leave())
    worker.close()  # with a message unread, so the kernel answers ECONNRESET
    assert list(supervisor.messages()) == []
    assert supervisor.closed


def test_sending_to_nobody_says_so(pair: tuple[Channel, Channel]) -> None:
    supervisor, worker = pair
    worker.close()
    with pytest.raises(ChannelClosed):
        supervisor.send(Leave())


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", MAX_MESSAGE_BYTES + 1),
        struct.pack("<I", 0),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 2) + b"\x91\x63",
    ],
)
def test_nonsense_is_a_protocol_error(wire: Ends, data: bytes) -> None:
    channel, raw = wire
    raw.sendall(data)
    with pytest.raises(ProtocolError):
        channel.receive(5)


def test_a_peer_that_does_not_read_is_given_up(pair: tuple[Channel, Channel]) -> None:
    supervisor, _ = pair

    def flood() -> None:
        for _ in range(10_000):
            supervisor.send(End(1, "x" * 4096))

    with pytest.raises(SessionLost):
        flood()
    with pytest.raises(SessionLost):
        supervisor.send(Leave())  # half of the last one is out: nothing may follow it


def test_a_large_message_goes_through_while_the_peer_reads(
    pair: tuple[Channel, Channel],
) -> None:
    supervisor, worker = pair
    large = Granted(1, 2, tuple(range(1 << 19)))
    heard: list[object] = []
    reader = threading.Thread(target=lambda: heard.append(worker.receive(30)))
    reader.start()
    supervisor.send(large)
    reader.join(30)
    assert heard == [large]


def test_a_message_above_the_limit_is_not_sent(pair: tuple[Channel, Channel]) -> None:
    supervisor, worker = pair
    with pytest.raises(ProtocolError):
        supervisor.send(Granted(1, 2, ((1 << 64) - 1,) * (1 << 19)))
    supervisor.send(Leave())
    assert worker.receive(5) == Leave()


def test_threads_do_not_mix_their_messages(pair: tuple[Channel, Channel]) -> None:
    supervisor, worker = pair
    threads = [
        threading.Thread(
            target=lambda n=n: [supervisor.send(End(n, "x" * 500)) for _ in range(100)]
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    heard = [worker.receive(10) for _ in range(400)]
    for thread in threads:
        thread.join(10)
    assert sorted(m.session for m in heard if isinstance(m, End)) == sorted([0, 1, 2, 3] * 100)


def test_a_time_limit_ends_the_wait(pair: tuple[Channel, Channel]) -> None:
    start = time.monotonic()
    assert pair[1].receive(0.05) is None
    assert time.monotonic() - start >= 0.05


def test_the_exception_survives_a_pool() -> None:
    assert str(pickle.loads(pickle.dumps(ChannelClosed("gone")))) == "gone"


def test_descriptors_come_with_their_messages() -> None:
    ours, theirs = socket.socketpair()
    supervisor = Channel(ours, TO_WORKER, FROM_WORKER)
    worker = Channel(theirs, FROM_WORKER, TO_WORKER, takes_descriptors=True)
    pipes = [os.pipe() for _ in range(3)]
    for number, (read, _) in enumerate(pipes):
        supervisor.send(End(number, "x" * (4000 if number == 1 else 0)), read)
        supervisor.send(Leave())
    got = [worker.receive(5) for _ in range(6)]
    assert [message for message in got if isinstance(message, Leave)] == [Leave()] * 3
    assert len(worker.descriptors) == 3
    for read, write in pipes:
        os.write(write, b"?")
        copy = worker.descriptors.popleft()
        assert os.read(copy, 2) == b"?"
        assert not os.get_inheritable(copy)
        for descriptor in (read, write, copy):
            os.close(descriptor)
    supervisor.close()
    worker.close()


def test_nobody_is_given_descriptors_unasked(pair: tuple[Channel, Channel]) -> None:
    _, worker = pair
    before = len(os.listdir("/proc/self/fd"))
    worker.send(Closed(1, ""), 0)
    assert pair[0].receive(5) == Closed(1, "")
    assert len(os.listdir("/proc/self/fd")) == before
    assert not pair[0].descriptors
