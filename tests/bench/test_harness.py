# SPDX-License-Identifier: Apache-2.0
"""The harness keeps its limit of time: nothing is begun when it is over, and all is closed."""

from __future__ import annotations

from typing import Any

import pytest

from flyt.bench.harness import Harness
from flyt.bench.plan import Entrant, Job
from flyt.bench.results import Key

ROUNDS = 5
WHO = ("memcpy", "native pinned", "flyt pinned")
JOB = Job("copy", 4096, 1, ROUNDS, tuple(Entrant(name) for name in WHO))


class Site:
    """Processes that obey at once, and a time that is over after so many orders."""

    def __init__(self, orders: int) -> None:
        self.orders = orders
        self.done: list[str] = []
        self.late: list[str] = []

    def left(self) -> float:
        return float(len(self.done) < self.orders)

    def get(self, _kind: str, _number: int = 1) -> Site:
        return self

    def ask(self, do: str, **_: Any) -> dict[str, Any]:
        if not self.left():
            self.late.append(do)
        self.done.append(do)
        return {"samples": {"h2d": 1.0}}


def run(orders: int) -> tuple[Site, Any]:
    site = Site(orders)
    harness = Harness(site, site, 30.0, lambda *_: None)
    harness.run([JOB])
    return site, harness.results


@pytest.mark.parametrize("orders", range(1, len(WHO) * (ROUNDS + 2)))
def test_what_is_late_is_not_begun(orders: int) -> None:
    site, results = run(orders)
    opened = site.done.count("begin_case")
    assert site.late == ["close_case"] * opened
    (note,) = results.notes
    complete = max(0, (orders - len(WHO)) // len(WHO) - 1)
    series = results.samples.get(Key("copy", 4096, "memcpy", "h2d"))
    if complete < 3:
        assert note.startswith(f"copy, 4 KiB: dropped after {complete} of {ROUNDS} rounds")
        assert series is None
    else:
        assert note == f"copy, 4 KiB: {complete} of {ROUNDS} rounds, for lack of time"
        assert {len(found) for found in results.samples.values()} == {complete}


def test_with_enough_time_all_is_there() -> None:
    _, results = run(1000)
    assert results.notes == []
    rounds = {key.contender: len(found) for key, found in results.samples.items()}
    assert rounds == dict.fromkeys(WHO, ROUNDS)
