# SPDX-License-Identifier: Apache-2.0
"""The demo's processes: one backend, some clients, each bounded in how long it may take.

Both are started as a user would start them; a fault comes back as `DemoFailed` with the end of
the process's own log.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyt.errors import FlytError

START_LIMIT = 60.0
"""Seconds until the backend is ready; a CUDA context takes a few."""

STOP_LIMIT = 20.0
"""Seconds that a process gets to end when it is told to."""

LOG_TAIL = 4000
"""Characters of a process's log that a fault quotes: enough for one traceback."""

READ_BYTES = 65_536


class DemoFailed(FlytError):
    """The demo did not show what it should; the text says what was wrong."""


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace")[-LOG_TAIL:].strip()
    return f"\n{text}" if text else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what still runs; harmless for what has ended."""
    if process.poll() is None:
        process.kill()
        process.wait(STOP_LIMIT)


class Backend:
    """A backend that is ready.

    Attributes
    ----------
    region : str
        Path of the region that it shares.
    environment : dict
        For clients: names the backend and nothing else of Flyt.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        report: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self.process = process
        self.region: str = report["region"]
        self.environment = {**environment, "FLYT_BACKEND": report["endpoints"][0]}
        self.log = log

    def stop(self) -> None:
        """End it in order; raise `DemoFailed` if it leaves badly or leaves something behind."""
        code = _terminate(self.process)
        if code != 0:
            raise DemoFailed(f"the backend ended with code {code}{_tail(self.log)}")
        if os.path.exists(self.region):
            raise DemoFailed(f"the backend left its region {self.region} behind")


def _terminate(process: subprocess.Popen[bytes]) -> int:
    """Ask a backend to end, so that it clears its region away; kill it only if it won't."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(STOP_LIMIT)


def _await_ready(ready: int, log: Path) -> dict[str, Any]:
    deadline = time.monotonic() + START_LIMIT
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(ready, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise DemoFailed(f"the backend is not ready after {START_LIMIT:.0f} s{_tail(log)}")
            chunk = os.read(ready, READ_BYTES)
            if not chunk:
                raise DemoFailed(f"the backend did not start{_tail(log)}")
            line += chunk
    report: dict[str, Any] = json.loads(line)
    return report


@contextlib.contextmanager
def running_backend(folder: Path, device: str, size: int) -> Iterator[Backend]:
    """Run ``flyt-backend`` on a region and an endpoint of its own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("FLYT_")}
    environment = {**own, "FLYT_RUNTIME_DIR": str(folder / "run")}
    log = folder / "backend.log"
    ready, ready_end = os.pipe()
    parent = os.pidfd_open(os.getpid())  # the backend ends with us, however we end
    command = [sys.executable, "-m", "flyt.cli.backend", "--device", device]
    command += ["--region", f"flyt-demo-{os.getpid()}", "--size", str(size)]
    command += ["--listen", f"ipc://{folder}/backend.sock"]
    command += ["--ready-fd", str(ready_end), "--with-parent-fd", str(parent)]
    try:
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(ready_end, parent),
                env=environment,
            )
    except BaseException:
        os.close(ready)
        raise
    finally:
        os.close(ready_end)
        os.close(parent)
    try:
        try:
            report = _await_ready(ready, log)
        finally:
            os.close(ready)
        yield Backend(process, report, environment, log)
    finally:
        _terminate(process)


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
            raise DemoFailed(f"client {self.process.pid} ended half-way{_tail(self.log)}")
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["event"] == "failed":
                raise DemoFailed(f"client {self.process.pid}: {event['text']}{_tail(self.log)}")
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
            raise DemoFailed(f"client {self.process.pid} ended with {code}{_tail(self.log)}")

    def close(self) -> None:
        _end(self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
