# SPDX-License-Identifier: Apache-2.0
"""`scripts/vm run` with payloads that fail, hang and crash, each in a guest of its own.

They boot and wait beside all other tests, which leave a processor idle most of that time.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.conftest import ROOT
from vm.machine import CRASHED, HUNG

LIMIT = 200.0
"""Seconds; boots side by side, and the time limits of the payloads."""
SECONDS = "10"
"""A payload's own limit, which it must not reach before its guest hangs. That counts as hung after
`GRACE` more."""
COPY_SECONDS = "90"
"""Of the one that imports Flyt: under TCG that takes some."""
FAILED = 7
"""The exit code that a payload chooses."""

# The guest's first process is frozen, so nobody there answers any more.
GUEST_HANGS = """
import os
os.mkdir("/tmp/cg")
assert os.system("mount -t cgroup2 none /tmp/cg") == 0
os.mkdir("/tmp/cg/frozen")
for name in ("procs", "freeze"):
    with open(f"/tmp/cg/frozen/cgroup.{name}", "w") as file:
        file.write("1")
"""
CRASHES = "open('/proc/sysrq-trigger', 'w').write('c')"

VERDICTS = {
    GUEST_HANGS: (HUNG, "the guest does not answer"),
    CRASHES: (CRASHED, "sysrq triggered crash"),  # its console's last words
}
"""Payload: exit code of the script, and what it says."""


class Verdicts:
    """Three running scripts. The one that fails moves bytes first: it is the second guest of this
    host, with a backend and a region of its own.

    Parameters
    ----------
    folder : Path
        An empty one, theirs alone; its parent gets their payloads.
    fails : Path
        The payload that fails with its argument.
    region, backend : str
        Of the guest that fails.
    """

    def __init__(self, folder: Path, fails: Path, region: str, backend: str) -> None:
        self.folder = folder
        self._shm = set(os.listdir("/dev/shm"))
        self._stack = contextlib.ExitStack()
        options = ["--region", region, "--env", f"FLYT_BACKEND={backend}"]
        # Somebody waits for each from the start: the fixtures that look for leaks bury the dead.
        self._waiting = self._stack.enter_context(ThreadPoolExecutor())
        self._ends = [self._start(fails, COPY_SECONDS, *options)]
        for number, payload in enumerate(VERDICTS):
            file = folder.parent / f"payload{number}.py"
            file.write_text(payload)
            self._ends.append(self._start(Path(file.name), SECONDS))

    def _start(self, payload: Path, seconds: str, *options: str) -> Future[tuple[int, str]]:
        command = [ROOT / "scripts" / "vm", "run", "--seconds", seconds, *options, payload]
        script = subprocess.Popen(
            [*command, str(FAILED)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder.parent,  # whence a relative path leads
            env={**os.environ, "FLYT_VENV": sys.prefix, "TMPDIR": str(self.folder)},
        )
        self._stack.callback(script.terminate)  # its guest ends with it

        def end() -> tuple[int, str]:
            said, _ = script.communicate(timeout=LIMIT)
            return script.returncode, said

        return self._waiting.submit(end)

    def ends(self) -> list[tuple[int, str]]:
        """Wait for all; each one's exit code, and what it printed."""
        return [end.result(LIMIT) for end in self._ends]

    def left(self) -> list[str]:
        """What of theirs is still there: processes, shared memory, files."""
        found = [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - self._shm]
        found += map(str, self.folder.iterdir())
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if os.fsencode(self.folder) in path.read_bytes():
                    found.append(f"process {path.parent.name}")
        return found

    def close(self) -> None:
        """End those that still run."""
        self._stack.close()
