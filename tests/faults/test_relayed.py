# SPDX-License-Identifier: Apache-2.0
"""--single-port: a relayed session is no stranger at the main endpoint, and no more of it is kept
than its credits and the answers that it reads allow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flyt.backend.loop import EventLoop
from flyt.backend.relay import MOST_MESSAGES, Relay
from flyt.backend.visitors import HELLO_BYTES, Visitors
from flyt.backend.wire import SOCKET_LIMITS, UNREAD
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.handshake import Feature
from flyt.rpc.sockets import Dialer, Incoming, Listener, open_context
from tests.faults.test_greed import forget_peak, memory_of, payload_of
from tests.faults.zmtp import MORE, Zmtp, frame
from tests.pair.raw import Honest, eventually, say, session_of

MIB = 1 << 20
TOKEN = bytes(range(16))
ATTACH = m.COMMANDS.encode(m.Attach(1, TOKEN, True, 0, 0, (), 0))


# --- the relay by itself, its client and its session in this process --------------------------


class Stage:
    """A main endpoint with a relay and its visitors, one session's socket, one client."""

    def __init__(self, folder: Path) -> None:
        self.context = open_context()
        self.loop = EventLoop()
        self.door = Listener(self.context, "tcp://127.0.0.1:*", **SOCKET_LIMITS)
        self.session = Listener(self.context, f"ipc://{folder}/s", **SOCKET_LIMITS)
        self.relay = Relay(self.loop, self.context)
        self.relay.expect(TOKEN, str(self.session.endpoint), "")
        self.visitors = Visitors(self.loop, lambda: [self.door], lambda *_: False)
        for source in self.door.pollables:
            self.loop.watch(source, self._serve)
        self.client = Dialer(self.context, self.door.endpoint)

    def _serve(self) -> None:
        incoming = self.door.receive()
        for source in self.door.gone():
            self.relay.gone(self.door, source)
        if incoming is not None:
            self.relay.takes(self.door, incoming)
        self.visitors.came(self.door)

    def attached(self) -> Incoming:
        """The client's ATTACH, as the session gets it."""
        self.client.send([ATTACH])
        return self.taken()

    def taken(self) -> Incoming:
        """The next message at the session."""
        found: list[Incoming] = []

        def look() -> bool:
            if (incoming := self.session.receive()) is not None:
                found.append(incoming)
            return bool(found)

        assert self.turn_until(look), "nothing comes"
        return found[0]

    def heard(self) -> list[bytes]:
        """The next message at the client."""
        found: list[list[bytes]] = []

        def look() -> bool:
            self.client.check()
            if (frames := self.client.receive()) is not None:
                found.append(frames)
            return bool(found)

        assert self.turn_until(look), "nothing comes"
        return found[0]

    def turn_until(self, done: Callable[[], bool], seconds: float = 10.0) -> bool:
        """Turn the loop, looking often: our own sockets are not in it."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                return False
            self.loop.turn(0.01)
        return True

    def close(self) -> None:
        self.relay.close()
        for one in (self.client, self.session, self.door):
            one.close()
        self.context.term()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("FLYT_RUNTIME_DIR", str(tmp_path))
    one = Stage(tmp_path)
    yield one
    one.close()


def is_cut(stranger: Zmtp) -> bool:
    """Whether its connection has ended; never waits."""
    stranger.socket.setblocking(False)
    try:
        return stranger.socket.recv(1000) == b""
    except BlockingIOError:
        return False


def test_a_relayed_session_may_idle(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flyt.backend.visitors.SILENT_SECONDS", 0.3)
    stage.attached()
    with Zmtp(stage.door.endpoint) as stranger:
        assert stage.turn_until(lambda: is_cut(stranger)), "a silent stranger stays"
    stage.client.send([b"still here"])
    assert stage.taken().frames == [b"still here"]


def test_a_relayed_session_is_not_cut_when_the_daemon_grows(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = iter(range(0, 1 << 50, 1 << 40))
    monkeypatch.setattr("flyt.backend.visitors.resident_bytes", lambda: next(grown))
    stage.attached()
    with Zmtp(stage.door.endpoint) as stranger:
        assert stage.turn_until(lambda: is_cut(stranger)), "a stranger stays"
    stage.client.send([b"still here"])
    assert stage.taken().frames == [b"still here"]


def test_large_frames_pass_both_ways(stage: Stage) -> None:
    identity = stage.attached().identity
    large = os.urandom(m.INLINE_CHUNK)
    assert m.INLINE_CHUNK > HELLO_BYTES
    stage.client.send([b"command", large])
    assert stage.taken().frames == [b"command", large]
    stage.session.send(identity, [b"answer", large])
    assert stage.heard() == [b"answer", large]


def test_a_message_that_no_session_sends_ends_it(stage: Stage) -> None:
    stage.attached()
    stage.client.send([bytes(m.INLINE_CHUNK)] * 3)
    word = m.REPLIES.decode(stage.heard()[0])
    assert isinstance(word, m.Sticky)
    assert "bytes" in word.text


def test_more_commands_than_credits_end_it(stage: Stage) -> None:
    stage.attached()
    sent = MOST_MESSAGES + UNREAD
    for _ in range(4 * sent):  # the session takes none; the kernel's buffers hold a few
        stage.client.send([bytes(m.INLINE_CHUNK // 4)])
    word = m.REPLIES.decode(stage.heard()[0])
    assert isinstance(word, m.Sticky)
    assert "credits" in word.text


# --- a whole daemon -----------------------------------------------------------------------------

PULLS = 200
"""A MiB each, within a session's credits; with the 64 that may wait most stay with the worker."""


@pytest.fixture(scope="module")
def served(module_backend: Callable[..., Any]) -> Any:
    listen = [f"ipc:///tmp/flyt-relayed-{os.getpid()}.sock", "tcp://127.0.0.1:*"]
    return module_backend(listen=listen, extra=["--single-port"])


def test_a_relayed_client_that_reads_nothing(served: Any) -> None:
    where = served.endpoints[1]
    hello = m.Hello(m.PROTOCOL_VERSION, (Feature.INLINE,), os.getpid(), "deaf")
    welcome = say(where, hello)
    assert isinstance(welcome, m.Welcome)
    assert welcome.port == 0, "the session is relayed"
    honest = Honest(served)
    try:
        with Zmtp(Endpoint.parse(where)) as deaf:

            def call(command: Any) -> m.Result:
                deaf.send(m.COMMANDS.encode(command))
                reply = m.REPLIES.decode(deaf.message()[0])
                while not isinstance(reply, m.Result | m.Done):
                    reply = m.REPLIES.decode(deaf.message()[0])
                assert isinstance(reply, m.Done) or reply.status == 0, reply
                return reply

            call(m.Attach(1, welcome.token, True, 0, 0, (), 0))
            address = call(m.Malloc(2, 0, PULLS * MIB, 0)).values[0]
            for part in range(PULLS):
                command = m.COMMANDS.encode(m.Push(3 + part, address + part * MIB, MIB))
                deaf.send(command, part.to_bytes(2, "big") * (MIB // 2))
                deaf.message()
            before = memory_of(served.pid)
            forget_peak(served.pid)
            numbers = range(3 + PULLS, 3 + 2 * PULLS)
            pulls = [m.Pull(n, address + part * MIB, MIB) for part, n in enumerate(numbers)]
            deaf.socket.sendall(b"".join(frame(m.COMMANDS.encode(pull)) for pull in pulls))
            assert honest.carries_on(5), "another client waits for the one that does not read"
            peak = memory_of(served.pid, "VmHWM") - before
            assert peak < 2 * (UNREAD + 8) * MIB, f"{peak >> 20} MiB of answers in the daemon"
            left = {number: part for part, number in enumerate(numbers)}
            while left:
                head, data = payload_of(deaf)
                assert data == left.pop(head.id).to_bytes(2, "big") * (MIB // 2)
        assert eventually(lambda: session_of(served, os.getpid()) is None)
    finally:
        honest.close()


def test_a_relayed_message_without_end(served: Any) -> None:
    where = Endpoint.parse(served.endpoints[1])
    hello = m.Hello(m.PROTOCOL_VERSION, (Feature.INLINE,), os.getpid(), "endless")
    welcome = say(str(where), hello)
    assert isinstance(welcome, m.Welcome)
    honest = Honest(served)
    forget_peak(served.pid)
    before = memory_of(served.pid)
    endless = frame(bytes(MIB), MORE)
    sent = 0
    try:
        with Zmtp(where) as greedy:
            greedy.send(m.COMMANDS.encode(m.Attach(1, welcome.token, True, 0, 0, (), 0)))
            greedy.message()
            try:
                while sent < 4 << 30:
                    sent += greedy.socket.send(endless[sent % len(endless) :])
            except OSError as exc:
                how = repr(exc)
        assert sent < 4 << 30, "it was never cut off"
        peak = memory_of(served.pid, "VmHWM") - before
        assert peak < 2 << 30, f"the daemon grew by {peak >> 20} MiB"
        assert "cutting a relayed session off" in served.log, how
        assert honest.carries_on(2)
        assert eventually(lambda: session_of(served, os.getpid()) is None)
    finally:
        honest.close()
