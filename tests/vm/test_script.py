# SPDX-License-Identifier: Apache-2.0
"""A guest's verdict is the exit code of `scripts/vm run`, and a guest that fails has one too."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.vm.conftest import Lab
from tests.vm.verdicts import FAILED, VERDICTS
from vm.machine import HUNG

pytestmark = pytest.mark.timeout(300)


def test_a_guest_that_fails_hangs_or_crashes_fails_the_script(lab: Lab) -> None:
    """And leaves no process, no shared memory and no file."""
    (code, said), *others = lab.verdicts.ends()
    assert code == FAILED, said
    report = json.loads(said.splitlines()[-1])
    assert (report["right"], report["region"], report["warnings"]) == (True, True, []), report
    for (code, said), (wanted, words) in zip(others, VERDICTS.values(), strict=True):
        assert (code, words in said) == (wanted, True), said
    assert lab.verdicts.left() == []


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
