# SPDX-License-Identifier: Apache-2.0
"""From halves and windows to the loader's command line; all that can be refused is refused here."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from flyt.errors import ConfigurationError
from flyt.split import build, elf, layout
from flyt.split.halves import Half
from flyt.split.image import Image

VARIABLE = "LHINFO_PTR"
PRESET = "0xffffffffffffffff"
"""At the width of every address, so that the loader can write one over it."""

HALVES_LIMIT = 7
"""Lower halves: SPLIT_HALVES of abi.h, less the upper one."""

STACK_LEAST = 8 << 20
"""Bytes of a half's main stack at least: as in elf.c."""

IMAGE = "flyt-split-{rank}.image"

RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""Variables in which a launcher of MPI programs says the process's rank."""


@dataclass(frozen=True)
class Launch:
    """The loader's command line and environment."""

    command: list[str]
    environment: dict[str, str]

    def execute(self) -> NoReturn:
        os.execve(self.command[0], self.command, self.environment)


def rank() -> str:
    """Rank of this process as its launcher says it; 0 without one."""
    return next((os.environ[name] for name in RANKS if name in os.environ), "0")


def _windows(names: Sequence[str], wanted: Mapping[str, layout.Window]) -> dict[str, layout.Window]:
    windows = layout.default_windows(names)
    for name, window in wanted.items():
        if name not in windows:
            raise ConfigurationError(f"a window is given for {name!r}, which is none of the halves")
        windows[name] = window
    return windows


def _stack() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return max(soft, STACK_LEAST) if soft != resource.RLIM_INFINITY else STACK_LEAST


def _program(name: str, wanted: str) -> elf.Program:
    found = shutil.which(wanted) if "/" not in wanted else wanted
    if found is None:
        raise ConfigurationError(f"{name}: no program {wanted!r} in PATH")
    return elf.read(
        Path(os.path.realpath(found))
    )  # $ORIGIN is where the file lies, as for the kernel


def prepare(
    halves: Sequence[Half],
    command: Sequence[str],
    *,
    windows: Mapping[str, layout.Window] | None = None,
    stubs: Sequence[Path] = (),
    image: str = IMAGE,
    restart: Image | None = None,
) -> Launch:
    """Check everything and write the loader's command line.

    Parameters
    ----------
    halves
        In the order in which they are loaded; the last ends first.
    command
        The upper half's program and arguments.
    windows
        Those that differ from the usual ones, by half's name; ``arena`` is device memory's.
    stubs
        Further folders with stub libraries.
    image
        Where a checkpoint goes; ``{rank}`` stands for the MPI rank.
    restart
        The image to take the upper half's state from; `prepare_restart` says what fits it.

    Raises
    ------
    ConfigurationError
        A program can't be a half, a library is missing, or windows overlap or are too small.
    """
    names = [half.name for half in halves]
    if len(halves) > HALVES_LIMIT or len({*names, layout.UPPER, layout.ARENA}) < len(names) + 2:
        raise ConfigurationError(f"up to {HALVES_LIMIT} lower halves, each with a name of its own")
    chosen = _windows(names, windows or {})
    folders = dict.fromkeys(
        [
            build.upper_library().parent,
            *(f for half in halves for f in half.stubs),
            *(folder.absolute() for folder in stubs),
        ]
    )
    library_path = ":".join(
        [*map(str, folders), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    )
    needed, options = {}, []
    for half in halves:
        lower = _program(half.name, str(half.program))
        if not lower.position_independent:
            raise ConfigurationError(
                f"{lower.path}: a lower half must be position-independent (PIE)"
            )
        needed[half.name] = elf.needs(lower) + _stack()
        window = chosen[half.name]
        options += ["--half", half.name, f"{window.base:x}", f"{window.size:x}"]
        options += [f"{half.own_hints:d}", lower.interpreter, str(lower.path)]
    if restart is None:
        upper = _program("the program", command[0])
        needed[layout.UPPER] = elf.needs(upper, library_path) + _stack()
        source = [upper.interpreter, library_path, str(upper.path)]
    else:
        source = ["", "", restart.path]  # program and libraries are in the image
    layout.check(chosen, needed)
    window, arena = chosen[layout.UPPER], chosen[layout.ARENA]
    words = [str(build.loader()), "--upper", f"{window.base:x}", f"{window.size:x}"]
    words += [*source, *options]
    words += ["--arena", f"{arena.base:x}", f"{arena.size:x}"]
    words += ["--image", os.path.abspath(image.replace("{rank}", rank()))]
    words += ["--restart", restart.path] if restart else []
    return Launch([*words, "--", *command], {**os.environ, VARIABLE: PRESET})


def prepare_restart(
    halves: Sequence[Half],
    saved: Image,
    *,
    windows: Mapping[str, layout.Window] | None = None,
    image: str = IMAGE,
) -> Launch:
    """Check everything and write the loader's command line for a restart.

    The upper half and the arena of device memory lie where they lay; `windows` places lower halves.

    Raises
    ------
    ConfigurationError
        As `prepare`; or the image was made over other lower halves.
    """
    fixed = {layout.UPPER: saved.upper, layout.ARENA: saved.arena}
    if set(windows or {}) & set(fixed):
        raise ConfigurationError(
            "a restart can't move the upper half or the arena: pointers to them are in the image"
        )
    given = {half.name: half for half in halves}
    if set(given) != set(saved.halves):
        raise ConfigurationError(
            f"{saved.path} was made over the lower halves {', '.join(saved.halves)}: name these"
        )
    return prepare(
        [given[name] for name in saved.halves],  # in the image's order: stubs know them by number
        [os.path.basename(saved.path)],
        windows={**fixed, **(windows or {})},
        image=image,
        restart=saved,
    )
