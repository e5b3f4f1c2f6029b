# SPDX-License-Identifier: Apache-2.0
"""``flyt ipc``: run a program whose cudaMalloc gives shareable memory; study sharing here."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from flyt.bench.machine import describe
from flyt.errors import ConfigurationError, FlytError
from flyt.ipc.driver import get_driver
from flyt.ipc.native_build import library_path
from flyt.ipc.study import plots
from flyt.ipc.study.report import QUESTIONS, Report
from flyt.ipc.study.run import LIMIT, run as run_experiments
from flyt.ipc.torch_pool import PRELOADED_VARIABLE


@click.group()
def ipc() -> None:
    """Zero-copy sharing of GPU memory between processes."""


@ipc.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...]) -> None:
    """Run COMMAND with cudaMalloc and cudaFree replaced (LD_PRELOAD).

    What it allocates can be sent with flyt.ipc.send. The program must load libcudart.so, as
    PyTorch's and CuPy's packages do; one that links the runtime statically keeps its own.
    """
    try:
        path = str(library_path("preload"))
    except ConfigurationError as exc:
        click.echo(f"flyt ipc run: {exc}", err=True)
        sys.exit(1)
    others = os.environ.get("LD_PRELOAD")
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{path}:{others}" if others else path,
        PRELOADED_VARIABLE: path,
    }
    try:
        os.execvpe(command[0], command, environment)
    except OSError as exc:
        click.echo(f"flyt ipc run: {command[0]}: {exc.strerror}", err=True)
        sys.exit(127)


@ipc.command(context_settings={"show_default": True})
@click.option("--only", multiple=True, type=click.Choice(list(QUESTIONS)), help="These questions.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for JSON and CSV files.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="DIR", help="Draw PNG and SVG.")
@click.option("--like", type=click.Choice(["torch", "cupy", "numpy"]), help="Library of arrays.")
@click.option(
    "--limit", type=click.FloatRange(min=1), default=LIMIT, metavar="SECONDS", help="For all."
)
@click.option(
    "--summary",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Measure nothing: show (and --plot) what an earlier --out wrote.",
)
def study(
    only: tuple[str, ...],
    out: Path | None,
    plot: Path | None,
    like: str | None,
    limit: float,
    summary: Path | None,
) -> None:
    """Answer questions about sharing by experiments on this machine's GPU.

    Exit code 1 if an experiment broke off; what the others found is there. What needs a GPU is no
    failure where there is none.
    """
    try:
        if plot is not None:
            plots.require()
        if summary is not None:
            report = Report.read(summary)
        else:
            report = _measure([q for q in QUESTIONS if not only or q in only], like, limit)
    except FlytError as exc:
        click.echo(f"flyt ipc study: {exc}", err=True)
        sys.exit(1)
    click.echo(report.title())
    for answer in report.answers:
        click.echo(f"{QUESTIONS[answer.question]}\n  {answer.verdict}")
        if answer.error is not None and answer.rows:
            click.echo(f"  broken off: {answer.error}")
    written = report.write(out) if out is not None else []
    if plot is not None:
        written += plots.draw(report, plot)
    for path in written:
        click.echo(f"wrote {path}")
    if report.failed:
        sys.exit(1)


def _measure(questions: list[str], like: str | None, limit: float) -> Report:
    driver = get_driver()
    library = like or (_gpu_library() if driver.kind == "cuda" else "numpy")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=len(questions))

        def progress(text: str, ended: int) -> None:
            bar.update(task, description=text, advance=ended)

        answers = run_experiments(questions, driver.kind, library, limit, progress)
    return Report(driver.kind, describe(), answers)


def _gpu_library() -> str:
    """The one of two that is there; of both CuPy, which starts sooner."""
    return "cupy" if importlib.util.find_spec("cupy") is not None else "torch"
