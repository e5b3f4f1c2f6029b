# SPDX-License-Identifier: Apache-2.0
"""What archives and disks are made from: a folder in the cache, filled, compiled, thrown away."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from vm.fetch import VmError

COMPILE_SECONDS = 120.0
KEPT = 2
"""Files of each kind in the cache: one may be another tree's or interpreter's."""


def digest(facts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def staged(cache: Path) -> Iterator[Path]:
    root = cache / f"stage-{os.getpid()}"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    try:
        yield root
    finally:
        shutil.rmtree(root)


def compile_all(root: Path) -> None:
    """Byte code that is never checked against its source: under TCG each look costs."""
    command = [sys.executable, "-m", "compileall", "-q", "-j0", "--invalidation-mode"]
    command += ["unchecked-hash", "-s", str(root), "-p", "/", str(root)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMPILE_SECONDS,
    )
    if done.returncode:
        raise VmError(f"the guest's Python files don't compile:\n{done.stdout}")


def keep(part: Path, made: Path) -> None:
    """Give a finished file its name, and remove the older ones of its kind."""
    part.rename(made)
    kind = made.stem.partition("-")[0]
    files = sorted(made.parent.glob(f"{kind}-*{made.suffix}"), key=lambda p: p.stat().st_mtime)
    for old in files[:-KEPT]:
        old.unlink()
