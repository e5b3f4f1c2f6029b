# SPDX-License-Identifier: Apache-2.0
"""What a run found: seconds of one copy, by case, size, contender and number of clients."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from flyt.bench.plan import CONTENDERS

DIGITS = 6
"""Significant ones of a sample; clocks give no more, and a file then shows the very same tables."""


class Key(NamedTuple):
    """Names one series of samples; `metric` is a name that a case gives its samples."""

    case: str
    size: int
    contender: str
    metric: str
    clients: int = 1


class Spread(NamedTuple):
    """Median and quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(low, median, high)


@dataclasses.dataclass
class Results:
    """Samples of a run, one a round; the n-th samples of one case and size were taken in one round.

    Attributes
    ----------
    samples : dict
        Seconds of one copy (or call); of several clients together: of the sum of all.
    notes : list of str
        All that was dropped or went another way than planned.
    copies, compared : int
        Copies that were checked, and their bytes.
    """

    samples: dict[Key, list[float]] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    copies: int = 0
    compared: int = 0

    def add(self, key: Key, seconds: Iterable[float]) -> None:
        self.samples[key] = [float(f"{value:.{DIGITS}g}") for value in seconds]

    def verified(self, copies: int, size: int) -> None:
        self.copies += copies
        self.compared += copies * size

    def spread(self, key: Key) -> Spread | None:
        found = self.samples.get(key)
        return Spread.of(found) if found else None

    def sizes(self, case: str) -> list[int]:
        return sorted({key.size for key in self.samples if key.case == case})

    def contenders(self, case: str) -> list[str]:
        """Who took part, in the order of the table of contenders."""
        there = {key.contender for key in self.samples if key.case == case}
        return [name for name in CONTENDERS if name in there]

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                **key._asdict(),
                **{name: float(f"{value:.4g}") for name, value in Spread.of(s)._asdict().items()},
                "samples": s,
            }
            for key, s in self.samples.items()
        ]

    @classmethod
    def from_json(cls, records: Iterable[dict[str, Any]]) -> Results:
        found = cls()
        for record in records:
            key = Key(*(record[name] for name in Key._fields))
            found.samples[key] = [float(value) for value in record["samples"]]
        return found
