# SPDX-License-Identifier: Apache-2.0
"""The folder where the processes of one user meet: lock files and the default endpoint.

Every process that uses a region must find the same folder; containers mount it or set
``FLYT_RUNTIME_DIR``.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from flyt.environment import RUNTIME_DIR
from flyt.errors import ConfigurationError

VARIABLE = RUNTIME_DIR.name
SYSTEM_FOLDER = Path("/run/flyt")
SHARED_TEMPORARY = Path("/tmp")
"""Not $TMPDIR: two processes with different values would not meet."""


def runtime_dir() -> Path:
    """The runtime folder, made with mode 0700 if it is not there.

    ``$FLYT_RUNTIME_DIR``; else ``/run/flyt`` for root; else ``$XDG_RUNTIME_DIR/flyt``; else
    ``/tmp/flyt-<uid>``, if that is ours alone.

    Raises
    ------
    ConfigurationError
        The folder can't be made or is not safe to use.
    """
    uid = os.geteuid()
    if chosen := RUNTIME_DIR.read():
        return _made(_absolute(VARIABLE, chosen))
    if uid == 0:
        return _made(SYSTEM_FOLDER)
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return _made(_absolute("XDG_RUNTIME_DIR", session) / "flyt")
    folder = _made(SHARED_TEMPORARY / f"flyt-{uid}")
    _check_private(folder, uid)
    return folder


def _absolute(variable: str, value: str) -> Path:
    path = Path(value)
    if not path.is_absolute():
        raise ConfigurationError(
            f"{variable}={value} is a relative path; processes would not meet there: "
            "set an absolute one"
        )
    return path


def _made(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigurationError(
            f"can't use {path} as the runtime folder: {exc.strerror}; "
            f"set {VARIABLE} to a folder that this user can write"
        ) from exc
    return path


def _check_private(path: Path, uid: int) -> None:
    """Anyone can make this name in /tmp before us, so what is there is looked at."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid or status.st_mode & 0o077:
        raise ConfigurationError(
            f"{path} is not a folder of user {uid} alone (mode 0700): "
            f"remove it, or set XDG_RUNTIME_DIR or {VARIABLE}"
        )
