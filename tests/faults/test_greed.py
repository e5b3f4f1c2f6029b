# SPDX-License-Identifier: Apache-2.0
"""Clients and strangers that take and never give: what is kept for them has a bound, and others
notice nothing."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flyt.backend.loop import EventLoop
from flyt.backend.visitors import HELLO_BYTES, MOST_VISITORS, Visitors
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.handshake import Feature
from flyt.rpc.sockets import Listener, open_context
from flyt.shm.layout import SUPERBLOCK
from tests.faults.zmtp import MORE, Zmtp, frame
from tests.pair.raw import SOON, Honest, RawClient, eventually, say, status, worker_of

MIB = 1 << 20
SIZE = SUPERBLOCK.size
DEVICES_UNAVAILABLE = 46


@pytest.fixture(scope="module")
def served(module_backend: Callable[..., Any]) -> Any:
    listen = [f"ipc:///tmp/flyt-greed-{os.getpid()}.sock", "tcp://127.0.0.1:*"]
    return module_backend(listen=listen)


@pytest.fixture(scope="module")
def neighbour(served: Any) -> Iterator[Honest]:
    client = Honest(served)
    yield client
    client.close()


@pytest.fixture
def honest(neighbour: Honest) -> Iterator[Honest]:
    """The honest client; it must have noticed nothing at the test's end."""
    yield neighbour
    assert neighbour.carries_on(1), "the honest client stands still"


def memory_of(pid: int, field: str = "VmRSS") -> int:
    """Bytes that a process has (VmRSS), or had at most (VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise AssertionError(f"no {field} of {pid}")


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


# --- a client that does not read --------------------------------------------------------------

PULLS = 400
"""A MiB each: with the 64 that may wait and 8 in slots, most are not taken until some are read."""


def test_a_client_without_rings_that_reads_nothing(served: Any, honest: Honest) -> None:
    worker = worker_of(served, honest.pid)
    hello = m.Hello(m.PROTOCOL_VERSION, (Feature.INLINE,), os.getpid(), "deaf")
    welcome = say(served.endpoint, hello)
    assert isinstance(welcome, m.Welcome)
    where = Endpoint.parse(served.endpoint).session(welcome.port, welcome.path)
    with Zmtp(where) as deaf:

        def call(command: Any) -> m.Result:
            deaf.send(m.COMMANDS.encode(command))
            while not isinstance(reply := m.REPLIES.decode(deaf.message()[0]), m.Result | m.Done):
                pass
            assert isinstance(reply, m.Done) or reply.status == 0, reply
            return reply

        call(m.Attach(1, welcome.token, True, 0, 0, (), 0))
        address = call(m.Malloc(2, 0, PULLS * MIB, 0)).values[0]
        for part in range(PULLS):
            command = m.COMMANDS.encode(m.Push(3 + part, address + part * MIB, MIB))
            deaf.send(command, part.to_bytes(2, "big") * (MIB // 2))
            deaf.message()
        before = memory_of(worker)
        numbers = range(3 + PULLS, 3 + 2 * PULLS)
        pulls = [m.Pull(n, address + part * MIB, MIB) for part, n in enumerate(numbers)]
        deaf.socket.sendall(b"".join(frame(m.COMMANDS.encode(pull)) for pull in pulls))
        assert honest.carries_on(5), "another client waits for the one that does not read"
        assert memory_of(worker) - before < 150 * MIB, "its answers pile up in the worker"
        # Each command has an answer of its own; nothing says in which order they come.
        left = {number: part for part, number in enumerate(numbers)}
        while left:
            head, data = payload_of(deaf)
            assert data == left.pop(head.id).to_bytes(2, "big") * (MIB // 2)


def payload_of(peer: Zmtp) -> tuple[m.Result, bytes]:
    """The next Result that has a payload."""
    while len(frames := peer.message()) < 2:
        assert not isinstance(m.REPLIES.decode(frames[0]), m.Result), frames
    head = m.REPLIES.decode(frames[0])
    assert isinstance(head, m.Result)
    return head, frames[1]


# --- messages that never end ---------------------------------------------------------------------


def test_a_message_without_end_at_the_main_endpoint(served: Any, honest: Honest) -> None:
    forget_peak(served.pid)
    before = memory_of(served.pid)
    endless = frame(bytes(HELLO_BYTES - 100), MORE) * 16
    sent = 0
    with Zmtp(Endpoint.parse(served.endpoint)) as greedy:
        try:
            while sent < 4 << 30:
                sent += greedy.socket.send(endless[sent % len(endless) :])
        except OSError as exc:
            how = repr(exc)
    assert sent < 4 << 30, "it was never cut off"
    peak = memory_of(served.pid, "VmHWM") - before
    assert peak < 1 << 30, f"the daemon grew by {peak >> 20} MiB"
    assert eventually(lambda: "without end" in served.log), how  # said after it was done
    assert isinstance(say(served.endpoint, m.AskStatus()), m.StatusReport)
    assert eventually(lambda: memory_of(served.pid) - before < 64 * MIB), "it is given back"


def test_a_message_of_many_frames_is_garbage(served: Any, honest: Honest) -> None:
    garbage = status(served)["garbage"]
    with Zmtp(Endpoint.parse(served.endpoint)) as chatty:
        chatty.send(*[b"x"] * 100_000)
        assert eventually(lambda: status(served)["garbage"] == garbage + 1)


def test_a_frame_too_large_for_a_hello(served: Any, honest: Honest) -> None:
    with Zmtp(Endpoint.parse(served.endpoint)) as greedy:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # cut while we send
            greedy.send(bytes(HELLO_BYTES + 1))
        with pytest.raises(ConnectionResetError):
            greedy.message()


def test_one_that_asks_and_never_reads(served: Any, honest: Honest) -> None:
    before = memory_of(served.pid)
    question = frame(m.HELLOS.encode(m.AskStatus())) * 1000
    with Zmtp(Endpoint.parse(served.endpoint)) as deaf:
        deaf.socket.settimeout(0.5)
        try:
            for _ in range(100):
                deaf.socket.sendall(question)
        except TimeoutError:
            pass  # nothing more is taken from it
        assert isinstance(say(served.endpoint, m.AskStatus()), m.StatusReport)
        assert memory_of(served.pid) - before < 64 * MIB


# --- connections that say nothing ---------------------------------------------------------------


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_idle_connections_shut_nobody_out(served: Any, honest: Honest, scheme: str) -> None:
    where = next(e for e in map(Endpoint.parse, served.endpoints) if e.scheme == scheme)
    family = socket.AF_UNIX if scheme == "ipc" else socket.AF_INET
    before = descriptors_of(served.pid)
    idle: list[socket.socket] = []
    try:
        for _ in range(MOST_VISITORS + 200):
            idle.append(socket.socket(family))
            idle[-1].connect(where.path if scheme == "ipc" else (where.host, where.port))
        hello = m.Hello(m.PROTOCOL_VERSION, (1, 2), os.getpid(), "late")
        assert isinstance(say(str(where), hello), m.Welcome)
        assert eventually(lambda: descriptors_of(served.pid) <= before + MOST_VISITORS + 20)
    finally:
        for one in idle:
            one.close()
    assert eventually(lambda: descriptors_of(served.pid) <= before + 2), "they are all closed"


def test_a_silent_connection_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("flyt.backend.visitors.SILENT_SECONDS", 0.3)
    context = open_context()
    listener = Listener(context, "tcp://127.0.0.1:*")
    loop = EventLoop()
    visitors = Visitors(loop, lambda: [listener], lambda _, source: source in waiting)
    waiting: set[int] = set()

    def serve() -> None:
        if (incoming := listener.receive()) is not None:
            waiting.add(incoming.source)
        listener.gone()
        visitors.came(listener)

    for source in listener.pollables:
        loop.watch(source, serve)
    try:
        where = ("127.0.0.1", listener.endpoint.port)
        with socket.create_connection(where) as silent, Zmtp(listener.endpoint) as asking:
            asking.send(b"a question that takes its time")
            silent.setblocking(False)
            ended: list[bool] = []

            def read() -> None:
                ended.append(silent.recv(1000) == b"")

            loop.watch(silent.fileno(), read)
            assert loop.turn_until(lambda: any(ended), 10.0), "the silent one stays"
            loop.unwatch(silent.fileno())
            asking.socket.setblocking(False)
            with pytest.raises(BlockingIOError):
                asking.socket.recv(1)
    finally:
        listener.close()
        context.term()


# --- sessions ------------------------------------------------------------------------------------


def test_one_user_does_not_take_all_sessions(backend: Callable[..., Any], tmp_path: Path) -> None:
    listen = [f"ipc://{tmp_path}/b.sock", "tcp://127.0.0.1:*"]
    served = backend(listen=listen, extra=["--sessions-per-user", "2"])
    hello = m.Hello(m.PROTOCOL_VERSION, (1, 2), os.getpid(), "many")
    with RawClient(served.endpoint), RawClient(served.endpoint):
        refused = say(served.endpoint, hello)
        assert isinstance(refused, m.Refused), refused
        assert refused.code == DEVICES_UNAVAILABLE
        assert f"uid {os.getuid()} has 2 sessions" in refused.text
        assert "--sessions-per-user" in refused.text
        assert isinstance(say(served.endpoints[1], hello), m.Welcome), "another user's first"
    assert eventually(lambda: not status(served)["sessions"], 15.0)  # they never attached
    assert isinstance(say(served.endpoint, hello), m.Welcome)


# --- the superblock ------------------------------------------------------------------------------


def test_a_superblock_that_a_client_overwrote(served: Any, honest: Honest) -> None:
    with open(served.region, "r+b", buffering=0) as region:
        right = os.pread(region.fileno(), SIZE, 0)
        for damage in (bytes(SIZE), os.urandom(SIZE), right[:8] + bytes(SIZE - 8)):
            os.pwrite(region.fileno(), damage, 0)
            with RawClient(served.endpoint) as newcomer:  # its constructor reads the superblock
                assert newcomer.attach_as_clients_do().status == 0
            assert os.pread(region.fileno(), SIZE, 0) == right
    assert "overwritten the superblock" in served.log


def test_the_sweep_restores_the_superblock(backend: Callable[..., Any]) -> None:
    served = backend(size="4M", extra=["--sweep-seconds", "0.1"])
    with open(served.region, "r+b", buffering=0) as region:
        right = os.pread(region.fileno(), SIZE, 0)
        os.pwrite(region.fileno(), os.urandom(SIZE), 0)
        assert eventually(lambda: os.pread(region.fileno(), SIZE, 0) == right, SOON)


ROUNDS = 100


def test_who_left_has_made_room(backend: Callable[..., Any]) -> None:
    """Whoever has the answer to its goodbye may come back at once, at the limit too."""
    served = backend(extra=["--sessions-per-user", "1"])
    for _ in range(ROUNDS):
        with RawClient(served.endpoint) as client:  # a refusal would be no Welcome
            assert client.attach_inline().status == 0
            assert client.call(m.Bye).status == 0
