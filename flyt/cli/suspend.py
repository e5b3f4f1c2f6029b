# SPDX-License-Identifier: Apache-2.0
"""``flyt suspend`` and ``flyt resume``: take a session off the GPU, and bring it back."""

from __future__ import annotations

import sys

import click

from flyt.backend.suspensions import LIMIT, LONGEST_PATIENCE
from flyt.cli.asking import ask_backend
from flyt.errors import FlytError
from flyt.frontend.settings import Settings
from flyt.rpc.greetings import Resume, Suspend

ANSWER_SECONDS = LIMIT + 5.0
"""The backend gives up first, and says why."""

PATIENCE = 300
"""Default of --wait: long enough for a smaller job in between, short enough that nobody takes a
client that waits for one that hangs."""

DIGITS = 16
"""Of a session's number in hexadecimal; more of them are decimal."""

LAST_SESSION = (1 << 64) - 1


def _number(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """A session as `flyt status` shows it, in hexadecimal; or as the number that it is on the wire,
    which hardly ever has as few decimal digits."""
    digits = value.removeprefix("0x")
    decimal = digits == value and len(digits) > DIGITS
    try:
        if digits.isascii() and digits.isalnum() and (decimal or len(digits) <= DIGITS):
            number = int(digits, 10 if decimal else 16)
            if number <= LAST_SESSION:
                return number
    except ValueError:
        pass  # said below
    text = f"{value!r} is no session: flyt status lists them"
    raise click.BadParameter(text, context, parameter)


_backend = click.option(
    "--backend", metavar="ENDPOINT", help="Default: FLYT_BACKEND, else the local one."
)


@click.command()
@click.argument("session", callback=_number)
@click.option(
    "--wait",
    "patience",
    type=click.IntRange(0, LONGEST_PATIENCE),
    default=PATIENCE,
    show_default=True,
    help="Seconds that a call of the client waits before it fails (cudaErrorSystemNotReady).",
)
@_backend
def suspend(session: int, patience: int, backend: str | None) -> None:
    """Move the GPU state of a SESSION to host memory, so that others have the GPU.

    The backend runs with --isolation process. Only its own user may, on its host (ipc).
    """
    _have("suspend", Suspend(session, patience), backend)


@click.command()
@click.argument("session", callback=_number)
@_backend
def resume(session: int, backend: str | None) -> None:
    """Bring a suspended SESSION back to the GPU; what its client has called meanwhile goes on."""
    _have("resume", Resume(session), backend)


def _have(command: str, question: Suspend | Resume, backend: str | None) -> None:
    try:
        ask_backend(Settings.read(endpoint=backend), question, ANSWER_SECONDS)
    except FlytError as exc:
        click.echo(f"flyt {command}: {exc}", err=True)
        sys.exit(1)
