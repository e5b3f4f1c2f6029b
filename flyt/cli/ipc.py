# SPDX-License-Identifier: Apache-2.0
"""``flyt ipc``: run a program whose cudaMalloc gives shareable memory; study sharing here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from flyt.errors import ConfigurationError, FlytError
from flyt.ipc.driver import get_driver
from flyt.ipc.native_build import library_path
from flyt.ipc.study import costs, crashes
from flyt.ipc.study.report import QUESTIONS, UNWRITTEN, Answer, Report
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


@ipc.command()
@click.option("--out", type=click.Path(path_type=Path), help="Folder for JSON and CSV files.")
@click.option("--like", type=click.Choice(["torch", "cupy", "numpy"]), help="Library of arrays.")
def study(out: Path | None, like: str | None) -> None:
    """Answer questions about sharing by experiments on this machine's GPU.

    Two of four are written so far; the others say so.
    """
    try:
        driver = get_driver()
        library = like or ("torch" if driver.kind == "cuda" else "numpy")
        answers = [costs.measure(), crashes.measure(library)]
    except FlytError as exc:
        click.echo(f"flyt ipc study: {exc}", err=True)
        sys.exit(1)
    answers += [Answer(question, reason, []) for question, reason in UNWRITTEN.items()]
    for answer in sorted(answers, key=lambda answer: list(QUESTIONS).index(answer.question)):
        click.echo(f"{QUESTIONS[answer.question]}\n  {answer.verdict}")
    if out is not None:
        for path in Report.of(driver, answers).write(out):
            click.echo(f"wrote {path}")
