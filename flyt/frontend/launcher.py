# SPDX-License-Identifier: Apache-2.0
"""``FLYT_BACKEND=emulated:``: a private backend with an emulated device, as a child process."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile

from flyt.errors import CommandTimeout, SessionLost
from flyt.rpc.patience import Deadline

REGION_SIZE = 256 << 20
"""Of a private backend; less where /dev/shm has less."""

SHARE_OF_SPACE = 2
"""A private region takes at most this part of the free shared memory."""

END_SECONDS = 10.0

_READ_BYTES = 4096


class Launched:
    """A running private backend."""

    def __init__(self, process: subprocess.Popen[bytes], folder: str, endpoint: str) -> None:
        self._process = process
        self._folder = folder
        self.endpoint = endpoint

    def end(self) -> None:
        """Stop it and wait until everything it made is gone."""
        _end(self._process)
        shutil.rmtree(self._folder, ignore_errors=True)


def launch(options: str, deadline: Deadline) -> Launched:
    """Start ``flyt-backend --device emulated`` and wait until it listens.

    The child ends with this process: it watches a pidfd of it.

    Parameters
    ----------
    options : str
        ``--device-options``, what stands behind ``emulated:``.

    Raises
    ------
    SessionLost
        It ended at once; its reason is on stderr.
    """
    folder = tempfile.mkdtemp(prefix="flyt-emulated-")
    ready, answer = os.pipe()
    parent = os.pidfd_open(os.getpid())
    space = os.statvfs("/dev/shm")
    size = min(REGION_SIZE, space.f_bavail * space.f_frsize // SHARE_OF_SPACE)
    region = f"flyt-emulated-{os.getpid()}-{secrets.token_hex(4)}"
    command = [
        sys.executable, "-m", "flyt.cli.backend", "--device", "emulated",
        "--device-options", options, "--region", region,
        "--size", str(size), "--listen", f"ipc://{folder}/backend.sock",
        "--ready-fd", str(answer), "--with-parent-fd", str(parent), "--log-level", "WARNING",
    ]  # fmt: skip
    environment = {**os.environ, "FLYT_RUNTIME_DIR": folder}
    process: subprocess.Popen[bytes] | None = None
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=(answer, parent),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process; the pidfd ends that one
        )
        os.close(answer)
        answer = -1
        line = _ready_line(ready, deadline)
        return Launched(process, folder, json.loads(line)["endpoints"][0])
    except BaseException:
        if process is not None:
            _end(process)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        for descriptor in {ready, parent, answer} - {-1}:
            os.close(descriptor)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask first: a backend that is killed leaves its region behind."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_SECONDS)


def _ready_line(ready: int, deadline: Deadline) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([ready], [], [], deadline.left())[0]:
            raise CommandTimeout("the private emulated backend did not start in time")
        data = os.read(ready, _READ_BYTES)
        if not data:
            raise SessionLost("the private emulated backend ended at once; see its message above")
        line += data
    return line
