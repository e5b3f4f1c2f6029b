# SPDX-License-Identifier: Apache-2.0
"""`Peer`: the second process of an experiment, asked over a pair of sockets.

A request and its answer are one packet each: JSON, and the descriptors that go with it. The process
at the other end runs `flyt.ipc.study.second`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flyt.errors import DeviceError, PeerLost, PeerTimeout, SharingError
from flyt.ipc import sockets

if TYPE_CHECKING:
    from typing_extensions import Self

PACKET_BYTES = 65_536
MAX_DESCRIPTORS = 16
LIMIT = 30.0
"""Seconds for an answer: a first one waits for Python and a context, which take 1 to 3."""

END_LIMIT = 5.0
"""Seconds for the process to end by itself."""


def send(sock: socket.socket, content: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """One packet."""
    socket.send_fds(sock, [json.dumps(content).encode()], list(fds))


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next packet; the caller closes its descriptors. PeerLost at the end."""
    octets, fds, flags, _ = socket.recv_fds(sock, PACKET_BYTES, MAX_DESCRIPTORS)
    if not octets or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise PeerLost("the other process of the experiment has ended")
    content = json.loads(octets)
    return content, fds


class Peer:
    """A second process, with a driver of its own.

    Parameters
    ----------
    module : str
        Name of the module of the study whose ``JOBS`` it does.
    """

    def __init__(self, module: str) -> None:
        ours, theirs = sockets.pair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flyt.ipc.study.second", str(theirs.fileno()), module],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._sock = ours

    def begin(self, job: str, fds: Sequence[int] = (), **arguments: Any) -> None:
        """Ask for a job; `finish` has its answer."""
        try:
            send(self._sock, {"job": job, **arguments}, fds)
        except OSError as exc:
            raise PeerLost(f"{self._end()} before it was asked to {job}") from exc

    def finish(self, timeout: float = LIMIT) -> tuple[dict[str, Any], list[int]]:
        """The answer and its descriptors, which are the caller's to close."""
        self._sock.settimeout(timeout)
        try:
            answer, fds = receive(self._sock)
        except TimeoutError as exc:
            raise PeerTimeout(f"the second process does not answer within {timeout} s") from exc
        except (OSError, PeerLost) as exc:
            raise PeerLost(self._end()) from exc
        if "error" in answer:
            for fd in fds:
                os.close(fd)
            if answer["code"] is not None:
                raise DeviceError(answer["code"], answer["error"])
            raise SharingError(f"the second process: {answer['error']}")
        return answer, fds

    def ask(self, job: str, fds: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        """Have a job done whose answer has no descriptors."""
        answer, more = self.ask_fds(job, fds, **arguments)
        for fd in more:
            os.close(fd)
        return answer

    def ask_fds(
        self, job: str, fds: Sequence[int] = (), **arguments: Any
    ) -> tuple[dict[str, Any], list[int]]:
        """Have a job done; the answer and its descriptors."""
        self.begin(job, fds, **arguments)
        return self.finish()

    def _end(self) -> str:
        """What became of the process, once its socket is closed."""
        try:
            code = self._process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            return "the second process has closed its socket, and is there"
        return f"the second process ended with exit code {code}"

    def close(self) -> None:
        """Let it end; kill it if it does not."""
        self._sock.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(END_LIMIT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
