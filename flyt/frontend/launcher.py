# SPDX-License-Identifier: Apache-2.0
"""A private backend as a child process: its own region, runtime folder and endpoint.

``FLYT_BACKEND=emulated:`` runs one, and so do the commands that show and measure.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flyt.errors import CommandTimeout, SessionLost
from flyt.rpc.patience import Deadline

REGION_SIZE = 256 << 20
"""Of a private backend; less where /dev/shm has less."""

SHARE_OF_SPACE = 2
"""A private region takes at most this part of the free shared memory."""

END_SECONDS = 20.0
"""A backend that serves an interrupted copy finishes it first."""

LOG_TAIL = 4000
"""Characters of its log that an error quotes: enough for one traceback."""

PLACES = ("FLYT_BACKEND", "FLYT_REGION", "FLYT_RUNTIME_DIR")
"""What the caller set these to belongs to another backend."""

_READ_BYTES = 4096


class Launched:
    """A running private backend.

    Attributes
    ----------
    endpoint, region : str
        Where it listens; path of the region that it shares.
    environment : dict of str
        For client processes: names this backend.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        folder: str,
        report: Mapping[str, Any],
        log: Path | None,
    ) -> None:
        self._process = process
        self._folder = folder
        self._log = log
        self.endpoint: str = report["endpoints"][0]
        self.region: str = report["region"]
        self.environment = {
            **without_places(os.environ),
            "FLYT_RUNTIME_DIR": folder,
            "FLYT_BACKEND": self.endpoint,
        }

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> int:
        """Stop it and wait until everything it made is gone; its exit code. May be repeated."""
        code = _end(self._process)
        shutil.rmtree(self._folder, ignore_errors=True)
        return code

    def leave(self) -> None:
        """Stop it and make sure that it went in order.

        Raises
        ------
        SessionLost
            It ended badly, or left its region behind.
        """
        code = self.end()
        if code != 0:
            raise SessionLost(f"the backend ended with code {code}{tail(self._log)}")
        if os.path.exists(self.region):
            raise SessionLost(f"the backend left its region {self.region} behind")


def launch(options: str, deadline: Deadline) -> Launched:
    """Start ``flyt-backend --device emulated`` and wait until it listens.

    Parameters
    ----------
    options : str
        ``--device-options``, what stands behind ``emulated:``.

    Raises
    ------
    SessionLost
        It ended at once; its reason is on stderr.
    CommandTimeout
        It was not ready in time.
    """
    space = os.statvfs("/dev/shm")
    size = min(REGION_SIZE, space.f_bavail * space.f_frsize // SHARE_OF_SPACE)
    more = ["--device-options", options, "--log-level", "WARNING"]
    return start("emulated", size, deadline, more=more)


def start(
    device: str,
    size: int,
    deadline: Deadline,
    *,
    more: list[str] | None = None,
    log: Path | None = None,
) -> Launched:
    """Start ``flyt-backend`` and wait until it listens.

    The child ends with this process: it watches a pidfd of it.

    Parameters
    ----------
    device : str
        Its ``--device``.
    size : int
        Bytes of its region.
    more : list of str, optional
        Further options.
    log : Path, optional
        Gets what it prints, and errors quote it; default: this process's own output.

    Raises
    ------
    SessionLost
        It ended at once.
    CommandTimeout
        It was not ready in time.
    """
    folder = tempfile.mkdtemp(prefix="flyt-private-")
    ready, answer = os.pipe()
    parent = os.pidfd_open(os.getpid())
    command = [
        sys.executable, "-m", "flyt.cli.backend", "--device", device,
        "--region", f"flyt-private-{os.getpid()}-{secrets.token_hex(4)}", "--size", str(size),
        "--listen", f"ipc://{folder}/backend.sock",
        "--ready-fd", str(answer), "--with-parent-fd", str(parent), *(more or []),
    ]  # fmt: skip
    process: subprocess.Popen[bytes] | None = None
    try:
        output = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        try:
            process = subprocess.Popen(
                command,
                env={
                    **without_places(os.environ),
                    "FLYT_RUNTIME_DIR": folder,
                    "FLYT_DAEMON": "1",
                },
                pass_fds=(answer, parent),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for this process; the pidfd ends that one
            )
        finally:
            if output is not None:
                os.close(output)
        os.close(answer)
        answer = -1
        return Launched(process, folder, json.loads(_ready_line(ready, deadline, log)), log)
    except BaseException:
        if process is not None:
            _end(process)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        for descriptor in {ready, parent, answer} - {-1}:
            os.close(descriptor)


def tail(log: Path | None) -> str:
    """The end of a log, for an error message; "" if there is none."""
    text = log.read_text(errors="replace")[-LOG_TAIL:].strip() if log is not None else ""
    return f"\n{text}" if text else ""


def without_places(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment that names no backend; settings such as FLYT_SLOT_SIZE stay."""
    return {name: value for name, value in environment.items() if name not in PLACES}


def _end(process: subprocess.Popen[bytes]) -> int:
    """Ask first: a backend that is killed leaves its region behind."""
    process.terminate()
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(END_SECONDS)


def _ready_line(ready: int, deadline: Deadline, log: Path | None) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([ready], [], [], deadline.left())[0]:
            raise CommandTimeout(f"the private backend did not start in time{tail(log)}")
        data = os.read(ready, _READ_BYTES)
        if not data:
            reason = tail(log) or "; see its message above"
            raise SessionLost(f"the private backend ended at once{reason}")
        line += data
    return line
