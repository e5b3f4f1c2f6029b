# SPDX-License-Identifier: Apache-2.0
"""Programs in namespaces of their own: a /dev/shm, or a network, that nobody else uses."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

LIMIT = 90.0
"""Seconds for a program: a hang, not a measure of speed."""


@functools.cache
def _why_not(*flags: str) -> str:
    try:
        done = subprocess.run(
            ["unshare", *flags, "true"], capture_output=True, text=True, check=False, timeout=LIMIT
        )
    except FileNotFoundError:
        return "util-linux's unshare is not there"
    return done.stderr.strip() if done.returncode else ""


def run_apart(program: str, *arguments: str, shm: str = "", network: bool = False) -> str:
    """What a Python program prints, run where /dev/shm has ``shm`` bytes (as mount takes them), or
    where there is no network but its own loopback; skips the test where this user may not."""
    flags = [*(["--mount"] if shm else []), *(["--net"] if network else [])]
    if (reason := _why_not(*flags)) != "":
        pytest.skip(f"no namespace of its own here: {reason}")
    python = [sys.executable, "-c", program, *arguments]
    mount = f"mount -t tmpfs -o size={shm} tmpfs /dev/shm && " if shm else ""
    done = subprocess.run(
        ["unshare", *flags, "sh", "-c", f'{mount}exec "$@"', "-", *python],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        env=dict(os.environ),
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
