# SPDX-License-Identifier: Apache-2.0
"""The curves of a run, as PNG and SVG, through matplotlib (the extra ``flyt[plot]``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flyt import plotting
from flyt.bench.plan import bytes_text
from flyt.bench.results import Key, Results
from flyt.plotting import FORMATS

COLOURS = {
    "memcpy": "#8c8c8c",
    "native pageable": "#e69f00",
    "native pinned": "#d55e00",
    "flyt pageable": "#56b4e9",
    "flyt pinned": "#0072b2",
    "flyt inline": "#cc79a7",
}
"""Okabe and Ito's palette: told apart by the colour-blind too."""


def require() -> None:
    """See `flyt.plotting.require`."""
    plotting.require("curves")


def draw(results: Results, title: str, folder: Path) -> list[Path]:
    """Write every curve that there are samples for; the files' paths.

    Parameters
    ----------
    results : Results
    title : str
        Names machine and device under each curve.
    folder : Path
        Made if it isn't there.
    """
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = list[Path]()
    for name, cases, fill in CURVES:
        if not any(results.sizes(case) for case in cases):
            continue
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        fill(results, figure)
        written += plotting.save(figure, folder, name, title, FORMATS)
    return written


def _by_size(results: Results, figure: Any, value: Callable[[int, float], float], y: str) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    sizes = results.sizes("copy")
    for ax, way, heading in zip(
        axes, ("h2d", "d2h"), ("host to device", "device to host"), strict=True
    ):
        for contender in results.contenders("copy"):
            spreads = [(s, results.spread(Key("copy", s, contender, way))) for s in sizes]
            there = [(s, spread) for s, spread in spreads if spread is not None]
            xs = [s for s, _ in there]
            colour = COLOURS.get(contender)
            ax.plot(
                xs, [value(s, q.median) for s, q in there], "o-", ms=3, label=contender, c=colour
            )
            ax.fill_between(
                xs,
                [value(s, q.low) for s, q in there],
                [value(s, q.high) for s, q in there],
                alpha=0.2,
                color=colour,
                linewidth=0,
            )
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(sizes, [bytes_text(s) for s in sizes], rotation=45, ha="right", fontsize=8)
        ax.minorticks_off()
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_title(heading)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel(y)
    axes[1].legend(fontsize=8)


def _throughput(results: Results, figure: Any) -> None:
    _by_size(results, figure, lambda size, seconds: size / seconds / 1e9, "GB/s")


def _duration(results: Results, figure: Any) -> None:
    _by_size(results, figure, lambda _, seconds: seconds * 1e6, "µs a copy")


def _clients(results: Results, figure: Any) -> None:
    panels = [panel for panel in CLIENT_PANELS if results.sizes(panel[0])]
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (case, metric, heading, y, factor) in zip(axes, panels, strict=True):
        size = results.sizes(case)[0]
        amount = factor * (size if case == "stream" else 1)
        counts = sorted({key.clients for key in results.samples if key.case == case})
        for contender in results.contenders(case):
            keys = [Key(case, size, contender, metric, count) for count in counts]
            spreads = [(key.clients, results.spread(key)) for key in keys]
            points = [(n, amount / spread.median) for n, spread in spreads if spread is not None]
            kind = " (threads)" if case == "mix" and contender.startswith("native") else ""
            xs, ys = zip(*points, strict=True)
            ax.plot(xs, ys, "o-", ms=4, label=contender + kind, c=COLOURS.get(contender))
        ax.set_xticks(counts)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("clients")
        ax.set_ylabel(y)
        ax.set_title(f"{bytes_text(size)}, {heading}")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)


CLIENT_PANELS = (
    ("stream", "h2d", "pinned, host to device", "GB/s, sum", 1e-9),
    ("stream", "d2h", "pinned, device to host", "GB/s, sum", 1e-9),
    ("mix", "mix", "half each way", "1,000 copies a second, sum", 1e-3),
)
"""Case, metric, heading, label of the y axis, and what turns it into that unit."""

CURVES: tuple[tuple[str, tuple[str, ...], Callable[[Results, Any], None]], ...] = (
    ("throughput", ("copy",), _throughput),
    ("duration", ("copy",), _duration),
    ("clients", ("stream", "mix"), _clients),
)
"""File name, the cases that it needs one of, and what fills the figure."""
