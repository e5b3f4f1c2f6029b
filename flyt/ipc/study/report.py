# SPDX-License-Identifier: Apache-2.0
"""`Report`: rows of measurements and one verdict a question, as JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

from flyt.errors import ConfigurationError

QUESTIONS = {
    "costs": "What does opening and closing a shared block cost, and how much memory?",
    "bandwidth": "Do kernels use another process's memory as fast as their own?",
    "coherence": "When does one process see what another has written?",
    "compatibility": "Which allocator's memory can which call export?",
    "crashes": "What survives a process that dies, and what leaks once all are dead?",
}

FILE = "study.json"

READ_BOUND = 0.99
"""Imported memory is read at this part of the local bandwidth, at least."""

_DAMAGE = ValueError, OverflowError, RecursionError
"""Of JSON that is none, or has numbers or a depth that nobody writes."""

Row = dict[str, Any]
"""One measurement. All rows of a question have the same keys."""


@dataclasses.dataclass(slots=True)
class Answer:
    """What one experiment found.

    Attributes
    ----------
    question : str
        A key of `QUESTIONS`.
    verdict : str
        One sentence or several that the rows bear out, or why there are none.
    rows : list of dict
        One measurement each, all with the same keys.
    error : str, optional
        Why the experiment broke off; the rows are those that it had by then.
    seconds : float
        How long it took.
    """

    question: str
    verdict: str
    rows: list[Row]
    error: str | None = None
    seconds: float = 0.0


@dataclasses.dataclass(slots=True)
class Report:
    """All answers of one run.

    Attributes
    ----------
    driver : str
        "cuda" or "emulated".
    machine : dict
        Card, driver, date and versions; no name of a host.
    answers : list of Answer
    """

    driver: str
    machine: dict[str, Any]
    answers: list[Answer]

    @property
    def failed(self) -> bool:
        return any(answer.error is not None for answer in self.answers)

    def answer(self, question: str) -> Answer | None:
        return next((one for one in self.answers if one.question == question), None)

    def title(self) -> str:
        """Where and when, in a line."""
        card = self.machine.get("card") or {}
        where = card.get("name") or f"{self.driver} driver, {self.machine.get('cpu')}"
        version = f", driver {card['driver_version']}" if card.get("driver_version") else ""
        date = str(self.machine.get("date"))[:10]
        return f"{where}{version}; commit {self.machine.get('commit')}; {date}"

    def write(self, folder: Path) -> list[Path]:
        """``study.json``, and a CSV file for each question that has rows."""
        folder.mkdir(parents=True, exist_ok=True)
        whole = folder / FILE
        whole.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
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

    @classmethod
    def read(cls, file: Path) -> Report:
        """What `write` wrote.

        Raises
        ------
        ConfigurationError
            The file is no such report.
        """
        try:
            content = json.loads(file.read_text())
            answers = [_answer(one) for one in content["answers"]]
            machine = dict(content["machine"])
            dict(machine.get("card") or {})
            found = cls(str(content["driver"]), machine, answers)
        except (OSError, AttributeError, LookupError, TypeError, *_DAMAGE) as exc:
            raise ConfigurationError(f"{file} is no report of flyt ipc study: {exc!r}") from exc
        strange = [answer.question for answer in answers if answer.question not in QUESTIONS]
        if strange:
            raise ConfigurationError(f"{file} answers {strange[0]!r}, which nobody asks here")
        return found


def _answer(content: dict[str, Any]) -> Answer:
    """What a file says, or ValueError, KeyError or TypeError."""
    error, rows = content["error"], [dict(row) for row in content["rows"]]
    if any(row.keys() != rows[0].keys() for row in rows):
        raise ValueError("rows of one question have different keys")
    question, verdict = str(content["question"]), str(content["verdict"])
    told = None if error is None else str(error)
    return Answer(question, verdict, rows, told, float(content["seconds"]))
