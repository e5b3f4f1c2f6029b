# SPDX-License-Identifier: Apache-2.0
"""``flyt bench``: native CUDA, Flyt and plain memcpy in one run, as ratios with their bounds."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import click
from cuda.bindings import runtime as cudart
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flyt.bench import plots
from flyt.bench.harness import Progress as Listener
from flyt.bench.plan import CASES, CLIENTS, LIMIT, QUICK_LIMIT, QUICK_SIZES, SIZES, Plan
from flyt.bench.report import FALLBACK, Report, show
from flyt.bench.run import Setup, jobs_of, run
from flyt.errors import ConfigurationError
from flyt.shm.native import native as native_library
from flyt.sizes import parse_size

CUPY = "cupy.cuda.runtime"

PLAIN_WIDTH = 120
"""Columns where the output is no terminal: the tables fit."""

MOST_CLIENTS = 64
"""Processes; each is a Python interpreter."""

LARGEST_COPY = 1 << 34

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _sizes(_context: click.Context, option: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    try:
        sizes = sorted({parse_size(text) for text in value.split(",")})
    except ConfigurationError as exc:
        raise click.BadParameter(str(exc), _context, option) from exc
    if not 0 < sizes[0] <= sizes[-1] <= LARGEST_COPY:
        raise click.BadParameter("sizes are from 1 byte to 16G", _context, option)
    return sizes


def _clients(_context: click.Context, option: click.Parameter, value: str) -> list[int]:
    counts = sorted({int(text) if text.isdecimal() else 0 for text in value.split(",")})
    if not 0 < counts[0] <= counts[-1] <= MOST_CLIENTS:
        raise click.BadParameter(f"numbers from 1 to {MOST_CLIENTS}, by comma", _context, option)
    return counts


@click.command(context_settings={"show_default": True})
@click.option(
    "--device",
    type=click.Choice(["auto", "emulated", "cupy"]),
    default="auto",
    help="Of the private backend; auto: the GPU if there is one, and says so if not.",
)
@click.option(
    "--native",
    metavar="MODULE",
    help=f"What stands for native CUDA: a module like cuda.bindings.runtime, or none.  "
    f"[default: {CUPY}, with a GPU]",
)
@click.option("--backend", metavar="ENDPOINT", help="Measure a backend that runs already.")
@click.option("--quick", is_flag=True, help="Fewer sizes and rounds.")
@click.option(
    "--limit",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="What does not fit is dropped, and said.  "
    f"[default: {LIMIT:.0f}, quick {QUICK_LIMIT:.0f}]",
)
@click.option("--case", "cases", multiple=True, type=click.Choice(CASES), help="Only these cases.")
@click.option("--sizes", callback=_sizes, metavar="4,4K,…", help="Of the copies.")
@click.option("--clients", callback=_clients, default=",".join(map(str, CLIENTS)), help="At once.")
@click.option("--rounds", type=click.IntRange(min=0), default=0, help="At most; 0: by case.")
@click.option("--json", "json_file", metavar="FILE", help="Write all that was found; - is stdout.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="DIR", help="Draw PNG and SVG.")
@click.option(
    "--summary",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Measure nothing: show (and --plot) what an earlier --json wrote.",
)
def bench(json_file: str | None, plot: Path | None, summary: Path | None, **asked: Any) -> None:
    """Measure Flyt beside native CUDA and a plain memcpy, taking turns, every byte compared.

    Exit code 1 if a byte was wrong or something failed; a bound that is missed is in the table.
    """
    to_stdout = json_file == "-"
    console = Console(stderr=to_stdout)
    if not console.is_terminal:
        console = Console(stderr=to_stdout, width=PLAIN_WIDTH)
    try:
        if plot is not None:
            plots.require()
        report = _read(summary) if summary is not None else _measure(console, **asked)
    except ConfigurationError as fault:
        raise click.ClickException(str(fault)) from None
    if json_file is not None:
        text = json.dumps(report.to_json(), indent=1) + "\n"
        if to_stdout:
            click.echo(text, nl=False)
        else:
            Path(json_file).write_text(text)
    if not to_stdout:
        show(report, console)
    if plot is not None:
        for path in plots.draw(report.results, _title(report), plot):
            console.print(f"wrote {path}", highlight=False)
    if report.failure:
        raise click.ClickException(report.failure)


def _measure(
    console: Console,
    *,
    device: str,
    native: str | None,
    backend: str | None,
    quick: bool,
    limit: float | None,
    cases: tuple[str, ...],
    sizes: list[int] | None,
    clients: list[int],
    rounds: int,
) -> Report:
    if backend is None and device == "auto":
        device = "cupy" if _has_gpu() else "emulated"
        if device == "emulated":
            console.print("no GPU here: measuring the emulated device")
    if native_library() is None:
        console.print(FALLBACK, style="bold red", highlight=False)
    if native is None and backend is None and device == "cupy":
        native = CUPY
    setup = Setup(device, None if native == "none" else native, backend)
    plan = Plan(sizes or (QUICK_SIZES if quick else SIZES), clients, cases or CASES, rounds, quick)
    for number in ENDINGS:
        signal.signal(number, _leave)
    total = sum(job.rounds + 1 for job in jobs_of(setup, plan))
    with _bar(console, total) as progress:
        return run(setup, plan, limit or (QUICK_LIMIT if quick else LIMIT), progress)


def _has_gpu() -> bool:
    error, count = cudart.cudaGetDeviceCount()
    return not error and count > 0


def _leave(number: int, _frame: FrameType | None) -> None:
    """End the run, and let nothing disturb the clearing away: each step of it has a time limit."""
    for ending in ENDINGS:
        signal.signal(ending, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


@contextlib.contextmanager
def _bar(console: Console, total: int) -> Iterator[Listener]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=total)

        def progress(text: str, rounds: int) -> None:
            bar.update(task, description=text, advance=rounds)

        yield progress


def _read(file: Path) -> Report:
    try:
        return Report.from_json(json.loads(file.read_text()))
    except (AttributeError, ValueError, KeyError, TypeError) as exc:
        raise ConfigurationError(f"{file} is no result of flyt bench: {exc!r}") from exc


def _title(report: Report) -> str:
    machine = report.machine
    card = (machine["card"] or {}).get("name")
    where = card or f"{machine['cpu']}, {machine['cores']} cores"
    settings = report.settings
    device = f"backend {settings['backend']}" if settings["backend"] else settings["device"]
    date = str(machine["date"])[:10]
    if report.is_fallback:
        device += ", without the compiled library"
    return f"{device}; {where}; commit {machine['commit']}; {date}; quartiles shaded"
