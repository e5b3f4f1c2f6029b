# SPDX-License-Identifier: Apache-2.0
"""Peers: real child processes at the other end of a connection, on the emulated driver."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from flyt import ipc

PEER_LIMIT = 60.0
"""Seconds that a peer may take for a line or to end: it bounds a hang only."""

PRELUDE = """
import os, sys
import numpy as np
from flyt import ipc
conn = ipc.Connection(int(sys.argv[1]))
def say(*words): print(*words, flush=True)
def hear(): return sys.stdin.readline().strip()
"""


class Peer:
    """A child process and the connection to it.

    Attributes
    ----------
    conn : flyt.ipc.Connection
    process : subprocess.Popen
    """

    def __init__(self, code: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        self._heard = b""
        ours, theirs = ipc.pair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PRELUDE + code, str(theirs.fileno()), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "FLYT_IPC_DRIVER": "emulated", **(env or {})},
            )
        self.conn = ipc.Connection(ours)

    def hear(self) -> str:
        """The peer's next line."""
        assert self.process.stdout is not None
        while b"\n" not in self._heard:
            if not select.select([self.process.stdout], [], [], PEER_LIMIT)[0]:
                pytest.fail("the peer says nothing")
            if not (chunk := os.read(self.process.stdout.fileno(), 65_536)):
                pytest.fail(f"the peer ended with {self.end()} and says nothing")
            self._heard += chunk
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode().strip()

    def say(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> int:
        return self.process.wait(PEER_LIMIT)

    def dispose(self) -> None:
        self.conn.abort()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PEER_LIMIT)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


@pytest.fixture(scope="session", autouse=True)
def emulated() -> None:
    """This process's driver; children get it by their environment."""
    ipc.set_driver(_DRIVER)


_DRIVER = ipc.TwinDriver()


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """``peer(code, *arguments, env=None)``: run code that has ``conn``, ``say`` and ``hear``."""
    started: list[Peer] = []

    def start(code: str, *arguments: str, env: dict[str, str] | None = None) -> Peer:
        started.append(Peer(code, *arguments, env=env))
        return started[-1]

    yield start
    for one in started:
        one.dispose()


@pytest.fixture
def both() -> Iterator[tuple[ipc.Connection, ipc.Connection]]:
    """Both ends of a connection in this process."""
    left, right = (ipc.Connection(sock) for sock in ipc.pair())
    yield left, right
    left.abort()
    right.abort()


class Usage:
    """What a process has open, mapped and resident, read from /proc."""

    def __init__(self, pid: int) -> None:
        self.descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        with open(f"/proc/{pid}/maps") as maps:
            self.mappings = len(maps.readlines())
        with open(f"/proc/{pid}/statm") as statm:
            self.resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        self.threads = len(os.listdir(f"/proc/{pid}/task"))


@pytest.fixture
def usage() -> Callable[[int], Usage]:
    return Usage
