# SPDX-License-Identifier: Apache-2.0
"""The contenders' processes, as the harness sees them: started when first needed."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flyt.bench.runtimes import BenchFailed, NoRoom
from flyt.frontend.launcher import tail

REPLY_LIMIT = 120.0
"""Seconds for one round of one contender; 1 GiB inline takes a few. A bound on hangs."""

END_LIMIT = 20.0
"""Seconds until a process that lost its input, or was killed, must be gone."""

NO_REGION = "/nonexistent/flyt-bench"
"""As FLYT_REGION it makes a session go inline: the region can't be mapped."""

READ_BYTES = 65_536


class Process:
    """One contender's process."""

    def __init__(self, name: str, module: str, environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        self._pending = b""
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flyt.bench.worker", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is for the harness, which ends it
            )
        self._starting = True

    def send(self, do: str, **fields: Any) -> None:
        if self._process.stdin is None:
            raise BenchFailed(f"{self.name} has no input")
        try:
            self._process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        except BrokenPipeError:
            return  # it has ended; what it said last tells why

    def receive(self) -> dict[str, Any]:
        """The reply to the oldest order that has none yet.

        Raises
        ------
        NoRoom
            There is not as much memory as the order wants.
        BenchFailed
            It reports a fault, has ended, or does not answer.
        """
        if self._starting:  # its first line says that it has loaded its module
            self._starting = False
            self._reply()
        return self._reply()

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        self.send(do, **fields)
        return self.receive()

    def _reply(self) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self._line())
        if "no_room" in reply:
            raise NoRoom(f"{self.name}: {reply['no_room']}")
        if "failed" in reply:
            raise BenchFailed(f"{self.name}: {reply['failed']}{tail(self._log)}")
        return reply

    def _line(self) -> bytes:
        if self._process.stdout is None:
            raise BenchFailed(f"{self.name} has no output")
        output = self._process.stdout.fileno()
        deadline = time.monotonic() + REPLY_LIMIT
        while b"\n" not in self._pending:
            if not select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise BenchFailed(
                    f"{self.name} has not answered for {REPLY_LIMIT:.0f} s{tail(self._log)}"
                )
            data = os.read(output, READ_BYTES)
            if not data:
                code = self._process.wait(END_LIMIT)
                raise BenchFailed(
                    f"the process of {self.name} ended half-way with {code}{tail(self._log)}"
                )
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def leave(self) -> None:
        """Let it end in order.

        Raises
        ------
        BenchFailed
            It ends badly, or not at all.
        """
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            code = self._process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            raise BenchFailed(f"the process of {self.name} does not end") from None
        if code != 0:
            raise BenchFailed(f"the process of {self.name} ended with {code}{tail(self._log)}")

    def close(self) -> None:
        """End it now if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(END_LIMIT)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Processes:
    """All processes of a run.

    Parameters
    ----------
    modules : mapping
        Kind of process ("flyt", "native", …) → the module that it measures.
    environment : mapping
        Names the backend.
    folder : Path
        For their logs.
    """

    def __init__(
        self, modules: Mapping[str, str], environment: Mapping[str, str], folder: Path
    ) -> None:
        self._modules = modules
        self._environment = environment
        self._folder = folder
        self._running: dict[tuple[str, int], Process] = {}

    @property
    def kinds(self) -> Sequence[str]:
        return list(self._modules)

    def get(self, kind: str, number: int = 1) -> Process:
        """The `number`-th process of its kind."""
        found = self._running.get((kind, number))
        if found is None:
            environment = dict(self._environment)
            if kind == "inline":
                environment["FLYT_REGION"] = NO_REGION
            name = kind if number == 1 else f"{kind} {number}"
            log = self._folder / f"{kind}-{number}.log"
            found = Process(name, self._modules[kind], environment, log)
            self._running[kind, number] = found
        return found

    def notes(self) -> dict[str, dict[str, int]]:
        """Counters of those that have some, by process."""
        found = {p.name: p.ask("notes")["notes"] for p in self._running.values()}
        return {name: notes for name, notes in found.items() if notes}

    def leave(self) -> None:
        """Let all end in order; raises `BenchFailed` if one doesn't."""
        for process in self._running.values():
            process.leave()

    def close(self) -> None:
        for process in self._running.values():
            process.close()
