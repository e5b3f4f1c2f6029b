# SPDX-License-Identifier: Apache-2.0
"""What ``scripts/gpu-kernels`` says of numba's tests: shards are summed, and none is forgotten."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPORT = Path(__file__).resolve().parent.parent / "scripts" / "kernels_report.py"
CLASS = "numba_cuda.numba.cuda.tests.cudapy.test_{module}.TestIt"
RESULTS = {
    "passed": "",
    "failed": "<failure/>",
    "skipped": '<skipped type="pytest.skip"/>',
    "xfailed": '<skipped type="pytest.xfail"/>',
}


def shard(folder: Path, name: str, told: dict[str, str], status: str | None = "1\n") -> None:
    """What a run leaves: ``told`` has an outcome for each ``module.test``."""
    cases = ""
    for test, outcome in told.items():
        module, _, function = test.partition(".")
        classname = CLASS.format(module=module)
        cases += (
            f'<testcase classname="{classname}" name="{function}">{RESULTS[outcome]}</testcase>'
        )
    (folder / f"numba-{name}.xml").write_text(
        f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
    )
    (folder / f"numba-{name}.log").touch()
    if status is not None:
        (folder / f"numba-{name}.rc").write_text(status)


def report(folder: Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, str(REPORT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads((folder / "kernels.json").read_text())["numba"]


def test_shards_are_summed(tmp_path: Path) -> None:
    shard(tmp_path, "native-0", {"a.one": "passed", "a.two": "skipped"})
    shard(tmp_path, "native-1", {"b.one": "passed"})
    shard(tmp_path, "flyt-0", {"a.one": "passed", "a.two": "skipped"})
    shard(tmp_path, "flyt-1", {"b.one": "xfailed"})
    code, told = report(tmp_path)
    assert code == 0
    assert told["native"]["cudapy"] == {"passed": 2, "failed": 0, "skipped": 1, "xfailed": 0}
    assert told["flyt"]["cudapy"] == {"passed": 1, "failed": 0, "skipped": 1, "xfailed": 1}
    assert told["known_failures"] == ["cudapy.test_b.TestIt::one"]


def test_what_fails_natively_does_not_count_against_flyt(tmp_path: Path) -> None:
    shard(tmp_path, "native-0", {"a.one": "failed", "a.two": "passed"})
    shard(tmp_path, "flyt-0", {"a.one": "failed", "a.two": "passed"})
    code, told = report(tmp_path)
    assert code == 0
    assert told["failed_natively"] == {"cudapy.test_a.TestIt::one": "failed"}


@pytest.mark.parametrize("ours", ["failed", "skipped", None])
def test_what_passes_natively_alone_fails_the_run(tmp_path: Path, ours: str | None) -> None:
    shard(tmp_path, "native-0", {"a.one": "passed"})
    shard(tmp_path, "flyt-0", {} if ours is None else {"a.one": ours})
    code, told = report(tmp_path)
    assert code == 1
    assert told["only_native"] == {"cudapy.test_a.TestIt::one": ours or "not run"}


@pytest.mark.parametrize("status", ["124\n", "2\n", None], ids=["limit", "interrupt", "nothing"])
@pytest.mark.parametrize("which", ["native-1", "flyt-1"])
def test_a_shard_that_was_cut_fails_the_run(tmp_path: Path, which: str, status: str | None) -> None:
    """What ran until then had passed; and of what did not run natively nobody knows."""
    for name in ("native-0", "flyt-0", "native-1", "flyt-1"):
        told = {f"{name[-1]}.one": "passed"}
        shard(tmp_path, name, told, status if name == which else "0\n")
    code, told = report(tmp_path)
    assert (code, told["cut"]) == (1, [f"numba-{which}"])
