# SPDX-License-Identifier: Apache-2.0
"""Asks a running split process for a checkpoint: a signal, and then its image appears."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from flyt.errors import ConfigurationError
from flyt.split.maps import windows_of

SIGNAL = signal.SIGRTMAX
"""SPLIT_SIGNAL of abi.h; a program that installs a handler of its own for it can't be asked."""

PAUSE = 0.02
"""Seconds between two looks: an image takes about as long."""


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return state.st_ino, state.st_mtime_ns


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie: that has no command line any more."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def image_of(pid: int) -> Path:
    """Where the checkpoints of a running split process go."""
    windows_of(pid)  # it is one
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return Path(os.fsdecode(words[words.index(b"--image") + 1]))


def checkpoint(pid: int, limit: float) -> Path:
    """Ask for a checkpoint; the path of the image once it is whole.

    Raises
    ------
    ConfigurationError
        The process is none of ours, has ended, or has made no image within `limit` seconds.
    """
    path = image_of(pid)
    before = _stamp(path)
    try:
        os.kill(pid, SIGNAL)
    except (ProcessLookupError, PermissionError) as exc:
        raise ConfigurationError(f"process {pid}: {exc.strerror}") from exc
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if _stamp(path) not in {None, before}:
            return path
        if has_ended(pid):
            raise ConfigurationError(f"process {pid} has ended before it made an image")
        time.sleep(PAUSE)
    raise ConfigurationError(
        f"process {pid} has made no image in {limit:g} s: either it has called no lower half "
        "since, or its standard error says what forbids it"
    )
