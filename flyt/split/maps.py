# SPDX-License-Identifier: Apache-2.0
"""Which half each mapping of a running split process belongs to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flyt.errors import ConfigurationError
from flyt.split.build import LOADER_BASE
from flyt.split.layout import ARENA, GRANULE, LOWEST, UPPER, Window

LOADER, KERNEL, OUTSIDE = "loader", "kernel", "outside"
KERNELS = ("[stack]", "[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]")


@dataclass(frozen=True)
class Mapping:
    """A line of /proc/PID/maps with its owner.

    Attributes
    ----------
    owner
        A half's name, ``arena``, ``loader`` (and its record), ``kernel`` (what it places itself),
        or ``outside``: what a driver has placed where no window is.
    """

    owner: str
    start: int
    end: int
    rights: str
    name: str


def _of(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError as exc:  # ended, or another user's
        raise ConfigurationError(f"process {pid}: {exc.strerror}") from exc


def windows_of(pid: int) -> dict[str, Window]:
    """Windows of a running split process, as its loader's command line says them."""
    words = _of(pid, "cmdline").decode(errors="replace").split("\0")
    if "--upper" not in words or "--" not in words or not words[0].endswith("/flyt-loader"):
        raise ConfigurationError(f"process {pid} is none that `flyt split` has started")
    words = words[: words.index("--")]
    found = {}
    for index, word in enumerate(words):
        if word == "--half":
            found[words[index + 1]] = Window(*(int(w, 16) for w in words[index + 2 : index + 4]))
        elif word in {"--upper", "--arena"}:
            name = UPPER if word == "--upper" else ARENA
            found[name] = Window(*(int(w, 16) for w in words[index + 1 : index + 3]))
    return found


def owner(start: int, name: str, windows: dict[str, Window]) -> str:
    """Whose an address is."""
    for half, window in windows.items():
        if start in window:
            return half
    if start < LOWEST:
        return UPPER  # a program that is not position-independent
    if start in Window(LOADER_BASE, GRANULE) or name == "[heap]":
        return LOADER
    return KERNEL if name in KERNELS else OUTSIDE


def read(pid: int) -> list[Mapping]:
    """Every mapping of a running split process."""
    windows = windows_of(pid)
    found = []
    for line in os.fsdecode(_of(pid, "maps")).splitlines():
        parts = line.split(None, 5)
        start, _, end = parts[0].partition("-")
        name = parts[5] if len(parts) > 5 else ""
        address = int(start, 16)
        whose = owner(address, name, windows)
        found.append(Mapping(whose, address, int(end, 16), parts[1], name))
    return found


def address_of_record(pid: int) -> int:
    """What LHINFO_PTR holds in the process's environment, as the loader has overwritten it."""
    for entry in _of(pid, "environ").split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == b"LHINFO_PTR":
            return int(value, 16)
    raise ConfigurationError(f"process {pid} has no LHINFO_PTR in its environment")
