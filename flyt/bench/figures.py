# SPDX-License-Identifier: Apache-2.0
"""What Flyt promises: each figure one ratio of one run with its bound.

A figure may rest on several parts (both directions, two sizes); the worst one counts. Ratios are
of medians; their spread is that of the ratios within each round.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from flyt.bench.plan import (
    BURST_CALLS,
    GIB,
    LARGE,
    MIB,
    SMALL,
    TRAIN_CALLS,
    bytes_text,
)
from flyt.bench.results import Key, Results, Spread

WAYS = ("h2d", "d2h")
PROMISED = (256 * MIB, GIB)
MOST_CLIENTS = 8


@dataclasses.dataclass(frozen=True)
class Part:
    """One comparison.

    Attributes
    ----------
    label : str
    flyt : Key
    others : tuple of Key
        What it is compared with; of several the one that is fastest for its bytes. Empty: nothing,
        the time itself is the figure.
    """

    label: str
    flyt: Key
    others: tuple[Key, ...] = ()


@dataclasses.dataclass(frozen=True)
class Figure:
    """A promise.

    Attributes
    ----------
    bound : float
    faster : bool
        Whether the ratio is one of speeds, which has to be at least `bound`; else it is one of
        times, which may be at most `bound`.
    against : str
        "native": needs CUDA itself in the run. "memcpy": the emulated device's promises.
    parts : tuple of Part
    microseconds : bool
        The figure is no ratio but a time.
    """

    title: str
    bound: float
    faster: bool
    against: str
    parts: tuple[Part, ...]
    microseconds: bool = False

    @property
    def bound_text(self) -> str:
        return f"{'≥' if self.faster else '≤'} {self.bound:g}{' µs' * self.microseconds}"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A figure as a run has it.

    Attributes
    ----------
    parts : dict of str to Spread
        Those that were measured.
    missing : tuple of str
        Labels of those that weren't.
    """

    figure: Figure
    parts: dict[str, Spread]
    missing: tuple[str, ...]

    @property
    def worst(self) -> Spread | None:
        if not self.parts:
            return None
        pick = min if self.figure.faster else max
        return pick(self.parts.values(), key=lambda spread: spread.median)

    @property
    def ok(self) -> bool | None:
        """Whether the promise is kept; None if a part is missing and the rest keeps it."""
        worst = self.worst
        if worst is None:
            return None
        bound = self.figure.bound
        kept = worst.median >= bound if self.figure.faster else worst.median <= bound
        return None if kept and self.missing else kept

    def to_json(self) -> dict[str, Any]:
        def rounded(spread: Spread | None) -> dict[str, float] | None:
            return spread and {k: float(f"{v:.4g}") for k, v in spread._asdict().items()}

        return {
            "figure": self.figure.title,
            "bound": self.figure.bound_text,
            "measured": rounded(self.worst),
            "ok": self.ok,
            "parts": {label: rounded(spread) for label, spread in self.parts.items()},
            "missing": list(self.missing),
        }


def _copies(
    flyt: str, other: str, sizes: Sequence[int], ways: Sequence[str], case: str = "copy"
) -> tuple[Part, ...]:
    return tuple(
        Part(
            f"{way.upper()} {bytes_text(size)}",
            Key(case, size, flyt, way),
            (Key(case, size, other, way),),
        )
        for size in sizes
        for way in ways
    )


def _calls(case: str, metric: str, label: str) -> tuple[Part, ...]:
    native, flyt = (Key(case, SMALL, f"{who} pageable", metric) for who in ("native", "flyt"))
    return (Part(label, flyt, (native,)),)


def _link(way: str) -> Part:
    limits = (
        Key("stream", LARGE, "native pinned", way),
        *(
            Key(case, size, "native pinned", way)
            for case in ("copy", "loop")
            for size in (LARGE, *PROMISED)
        ),
    )
    return Part(way.upper(), Key("stream", LARGE, "flyt pinned", way, MOST_CLIENTS), limits)


_MIX = tuple(
    Key("mix", SMALL, f"{who} pageable", "mix", MOST_CLIENTS) for who in ("flyt", "native")
)

FIGURES = (
    Figure(
        "pageable H2D and D2H, 256 MiB and 1 GiB, in a loop ÷ native pinned",
        0.75, True, "native", _copies("flyt pageable", "native pinned", PROMISED, WAYS, "loop"),
    ),
    Figure(
        "pinned H2D and D2H, 64 MiB and more, in a loop ÷ native pinned",
        0.97, True, "native",
        _copies("flyt pinned", "native pinned", (LARGE, *PROMISED), WAYS, "loop"),
    ),
    Figure(
        "pageable H2D and D2H, 256 MiB and 1 GiB ÷ native pinned",
        0.75, True, "native", _copies("flyt pageable", "native pinned", PROMISED, WAYS),
    ),
    Figure(
        "pageable H2D, 256 MiB and 1 GiB ÷ native pageable",
        4.5, True, "native", _copies("flyt pageable", "native pageable", PROMISED, ("h2d",)),
    ),
    Figure(
        "pageable D2H, 256 MiB and 1 GiB ÷ native pageable",
        3, True, "native", _copies("flyt pageable", "native pageable", PROMISED, ("d2h",)),
    ),
    Figure(
        "pinned H2D and D2H, 64 MiB and more ÷ native pinned",
        0.97, True, "native", _copies("flyt pinned", "native pinned", (LARGE, *PROMISED), WAYS),
    ),
    Figure(
        f"4 KiB pageable H2D, time to return in a burst of {BURST_CALLS} ÷ native",
        0.7, False, "native", _calls("burst", "return", "return"),
    ),
    Figure(
        f"{TRAIN_CALLS:,} of them back to back and a synchronise ÷ native",
        1.3, False, "native", _calls("train", "each", "each"),
    ),
    Figure(
        "4 KiB D2H, synchronous ÷ native",
        1.6, False, "native", _calls("latency", "d2h_p50", "median"),
    ),
    Figure(
        "async memset, cost to issue ÷ native",
        0.6, False, "native", _calls("post", "issue", "issue"),
    ),
    Figure(
        "8 clients, pinned 64 MiB copies, sum ÷ link limit",
        0.95, True, "native", tuple(_link(way) for way in WAYS),
    ),
    Figure(
        "8 clients, synchronous 4 KiB copies, half each way, sum ÷ 8 native threads",
        0.8, True, "native", (Part("sum", _MIX[0], (_MIX[1],)),),
    ),
    Figure(
        "pageable H2D, 256 MiB ÷ plain memcpy",
        0.6, True, "memcpy", _copies("flyt pageable", "memcpy", PROMISED[:1], ("h2d",)),
    ),
    Figure(
        "4 KiB D2H, synchronous, median (with the command ring)",
        40, False, "memcpy", (Part("median", Key("latency", SMALL, "flyt pageable", "d2h_p50")),),
        microseconds=True,
    ),
)  # fmt: skip


def measure(results: Results, against: Sequence[str]) -> list[Measured]:
    """All figures that a run against `against` ("native", "memcpy") was to have."""
    found = []
    for figure in FIGURES:
        if figure.against not in against:
            continue
        parts, missing = {}, []
        for part in figure.parts:
            spread = _ratio(part, figure, results)
            if spread is None:
                missing.append(part.label)
            else:
                parts[part.label] = spread
        found.append(Measured(figure, parts, tuple(missing)))
    return found


def _ratio(part: Part, figure: Figure, results: Results) -> Spread | None:
    mine = results.samples.get(part.flyt)
    if not mine:
        return None
    if not part.others:
        return Spread.of([seconds * 1e6 for seconds in mine])
    there = [key for key in part.others if key in results.samples]
    if not there:
        return None
    other = min(there, key=lambda key: statistics.median(results.samples[key]) / key.size)
    return ratio(
        [seconds / part.flyt.size for seconds in mine],
        [seconds / other.size for seconds in results.samples[other]],
        faster=figure.faster,
        paired=other[:2] == part.flyt[:2],
    )


def ratio(mine: Sequence[float], others: Sequence[float], *, faster: bool, paired: bool) -> Spread:
    """Compare two series of seconds.

    Parameters
    ----------
    mine, others : sequence of float
    faster : bool
        How many times as fast; else how many times as long.
    paired : bool
        The n-th samples belong to one round. Else the spread is the widest that the
        quartiles allow.

    Returns
    -------
    Spread
        The ratio of the medians, and the quartiles of the ratios.
    """
    upper, lower = (others, mine) if faster else (mine, others)
    median = statistics.median(upper) / statistics.median(lower)
    if paired and len(upper) == len(lower):
        spread = Spread.of([a / b for a, b in zip(upper, lower, strict=True)])
        return spread._replace(median=median)
    above, below = Spread.of(upper), Spread.of(lower)
    return Spread(above.low / below.high, median, above.high / below.low)
