# SPDX-License-Identifier: Apache-2.0
"""``flyt split``: a program and its lower halves in one address space."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import click

from flyt.errors import ConfigurationError, FlytError
from flyt.split import build, halves, launch, maps, prototypes, request
from flyt.split.cost import measure
from flyt.split.image import read as read_image
from flyt.split.layout import Window

PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def give_up(exc: FlytError) -> NoReturn:
    click.echo(f"flyt split: {exc}", err=True)
    sys.exit(126)


def windows_from(texts: tuple[str, ...]) -> dict[str, Window]:
    found = {}
    for text in texts:
        name, equals, window = text.partition("=")
        if not equals:
            raise ConfigurationError(f"{text!r}: write NAME=0xBASE:SIZE")
        found[name] = Window.parse(window)
    return found


@click.group()
def split() -> None:
    """Run a program beside lower halves that have CUDA and MPI for it."""


@split.command(context_settings=PASS_ON)
@click.option("--half", "lower", multiple=True, help="cuda, mpi[=openmpi|mpich] or NAME=/PROGRAM.")
@click.option("--window", multiple=True, help="NAME=0xBASE:SIZE; also for upper and arena.")
@click.option("--stubs", multiple=True, type=click.Path(path_type=Path), help="Further stubs.")
@click.option("--image", default=launch.IMAGE, help="Where checkpoints go; {rank} is the MPI rank.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    lower: tuple[str, ...],
    window: tuple[str, ...],
    stubs: tuple[Path, ...],
    image: str,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND as the upper half; its stub libraries reach the lower halves."""
    try:
        prepared = launch.prepare(
            [halves.find(text) for text in lower],
            command,
            windows=windows_from(window),
            stubs=stubs,
            image=image,
        )
    except FlytError as exc:
        give_up(exc)
    prepared.execute()


@split.command()
@click.option("--half", "lower", multiple=True, help="As for run: the same lower halves.")
@click.option("--window", multiple=True, help="NAME=0xBASE:SIZE of a lower half.")
@click.option("--image", default=launch.IMAGE, help="Where further checkpoints go.")
@click.argument("saved")
def restart(lower: tuple[str, ...], window: tuple[str, ...], image: str, saved: str) -> None:
    """Continue the program of the image SAVED over fresh lower halves; {rank} is the MPI rank."""
    try:
        prepared = launch.prepare_restart(
            [halves.find(text) for text in lower],
            read_image(saved.replace("{rank}", launch.rank())),
            windows=windows_from(window),
            image=image,
        )
    except FlytError as exc:
        give_up(exc)
    prepared.execute()


@split.command()
@click.option("--limit", default=60.0, help="Seconds to wait for the image.")
@click.argument("pid", type=int)
def checkpoint(limit: float, pid: int) -> None:
    """Ask a running process for a checkpoint at its next call of a lower half, and wait for it."""
    try:
        click.echo(request.checkpoint(pid, limit))
    except FlytError as exc:
        give_up(exc)


@split.command(name="maps")
@click.argument("pid", type=int)
def show_maps(pid: int) -> None:
    """Show which half each mapping of a running process belongs to."""
    try:
        found = maps.read(pid)
        record = maps.address_of_record(pid)
    except FlytError as exc:
        give_up(exc)
    click.echo(f"record at {record:#x}")
    for one in found:
        click.echo(f"{one.owner:<15} {one.start:012x}-{one.end:012x} {one.rights} {one.name}")


@split.command()
def cost() -> None:
    """Measure a crossing and the trapped system calls, in nanoseconds."""
    try:
        found = measure()
    except FlytError as exc:
        give_up(exc)
    click.echo(f"{'':<14}{'alone':>10}{'split':>10}")
    for name, (alone, crossed) in found.items():
        before = "-" if alone is None else f"{alone:.1f}"
        click.echo(f"{name:<14}{before:>10}{crossed:>10.1f}")


@split.command()
@click.argument("half", nargs=-1)
def flags(half: tuple[str, ...]) -> None:
    """Print a C compiler's flags for a program that calls HALF (cuda, mpi)."""
    try:
        folders = [build.upper_library()]
        for name in half:
            if name not in halves.TABLES:
                raise ConfigurationError(f"no lower half is called {name!r}")
            folders.append(build.stub_libraries(prototypes.read(halves.TABLES[name]))[0])
    except FlytError as exc:
        give_up(exc)
    words = [f"-I{build.INCLUDE}", *(f"-L{path.parent} -l:{path.name}" for path in folders)]
    click.echo(" ".join([*words, "-Wl,--allow-shlib-undefined"]))
