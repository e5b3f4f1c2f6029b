# SPDX-License-Identifier: Apache-2.0
"""Ratios from given samples, by hand; the promises are those that were made."""

from __future__ import annotations

import pytest

from flyt.bench.figures import FIGURES, Measured, measure, ratio
from flyt.bench.plan import CASES, GIB, KIB, LARGE, MIB, Plan
from flyt.bench.results import Key, Results, Spread


def results(**extra: float) -> Results:
    """A run in which each figure is what the table below says."""
    found = Results()

    def add(case: str, size: int, contender: str, metric: str, seconds: float, n: int = 1) -> None:
        found.samples[Key(case, size, contender, metric, n)] = [seconds * f for f in (1, 0.5, 2)]

    for size in (64 * MIB, 256 * MIB, GIB):
        for way in ("h2d", "d2h"):
            at = size / MIB
            add("copy", size, "native pinned", way, 20e-6 * at)
            add("copy", size, "native pageable", way, 100e-6 * at)
            add("copy", size, "flyt pinned", way, 20.2e-6 * at)
            add("copy", size, "flyt pageable", way, (25e-6 if size != GIB else 24e-6) * at)
            add("copy", size, "memcpy", way, 15e-6 * at)
            add("loop", size, "native pinned", way, 21e-6 * at)
            add("loop", size, "flyt pinned", way, 22e-6 * at)
            add("loop", size, "flyt pageable", way, 24e-6 * at)
    for who, factor in (("native", 1.0), ("flyt", 1.5)):
        add("latency", 4 * KIB, f"{who} pageable", "d2h_p50", 8e-6 * factor)
        add("burst", 4 * KIB, f"{who} pageable", "return", 6e-6 / factor)
        add("train", 4 * KIB, f"{who} pageable", "each", 7e-6 * factor)
        add("post", 4 * KIB, f"{who} pageable", "issue", 3e-6 / factor)
        add("mix", 4 * KIB, f"{who} pageable", "mix", 10e-6 * factor, 8)
    for way, seconds in (("h2d", 1300e-6), ("d2h", 1350e-6)):
        add("stream", LARGE, "native pinned", way, 1300e-6)
        add("stream", LARGE, "flyt pinned", way, seconds, 8)
    return found


EXPECTED = (
    # bound, what follows from the samples above, kept
    (0.75, 21 / 24, True),
    (0.97, 21 / 22, False),
    (0.75, 20 / 25, True),
    (4.5, 100 / 25, False),
    (3, 100 / 25, True),
    (0.97, 20 / 20.2, True),
    (0.7, 1 / 1.5, True),
    (1.3, 1.5, False),
    (1.6, 1.5, True),
    (0.6, 1 / 1.5, False),
    # The link's limit is the fastest for its bytes: 20 µs a MiB, faster than 1300 µs for 64 MiB.
    (0.95, 64 * 20 / 1350, False),
    (0.8, 1 / 1.5, False),
    (0.6, 15 / 25, True),
    (40, 8 * 1.5, True),
)


def test_every_figure_from_given_samples() -> None:
    measured = measure(results(), ["native", "memcpy"])
    assert len(measured) == len(EXPECTED)
    for found, (bound, value, kept) in zip(measured, EXPECTED, strict=True):
        assert found.figure.bound == bound
        assert found.worst is not None
        assert found.worst.median == pytest.approx(value), found.figure.title
        assert found.ok is kept, found.figure.title
        assert found.missing == ()


def test_only_the_figures_that_apply() -> None:
    assert {m.figure.against for m in measure(results(), ["memcpy"])} == {"memcpy"}
    assert measure(results(), []) == []


def test_a_missing_part_is_named_and_is_no_kept_promise() -> None:
    found = results()
    del found.samples[Key("copy", GIB, "flyt pageable", "d2h")]
    first, second = measure(found, ["native"])[2:4]
    assert (first.missing, first.ok) == (("D2H 1 GiB",), None)
    assert second.ok is False  # what is there breaks it already
    nothing = measure(Results(), ["native"])[0]
    assert (nothing.worst, nothing.ok, len(nothing.missing)) == (None, None, 4)


def test_the_worst_part_counts() -> None:
    fast, slow = Spread(1, 1, 1), Spread(2, 2, 2)
    parts = {"a": fast, "b": slow}
    speed = next(f for f in FIGURES if f.faster)
    time = next(f for f in FIGURES if not f.faster)
    assert Measured(speed, parts, ()).worst == fast
    assert Measured(time, parts, ()).worst == slow


def test_a_ratio_is_of_medians_and_its_spread_of_rounds() -> None:
    # In each round the other one takes twice as long, whatever the round.
    mine, others = [1.0, 10.0, 2.0, 4.0, 3.0], [2.0, 20.0, 4.0, 8.0, 6.0]
    assert ratio(mine, others, faster=True, paired=True) == (2, 2, 2)
    assert ratio(mine, others, faster=False, paired=True) == (0.5, 0.5, 0.5)
    # Not of one round: the quartiles are 2, 3, 4 and 4, 6, 8.
    assert ratio(mine, others, faster=True, paired=False) == (4 / 4, 6 / 3, 8 / 2)


def test_every_part_is_measured_by_the_full_plan() -> None:
    """No figure waits for a sample that no job takes."""
    metrics = {
        "copy": ("h2d", "d2h"),
        "loop": ("h2d", "d2h"),
        "latency": ("d2h_p50", "d2h_p99", "h2d_p50", "h2d_p99"),
        "burst": ("return",),
        "train": ("each",),
        "post": ("issue",),
        "stream": ("h2d", "d2h"),
        "mix": ("mix",),
    }
    assert set(metrics) == set(CASES)
    there = {
        Key(job.case, job.size, entrant.contender, metric, entrant.threads or entrant.clients)
        for job in Plan().jobs(["memcpy", "native", "flyt", "inline"])
        for entrant in job.entrants
        for metric in metrics[job.case]
    }
    for figure in FIGURES:
        for part in figure.parts:
            assert {part.flyt, *part.others} <= there, figure.title


def test_quartiles() -> None:
    assert Spread.of([5.0]) == (5, 5, 5)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == (2, 3, 4)
