# SPDX-License-Identifier: Apache-2.0
"""What is compiled at its first use: by which compiler, and where it is kept.

The library that is built at install has a builder of its own (`flyt.shm.native.build`), since
nothing of Flyt can be imported there yet.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
from pathlib import Path

from flyt.errors import ConfigurationError

COMPILERS = ("cc", "gcc", "clang")
COMPILE_LIMIT = 120.0
"""Seconds; each piece takes about one."""


def compiler(lacking: str) -> list[str]:
    """The C compiler's command: $CC, or the first of cc, gcc and clang.

    Raises
    ------
    ConfigurationError
        There is none; ``lacking`` says what needs it and what to do.
    """
    wanted = os.environ.get("CC")
    if wanted:
        return shlex.split(wanted)
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise ConfigurationError(lacking)


def cache_folder(what: str, *below: str) -> Path:
    """The folder ``below`` Flyt's in the user's cache; only this user may write there, since what
    it holds is loaded or run.

    Raises
    ------
    ConfigurationError
        It can't be made, or others may write there; ``what`` names what was to be kept.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base, "flyt", *below)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError as exc:
        raise ConfigurationError(
            f"no folder to keep compiled {what} in: {exc}; set XDG_CACHE_HOME to one"
        ) from exc
    if state.st_uid != os.geteuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigurationError(f"{folder} can be written by others: make it yours, mode 700")
    return folder
