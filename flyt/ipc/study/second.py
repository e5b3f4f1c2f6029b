# SPDX-License-Identifier: Apache-2.0
"""The second process of an experiment: does what `Peer` asks, until its socket is closed."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from flyt.errors import DeviceError, FlytError, PeerLost
from flyt.ipc.study.peer import receive, send

Job = Callable[[dict[str, Any], list[int]], tuple[dict[str, Any], Sequence[int]]]
"""Takes the request and its descriptors, which are closed after it; gives the answer and its own,
which stay the job's."""


def serve(sock: socket.socket, jobs: dict[str, Job]) -> None:
    """Answer until the socket is closed."""
    while True:
        try:
            request, fds = receive(sock)
        except PeerLost:
            return
        with contextlib.ExitStack() as undo:
            for fd in fds:
                undo.callback(os.close, fd)
            try:
                answer, more = jobs[request["job"]](request, fds)
            except FlytError as exc:
                code = exc.code if isinstance(exc, DeviceError) else None
                detail = exc.detail if isinstance(exc, DeviceError) else str(exc)
                answer, more = {"error": detail, "code": code}, ()
            try:
                send(sock, answer, more)
            except OSError:  # it has stopped waiting
                return


def main() -> None:
    """Entry point of ``python -m flyt.ipc.study.second FD MODULE``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its socket tells it of the end
    module = importlib.import_module(f"flyt.ipc.study.{sys.argv[2]}")
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        serve(sock, module.JOBS)


if __name__ == "__main__":
    main()
