# SPDX-License-Identifier: Apache-2.0
"""In the guest, its first process: runs programs for the host, which asks over a serial port.

A line is a request, ``{"id", "argv", "code", "env", "user", "seconds"}``, or an answer: first
``{"ready": true}``, then for each request ``{"id", "code", "out"}``. Requests run side by side.

Python code runs in a forked child that finds Flyt imported: under TCG importing it takes longer
than most tests. This process has one thread and no session, so a fork is as good as a fresh start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import pwd
import select
import signal
import sys
import time
import traceback
import tty
from typing import Any

PORT = "/dev/ttyS1"
PRELOAD = "flyt.preload"
"""On the kernel's command line: import Flyt before the guest is ready."""
TIMED_OUT = 124
"""What timeout(1) answers."""
CHUNK = 4096
KEPT = 256 << 10
"""Bytes of a program's output that the host gets, its end: the port is slow."""


@dataclasses.dataclass
class Child:
    """A program that runs; ``file`` gets its output."""

    number: int
    pid: int
    file: str
    deadline: float
    late: bool = False


class Agent:
    """The port, the children, and one loop."""

    def __init__(self) -> None:
        self._port = os.open(PORT, os.O_RDWR | os.O_NOCTTY)
        tty.setraw(self._port)
        self._read = b""
        self._children: dict[int, Child] = {}
        self._poll = select.poll()
        self._poll.register(self._port, select.POLLIN)

    def serve(self) -> None:
        """Until the kernel ends."""
        self._say({"ready": True})
        while True:
            for descriptor, _ in self._poll.poll(self._patience()):
                if descriptor == self._port:
                    self._listen()
                else:
                    self._bury(descriptor)
            self._hurry()
            self._bury_orphans()

    def _say(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode("ascii") + b"\n"
        while data:
            data = data[os.write(self._port, data) :]

    def _listen(self) -> None:
        self._read += os.read(self._port, CHUNK)
        *lines, self._read = self._read.split(b"\n")
        for line in lines:
            self._start(json.loads(line))

    def _start(self, request: dict[str, Any]) -> None:
        # Output goes to a file: a killed program's children may hold a pipe open for ever.
        number = request["id"]
        file = f"/tmp/out.{number}"
        pid = os.fork()
        if pid == 0:
            _become(request, file)
        descriptor = os.pidfd_open(pid)
        self._children[descriptor] = Child(
            number, pid, file, time.monotonic() + float(request["seconds"])
        )
        self._poll.register(descriptor, select.POLLIN)

    def _patience(self) -> float | None:
        waiting = [child.deadline for child in self._children.values() if not child.late]
        return max(0.0, min(waiting) - time.monotonic()) * 1000 + 1 if waiting else None

    def _hurry(self) -> None:
        for child in self._children.values():
            if not child.late and time.monotonic() >= child.deadline:
                child.late = True
                os.kill(child.pid, signal.SIGKILL)

    def _bury(self, descriptor: int) -> None:
        child = self._children.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        with open(child.file, "rb") as out:
            skipped = max(0, os.fstat(out.fileno()).st_size - KEPT)
            out.seek(skipped)
            text = out.read(KEPT).decode(errors="replace")
        if skipped:
            text = f"[{skipped} bytes before are left out]\n{text}"
        os.unlink(child.file)
        self._say({"id": child.number, "code": TIMED_OUT if child.late else status, "out": text})

    def _bury_orphans(self) -> None:
        """The first process inherits every orphan; ours are waited for by name."""
        known = {child.pid for child in self._children.values()}
        with contextlib.suppress(ChildProcessError):  # there are none
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in known:
                    return
                os.waitpid(found.si_pid, 0)


def _become(request: dict[str, Any], file: str) -> None:
    """In the child: never returns."""
    code = 1
    try:
        out = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.closerange(3, 256)
        os.setsid()
        if request["user"]:
            _drop(request["user"])
        os.environ.update(request["env"])
        if request["code"] is None:
            os.execvp(request["argv"][0], request["argv"])
        faulthandler.enable()
        sys.argv = ["payload", *request["argv"]]
        exec(compile(request["code"], "payload", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if isinstance(exc.code, str):
            print(exc.code, file=sys.stderr)
    except Exception:  # noqa: BLE001 - whatever the payload raises is its result
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


def _drop(name: str) -> None:
    entry = pwd.getpwnam(name)
    os.setgroups([])
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)


if __name__ == "__main__":
    with open("/proc/cmdline") as options:
        if PRELOAD in options.read():
            importlib.import_module("flyt")
    Agent().serve()
