# SPDX-License-Identifier: Apache-2.0
"""A backend's end of a session's socket, in the hands of the test."""

from __future__ import annotations

import collections
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from flyt.frontend.connection import Connection
from flyt.frontend.inflight import Pending
from flyt.rpc import messages as m
from flyt.rpc.sockets import Listener, open_context

LIMIT = 20.0
"""Seconds; a bound on hangs, nothing is timed."""

CREDITS = 64
HEARTBEAT_MS = 30_000


def until_refused(address: str) -> None:
    """ZeroMQ closes a socket on a thread of its own; until then somebody does listen."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        family = socket.AF_UNIX if scheme == "ipc" else socket.AF_INET
        with socket.socket(family) as probe:
            try:
                probe.connect(rest if scheme == "ipc" else (host, int(port)))
            except ConnectionResetError:
                pass  # it is being closed
            except (ConnectionRefusedError, FileNotFoundError):
                return
        time.sleep(0.01)
    pytest.fail(f"something still listens at {address}")


class Server:
    """A real ROUTER that takes commands and answers them when the test says so.

    Either the test drives it (`take`, `answer`), or a thread does (`serve`); never both.
    """

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.listener = Listener(context, address)
        self.taken = 0
        self.closed = False
        self._identity = b""
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        self._failures: list[BaseException] = []

    def poll(self, seconds: float = 0.0) -> tuple[Any, list[bytes]] | None:
        """The next command and its further frames, or None."""
        poller = zmq.Poller()
        poller.register(self.listener.pollables[0], zmq.POLLIN)
        deadline = time.monotonic() + seconds
        while (incoming := self.listener.receive()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            poller.poll(left * 1000)
        self._identity = incoming.identity
        self.taken += 1
        return m.COMMANDS.decode(incoming.frames[0]), incoming.frames[1:]

    def take(self, count: int = 1) -> list[Any]:
        """The next commands; all must come."""
        commands = []
        for _ in range(count):
            got = self.poll(LIMIT)
            assert got is not None, f"only {len(commands)} of {count} commands came"
            commands.append(got[0])
        return commands

    def answer(
        self,
        command: Any,
        status: int = 0,
        values: tuple[int, ...] = (),
        text: str = "",
        *,
        taken: int | None = None,
        payload: bytes | None = None,
    ) -> None:
        taken = self.taken if taken is None else taken
        self.say(m.Result(command.id, status, taken, values, text), payload)

    def say(self, message: Any, payload: bytes | None = None) -> None:
        frames = [m.REPLIES.encode(message)]
        self.raw(frames if payload is None else [*frames, payload])

    def raw(self, frames: list[bytes]) -> None:
        assert self.listener.send(self._identity, frames)

    def serve(self, handle: Callable[[list[tuple[Any, list[bytes]]]], None]) -> None:
        """On a thread of its own: give ``handle`` all the commands that are there, again and
        again until the end, also when there are none."""

        def run() -> None:
            poller = zmq.Poller()
            for source in (self.listener.pollables[0], self._stop):
                poller.register(source, zmq.POLLIN)
            try:
                while self._stop not in dict(poller.poll(5)):
                    batch = []
                    while (got := self.poll()) is not None:
                        batch.append(got)
                    handle(batch)
            except BaseException as exc:  # noqa: BLE001 - handed to the test's thread
                self._failures.append(exc)

        self._thread = threading.Thread(target=run, name="test-server")
        self._thread.start()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._thread is not None:
            os.eventfd_write(self._stop, 1)
            self._thread.join(LIMIT)
        os.close(self._stop)
        self.listener.close()
        until_refused(str(self.listener.endpoint))
        for failure in self._failures:
            raise failure


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = open_context()
    yield context
    context.term()


@pytest.fixture(params=["ipc", "tcp"])
def server(request: pytest.FixtureRequest, context: zmq.Context[Any]) -> Iterator[Server]:
    # Not tmp_path: its name may exceed the 107 bytes that a socket's path can have.
    folder = Path(tempfile.mkdtemp(prefix="flyt-"))
    address = f"ipc://{folder}/s" if request.param == "ipc" else "tcp://127.0.0.1:*"
    server = Server(context, address)
    yield server
    try:
        server.close()
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def connect(context: zmq.Context[Any], server: Server) -> Iterator[Callable[..., Connection]]:
    """``connect(heartbeat_ms=…, credits=…)``: a connection to the server."""
    made: list[Connection] = []

    def make(*, heartbeat_ms: int = HEARTBEAT_MS, credits: int = CREDITS) -> Connection:  # noqa: A002
        made.append(Connection(context, server.listener.endpoint, heartbeat_ms, credits))
        return made[-1]

    yield make
    for connection in made:
        connection.close()


@pytest.fixture
def connection(connect: Callable[..., Connection]) -> Connection:
    return connect()


@pytest.fixture
def led(connection: Connection, server: Server, background: Background) -> tuple[Pending, Any]:
    """A command that another thread waits for, and leads: as it was sent, and as it came."""
    pending = connection.submit(m.Ping)
    background.start(connection.wait, pending)
    (command,) = server.take()
    deadline = time.monotonic() + LIMIT
    while not connection.room.is_led:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return pending, command


class Background:
    """Functions on threads; what they raise or return is the test's to look at."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.results: collections.deque[Any] = collections.deque()

    def start(self, function: Callable[..., Any], *arguments: Any) -> threading.Thread:
        def run() -> None:
            try:
                self.results.append(function(*arguments))
            except BaseException as exc:  # noqa: BLE001 - handed to the test's thread
                self.results.append(exc)

        thread = threading.Thread(target=run, name="test-background")
        self._threads.append(thread)
        thread.start()
        return thread

    def finish(self) -> list[Any]:
        """What all of them returned or raised, in the order of their end."""
        for thread in self._threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), "a thread hangs"
        self._threads.clear()
        results = list(self.results)
        self.results.clear()
        return results


@pytest.fixture
def background() -> Iterator[Background]:
    background = Background()
    yield background
    background.finish()
