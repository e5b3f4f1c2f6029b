# SPDX-License-Identifier: Apache-2.0
"""A guest's verdict is the exit code of `scripts/vm run`, and a guest that fails has one too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.vm.conftest import HOST, PAYLOADS, Lab, port_of
from vm.machine import CRASHED, HUNG

pytestmark = pytest.mark.timeout(300)

LIMIT = 200.0
"""Seconds; boots side by side, and the time limits of the payloads."""
SECONDS = "10"
"""A payload's own limit, which it must not reach before its guest hangs. That counts as hung after
`GRACE` more."""
COPY_SECONDS = "60"
"""Of the one that imports Flyt: under TCG that takes some."""

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
"""Payload: exit code of the script, and what it says. The third guest is in the test itself."""


def _processes() -> set[str]:
    """Of every guest: they name its folder on their command line."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if b"flyt-vm-" in line:
            found.add(path.parent.name)
    return found


def _left() -> tuple[set[str], set[str], set[str]]:
    shm, temporary = os.listdir("/dev/shm"), os.listdir(tempfile.gettempdir())
    return _processes(), set(shm), {name for name in temporary if name.startswith("flyt-vm-")}


def _script(payload: Path, seconds: str, *options: str) -> subprocess.Popen[str]:
    command = [ROOT / "scripts" / "vm", "run", "--seconds", seconds, *options, payload]
    return subprocess.Popen(
        [*command, "7"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "FLYT_VENV": sys.prefix},
    )


def test_a_guest_that_fails_hangs_or_crashes_fails_the_script(lab: Lab, tmp_path: Path) -> None:
    """And leaves no process, no shared memory and no folder.

    The one that fails is the second guest of this host, with a backend and a region of its own.
    """
    before = _left()
    with contextlib.ExitStack() as stack:
        # Moves bytes, then exits with its argument.
        backend = f"FLYT_BACKEND=tcp://{HOST}:{port_of(lab.lone)}"
        fails = PAYLOADS / "small.py"
        scripts = [_script(fails, COPY_SECONDS, "--region", lab.lone.region, "--env", backend)]
        for number, payload in enumerate(VERDICTS):
            file = tmp_path / f"payload{number}.py"
            file.write_text(payload)
            scripts.append(_script(file, SECONDS))
        for script in scripts:
            stack.callback(script.wait)
            stack.callback(script.kill)
        report = lab.copies()
        assert (report["right"], report["region"]) == (True, True), report
        deadline = time.monotonic() + LIMIT
        said = [
            script.communicate(timeout=max(1.0, deadline - time.monotonic()))[0]
            for script in scripts
        ]
    assert scripts[0].returncode == 7, said[0]
    report = json.loads(said[0].splitlines()[-1])
    assert (report["right"], report["region"], report["warnings"]) == (True, True, []), report
    for script, text, (code, words) in zip(scripts[1:], said[1:], VERDICTS.values(), strict=True):
        assert (script.returncode, words in text) == (code, True), text
    assert _left() == before


def test_the_verdict_is_the_payloads(lab: Lab) -> None:
    done = lab.machine.run("a", "b", code="import sys; print(sys.argv[1:]); sys.exit(7)")
    assert (done.code, done.out) == (7, "['a', 'b']\n")


def test_a_payload_that_hangs_is_ended(lab: Lab) -> None:
    assert lab.machine.run(code="while True: pass", seconds=2).code == HUNG


def test_a_guest_that_hangs_is_given_up(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vm.machine.GRACE", 2.0)
    os.kill(lab.machine.pid, signal.SIGSTOP)
    try:
        done = lab.machine.run("true", seconds=1)
    finally:
        os.kill(lab.machine.pid, signal.SIGCONT)
    assert done.code == HUNG
    assert "does not answer" in done.out


def test_a_payload_that_is_killed_fails(lab: Lab) -> None:
    assert lab.machine.run(code="import os; os.abort()").code == -signal.SIGABRT
    assert lab.machine.run("/no/such/program").code != 0
