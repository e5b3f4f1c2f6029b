# SPDX-License-Identifier: Apache-2.0
"""A session that is woken by its doorbell, with a plain socket in QEMU's place: nothing gets lost,
and who rings for nothing gets little for it."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from flyt.rpc import messages as m
from flyt.rpc.handshake import Feature
from flyt.shm import ring
from flyt.shm.ring import RingReader, RingWriter
from tests.pair.raw import LIMIT, RawClient, eventually, status

pytestmark = pytest.mark.skipif(
    ring.usable() is None,
    reason="a doorbell wakes who sleeps at a ring: --no-ring, or no C compiler at the install",
)

ASLEEP_SECONDS = 0.05
"""In which a session's thread falls asleep: a hundred times what it takes."""


class Qemu:
    """What the daemon told QEMU: an eventfd for each peer."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(LIMIT)
        self._socket.connect(path)
        self.bells: dict[int, int] = {}
        for _ in range(3 + 64):
            data, fds, _, _ = socket.recv_fds(self._socket, 8, 1)
            (number,) = struct.unpack("<q", data)
            if number == -1:
                os.close(fds[0])
            elif fds:
                self.bells[number] = fds[0]

    def ring(self, peer: int) -> None:
        os.eventfd_write(self.bells[peer], 1)

    def close(self) -> None:
        self._socket.close()
        for fd in self.bells.values():
            os.close(fd)


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="flyt-")
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def served(folder: str, module_backend: Callable[..., Any]) -> Any:
    return module_backend(size="64M", extra=["--doorbell", f"{folder}/bell"])


@pytest.fixture
def qemu(served: Any, folder: str) -> Iterator[Qemu]:
    connected = Qemu(f"{folder}/bell")
    yield connected
    connected.close()


class Client(RawClient):
    """A client with rings, which wakes nobody unless it is told to."""

    def __init__(self, served: Any) -> None:
        super().__init__(served.endpoint, features=(1, 2, 3, Feature.DOORBELL))

    def attach_with_rings(self) -> m.Result:
        result = self.attach(ring=True)
        assert (result.status, len(result.values)) == (0, 2), result
        native = ring.native()
        assert native is not None
        assert self.window is not None
        self.commands: RingWriter
        self.replies: RingReader
        self.commands, self.replies = ring.frontend_rings(native, self.window.base)
        return result

    def put(self) -> tuple[int, bool]:
        """A PING into the ring: its number, and whether the backend's thread sleeps."""
        self._last += 1
        return self._last, self.commands.write(m.COMMANDS.encode(m.Ping(self._last)))

    def answered(self, number: int, seconds: float = LIMIT) -> bool:
        """Whether the ring brings the answer, plain success."""

        def look() -> bool:
            entry = self.replies.read()
            if entry is None:
                return False
            reply = m.REPLIES.decode(entry)
            first = reply.first if isinstance(reply, m.Done) else reply.id
            return bool(first == number)

        return eventually(look, seconds)


def test_a_ring_wakes_the_session_and_nothing_else_is_needed(served: Any, qemu: Qemu) -> None:
    with Client(served) as client:
        assert client.welcome.bell > 0
        qemu.ring(client.welcome.bell)
        result = client.attach_with_rings()
        assert result.values[1] == 1
        slept = 0
        for _ in range(20):
            time.sleep(ASLEEP_SECONDS)
            number, asleep = client.put()
            if asleep:
                slept += 1
                qemu.ring(client.welcome.bell)
            assert client.answered(number)
        assert slept > 10


def test_bells_reach_every_worker(backend: Callable[..., Any], folder: str) -> None:
    """With a worker for each session, started ahead."""
    path = f"{folder}/process"
    served = backend(size="64M", extra=["--doorbell", path, "--isolation", "process"])
    with closing(Qemu(path)) as qemu, Client(served) as one, Client(served) as other:
        workers = {entry["worker"] for entry in status(served)["sessions"]}
        assert len(workers) == 2
        for client in (one, other):
            qemu.ring(client.welcome.bell)
            assert client.attach_with_rings().values[1] == 1
        time.sleep(ASLEEP_SECONDS)
        for client in (one, other):
            number, asleep = client.put()
            if asleep:
                qemu.ring(client.welcome.bell)
            assert client.answered(number)


def test_without_a_ring_it_sleeps_on(served: Any, qemu: Qemu) -> None:
    """So it was the ring that woke it in the test before."""
    with Client(served) as client:
        qemu.ring(client.welcome.bell)
        assert client.attach_with_rings().values[1] == 1
        time.sleep(ASLEEP_SECONDS)
        number, asleep = client.put()
        assert asleep
        assert not client.answered(number, 0.3)
        client.dialer.send([m.KICK])  # a lost ring costs time, never the command
        assert client.answered(number)


def test_a_doorbell_that_leads_nowhere_is_noticed(served: Any, qemu: Qemu) -> None:
    with Client(served) as client:
        result = client.attach_with_rings()  # without a ring before
        assert result.values[1] == 0
        time.sleep(ASLEEP_SECONDS)
        number, _ = client.put()
        client.dialer.send([m.KICK])
        assert client.answered(number)


def test_a_ring_for_the_one_before_is_none_for_its_heir(served: Any, qemu: Qemu) -> None:
    for bell in qemu.bells:
        qemu.ring(bell)
    with Client(served) as heir:
        assert heir.attach_with_rings().values[1] == 0


def test_each_session_has_a_bell_of_its_own(served: Any, qemu: Qemu) -> None:
    with Client(served) as one, Client(served) as other:
        assert one.welcome.bell != other.welcome.bell
        qemu.ring(other.welcome.bell)
        assert one.attach_with_rings().values[1] == 0
        assert other.attach_with_rings().values[1] == 1


def test_who_does_not_know_doorbells_gets_none(served: Any) -> None:
    with RawClient(served.endpoint) as client:
        assert client.welcome.bell == 0


def test_who_rings_without_end_is_served_all_the_same(served: Any, qemu: Qemu) -> None:
    """What it costs is measured in tests/backend/test_resting.py."""
    over = threading.Event()

    def ring_on() -> None:
        while not over.is_set():
            qemu.ring(client.welcome.bell)

    with Client(served) as client, Client(served) as other:
        for one in (client, other):
            qemu.ring(one.welcome.bell)
            assert one.attach_with_rings().values[1] == 1
        ringer = threading.Thread(target=ring_on)
        ringer.start()
        try:
            time.sleep(0.3)
            for one in (client, other):
                number, asleep = one.put()
                if asleep:
                    qemu.ring(one.welcome.bell)
                assert one.answered(number)
        finally:
            over.set()
            ringer.join()
