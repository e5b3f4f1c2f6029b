# SPDX-License-Identifier: Apache-2.0
"""What ``scripts/gpu`` says of its groups of tests: one that was cut is not green."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SUMMARY = Path(__file__).resolve().parent.parent / "scripts" / "junit_summary.py"
CASE = '<testcase classname="a" name="{name}">{result}</testcase>'
SKIPPED = '<skipped message="emulated only: slowed"/>'


def summary(folder: Path, status: str | None, *results: str) -> tuple[int, dict[str, object]]:
    cases = "".join(CASE.format(name=n, result=result) for n, result in enumerate(results))
    (folder / "group").touch()
    if results:
        (folder / "group.xml").write_text(
            f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
        )
    if status is not None:
        (folder / "group.rc").write_text(status)
    target = folder / "told.json"
    command = [sys.executable, str(SUMMARY), str(folder), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(target.read_text())


def test_a_group_that_passed(tmp_path: Path) -> None:
    code, told = summary(tmp_path, "0\n", "", "", SKIPPED)
    assert (code, told["passed"], told["emulated_only"]) == (0, 2, 1)


def test_a_group_that_failed(tmp_path: Path) -> None:
    code, told = summary(tmp_path, "1\n", "", "<failure/>")
    assert (code, told["failures"]) == (1, ["a::1"])


@pytest.mark.parametrize("status", ["2\n", "124\n", None], ids=["interrupted", "killed", "nothing"])
def test_a_group_that_was_cut(tmp_path: Path, status: str | None) -> None:
    """pytest writes its report at an interrupt, too, and what ran until then had passed."""
    code, told = summary(tmp_path, status, "", "")
    assert (code, told["unfinished_groups"], told["passed"]) == (1, ["group"], 2)
