# SPDX-License-Identifier: Apache-2.0
"""The lower halves that Flyt has: ``cuda`` and ``mpi``; and any other program that is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from flyt.errors import ConfigurationError
from flyt.split import prototypes
from flyt.split.build import NATIVE, lower_half, stub_libraries

MPI_COMPILERS = {"openmpi": "mpicc.openmpi", "mpich": "mpicc.mpich"}
"""As Debian's packages name them; where one is missing, a plain ``mpicc`` of that MPI does too."""

MPI_MACROS = {"openmpi": "OPEN_MPI", "mpich": "MPICH_VERSION"}
"""What each MPI's mpi.h defines."""

PROBE_LIMIT = 30.0
"""Seconds for a compiler to list what mpi.h defines; it takes a fraction of one."""

LAUNCHERS = {"openmpi": "OMPI_COMM_WORLD_RANK", "mpich": "PMI_RANK"}
"""Variables that each MPI's mpirun sets; ranks over the other MPI would not find each other."""

TABLES = {"cuda": NATIVE / "cuda.protos", "mpi": NATIVE / "mpi.protos"}


@dataclass(frozen=True)
class Half:
    """A lower half's program.

    Attributes
    ----------
    own_hints
        It may map outside of all windows where it asks for an address there, or for more than its
        window holds: the CUDA driver insists.
    stubs
        Folders of its stub libraries.
    """

    name: str
    program: Path
    own_hints: bool = False
    stubs: tuple[Path, ...] = ()


def _folders(name: str) -> tuple[Path, ...]:
    return tuple(path.parent for path in stub_libraries(prototypes.read(TABLES[name])))


def _cuda(kind: str) -> Half:
    if kind:
        raise ConfigurationError("cuda takes no kind: FLYT_SPLIT_CUDA says twin or real")
    sources = sorted((NATIVE / "lower" / "cuda").glob("*.c"))
    program = lower_half(prototypes.read(TABLES["cuda"]), sources)
    return Half("cuda", program, own_hints=True, stubs=_folders("cuda"))


def _launched_by_another(kind: str) -> bool:
    """Whether a launcher has started this process, and it is not this MPI's."""
    launchers = {name for name, variable in LAUNCHERS.items() if variable in os.environ}
    return bool(launchers) and kind not in launchers


def mpi_compiler(kind: str) -> str | None:
    """The compiler of an MPI, or None where it isn't installed."""
    if shutil.which(MPI_COMPILERS[kind]):
        return MPI_COMPILERS[kind]
    if not shutil.which("mpicc"):
        return None
    try:
        done = subprocess.run(
            ["mpicc", "-E", "-dM", "-include", "mpi.h", "-x", "c", os.devnull],
            capture_output=True, text=True, check=False, timeout=PROBE_LIMIT,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ConfigurationError(f"mpicc can't be run: {exc}") from exc
    return "mpicc" if f"#define {MPI_MACROS[kind]} " in done.stdout else None


def _mpi(kind: str) -> Half:
    kinds = [kind] if kind else sorted(MPI_COMPILERS, key=_launched_by_another)
    if kind and kind not in MPI_COMPILERS:
        raise ConfigurationError(f"no MPI is called {kind!r}: openmpi or mpich")
    for one in kinds:
        compiler = mpi_compiler(one)
        if compiler:
            program = lower_half(
                prototypes.read(TABLES["mpi"]),
                [NATIVE / "lower" / "mpi_lh.c"],
                name=f"mpi_lh.{one}",
                command=[compiler],
            )
            return Half("mpi", program, stubs=_folders("mpi"))
    raise ConfigurationError(
        f"the lower half mpi needs {' or '.join(MPI_COMPILERS[one] for one in kinds)} once, or "
        "an mpicc of such an MPI (Debian: libopenmpi-dev or libmpich-dev)"
    )


BUILT_IN = {"cuda": _cuda, "mpi": _mpi}


def find(text: str) -> Half:
    """A lower half by its name: ``cuda``, ``mpi[=openmpi|mpich]`` or ``NAME=PATH``."""
    name, _, value = text.partition("=")
    if "/" in value:
        if not 0 < len(name) <= prototypes.NAME_LIMIT:
            raise ConfigurationError(f"{name!r} is no name for a half: 1 to 15 characters")
        return Half(name, Path(value))
    if name not in BUILT_IN:
        raise ConfigurationError(
            f"no lower half is called {name!r}: {', '.join(BUILT_IN)}, or NAME=/PATH/TO/PROGRAM"
        )
    return BUILT_IN[name](value)
