# SPDX-License-Identifier: Apache-2.0
"""``flyt status``: what a backend on this host serves, from its own report."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flyt.cli.asking import ask_backend
from flyt.errors import FlytError
from flyt.frontend.settings import Settings
from flyt.rpc.greetings import AskStatus, StatusReport

ANSWER_SECONDS = 5.0
"""A backend answers within half a second, even with a worker that is stuck."""

PIPE_WIDTH = 250
"""Columns where the output is no terminal: a row is one line, whatever is in it."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

UNKNOWN = "?"
"""What a worker that does not answer has."""


def fetch(settings: Settings) -> dict[str, Any]:
    """The report of a backend.

    Raises
    ------
    FlytError
        Nobody listens there, or this user may not ask.
    """
    answer = ask_backend(settings, AskStatus(), ANSWER_SECONDS)
    if isinstance(answer, StatusReport):
        return dict(answer.report)
    raise FlytError(f"{settings.endpoint}: the backend did not understand")


def size(number: int | None) -> str:
    """Bytes for people."""
    if number is None:
        return UNKNOWN
    value, unit = float(number), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{number} B"


def age(seconds: float) -> str:
    """A duration for people."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {whole % 60:02} s"


def session_text(session: int) -> str:
    """A session for people and for `flyt suspend`: hexadecimal, as in the daemon's log."""
    return f"{session:016x}"


def screen() -> Console:
    """Where tables go."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


Column = Callable[[dict[str, Any]], str]
"""What a column says of a session."""


def summary_of(report: dict[str, Any]) -> tuple[str, str]:
    """The backend itself."""
    frames = report["frames"]
    return (
        (
            f"backend {report['pid']}: device {report['device']}, isolation "
            f"{report['isolation']}, region {report['region'] or 'none'}"
        ),
        (
            f"frames: {frames['granted']} of {frames['total']} in use, "
            f"{frames['reclaiming']} being cleared; workers: {len(report['workers'])}; "
            f"messages that were garbage: {report['garbage']}"
        ),
    )


def table_of(
    report: dict[str, Any], now: float, more: Mapping[str, Column] = MappingProxyType({})
) -> Table:
    """The sessions, with ``more`` columns by their names."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("session", "pid"):  # to be copied: on a narrow screen the others are folded
        table.add_column(name, no_wrap=True)
    for name in (
        "client",
        "user",
        "state",
        "age",
        "device memory",
        "frames",
        "in flight",
        "moved",
        "errors",
        *more,
    ):
        table.add_column(name, overflow="fold")
    for one in report["sessions"]:
        known = {name: UNKNOWN if one[name] is None else str(one[name]) for name in one}
        table.add_row(
            session_text(one["session"]),
            known["pid"],
            escape(one["program"]),
            escape(one["principal"]),
            "suspended" if one["suspended"] else "running",
            age(now - one["since"]),
            size(one["device_bytes"]),
            known["frames"],
            known["in_flight"],
            size(one["bytes_moved"]),
            known["errors"],
            *(column(one) for column in more.values()),
        )
    return table


@click.command()
@click.option("--backend", metavar="ENDPOINT", help="Default: FLYT_BACKEND, else the local one.")
@click.option("--json", "as_json", is_flag=True, help="The whole report, for programs.")
def status(backend: str | None, as_json: bool) -> None:
    """Show the sessions of a backend; only its own user may, on its host (ipc)."""
    try:
        report = fetch(Settings.read(endpoint=backend))
    except FlytError as exc:
        click.echo(f"flyt status: {exc}", err=True)
        sys.exit(1)
    if as_json:
        sessions = [{**one, "session": session_text(one["session"])} for one in report["sessions"]]
        print(json.dumps({**report, "sessions": sessions}, indent=2))
        return
    for line in summary_of(report):
        print(line)
    screen().print(table_of(report, time.time()))
