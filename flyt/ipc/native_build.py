# SPDX-License-Identifier: Apache-2.0
"""Compiles the two small C libraries at their first use, and keeps them in the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from flyt.compiling import COMPILE_LIMIT, cache_folder, compiler
from flyt.errors import ConfigurationError

SOURCES = {"pool": ("vmm.c", "pool.c"), "preload": ("vmm.c", "preload.c")}
"""A library for PyTorch's pluggable allocator, and one for LD_PRELOAD."""

HEADER = "vmm.h"
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread")
LIBRARIES = ("-ldl",)
NO_COMPILER = (
    "sharing PyTorch's own memory needs a C compiler once: install one (Debian: gcc) or name "
    "it in CC; flyt.ipc.empty and VirtualMemoryResource work without"
)

FOLDER = Path(__file__).with_name("native")


def library_path(name: str) -> Path:
    """Path of a compiled library; compiles it if it is new or its source has changed."""
    sources = [FOLDER / file for file in SOURCES[name]]
    digest = hashlib.sha256(repr((FLAGS, os.uname().machine)).encode())
    for file in [*sources, FOLDER / HEADER]:
        digest.update(file.read_bytes())
    path = cache_folder("libraries") / f"libflyt-{name}-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        _compile(sources, path)
    return path


def _compile(sources: list[Path], path: Path) -> None:
    command = [*compiler(NO_COMPILER), *FLAGS]
    descriptor, partial = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(descriptor)
    try:
        done = subprocess.run(
            [*command, "-o", partial, *map(str, sources), *LIBRARIES],
            capture_output=True,
            text=True,
            timeout=COMPILE_LIMIT,
            check=False,
        )
        if done.returncode:
            raise ConfigurationError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
        os.replace(partial, path)  # whole or not at all: others may be compiling too
    except OSError as exc:
        raise ConfigurationError(f"{command[0]} can't be run: {exc}") from exc
    finally:
        Path(partial).unlink(missing_ok=True)


def load(name: str) -> ctypes.CDLL:
    """The compiled library in this process; a preloaded one is the same object."""
    return ctypes.CDLL(str(library_path(name)))
