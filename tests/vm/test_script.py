# SPDX-License-Identifier: Apache-2.0
"""A guest's verdict is the exit code of `scripts/vm run`, and a guest that fails has one too."""

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


def test_a_guest_that_crashes_fails_the_script(tmp_path: Path) -> None:
    payload = tmp_path / "payload.py"
    payload.write_text(CRASH)
    done = subprocess.run(
        [ROOT / "scripts" / "vm", "run", payload, "seen"],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        env={**os.environ, "FLYT_VENV": sys.prefix},
    )
    assert done.returncode == CRASHED, done.stderr
    assert "sysrq triggered crash" in done.stdout  # its console's last words


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
