# SPDX-License-Identifier: Apache-2.0
"""Measures what a crossing costs on this machine, beside the same program without the loader."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from flyt.errors import ConfigurationError
from flyt.split import build, prototypes
from flyt.split.halves import TABLES, find
from flyt.split.launch import prepare

LIMIT = 120.0
"""Seconds; it takes about one."""

SOURCE = build.NATIVE / "cost" / "cost.c"


def _run(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT
    )
    if done.returncode:
        raise ConfigurationError(f"the measuring program failed: {done.stderr.strip()}")
    return {name: float(value) for name, value in map(str.split, done.stdout.splitlines())}


def measure(program: str = "cost") -> dict[str, tuple[float | None, float]]:
    """Nanoseconds of each operation: without the loader (None where there is no such), with it."""
    stub = build.stub_libraries(prototypes.read(TABLES["cuda"]))[0]
    upper = build.upper_library()
    libraries = [word for path in (stub, upper) for word in (f"-L{path.parent}", f"-l:{path.name}")]
    flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror")
    alone: Path = build.make(program + "-alone", (*flags, "-DALONE"), [SOURCE])
    split: Path = build.make(program, flags, [SOURCE], libraries=libraries)
    before = _run([str(alone)], dict(os.environ))
    prepared = prepare([find("cuda")], [str(split)])
    after = _run(prepared.command, {**prepared.environment, "FLYT_SPLIT_CUDA": "twin"})
    return {name: (before.get(name), value) for name, value in after.items()}
