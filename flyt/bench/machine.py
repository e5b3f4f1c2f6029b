# SPDX-License-Identifier: Apache-2.0
"""What the figures depend on: processor, cores, kernel, card, driver, versions, commit, date."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import flyt
from flyt.frontend.launcher import PLACES
from flyt.shm.native import native

ASK_LIMIT = 20.0
"""Seconds for nvidia-smi or git; a card that sleeps takes a few."""

PACKAGES = ("numpy", "pyzmq", "msgpack", "cuda-bindings", "cupy-cuda13x")

CARD_FIELDS = ("name", "driver_version", "pcie.link.gen.max", "pcie.link.width.max")

CGROUP = Path("/sys/fs/cgroup")


def output_of(*command: str) -> str | None:
    """First line that a command prints; None if it can't be run or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=ASK_LIMIT
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0]


def describe() -> dict[str, Any]:
    """The machine and all that runs on it; None for what it hasn't or doesn't tell."""
    card = output_of("nvidia-smi", f"--query-gpu={','.join(CARD_FIELDS)}", "--format=csv,noheader")
    return {
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _kib("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "card": dict(zip(CARD_FIELDS, card.split(", "), strict=False)) if card else None,
        "python": platform.python_version(),
        "flyt": flyt.__version__,
        "native_library": native() is not None,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("FLYT_") and name not in PLACES
        },
        "commit": output_of(
            "git", "-C", str(Path(flyt.__file__).parent), "describe", "--always", "--dirty"
        ),
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
    }


class Ticks(NamedTuple):
    """Time of all processors since the machine started.

    Attributes
    ----------
    busy : int
    stolen : int
        A hypervisor had them work for others, while something here wanted to go on.
    """

    busy: int
    stolen: int

    @classmethod
    def now(cls, stat: Path = Path("/proc/stat")) -> Ticks:
        """As proc_stat(5) has it: user, nice, system, idle, iowait, irq, softirq, steal."""
        times = [int(field) for field in stat.read_text().partition("\n")[0].split()[1:9]]
        times += [0] * (8 - len(times))
        return cls(sum(times) - times[3] - times[4], times[7])

    def stolen_since(self, before: Ticks) -> float:
        """The share of the time in which something here was, or wanted to be, at work."""
        return (self.stolen - before.stolen) / max(1, self.busy - before.busy)


def memory_available() -> int:
    """Bytes that this process and its children may still take."""
    free = _kib("/proc/meminfo", "MemAvailable") or 0
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no such group, or the root one: no limit of its own
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def _first(file: str, name: str) -> str | None:
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _kib(file: str, name: str) -> int | None:
    value = _first(file, name)
    return int(value.split()[0]) << 10 if value else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
