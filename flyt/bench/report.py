# SPDX-License-Identifier: Apache-2.0
"""A run as people and programs read it: tables, the figures last, and one JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from flyt.bench.figures import Measured, measure
from flyt.bench.plan import CONTENDERS, MIB, SMALL, bytes_text
from flyt.bench.results import Key, Results, Spread
from flyt.errors import ConfigurationError

FORMAT = 1
"""Goes up when the JSON changes its meaning."""

REFERENCES = {"flyt pageable": "native pageable", "flyt pinned": "native pinned"}
"""Whom a Flyt contender's ratio in the tables refers to, if it took part; else the plain memcpy."""

CALLS = (
    ("latency", "d2h_p50", "4 KiB D2H, synchronous, median"),
    ("latency", "d2h_p99", "the same, 99 %"),
    ("latency", "h2d_p50", "4 KiB H2D and a synchronise, median"),
    ("latency", "h2d_p99", "the same, 99 %"),
    ("burst", "return", "4 KiB H2D, to return in a burst"),
    ("train", "each", "4 KiB H2D, back to back, each"),
    ("post", "issue", "async memset, to issue"),
)
CLIENTS = (
    ("stream", "h2d", "pinned H2D"),
    ("stream", "d2h", "pinned D2H"),
    ("mix", "mix", "4 KiB, half each way"),
)
FALLBACK = (
    "without the compiled library (not built, or FLYT_NATIVE=0) this is the slow fallback: the "
    "figures say nothing of Flyt's speed. Install a C compiler, then Flyt again"
)
"""For people who measure so."""

OK = {True: "[green]yes[/]", False: "[bold red]no[/]", None: "—"}


@dataclasses.dataclass
class Report:
    """All that a run found.

    Attributes
    ----------
    settings : dict
        What was asked for: device, native module, limit, rounds, …
    against : list of str
        Which promises apply: "native", "memcpy".
    counters : dict
        ``flyt.statistics()`` of each Flyt process at the end.
    failure : str
        Why the run is no good; "" if every byte was right.
    """

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    against: Sequence[str]
    results: Results
    counters: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    failure: str = ""
    seconds: float = 0.0

    @property
    def figures(self) -> list[Measured]:
        return measure(self.results, self.against)

    @property
    def is_fallback(self) -> bool:
        """Whether the compiled library was not there; older files don't say."""
        return self.machine.get("native_library") is False

    def to_json(self) -> dict[str, Any]:
        return {
            "benchmark": "flyt bench",
            "format": FORMAT,
            "verified": not self.failure,
            "failure": self.failure,
            "compared": {"copies": self.results.copies, "bytes": self.results.compared},
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "seconds": self.seconds,
            "against": list(self.against),
            "figures": [figure.to_json() for figure in self.figures],
            "notes": self.results.notes,
            "counters": dict(self.counters),
            "results": self.results.to_json(),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Report:
        """Read what `to_json` gave; the figures are computed anew from the samples.

        Raises
        ------
        ConfigurationError
            It is no result of this benchmark, or of another format.
        """
        if found.get("benchmark") != "flyt bench" or found.get("format") != FORMAT:
            raise ConfigurationError(
                f"this is no result of flyt bench in format {FORMAT}: measure again, or read it "
                "with the version of Flyt that wrote it"
            )
        results = Results.from_json(found["results"])
        results.notes = list(found["notes"])
        results.copies, results.compared = found["compared"]["copies"], found["compared"]["bytes"]
        return cls(
            found["machine"],
            found["settings"],
            found["against"],
            results,
            found["counters"],
            found["failure"],
            found["seconds"],
        )


def show(report: Report, console: Console) -> None:
    """Print all tables; the figures come last."""
    results = report.results
    for case, how in (("copy", ""), ("loop", ", in a loop")):
        for way, title in (("h2d", "host to device"), ("d2h", "device to host")):
            if results.sizes(case):
                console.print(_copies(results, case, way, title + how))
    for table in (_calls(results), _clients(results)):
        if table.row_count:
            console.print(table)
    console.print(_figures(report))
    for note in results.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    console.print(
        f"{results.copies:,} copies with {results.compared / 1e9:.1f} GB compared byte by byte, "
        + ("[bold red]the run failed[/]" if report.failure else "all right")
        + f"; {report.seconds:.0f} s",
        highlight=False,
    )
    if report.is_fallback:
        console.print(FALLBACK, style="bold red", highlight=False)
    if report.failure:
        console.print(f"failure: {report.failure}", style="red", highlight=False, markup=False)


def _copies(results: Results, case: str, way: str, title: str) -> Table:
    contenders = results.contenders(case)
    table = Table(title=f"cudaMemcpy, {title}: µs below 1 MiB, GB/s above", title_justify="left")
    table.add_column("size", justify="right")
    for contender in contenders:
        table.add_column(contender, justify="right")
    for size in results.sizes(case):
        cells = []
        for contender in contenders:
            spread = results.spread(Key(case, size, contender, way))
            if spread is None:
                cells.append("—")
                continue
            reference = REFERENCES.get(contender, "")
            if reference not in contenders:
                reference = "memcpy" if contender.startswith("flyt") else ""
            other = results.spread(Key(case, size, reference, way))
            cells.append(
                _speed(size, spread) + (_times(other.median / spread.median) if other else "")
            )
        table.add_row(bytes_text(size), *cells)
    references = {c: r for c, r in REFERENCES.items() if r in contenders}
    table.caption = "×: speed as a multiple of " + (
        "native CUDA's with the same kind of memory (inline: of a plain memcpy's)"
        if references
        else "a plain memcpy's"
    )
    table.caption_justify = "left"
    return table


def _calls(results: Results) -> Table:
    cases = {case for case, _, _ in CALLS}
    there = {name for case in cases for name in results.contenders(case)}
    contenders = [name for name in CONTENDERS if name in there]
    table = Table(title="calls, µs (quartiles)", title_justify="left")
    table.add_column("call")
    for contender in contenders:
        table.add_column(contender, justify="right")
    for case, metric, label in CALLS:
        spreads = [results.spread(Key(case, SMALL, c, metric)) for c in contenders]
        if any(spreads):
            table.add_row(label, *(_microseconds(spread) for spread in spreads))
    return table


def _clients(results: Results) -> Table:
    keys = [k for k in results.samples if k.case in {"stream", "mix"}]
    counts = sorted({key.clients for key in keys})
    table = Table(title="several clients at once, sum of all", title_justify="left")
    table.add_column("copies")
    table.add_column("contender")
    for count in counts:
        table.add_column(str(count), justify="right")
    for case, metric, label in CLIENTS:
        for contender in results.contenders(case):
            size = results.sizes(case)[0]
            cells = []
            for count in counts:
                spread = results.spread(Key(case, size, contender, metric, count))
                cells.append("" if spread is None else _sum(case, size, spread))
            table.add_row(label.replace("pinned", f"pinned {bytes_text(size)}"), contender, *cells)
    return table


def _figures(report: Report) -> Table:
    settings = report.settings
    native = settings["native"]
    where = (
        f"backend {settings['backend']}" if settings["backend"] else f"device {settings['device']}"
    )
    table = Table(
        title=where + (f", native: {native}" if native else ""),
        title_justify="left",
    )
    for column in ("figure", "bound", "measured", "ok"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for measured in report.figures:
        worst = measured.worst
        text = "not measured"
        if worst is not None:
            text = f"{worst.median:.3g} ({worst.low:.3g}–{worst.high:.3g})"
            if measured.missing:
                text += f"\nwithout {', '.join(measured.missing)}"
        table.add_row(measured.figure.title, measured.figure.bound_text, text, OK[measured.ok])
    table.caption = "measured: the worst of its parts (quartiles); ratios within this run"
    table.caption_justify = "left"
    return table


def _speed(size: int, spread: Spread) -> str:
    seconds = spread.median
    return f"{size / seconds / 1e9:.2f}" if size >= MIB else f"{seconds * 1e6:.1f}"


def _times(ratio: float) -> str:
    return f"  {ratio:.2f}×" if ratio >= 0.095 else f"  {ratio:.1g}×"


def _microseconds(spread: Spread | None) -> str:
    if spread is None:
        return "—"
    low, median, high = (f"{seconds * 1e6:.1f}" for seconds in spread)
    return f"{median} ({low}–{high})"


def _sum(case: str, size: int, spread: Spread) -> str:
    if case == "mix":
        return f"{1e-3 / spread.median:.1f} k/s"
    return f"{size / spread.median / 1e9:.2f} GB/s"
