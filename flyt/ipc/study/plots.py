# SPDX-License-Identifier: Apache-2.0
"""The study's figures, as PNG and SVG, through matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flyt import plotting
from flyt.ipc.study.blocks import WAY_NAMES
from flyt.ipc.study.matrix import RESULTS
from flyt.ipc.study.report import READ_BOUND, Report, Row
from flyt.plotting import FORMATS

COLOURS = {
    "local": "#000000",
    "local vmm": "#e69f00",
    "imported vmm": "#0072b2",
    "imported legacy": "#d55e00",
}
RESULT_COLOURS = ("#009e73", "#f0e442", "#dddddd", "#ffffff", "#d55e00")
"""Okabe and Ito's palette: told apart by the colour-blind too."""


def require() -> None:
    """See `flyt.plotting.require`."""
    plotting.require("plots")


def draw(report: Report, folder: Path) -> list[Path]:
    """Write every figure that there are rows for; the files' paths."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = list[Path]()
    for name, question, size, needed, fill in FIGURES:
        answer = report.answer(question)
        if answer is None or not any(needed(row) for row in answer.rows):
            continue
        figure = Figure(figsize=size, layout="constrained")
        fill(answer.rows, figure)
        written += plotting.save(figure, folder, name, report.title(), FORMATS)
    return written


def _bytes(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def _by_size(rows: list[Row], ax: Any, operation: str, value: str, scale: str) -> None:
    """One line for each memory."""
    here = [row for row in rows if row["operation"] == operation]
    for memory in dict.fromkeys(row["memory"] for row in here):
        points = sorted((r["size"], r[value]) for r in here if r["memory"] == memory)
        xs, ys = zip(*points, strict=True)
        ax.plot(xs, ys, "o-", ms=4, label=memory, c=COLOURS.get(memory), alpha=0.8)
    _size_axis(ax, sorted({row["size"] for row in here}))
    ax.set_yscale(scale)
    if scale == "linear":
        ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)


def _size_axis(ax: Any, sizes: list[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [_bytes(s) for s in sizes], rotation=45, ha="right", fontsize=8)
    ax.minorticks_off()


def _three(rows: list[Row], figure: Any, values: dict[str, tuple[str, str, str]]) -> None:
    there = [name for name in values if any(row["operation"] == name for row in rows)]
    for ax, name in zip(figure.subplots(1, len(there), squeeze=False)[0], there, strict=True):
        value, label, scale = values[name]
        _by_size(rows, ax, name, value, scale)
        ax.set_title(name)
        ax.set_ylabel(label)
        ax.legend(fontsize=8)


def _bandwidth(rows: list[Row], figure: Any) -> None:
    _three(rows, figure, dict.fromkeys(("read", "write"), ("gb_per_s", "GB/s", "linear")))


def _latency(rows: list[Row], figure: Any) -> None:
    kernel = ("median_us", "µs a kernel", "log")
    chase = ("ns_per_load", "ns a load that waits for the one before", "linear")
    _three(rows, figure, {"read": kernel, "write": kernel, "chase": chase})


def _ratio(rows: list[Row], figure: Any) -> None:
    ratio = ("of_local", "of local speed", "linear")
    _three(rows, figure, dict.fromkeys(("read", "write", "chase"), ratio))
    for ax in figure.axes:
        ax.axhline(READ_BOUND, ls="--", lw=0.8, c="#808080")


def _costs(rows: list[Row], figure: Any) -> None:
    steps = [step for step in dict.fromkeys(r["step"] for r in rows) if step in COST_STEPS]
    axes = figure.subplots(1, len(steps), squeeze=False, sharey=True)[0]
    for ax, step in zip(axes, steps, strict=True):
        here = [row for row in rows if row["step"] == step]
        for way in dict.fromkeys(row["way"] for row in here):
            fields = ("size", "median_us", "least_us", "most_us")
            ours = sorted([row[field] for field in fields] for row in here if row["way"] == way)
            xs, ys, low, high = zip(*ours, strict=True)
            (line,) = ax.plot(xs, ys, "o-", ms=4, label=WAY_NAMES[way])
            ax.fill_between(xs, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
        _size_axis(ax, sorted({row["size"] for row in here}))
        ax.set_yscale("log")
        ax.set_title(step, fontsize=10)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("µs")
    axes[-1].legend(fontsize=8)


COST_STEPS = ("allocate", "export", "import and map", "unmap the import", "free")


def _coherence(rows: list[Row], figure: Any) -> None:
    """Parts of a million rounds; what never happened is drawn at nothing."""
    places = list(dict.fromkeys(row["where"] for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    axes = figure.subplots(1, len(places), squeeze=False, sharey=True)[0]
    for ax, where in zip(axes, places, strict=True):
        for row in (row for row in rows if row["where"] == where):
            y = variants.index(row["variant"])
            part = 100 * row["stale"] / row["rounds"] if row["rounds"] else 0
            ax.barh(y, part, color="#d55e00" if not row["ordered"] else "#000000")
            words = f"{row['stale']:,} of {row['rounds']:,}"
            if row["unseen"]:
                words += f"; flag unseen by {row['unseen']} of {row['pairs']}"
            ax.annotate(words, (part, y), (4, -3), textcoords="offset points", fontsize=7)
        ax.set_yticks(range(len(variants)), variants, fontsize=8)
        ax.set_xlim(0, 130)
        ax.set_xlabel("% of rounds with old data")
        ax.set_title(where)
    axes[0].invert_yaxis()


def _compatibility(rows: list[Row], figure: Any) -> None:
    from matplotlib.colors import ListedColormap

    allocators = list(dict.fromkeys(row["allocator"] for row in rows))
    ways = list(dict.fromkeys(row["export"] for row in rows))
    ax = figure.subplots()
    grid = [[float("nan")] * len(ways) for _ in allocators]
    for row in rows:
        y, x = allocators.index(row["allocator"]), ways.index(row["export"])
        grid[y][x] = RESULTS.index(row["result"])
        code = row["import_code"] or row["export_code"]
        text = f"{row['result']} ({code})" if code else row["result"]
        ax.text(x, y, text, ha="center", va="center", fontsize=7)
    ax.imshow(
        grid, aspect="auto", cmap=ListedColormap(RESULT_COLOURS), vmin=0, vmax=len(RESULTS) - 1
    )
    ax.set_xticks(range(len(ways)), [way.replace(", ", "\n") for way in ways], fontsize=7)
    ax.set_yticks(range(len(allocators)), allocators, fontsize=8)


Filler = Callable[[list[Row], Any], None]
FIGURES: tuple[tuple[str, str, tuple[float, float], Callable[[Row], bool], Filler], ...] = (
    ("costs", "costs", (14, 4), lambda row: row["step"] in COST_STEPS, _costs),
    ("bandwidth", "bandwidth", (11, 4.5), lambda row: row["operation"] != "chase", _bandwidth),
    ("latency", "bandwidth", (14, 4.5), lambda _row: True, _latency),
    ("ratio", "bandwidth", (14, 4.5), lambda _row: True, _ratio),
    ("coherence", "coherence", (12, 5), lambda _row: True, _coherence),
    ("compatibility", "compatibility", (11, 5), lambda _row: True, _compatibility),
)
"""File name, the question whose rows it draws, inches, the rows of which it needs one, and what
fills it."""
