# SPDX-License-Identifier: Apache-2.0
"""The daemon's side of the ivshmem protocol, with a plain socket in QEMU's place."""

from __future__ import annotations

import os
import resource
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from flyt.backend.doorbell import BELLS, Doorbell, free_bell
from flyt.backend.loop import EventLoop
from flyt.backend.options import Options
from flyt.errors import ConfigurationError
from flyt.shm.layout import MIB
from flyt.shm.region import Region

SIZE = 4 * MIB
TURNS_SECONDS = 0.05
"""One turn of the loop does what is to be done; nothing else comes."""


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: the path of a socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="flyt-") as name:
        yield Path(name)


@pytest.fixture
def region(folder: Path) -> Iterator[Region]:
    with closing(Region.create_or_adopt(str(folder / "region"), SIZE)) as made:
        yield made


class Daemon:
    """A doorbell and the loop that serves it."""

    def __init__(self, folder: Path, region: Region) -> None:
        self.loop = EventLoop()
        self.path = str(folder / "bell")
        self.doorbell = Doorbell(self.loop, self.path, region)

    def turn(self) -> None:
        self.loop.turn(TURNS_SECONDS)

    def connect(self) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(self.path)
        peer.setblocking(False)
        self.turn()
        return peer


@pytest.fixture
def daemon(folder: Path, region: Region) -> Iterator[Daemon]:
    made = Daemon(folder, region)
    yield made
    made.doorbell.close()
    assert not os.path.exists(made.path)
    assert not os.path.exists(made.path + ".lock")


@contextmanager
def descriptors(fds: list[int]) -> Iterator[None]:
    try:
        yield
    finally:
        for fd in fds:
            os.close(fd)


def receive(peer: socket.socket) -> tuple[int, list[int]]:
    """One message, as QEMU reads it: eight bytes, and the descriptors with them."""
    data, fds, _, _ = socket.recv_fds(peer, 8, 2)
    return struct.unpack("<q", data)[0], fds


def test_what_qemu_is_told(daemon: Daemon, region: Region) -> None:
    with daemon.connect() as peer:
        assert receive(peer) == (0, [])  # the protocol's version
        assert receive(peer) == (0, [])  # its own number
        number, (memory,) = receive(peer)
        with descriptors([memory]):
            assert number == -1
            assert os.path.sameopenfile(memory, region.fd)
        for expected in range(1, BELLS + 1):
            number, (bell,) = receive(peer)
            with descriptors([bell]):
                assert number == expected
                os.eventfd_write(bell, 1)
                # What QEMU signals for this peer is what the workers inherit, and no other.
                heard = [i for i, fd in enumerate(daemon.doorbell.bells, 1) if rang(fd)]
                assert heard == [expected]
        with pytest.raises(BlockingIOError):
            receive(peer)


def rang(fd: int) -> bool:
    try:
        return os.eventfd_read(fd) > 0
    except BlockingIOError:
        return False


def test_nobody_else_may_connect(daemon: Daemon) -> None:
    mode = os.stat(daemon.path).st_mode
    assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)


def test_one_guest_at_a_time_and_then_the_next(daemon: Daemon) -> None:
    with daemon.connect(), daemon.connect() as second:
        assert second.recv(8) == b"", "two guests would share one region"
    daemon.turn()  # the first has gone
    with daemon.connect() as third:
        assert len(third.recv(8)) == 8


@pytest.mark.parametrize("said", [b"x", bytes(10_000)], ids=["a-byte", "a-flood"])
def test_who_speaks_is_no_qemu(daemon: Daemon, said: bytes) -> None:
    with daemon.connect() as peer:
        peer.sendall(said)
        daemon.turn()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            peer.sendall(said)
    with daemon.connect() as next_one:
        assert len(next_one.recv(8)) == 8


def test_who_leaves_at_once_harms_nothing(daemon: Daemon) -> None:
    for _ in range(5):
        daemon.connect().close()
    daemon.turn()
    with daemon.connect() as peer:
        assert len(peer.recv(8)) == 8


def test_who_finds_no_descriptor_left_is_let_in_later(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flyt.backend.doorbell.AGAIN_SECONDS", 0.2)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(daemon.path)
        peer.setblocking(False)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            daemon.turn()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        # A loop that watches nothing at all would not wait.
        idle = os.eventfd(0)
        with descriptors([idle]):
            daemon.loop.watch(idle, lambda: None)
            begun = time.monotonic()
            daemon.loop.turn(60.0)  # it waits, and asks no more meanwhile
            daemon.loop.unwatch(idle)
        assert time.monotonic() - begun > 0.1
        daemon.turn()
        assert len(peer.recv(8)) == 8


def test_a_second_daemon_is_refused(daemon: Daemon, region: Region) -> None:
    with pytest.raises(ConfigurationError, match=r"another flyt-backend .* another --doorbell"):
        Doorbell(EventLoop(), daemon.path, region)
    with daemon.connect() as peer:
        assert len(peer.recv(8)) == 8


def test_a_killed_daemons_socket_is_replaced_but_no_file(folder: Path, region: Region) -> None:
    path = folder / "bell"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    Doorbell(EventLoop(), str(path), region).close()
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match="in use"):
        Doorbell(EventLoop(), str(path), region)
    assert path.read_text() == "mine"


def test_qemu_takes_powers_of_two_only(folder: Path) -> None:
    with (
        closing(Region.create_or_adopt(str(folder / "odd"), 3 * MIB)) as odd,
        pytest.raises(ConfigurationError, match="power of two"),
    ):
        Doorbell(EventLoop(), str(folder / "bell"), odd)
    assert os.listdir(folder) == ["odd"]


def test_bells_are_given_lowest_first_and_run_out() -> None:
    assert free_bell([]) == 1
    assert free_bell([0, 1, 3, 0]) == 2
    assert free_bell(range(1, BELLS + 1)) == 0


@pytest.mark.parametrize("path", ["relative", "/" + "x" * 107])
def test_paths_that_no_socket_can_have(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--doorbell .*absolute"):
        Options(listen=("tcp://127.0.0.1:0",), doorbell=path)


def test_a_doorbell_without_a_region() -> None:
    with pytest.raises(ConfigurationError, match="--no-region"):
        Options(listen=("tcp://127.0.0.1:0",), region=None, doorbell="/run/bell")
