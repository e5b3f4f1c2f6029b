# SPDX-License-Identifier: Apache-2.0
"""The driver's checkpoint of a process (570 or newer), asked for by a process of its own.

The driver blocks the CUDA calls of a locked process, so another one drives it: this module, run see
`flyt.backend.devices.checkpoint_helper`.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys

from flyt.backend.devices import codes
from flyt.errors import DeviceError

LIMIT = 120.0
"""Seconds for one suspension or resumption: 1 GiB took a second, so a full GPU takes a minute."""

HELPER = "flyt.backend.devices.checkpoint_helper"

log = logging.getLogger(__name__)


def suspend(pid: int) -> None:
    """Move a process's GPU state to host memory and free the GPU.

    Raises
    ------
    DeviceError
        The driver can't, or is too old; the process is as before.
    """
    try:
        _have("suspend", pid)
    except DeviceError:
        try:
            _have("resume", pid)  # whatever was done of it; one that runs is left alone
        except DeviceError as exc:
            log.error("process %d may stay as it is: %s", pid, exc)
        raise


def resume(pid: int) -> None:
    """Bring the state of a suspended process back to the GPU.

    Raises
    ------
    DeviceError
        There is too little free memory, for one; the process is suspended still.
    """
    _have("resume", pid)


def _have(action: str, pid: int) -> None:
    """Have another process do that."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", HELPER, action, str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            check=False,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired as exc:
        raise DeviceError(codes.NOT_READY, f"{action}: not done after {LIMIT:.0f} s") from exc
    except OSError as exc:
        raise DeviceError(codes.OPERATING_SYSTEM, f"{action}: {exc.strerror}") from exc
    if done.returncode:
        raise _failure(action, done.stdout)


def _failure(action: str, words: bytes) -> DeviceError:
    try:
        code, text = json.loads(words)
        return DeviceError(int(code), f"{action}: {text}")
    except (ValueError, TypeError):  # it died, or the driver wrote something
        return DeviceError(codes.OPERATING_SYSTEM, f"{action}: its helper process failed")
