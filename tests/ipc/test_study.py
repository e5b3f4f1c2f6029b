# SPDX-License-Identifier: Apache-2.0
"""``flyt ipc study`` on the emulated driver: it measures, and says what needs a GPU."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flyt.ipc.study import experiments
from flyt.ipc.study.report import QUESTIONS, Row
from flyt.ipc.study.run import run

LIMIT = 110.0


def study(*arguments: str, driver: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flyt.cli.main", "ipc", "study", *arguments],
        env={**os.environ, "FLYT_IPC_DRIVER": driver},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_the_study_measures_and_says_what_needs_a_gpu(tmp_path: Path) -> None:
    done = study("--out", str(tmp_path), driver="emulated")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "study.json").read_text())
    assert report["driver"] == "emulated"
    assert report["machine"]["date"]
    answers = {answer["question"]: answer for answer in report["answers"]}
    assert list(answers) == list(QUESTIONS)
    assert [answer["error"] for answer in answers.values()] == [None] * 5
    for question in ("bandwidth", "coherence", "compatibility"):
        assert answers[question]["rows"] == []
        assert answers[question]["verdict"].startswith("needs a GPU")
        assert not (tmp_path / f"{question}.csv").exists()
    rows = answers["crashes"]["rows"]
    assert [(row["dies"], row["how"]) for row in rows] == [
        (dies, how)
        for dies in ("exporter", "importer")
        for how in ("killed", "aborted", "faulting", "freed")
    ]
    assert [row["exit_code"] for row in rows] == [-9, -6, -11, 0] * 2
    assert all(row["bytes_intact"] and row["memory_released"] for row in rows)
    assert [row["descriptors_left"] for row in rows] == [0] * 8
    assert "0 descriptors are left" in answers["crashes"]["verdict"]
    steps = [(row["way"], row["step"]) for row in answers["costs"]["rows"]]
    each = ("allocate", "export", "import and map", "unmap the import", "free")
    assert steps == [("vmm", step) for step in each] * 3
    assert all(row["median_us"] > 0 for row in answers["costs"]["rows"])
    with (tmp_path / "costs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(steps)


def test_an_unknown_driver_is_a_line_not_a_traceback() -> None:
    done = study(driver="nothing")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("flyt ipc study: FLYT_IPC_DRIVER='nothing'")


def test_one_question_alone(tmp_path: Path) -> None:
    done = study("--only", "costs", "--out", str(tmp_path), driver="emulated")
    assert done.returncode == 0, done.stderr
    assert QUESTIONS["costs"] in done.stdout
    assert QUESTIONS["crashes"] not in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["costs.csv", "study.json"]


def test_an_experiment_that_breaks_off_keeps_its_rows_and_loses_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its process is a stand-in that yields a row and dies; the one after it is the real one."""
    said: list[tuple[str, int]] = []
    _worker(monkeypatch, tmp_path, {"costs": "print(ROW, flush=True); os.abort()"})
    asked = ["costs", "crashes"]
    costs, crashes = run(asked, "emulated", "numpy", LIMIT, lambda *given: said.append(given))
    assert costs.error == "its process ended with exit code -6"
    assert [row["step"] for row in costs.rows] == ["import and map"]
    assert costs.verdict.startswith("emulated: ")
    assert (crashes.error, len(crashes.rows)) == (None, 8)
    assert sum(ended for _, ended in said) == 2


def test_what_broke_an_experiment_off_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = "sys.stderr.write('something\\nCUDA error 719: it failed\\n'); sys.exit(1)"
    _worker(monkeypatch, tmp_path, {"costs": code})
    (costs,) = run(["costs"], "emulated", "numpy", LIMIT, lambda *_: None)
    assert (costs.error, costs.rows) == ("CUDA error 719: it failed", [])
    assert costs.verdict == "not answered: CUDA error 719: it failed"


@pytest.mark.parametrize("then", ["", "os.close(1);"], ids=["measuring", "ending"])
def test_an_experiment_that_hangs_is_ended_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, then: str
) -> None:
    code = (
        "child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid));"
        f"print(ROW, flush=True); {then} child.wait()"
    )
    _worker(monkeypatch, tmp_path, {"costs": code})
    costs, crashes = run(["costs", "crashes"], "emulated", "numpy", 4.0, lambda *_: None)
    assert costs.error == "it was ended when the time was over"
    assert len(costs.rows) == 1
    assert crashes.error is not None
    assert crashes.error.startswith("no time was left")
    state = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    deadline = time.monotonic() + 30
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while state.read_text().split()[2] != "Z":  # nobody reaps it where there is no init
            assert time.monotonic() < deadline
            time.sleep(0.01)


ROW: Row = {
    "driver": "emulated", "way": "vmm", "size": 1 << 20, "mapped_size": 2 << 20,
    "step": "import and map", "median_us": 5.0, "least_us": 4.0, "most_us": 6.0,
    "device_bytes": None,
}  # fmt: skip


def _worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, codes: dict[str, str]) -> None:
    """Another program for the processes of some experiments."""
    real = subprocess.Popen

    def start(command: list[str], **options: object) -> object:
        code = codes.get(command[3]) if command[2:3] == ["flyt.ipc.study.worker"] else None
        if code is not None:
            prelude = f"import json, os, subprocess, sys\nROW = json.dumps({ROW!r})\n"
            command = [sys.executable, "-c", prelude + code]
        return real(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(experiments.crashes.subprocess, "Popen", start)
    monkeypatch.setenv("FLYT_IPC_DRIVER", "emulated")
