# SPDX-License-Identifier: Apache-2.0
"""Listener and Dialer over real sockets: who speaks, who is gone, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from flyt.errors import ConfigurationError
from flyt.rpc.connections import Peer
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.sockets import LARGEST_MESSAGE, Dialer, Incoming, Listener

LIMIT = 20.0
Context = zmq.Context[Any]
Eventually = Callable[..., Any]

CHILD = """
import sys, time
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.sockets import Dialer, Listener, open_context
role, address, heartbeat = sys.argv[1], sys.argv[2], int(sys.argv[3])
context = open_context()
if role == "dial":
    end = Dialer(context, Endpoint.parse(address), heartbeat_ms=heartbeat)
    end.send([b"child"])
else:
    end = Listener(context, address, heartbeat_ms=heartbeat)
    print(end.endpoint, flush=True)
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    time.sleep(0.05)
    while (message := end.receive()) is not None:
        if role == "listen":
            end.send(message.identity, message.frames)
"""


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, folder: Path) -> str:
    return f"ipc://{folder}/s" if request.param == "ipc" else "tcp://127.0.0.1:*"


@pytest.fixture
def ends(context: Context) -> Iterator[contextlib.ExitStack]:
    """Closes listeners and dialers before the context."""
    with contextlib.ExitStack() as stack:
        yield stack


def _close_once(end: Listener | Dialer) -> None:
    if not end._wire.socket.closed:
        end.close()


@pytest.fixture
def listen(context: Context, ends: contextlib.ExitStack) -> Callable[..., Listener]:
    def make(address: str, **options: Any) -> Listener:
        listener = Listener(context, address, **options)
        ends.callback(_close_once, listener)
        return listener

    return make


@pytest.fixture
def dial(context: Context, ends: contextlib.ExitStack) -> Callable[..., Dialer]:
    def make(where: Listener | Endpoint, **options: Any) -> Dialer:
        endpoint = where.endpoint if isinstance(where, Listener) else where
        dialer = Dialer(context, endpoint, **options)
        ends.callback(_close_once, dialer)
        return dialer

    return make


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Another process that dials or listens: ``child("dial", address, heartbeat_ms)``."""
    started: list[subprocess.Popen[str]] = []

    def start(role: str, address: str, heartbeat_ms: int = 0) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", CHILD, role, address, str(heartbeat_ms)],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT)


@pytest.fixture
def ended(eventually: Eventually) -> Callable[[Dialer], str]:
    """Wait until a dialer is lost, and return the reason."""

    def reason(dialer: Dialer) -> str:
        def lost() -> str | None:
            dialer.check()
            return dialer.lost

        return str(eventually(lost))

    return reason


def _alive(dialer: Dialer, listener: Listener, eventually: Eventually) -> Incoming:
    """One message there and one back."""
    assert dialer.send([b"there"])
    incoming: Incoming = eventually(listener.receive)
    assert incoming.frames == [b"there"]
    assert listener.send(incoming.identity, [b"back"])
    assert eventually(dialer.receive) == [b"back"]
    return incoming


# --- messages --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [
        [b"x"],
        [b""],
        [b"command", b"payload"],
        [b"", b"", b"x", b""],
        [bytearray(b"one"), memoryview(b"two")],
        [b"k" * 40, b"m" * (1 << 20)],
        [b"z" * LARGEST_MESSAGE],
    ],
    ids=["one", "empty", "two", "four", "buffers", "chunk", "largest"],
)
def test_frames_arrive_as_sent(
    listen: Any, dial: Any, address: str, eventually: Eventually, frames: list[bytes]
) -> None:
    listener = listen(address)
    dialer = dial(listener)
    assert dialer.send(frames)
    incoming = eventually(listener.receive)
    assert incoming.frames == [bytes(frame) for frame in frames]
    assert listener.send(incoming.identity, frames)
    assert eventually(dialer.receive) == [bytes(frame) for frame in frames]


def test_order_of_many(listen: Any, dial: Any, address: str, eventually: Eventually) -> None:
    listener = listen(address, backlog=8)  # the sender's queue takes what the listener doesn't
    dialer = dial(listener)
    count = 3000
    for number in range(count):
        assert dialer.send([b"%d" % number])
    got = [eventually(listener.receive) for _ in range(count)]
    assert [incoming.frames[0] for incoming in got] == [b"%d" % n for n in range(count)]
    for number in range(count):  # far more than a high-water mark: none may be dropped
        assert listener.send(got[0].identity, [b"%d" % number])
    assert [eventually(dialer.receive) for _ in range(count)] == [[b"%d" % n] for n in range(count)]


def test_nothing_waits(listen: Any, dial: Any, address: str) -> None:
    listener = listen(address)
    dialer = dial(listener)
    assert listener.receive() is None
    assert listener.gone() == []
    assert dialer.receive() is None
    assert not dialer.readable()
    assert dialer.lost is None


def test_quiet_is_who_has_nothing_to_tell(
    listen: Any, dial: Any, address: str, eventually: Eventually
) -> None:
    listener = listen(address)
    dialer = dial(listener)
    dialer.send([b"x"])
    incoming = eventually(listener.receive)
    eventually(lambda: not dialer.is_quiet())  # it is connected
    dialer.check()
    assert dialer.is_quiet()
    assert listener.send(incoming.identity, [b"y"])
    assert eventually(lambda: not dialer.is_quiet())
    assert not dialer.is_quiet(), "asking takes nothing away"
    assert dialer.receive() == [b"y"]
    assert dialer.is_quiet()
    listener.close()
    assert eventually(lambda: not dialer.is_quiet())
    dialer.check()
    assert dialer.lost


def test_pollables_wake_up(listen: Any, dial: Any, address: str, eventually: Eventually) -> None:
    listener = listen(address)
    poller = zmq.Poller()
    for pollable in listener.pollables:
        poller.register(pollable, zmq.POLLIN)
    assert poller.poll(0) == []
    dialer = dial(listener)
    dialer.send([b"x"])
    message, monitor = listener.pollables
    assert eventually(lambda: message in dict(poller.poll(100)))
    assert eventually(listener.receive).frames == [b"x"]
    assert listener.gone() == []
    dialer.close()
    assert dict(poller.poll(LIMIT * 1000)) == {monitor: zmq.POLLIN}


def test_each_connection_has_its_own_identity_and_source(
    listen: Any, dial: Any, address: str, eventually: Eventually
) -> None:
    listener = listen(address)
    dialers = [dial(listener) for _ in range(5)]
    seen = [_alive(dialer, listener, eventually) for dialer in dialers]
    assert len({incoming.identity for incoming in seen}) == 5
    assert len({incoming.source for incoming in seen}) == 5
    for incoming in seen:
        assert stat.S_ISSOCK(os.fstat(incoming.source).st_mode)
    for dialer, first in zip(dialers, seen, strict=True):
        again = _alive(dialer, listener, eventually)
        assert (again.identity, again.source) == (first.identity, first.source)


def test_to_nobody(listen: Any, dial: Any, address: str, eventually: Eventually) -> None:
    listener = listen(address)
    assert listener.send(b"nobody", [b"x"]) is False
    dialer = dial(listener)
    identity = _alive(dialer, listener, eventually).identity
    dialer.close()
    eventually(listener.gone)
    assert eventually(lambda: not listener.send(identity, [b"x"]))


def test_a_dialler_knows_its_descriptor(
    listen: Any, dial: Any, address: str, eventually: Eventually, ended: Any
) -> None:
    listener = listen(address)
    dialer = dial(listener)
    _alive(dialer, listener, eventually)
    dialer.check()
    assert stat.S_ISSOCK(os.fstat(dialer.descriptor).st_mode)
    peer = socket.socket(fileno=os.dup(dialer.descriptor))
    with peer:
        assert (peer.family == socket.AF_UNIX) == address.startswith("ipc")
    listener.close()
    ended(dialer)
    assert dialer.descriptor == -1


# --- who it is -------------------------------------------------------------------------------


def test_the_kernel_names_a_local_peer(
    listen: Any, dial: Any, child: Any, folder: Path, eventually: Eventually
) -> None:
    listener = listen(f"ipc://{folder}/s")
    own = _alive(dial(listener), listener, eventually).peer
    assert (own.uid, own.pid) == (os.geteuid(), os.getpid())
    process = child("dial", f"ipc://{folder}/s")
    other = eventually(listener.receive).peer
    assert (other.uid, other.pid) == (os.geteuid(), process.pid)


def test_another_user_is_named(listen: Any, folder: Path, eventually: Eventually) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start a process as another user")
    nobody = 65534
    listener = listen(f"ipc://{folder}/s")
    folder.chmod(0o755)
    (folder / "s").chmod(0o777)
    # It speaks ZMTP itself: the other user need not be able to read this tree.
    code = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "greeting = b'\\xff' + bytes(8) + b'\\x7f\\x03\\0NULL' + bytes(48)\n"
        "ready = b'\\x05READY\\x0bSocket-Type\\0\\0\\0\\x06DEALER'\n"
        "s.sendall(greeting + bytes([4, len(ready)]) + ready)\n"
        "heard = b''\n"
        "while b'ROUTER' not in heard and (more := s.recv(500)): heard += more\n"
        "s.sendall(b'\\0\\x01x'); sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, f"{folder}/s"], stdin=subprocess.PIPE)
    try:
        incoming = eventually(listener.receive)
    finally:
        process.kill()
        process.communicate(timeout=LIMIT)
    assert incoming.frames == [b"x"]
    assert (incoming.peer.uid, incoming.peer.pid) == (nobody, process.pid)


def test_over_tcp_nobody_is_named(listen: Any, dial: Any, eventually: Eventually) -> None:
    listener = listen("tcp://127.0.0.1:*")
    peer = _alive(dial(listener), listener, eventually).peer
    assert peer.address.endswith("127.0.0.1")  # as IPv6 writes it where the host has IPv6
    assert (peer.uid, peer.pid) == (-1, -1)


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        (":1000:100:4242", Peer("local", 1000, 4242)),
        ("/run/b.sock:0:0:1", Peer("local", 0, 1)),
        ("127.0.0.1", Peer("127.0.0.1")),
        ("::1", Peer("::1")),
        ("fe80::1:2:3", Peer("local", 1, 3)),
        ("", Peer("")),
    ],
)
def test_peer_addresses(text: str, peer: Peer) -> None:
    assert Peer.parse(text) == peer


# --- who is gone -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["no-socket", "no-listener", "port"])
def test_a_refused_connection_is_reported_at_once(
    dial: Any, folder: Path, ended: Any, where: str
) -> None:
    path = folder / "s"
    if where == "port":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = Endpoint("tcp", host="127.0.0.1", port=free.getsockname()[1])
    else:
        endpoint = Endpoint("ipc", path=str(path))
        if where == "no-listener":
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(path))  # its process died: the name is there, nobody accepts
    try:
        dialer = dial(endpoint)
        dialer.send([b"x"])
        assert ended(dialer) == f"{endpoint}: nobody listens there"
        assert dialer.send([b"x"]) is False
        assert dialer.descriptor == -1
    finally:
        path.unlink(missing_ok=True)


def test_a_closed_listener_is_seen(
    listen: Any, dial: Any, address: str, eventually: Eventually, ended: Any
) -> None:
    listener = listen(address)
    dialer = dial(listener)
    _alive(dialer, listener, eventually)
    listener.close()
    assert "closed the connection, or it died" in ended(dialer)
    assert dialer.receive() is None
    assert dialer.send([b"x"]) is False


def test_a_closed_dialler_is_seen(
    listen: Any, dial: Any, address: str, eventually: Eventually
) -> None:
    listener = listen(address)
    staying, leaving = dial(listener), dial(listener)
    _alive(staying, listener, eventually)
    source = _alive(leaving, listener, eventually).source
    leaving.close()
    assert eventually(listener.gone) == [source]
    _alive(staying, listener, eventually)
    assert listener.gone() == []


def test_last_words_are_heard(
    listen: Any, dial: Any, address: str, eventually: Eventually, ended: Any
) -> None:
    listener = listen(address)
    dialer = dial(listener)
    identity = _alive(dialer, listener, eventually).identity
    words = [[b"word %d" % n] for n in range(100)]
    for word in words:
        assert listener.send(identity, word)
    listener.close()
    ended(dialer)
    assert [dialer.receive() for _ in range(100)] == words
    assert dialer.receive() is None


def test_a_killed_dialler_is_seen(
    listen: Any, dial: Any, child: Any, address: str, eventually: Eventually
) -> None:
    listener = listen(address)
    staying = dial(listener)
    _alive(staying, listener, eventually)
    process = child("dial", str(listener.endpoint))
    incoming = eventually(listener.receive)
    process.kill()
    assert eventually(listener.gone) == [incoming.source]
    assert eventually(lambda: not listener.send(incoming.identity, [b"x"]))
    _alive(staying, listener, eventually)


def test_a_killed_listener_is_seen(
    dial: Any, child: Any, address: str, folder: Path, eventually: Eventually, ended: Any
) -> None:
    process = child("listen", address)
    dialer = dial(Endpoint.parse(process.stdout.readline().strip()))
    dialer.send([b"x"])
    assert eventually(dialer.receive) == [b"x"]
    process.kill()
    assert "closed the connection, or it died" in ended(dialer)
    (folder / "s").unlink(missing_ok=True)  # the dead can't clear away after themselves


def test_a_stopped_dialler_is_dropped(
    listen: Any, child: Any, address: str, eventually: Eventually
) -> None:
    listener = listen(address, heartbeat_ms=1000)
    process = child("dial", str(listener.endpoint))
    source = eventually(listener.receive).source
    time.sleep(2.5)  # more than two limits: an idle peer that answers heartbeats is not dropped
    assert listener.gone() == []
    os.kill(process.pid, signal.SIGSTOP)
    assert eventually(listener.gone) == [source]


def test_a_stopped_listener_is_dropped(
    dial: Any, child: Any, address: str, folder: Path, eventually: Eventually, ended: Any
) -> None:
    process = child("listen", address)
    where = Endpoint.parse(process.stdout.readline().strip())
    dialer = dial(where, heartbeat_ms=1000)
    patient = dial(where)  # heartbeats are each side's own affair
    for one in (dialer, patient):
        one.send([b"x"])
        assert eventually(one.receive) == [b"x"]
    time.sleep(2.5)
    dialer.check()
    assert dialer.lost is None
    os.kill(process.pid, signal.SIGSTOP)
    assert "it died" in ended(dialer)
    patient.check()
    assert patient.lost is None
    os.kill(process.pid, signal.SIGCONT)
    patient.send([b"y"])
    assert eventually(patient.receive) == [b"y"]
    (folder / "s").unlink(missing_ok=True)


def test_nobody_dials_again(
    listen: Any, dial: Any, context: Context, address: str, eventually: Eventually, ended: Any
) -> None:
    listener = listen(address)
    dialer = dial(listener)
    _alive(dialer, listener, eventually)
    where = str(listener.endpoint)
    listener.close()
    ended(dialer)
    path = where.removeprefix("ipc://")
    if path != where:  # libzmq removes the name on its own thread
        eventually(lambda: not os.path.exists(path))
    successor = listen(where)  # the same path or port
    dialer.send([b"stale"])
    fresh = dial(successor)
    assert _alive(fresh, successor, eventually).frames == [b"there"]
    time.sleep(0.5)  # bounded: libzmq's own interval is 0.1 s
    dialer.check()
    assert dialer.descriptor == -1
    assert dialer.lost is not None
    assert successor.receive() is None


# --- who misbehaves --------------------------------------------------------------------------


def test_too_large_a_message_cuts_only_its_connection(
    listen: Any, dial: Any, address: str, eventually: Eventually, ended: Any
) -> None:
    listener = listen(address)
    honest, greedy = dial(listener), dial(listener)
    _alive(honest, listener, eventually)
    source = _alive(greedy, listener, eventually).source
    greedy.send([bytes(LARGEST_MESSAGE + 1)])
    assert eventually(listener.gone) == [source]
    ended(greedy)
    assert listener.receive() is None
    _alive(honest, listener, eventually)


def test_too_large_a_second_frame_leaves_no_first(
    listen: Any, dial: Any, address: str, eventually: Eventually
) -> None:
    listener = listen(address)
    honest, greedy = dial(listener), dial(listener)
    _alive(greedy, listener, eventually)
    greedy.send([b"first", bytes(LARGEST_MESSAGE + 1)])
    eventually(listener.gone)
    assert _alive(honest, listener, eventually).frames == [b"there"]


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.0\r\n\r\n" * 8, bytes(100), b"\xff" * 100, b"\xff" + bytes(8) + b"\x7f\x03"],
    ids=["http", "zeros", "ones", "half-a-greeting"],
)
def test_strangers_disturb_nobody(
    listen: Any, dial: Any, address: str, eventually: Eventually, data: bytes
) -> None:
    listener = listen(address)
    honest = dial(listener)
    _alive(honest, listener, eventually)
    where = listener.endpoint
    family = socket.AF_UNIX if where.scheme == "ipc" else socket.AF_INET
    for _ in range(3):
        with socket.socket(family) as stranger:
            stranger.connect(where.path if where.scheme == "ipc" else (where.host, where.port))
            stranger.sendall(data)
    _alive(honest, listener, eventually)
    assert listener.receive() is None


def test_a_server_that_speaks_something_else(dial: Any, ended: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialer = dial(Endpoint("tcp", host="127.0.0.1", port=server.getsockname()[1]))
        server.settimeout(LIMIT)
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"\xff" + b"\0" * 8 + b"\x7f\x03\0NOPE" + b"\0" * 48)
            assert ended(dialer)
    assert dialer.descriptor == -1


def test_a_reused_identity_takes_nothing_over(
    listen: Any, dial: Any, context: Context, address: str, eventually: Eventually
) -> None:
    listener = listen(address)
    sockets = [context.socket(zmq.DEALER) for _ in range(2)]
    try:
        for one in sockets:
            one.setsockopt(zmq.ROUTING_ID, b"same")
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.RCVTIMEO, int(LIMIT * 1000))
        owner, thief = sockets
        owner.connect(str(listener.endpoint))
        owner.send(b"mine")
        first = eventually(listener.receive)
        assert (first.identity, first.frames) == (b"same", [b"mine"])
        thief.connect(str(listener.endpoint))
        thief.send(b"stolen")
        honest = dial(listener)
        assert _alive(honest, listener, eventually).frames == [b"there"]
        assert listener.send(b"same", [b"for the owner"])
        assert owner.recv() == b"for the owner"
        owner.send(b"still mine")
        again = eventually(listener.receive)
        assert (again.source, again.frames) == (first.source, [b"still mine"])
        assert listener.receive() is None
        assert thief.poll(200) == 0
    finally:
        for one in sockets:
            one.close()


# --- addresses -------------------------------------------------------------------------------


def test_a_free_port_and_its_name(listen: Any) -> None:
    listener = listen("tcp://127.0.0.1:*")
    assert listener.endpoint.host == "127.0.0.1"
    assert 0 < listener.endpoint.port < 65536


def test_ipv6(listen: Any, dial: Any, eventually: Eventually) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError as exc:
        pytest.skip(f"no IPv6 here: {exc}")
    listener = listen("tcp://[::1]:*")
    assert listener.endpoint.host == "::1"
    _alive(dial(listener), listener, eventually)


def test_the_first_free_port_of_a_range(listen: Any, dial: Any, eventually: Eventually) -> None:
    low = _free_ports(3)
    listeners = [listen(f"tcp://127.0.0.1:{low}-{low + 2}") for _ in range(3)]
    assert [listener.endpoint.port for listener in listeners] == [low, low + 1, low + 2]
    for listener in listeners:
        assert listener.endpoint.host == "127.0.0.1"
        _alive(dial(listener), listener, eventually)
    with pytest.raises(ConfigurationError, match=f"127.0.0.1:{low}-{low + 2}.*in use"):
        listen(f"tcp://127.0.0.1:{low}-{low + 2}")


def _free_ports(count: int) -> int:
    """The first of some neighbouring ports that are free now."""
    for low in range(20_000 + os.getpid() % 10_000, 60_000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(low, low + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return low
    pytest.fail("no free ports")


@pytest.mark.parametrize("other", ["zmq", "tcp"])
def test_a_port_in_use(listen: Any, other: str) -> None:
    with contextlib.ExitStack() as stack:
        if other == "zmq":
            port = listen("tcp://127.0.0.1:*").endpoint.port
        else:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"can't listen on .*:{port}.*in use"):
            listen(f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///nowhere/at/all/s",
        "ipc:///proc/version/s",
        "ipc:///" + "x" * 200,
        "tcp://192.0.2.1:*",  # reserved for documentation: no interface has it
        "tcp://127.0.0.1:9-5",
        "tcp://127.0.0.1",
        "gopher://127.0.0.1:70",
        "nonsense",
        "",
    ],
)
def test_an_address_that_can_not_be_bound(listen: Any, address: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        listen(address)
    assert address.rpartition(":")[2] in str(caught.value)


@pytest.mark.parametrize(
    "endpoint",
    [
        Endpoint("ipc", path="/" + "x" * 200),
        Endpoint("tcp", host="127.0.0.1", port=0),
        Endpoint("emulated"),
    ],
    ids=["long", "no-port", "emulated"],
)
def test_an_endpoint_that_can_not_be_dialled(dial: Any, endpoint: Endpoint) -> None:
    with pytest.raises(ConfigurationError, match="can't dial"):
        dial(endpoint)


def test_a_socket_file_lives_as_long_as_its_listener(
    listen: Any, folder: Path, eventually: Eventually
) -> None:
    path = folder / "s"
    listener = listen(f"ipc://{path}")
    assert path.is_socket()
    listener.close()
    assert eventually(lambda: not path.exists())


def test_many_sockets(context: Context, listen: Any, dial: Any) -> None:
    # ZeroMQ's own limit is 1,023 sockets; a listener with its monitor takes three.
    assert context.get(zmq.MAX_SOCKETS) > 10_000


WITHOUT_DESCRIPTORS = """
import os, sys, time
from flyt.errors import ConfigurationError
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.sockets import Dialer, Listener, open_context

kind, address = sys.argv[1:]

def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True

def count():
    return sum(map(is_open, range(64)))

context = open_context()
first = Listener(context, "tcp://127.0.0.1:*")  # libzmq's own threads and descriptors are there now
taken, refused = [], 0
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
while True:
    before = count()
    try:
        if kind == "Dialer":
            made = Dialer(context, Endpoint.parse(address))
        else:
            made = Listener(context, address)
    except ConfigurationError as exc:
        assert "Too many open files" in str(exc), exc
        refused += 1
        limit = time.monotonic() + 10
        while count() != before:  # a thread of libzmq's closes them
            assert time.monotonic() < limit, (before, count())
            time.sleep(0.001)
        os.close(taken.pop())
    else:
        break
for descriptor in taken:
    os.close(descriptor)
made.close()
first.close()
context.term()
print(refused)
"""


@pytest.mark.parametrize("kind", ["Dialer", "Listener"])
def test_without_descriptors_nothing_is_left_open(kind: str, folder: Path) -> None:
    """Each descriptor that is missing is another place to fail at; then the context still ends."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS, kind, f"ipc://{folder}/s"],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 2


def test_many_come_and_go_at_once(context: Context) -> None:
    """The addresses of their monitors are let go of in libzmq's own time."""
    endpoint = Endpoint.parse("ipc:///nowhere")
    for _ in range(300):
        Dialer(context, endpoint).close()
