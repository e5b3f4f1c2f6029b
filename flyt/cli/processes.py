# SPDX-License-Identifier: Apache-2.0
"""The demo's processes: one backend, some clients, each bounded in how long it may take.

Both are started as a user would start them; a fault comes back as `DemoFailed` with the end of
the process's own log.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyt.errors import FlytError
from flyt.frontend.launcher import Launched, start, tail
from flyt.rpc.patience import Deadline

START_LIMIT = 60.0
"""Seconds until the backend is ready; a CUDA context takes a few."""

STOP_LIMIT = 20.0
"""Seconds that a process gets to end when it is told to."""

READ_BYTES = 65_536


class DemoFailed(FlytError):
    """The demo did not show what it should; the text says what was wrong."""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what still runs; harmless for what has ended."""
    if process.poll() is None:
        process.kill()
        process.wait(STOP_LIMIT)


@contextlib.contextmanager
def running_backend(folder: Path, device: str, size: int) -> Iterator[Launched]:
    """Run ``flyt-backend`` on a region and an endpoint of its own; its log is in `folder`.

    Raises
    ------
    FlytError
        It did not start.
    """
    backend = start(device, size, Deadline.after(START_LIMIT), log=folder / "backend.log")
    try:
        yield backend
    finally:
        backend.end()


class Client:
    """A client process, seen from the demo."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.result: dict[str, Any] | None = None
        self._pending = b""
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flyt.cli.demo_client", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env=dict(environment),
            )

    @property
    def output(self) -> int:
        if self.process.stdout is None:
            raise DemoFailed("a client has no output")
        return self.process.stdout.fileno()

    def tell(self, words: bytes) -> None:
        if self.process.stdin is not None:
            try:
                self.process.stdin.write(words)
            except BrokenPipeError:
                return  # it has ended; its output says why

    def events(self) -> Iterator[dict[str, Any]]:
        """What it has said; call it when there is something to read."""
        chunk = os.read(self.output, READ_BYTES)
        if not chunk:
            raise DemoFailed(f"client {self.process.pid} ended half-way{tail(self.log)}")
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["event"] == "failed":
                raise DemoFailed(f"client {self.process.pid}: {event['text']}{tail(self.log)}")
            yield event

    def leave(self) -> None:
        """Let it end in order."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            code = self.process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"client {self.process.pid} does not end") from None
        if code != 0:
            raise DemoFailed(f"client {self.process.pid} ended with {code}{tail(self.log)}")

    def close(self) -> None:
        _end(self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
