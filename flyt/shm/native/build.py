# SPDX-License-Identifier: Apache-2.0
"""Compiles Flyt's C files to one library; at install, or with ``python flyt/shm/native/build.py``.

The standard library alone: it runs in a build environment, where Flyt can't be imported yet. The
library is built without Python's headers, and of CPython uses its stable ABI alone (entries.c), so
one build serves every Python.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "libflyt.so"
FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror")
LIMIT = 120.0
"""Seconds; a few hundred lines take one."""


def compiler() -> list[str] | None:
    """The C compiler's command: $CC, else the first of the usual names that is installed."""
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    return None


def build(target: Path = LIBRARY) -> str:
    """Compile; "" on success, else why there is no library. An old one is gone then too."""
    command = compiler()
    if command is None:
        target.unlink(missing_ok=True)
        return "no C compiler was found"
    sources = sorted(str(path) for path in HERE.glob("*.c"))
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        try:
            done = subprocess.run(
                [*command, *FLAGS, "-o", str(made), *sources],
                capture_output=True, text=True, check=False, timeout=LIMIT,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as exc:
            target.unlink(missing_ok=True)
            return f"{shlex.join(command)} failed: {exc}"
        if done.returncode:
            target.unlink(missing_ok=True)
            return f"{shlex.join(command)} failed: {done.stderr.strip()[:2000]}"
        os.replace(made, target)  # a process that has the old one mapped keeps it
    return ""


if __name__ == "__main__":
    sys.exit(build() or 0)
