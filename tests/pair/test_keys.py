# SPDX-License-Identifier: Apache-2.0
"""A daemon with CURVE keys: who gets a session over TCP, with whom it shares, who can listen in."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flyt.frontend.greeting import ask
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.keys import ClientKeys, make, read_pair
from flyt.rpc.patience import Deadline
from flyt.rpc.sockets import Dialer, open_context
from tests.faults.zmtp import Zmtp
from tests.pair.raw import LIMIT, SILENCE, eventually, hear, session_of, status

COPY = """
import sys
import numpy as np
import flyt, flyt as cudart
source = np.tile(np.frombuffer(bytes.fromhex(sys.argv[1]), np.uint8), 50_000)
back = np.zeros_like(source)
K = cudart.cudaMemcpyKind
error, p = cudart.cudaMalloc(source.nbytes)
assert error == 0, flyt.last_failure()
answers = [
    cudart.cudaMemcpy(p, source, source.nbytes, K.cudaMemcpyHostToDevice),
    cudart.cudaMemcpy(back, p, source.nbytes, K.cudaMemcpyDeviceToHost),
]
assert not any(a[0] for a in answers), answers
assert (back == source).all()
print("right", flush=True)
sys.stdin.readline()
"""

CONNECT = """
import time, flyt
start = time.monotonic()
try:
    flyt.connect()
except flyt.FlytError as exc:
    print(type(exc).__name__, time.monotonic() - start < 15, exc)
else:
    print("connected")
print(int(flyt.cudaMalloc(4096)[0]))
"""

PATTERN = bytes(range(200, 232))
NO_DEVICE = 100


@dataclasses.dataclass
class Keys:
    """The files of a server and of three clients, two of them authorized."""

    folder: Path
    server: str
    public: dict[str, bytes]

    @property
    def options(self) -> list[str]:
        return ["--server-key", self.server, "--authorized-keys", str(self.folder / "authorized")]

    def env(self, client: str, server: str = "server") -> dict[str, str]:
        return {
            "FLYT_KEY": str(self.folder / f"{client}.key_secret"),
            "FLYT_SERVER_KEY": str(self.folder / f"{server}.key"),
        }

    def of(self, client: str) -> ClientKeys:
        env = self.env(client)
        return ClientKeys(read_pair(env["FLYT_KEY"], "FLYT_KEY"), self.public["server"])

    def secrets(self) -> list[bytes]:
        return [
            read_pair(str(path), "x").secret for path in sorted(self.folder.glob("*.key_secret"))
        ]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    folder.chmod(0o700)
    public = {}
    for name in ("server", "anna", "bert", "stranger"):
        *_, public[name] = make(str(folder), name)
    (folder / "authorized").mkdir(mode=0o700)
    for name in ("anna", "bert"):
        (folder / "authorized" / f"{name}.key").write_bytes((folder / f"{name}.key").read_bytes())
    return Keys(folder, str(folder / "server.key_secret"), public)


@pytest.fixture(scope="module", params=[[], ["--single-port"]], ids=["ports", "single port"])
def served(module_backend: Callable[..., Any], keys: Keys, request: Any) -> Any:
    """Endpoints: ipc first, then TCP."""
    number = len(request.param)
    listen = [f"ipc:///tmp/flyt-keys-{os.getpid()}-{number}.sock", "tcp://127.0.0.1:*"]
    extra = [*keys.options, *request.param, "--log-level", "DEBUG"]
    return module_backend(listen=listen, extra=extra)


def tcp_of(served: Any) -> dict[str, str]:
    return {"FLYT_BACKEND": served.endpoints[1]}


# --- who comes in ---------------------------------------------------------------------------------


def test_a_known_key_has_a_session_and_ipc_needs_none(
    served: Any, keys: Keys, start_client: Callable[..., Any]
) -> None:
    ours = start_client(COPY, served, PATTERN.hex(), env=tcp_of(served) | keys.env("anna"))
    local = start_client(COPY, served, PATTERN.hex())
    for client in (ours, local):
        assert client.stdout.readline() == "right\n"
    entries = [session_of(served, client.pid) for client in (ours, local)]
    assert [e["principal"] for e in entries if e is not None] == [
        f"key {keys.public['anna'].decode()}",
        f"uid {os.getuid()}",
    ]


def test_two_keys_never_share_a_worker(
    served: Any, keys: Keys, start_client: Callable[..., Any]
) -> None:
    names = ["anna", "bert", "anna"]
    clients = [
        start_client(COPY, served, PATTERN.hex(), env=tcp_of(served) | keys.env(name))
        for name in names
    ]
    workers = []
    for client in clients:
        assert client.stdout.readline() == "right\n"
        entry = session_of(served, client.pid)
        assert entry is not None
        workers.append(entry["worker"])
    assert workers[0] == workers[2] != workers[1]


@pytest.mark.parametrize(
    ("client", "server", "words"),
    [
        ("stranger", "server", "does not know this client's key"),
        ("anna", "bert", "another key than the one in FLYT_SERVER_KEY"),
        ("", "", "set FLYT_KEY and FLYT_SERVER_KEY"),
    ],
    ids=["unknown key", "wrong server", "no key"],
)
def test_others_fail_clearly_and_the_handshake_never_hears_of_them(
    served: Any,
    keys: Keys,
    run_client: Callable[..., Any],
    client: str,
    server: str,
    words: str,
) -> None:
    garbage, log = status(served)["garbage"], len(served.log)
    env = keys.env(client, server) if client else {}
    done = run_client(CONNECT, served, env=tcp_of(served) | env)
    first, second = done.stdout.splitlines()
    assert first.startswith("HandshakeError True"), done.stdout + done.stderr
    assert words in first
    assert second == str(NO_DEVICE)
    assert status(served)["garbage"] == garbage
    assert "refusing" not in served.log[log:]


def test_words_before_the_keys_reach_nobody(served: Any) -> None:
    """A peer that speaks ZeroMQ without CURVE, and one that does not even do that."""
    garbage = status(served)["garbage"]
    where = Endpoint.parse(served.endpoints[1])
    with pytest.raises(ConnectionResetError), Zmtp(where) as rude:
        rude.send(b"no HELLO")
    with socket.create_connection((where.host, where.port)) as ruder:
        ruder.sendall(os.urandom(10_000))
    assert not eventually(lambda: status(served)["garbage"] != garbage, SILENCE)


def test_another_key_may_not_attach_to_a_session_not_even_with_its_token(
    served: Any, keys: Keys
) -> None:
    context = open_context()
    endpoint = Endpoint.parse(served.endpoints[1])
    hello = m.Hello(m.PROTOCOL_VERSION, (2,), os.getpid(), "anna")
    try:
        welcome = ask(context, endpoint, hello, Deadline.after(LIMIT), keys.of("anna"))
        assert isinstance(welcome, m.Welcome)
        where = endpoint.session(welcome.port, welcome.path)
        attach = m.COMMANDS.encode(m.Attach(1, welcome.token, True, 0, 0, (), 0))
        for thief in (keys.of("bert"), None):
            with contextlib.closing(Dialer(context, where, keys=thief)) as dialer:
                dialer.send([attach])
                assert not hear(dialer, SILENCE)
        with contextlib.closing(Dialer(context, where, keys=keys.of("anna"))) as dialer:
            dialer.send([attach])
            answer = hear(dialer, LIMIT)
            assert answer is not None
            assert isinstance(m.REPLIES.decode(answer[0]), m.Credit | m.Done | m.Result)
    finally:
        context.term()


# --- secrets --------------------------------------------------------------------------------------


def test_secrets_are_nowhere_to_be_seen(
    served: Any, keys: Keys, start_client: Callable[..., Any]
) -> None:
    client = start_client(COPY, served, PATTERN.hex(), env=tcp_of(served) | keys.env("bert"))
    assert client.stdout.readline() == "right\n"
    shown = served.log.encode()
    for pid in [served.pid, *served.descendants(), client.pid]:
        for name in ("cmdline", "environ"):
            shown += Path(f"/proc/{pid}/{name}").read_bytes()
    secrets = keys.secrets()
    assert len(secrets) == 4
    assert not [secret for secret in secrets if secret in shown]


# --- listening in ---------------------------------------------------------------------------------


class Eavesdropper:
    """Passes connections to 127.0.0.2 on to the same port of 127.0.0.1, and keeps every byte."""

    def __init__(self, *ports: int) -> None:
        self.heard: list[bytes] = []
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        for port in ports:
            listening = socket.create_server(("127.0.0.2", port))
            self._sockets.append(listening)
            self._start(self._accept, listening, port)

    def _start(self, *call: Any) -> None:
        self._threads.append(threading.Thread(target=call[0], args=call[1:], daemon=True))
        self._threads[-1].start()

    def _accept(self, listening: socket.socket, port: int) -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", port))
            self._sockets += [client, server]
            self._start(self._pass, client, server)
            self._start(self._pass, server, client)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                self.heard.append(data)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LIMIT)
        for one in self._sockets:
            one.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@pytest.fixture
def listening_in() -> Iterator[Callable[..., Eavesdropper]]:
    started: list[Eavesdropper] = []

    def start(*ports: int) -> Eavesdropper:
        started.append(Eavesdropper(*ports))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.parametrize("single", [False, True], ids=["ports", "single port"])
@pytest.mark.parametrize("secure", [True, False], ids=["keys", "insecure"])
def test_who_listens_in_reads_nothing(
    backend: Callable[..., Any],
    run_client: Callable[..., Any],
    keys: Keys,
    listening_in: Callable[..., Eavesdropper],
    *,
    secure: bool,
    single: bool,
    device_kind: str,
) -> None:
    session_port = free_port()
    extra = ["--no-region", "--session-ports", f"{session_port}-{session_port}"]
    extra += ["--single-port"] if single else []
    extra += keys.options if secure else []
    served = backend(listen=["tcp://127.0.0.1:*"], extra=extra)
    port = Endpoint.parse(served.endpoint).port
    ear = listening_in(port, *([] if single else [session_port]))
    env = {"FLYT_BACKEND": f"tcp://127.0.0.2:{port}", **(keys.env("anna") if secure else {})}
    done = run_client(COPY, served, PATTERN.hex(), env=env)
    assert done.stdout == "right\n", done.stderr
    heard = b"".join(ear.heard)
    assert len(heard) > 2 * 50_000 * len(PATTERN), "the bytes did not pass by"
    assert (PATTERN in heard) == (not secure)
    name = b"Flyt emulated device" if device_kind == "emulated" else b"NVIDIA"
    assert (name in heard) == (not secure), "WELCOME's snapshot names the device"
