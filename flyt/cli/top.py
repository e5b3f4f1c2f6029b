# SPDX-License-Identifier: Apache-2.0
"""``flyt top``: the sessions of a backend, live, with how fast each moves bytes."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from flyt.cli.status import UNKNOWN, fetch, screen, size, summary_of, table_of
from flyt.errors import FlytError
from flyt.frontend.settings import Settings

SHORTEST, LONGEST = 0.1, 3600.0
"""Seconds between two looks: each asks all workers."""


def rates_of(
    earlier: dict[str, Any], report: dict[str, Any], seconds: float
) -> dict[int, float | None]:
    """Bytes a second of each session between two reports; None where one of them lacks it."""
    before = {one["session"]: one["bytes_moved"] for one in earlier["sessions"]}
    rates: dict[int, float | None] = {}
    for one in report["sessions"]:
        then, now = before.get(one["session"]), one["bytes_moved"]
        rates[one["session"]] = (
            None if then is None or now is None or seconds <= 0 else (now - then) / seconds
        )
    return rates


def view(report: dict[str, Any], rates: dict[int, float | None]) -> Group:
    """What is shown; the busiest session comes first."""

    def rate(one: dict[str, Any]) -> str:
        found = rates.get(one["session"])
        return UNKNOWN if found is None else f"{size(int(found))}/s"

    ordered = sorted(report["sessions"], key=lambda one: -(rates.get(one["session"]) or 0.0))
    table = table_of({**report, "sessions": ordered}, time.time(), {"rate": rate})
    return Group(*(Text(line) for line in summary_of(report)), table)


@click.command()
@click.option("--backend", metavar="ENDPOINT", help="Default: FLYT_BACKEND, else the local one.")
@click.option(
    "--interval",
    type=click.FloatRange(SHORTEST, LONGEST),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option(
    "-n",
    "--rounds",
    type=click.IntRange(min=1),
    help="Looks; then it ends. Default: until Ctrl-C, or until the backend ends.",
)
def top(backend: str | None, interval: float, rounds: int | None) -> None:
    """Watch the sessions of a backend; only its own user may, on its host (ipc)."""
    try:
        settings = Settings.read(endpoint=backend)
        report, taken = fetch(settings), time.monotonic()
        console = screen()
        with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as shown:
            # Into a pipe or a file: one view behind the other.
            show: Callable[[Group], None] = console.print
            if console.is_terminal:
                live = shown.enter_context(Live(console=console))
                show = functools.partial(live.update, refresh=True)
            show(view(report, {}))
            done = 1
            while rounds is None or done < rounds:
                time.sleep(interval)
                earlier, before = report, taken
                report, taken = fetch(settings), time.monotonic()
                show(view(report, rates_of(earlier, report, taken - before)))
                done += 1
    except FlytError as exc:
        click.echo(f"flyt top: {exc}", err=True)
        sys.exit(1)
