# SPDX-License-Identifier: Apache-2.0
"""In the guest: runs programs for the host, which asks over the second serial port.

A line is a request, ``{"id", "argv", "env", "input", "user", "seconds"}``, or an answer: first
``{"ready": true}``, then for each request ``{"id", "code", "out"}``. Requests run side by side.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import tty
from typing import Any

PORT = "/dev/ttyS1"
TIMED_OUT = 124
"""What timeout(1) answers."""


class Agent:
    """The port, and a thread for each request."""

    def __init__(self) -> None:
        descriptor = os.open(PORT, os.O_RDWR | os.O_NOCTTY)
        tty.setraw(descriptor)
        self._in = os.fdopen(descriptor, "r", encoding="ascii", closefd=False)
        self._out = os.fdopen(descriptor, "w", encoding="ascii", closefd=False)
        self._lock = threading.Lock()

    def serve(self) -> None:
        self._say({"ready": True})
        for line in self._in:
            threading.Thread(target=self._run, args=(json.loads(line),), daemon=True).start()

    def _say(self, answer: dict[str, Any]) -> None:
        with self._lock:
            self._out.write(json.dumps(answer) + "\n")
            self._out.flush()

    def _run(self, request: dict[str, Any]) -> None:
        # Output goes to a file: a killed program's children may hold a pipe open for ever.
        name = f"/tmp/out.{request['id']}"
        with open(name, "w+b") as out:
            try:
                process = subprocess.Popen(
                    request["argv"],
                    env={**os.environ, **request["env"]},
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=out,
                    user=request["user"] or None,
                    group=request["user"] or None,
                    extra_groups=[] if request["user"] else None,
                )
                try:
                    process.communicate(request["input"].encode(), timeout=request["seconds"])
                    code = process.returncode
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    code = TIMED_OUT
                out.seek(0)
                text = out.read().decode(errors="replace")
            except OSError as exc:
                code, text = 127, str(exc)
        os.unlink(name)
        self._say({"id": request["id"], "code": code, "out": text})


if __name__ == "__main__":
    Agent().serve()
