# SPDX-License-Identifier: Apache-2.0
"""``flyt ipc``: run a program whose cudaMalloc gives memory that can be shared."""

from __future__ import annotations

import os
import sys

import click

from flyt.errors import ConfigurationError
from flyt.ipc.native_build import library_path
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
