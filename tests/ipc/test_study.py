# SPDX-License-Identifier: Apache-2.0
"""``flyt ipc study`` on the emulated driver: it measures, and says what is not written yet."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_the_study_measures_and_says_what_it_does_not(tmp_path: Path) -> None:
    done = study("--out", str(tmp_path), driver="emulated")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "study.json").read_text())
    assert report["driver"] == "emulated"
    answers = {answer["question"]: answer for answer in report["answers"]}
    assert set(answers) == {"costs", "coherence", "compatibility", "crashes"}
    for question in ("coherence", "compatibility"):
        assert answers[question]["rows"] == []
        assert "no experiment is written" in answers[question]["verdict"]
    rows = answers["crashes"]["rows"]
    assert [(row["dies"], row["how"]) for row in rows] == [
        (dies, how)
        for dies in ("exporter", "importer")
        for how in ("killed", "aborted", "faulting", "freed")
    ]
    assert [row["exit_code"] for row in rows] == [-9, -6, -11, 0] * 2
    assert all(row["bytes_intact"] and row["memory_released"] for row in rows)
    assert "0 descriptors are left" in answers["crashes"]["verdict"]
    steps = [row["step"] for row in answers["costs"]["rows"]]
    assert steps == ["allocate", "export", "import and map", "unmap the import", "free"] * 3
    with (tmp_path / "costs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(steps)


def test_an_unknown_driver_is_a_line_not_a_traceback() -> None:
    done = study(driver="nothing")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("flyt ipc study: FLYT_IPC_DRIVER='nothing'")
