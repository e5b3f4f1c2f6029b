# SPDX-License-Identifier: Apache-2.0
"""``scripts/vm run``: a guest's verdict is the exit code, and a guest that fails has one too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.vm.conftest import Lab
from vm.machine import CRASHED, HUNG

pytestmark = pytest.mark.timeout(300)

LIMIT = 200
"""Seconds; a boot and no work."""
CRASH = "open('/proc/sysrq-trigger', 'w').write('c')"


def script(folder: Path, code: str, *options: str) -> subprocess.Popen[str]:
    folder.mkdir()
    payload = folder / "payload.py"
    payload.write_text(code)
    return subprocess.Popen(
        [ROOT / "scripts" / "vm", "run", payload, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FLYT_VENV": sys.prefix},
    )


def test_its_exit_code_is_the_payloads_or_says_that_the_guest_crashed(tmp_path: Path) -> None:
    failing = script(
        tmp_path / "a", "import sys; print('seen', sys.argv[1:]); sys.exit(7)", "a", "b"
    )
    crashing = script(tmp_path / "b", CRASH)
    out, err = failing.communicate(timeout=LIMIT)
    assert failing.returncode == 7, err
    assert "seen ['a', 'b']" in out
    out, err = crashing.communicate(timeout=LIMIT)
    assert crashing.returncode == CRASHED, err
    assert "sysrq triggered crash" in out  # its console's last words


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
