# SPDX-License-Identifier: Apache-2.0
"""`Report`: rows of measurements and one verdict a question, as JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

from flyt.ipc.driver import Driver

QUESTIONS = {
    "costs": "What does opening and closing a shared block cost, and how much memory?",
    "coherence": "When does one process see what another has written?",
    "compatibility": "Which allocator's memory can which call export?",
    "crashes": "What survives a process that dies, and what leaks once all are dead?",
}

UNWRITTEN = {
    "coherence": "no experiment is written yet: it needs litmus kernels on a GPU",
    "compatibility": "no experiment is written yet: it needs the allocators of a GPU",
}
"""Questions that the study can't answer, and why."""


@dataclasses.dataclass(slots=True)
class Answer:
    """What one experiment found.

    Attributes
    ----------
    question : str
        A key of `QUESTIONS`.
    verdict : str
        One sentence that the rows bear out.
    rows : list of dict
        One measurement each, all with the same keys.
    """

    question: str
    verdict: str
    rows: list[dict[str, Any]]


@dataclasses.dataclass(slots=True)
class Report:
    """All answers of one run."""

    driver: str
    answers: list[Answer]

    @classmethod
    def of(cls, driver: Driver, answers: list[Answer]) -> Report:
        return cls(driver.kind, answers)

    def write(self, folder: Path) -> list[Path]:
        """``study.json``, and a CSV file for each question that has rows."""
        folder.mkdir(parents=True, exist_ok=True)
        whole = folder / "study.json"
        content = {
            "driver": self.driver,
            "machine": platform.platform(),
            "answers": [dataclasses.asdict(answer) for answer in self.answers],
        }
        whole.write_text(json.dumps(content, indent=2) + "\n")
        written = [whole]
        for answer in self.answers:
            if answer.rows:
                path = folder / f"{answer.question}.csv"
                with path.open("w", newline="") as file:
                    table = csv.DictWriter(file, list(answer.rows[0]))
                    table.writeheader()
                    table.writerows(answer.rows)
                written.append(path)
        return written
