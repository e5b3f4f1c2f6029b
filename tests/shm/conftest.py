# SPDX-License-Identifier: Apache-2.0
"""Small regions and real other processes for the tests of flyt.shm."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flyt.shm.layout import MIB, Geometry
from flyt.shm.region import Region
from flyt.shm.table import FrameTable

ROOT = Path(__file__).resolve().parents[2]
SIZE = 4 * MIB
LIMIT = 60
"""Seconds; a bound on hangs, nothing is timed."""
_numbers = itertools.count()


def _search_path() -> str:
    return os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)


class Process:
    """Another Python process that talks in lines; ends with the test."""

    def __init__(self, code: str, *args: object, fds: tuple[int, ...] = ()) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
            env={**os.environ, "PYTHONPATH": _search_path()},
        )
        self.pid = self.popen.pid

    def line(self) -> str:
        """The next line it prints; "" when it is gone."""
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def go(self) -> None:
        """Let it continue from ``input()``."""
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()

    def finish(self) -> str:
        """The rest of its output, once it ended well."""
        out, _ = self.popen.communicate(timeout=LIMIT)
        assert self.popen.returncode == 0, f"exit {self.popen.returncode}: {out}"
        return out.strip()

    def end(self) -> None:
        """Kill it if it still runs, and close its pipes."""
        self.popen.kill()
        self.popen.communicate(timeout=LIMIT)


@pytest.fixture
def python() -> Iterator[Callable[..., Process]]:
    """Start a Python process that runs the given code with the given arguments."""
    started: list[Process] = []

    def start(code: str, *args: object, fds: tuple[int, ...] = ()) -> Process:
        started.append(Process(code, *args, fds=fds))
        return started[-1]

    yield start
    for process in started:
        process.end()


@pytest.fixture
def name() -> Iterator[str]:
    """A name for a POSIX shared-memory object; removed if the test left it."""
    name = f"flyt-test-{os.getpid()}-{next(_numbers)}"
    yield name
    Path("/dev/shm", name).unlink(missing_ok=True)


@pytest.fixture
def region(name: str) -> Iterator[Region]:
    """A fresh region of 4 MiB."""
    region = Region.create(name, SIZE)
    yield region
    region.unlink()
    region.close()


@pytest.fixture
def geometry() -> Geometry:
    """The layout of `region`: 63 frames of 64 KiB."""
    return Geometry.plan(SIZE)


@pytest.fixture
def table(region: Region, geometry: Geometry) -> Iterator[FrameTable]:
    """The formatted table of `region`."""
    table = FrameTable(region.fd, region.size, geometry)
    table.format(geometry, 7)
    yield table
    table.close()


@pytest.fixture
def maps() -> Callable[..., list[tuple[int, int, str, str]]]:
    """(start, end, permissions, path) of a process' mappings that touch an address range."""

    def read(low: int, high: int, pid: Any = "self") -> list[tuple[int, int, str, str]]:
        found = []
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            start, end = (int(part, 16) for part in fields[0].split("-"))
            if start < high and low < end:
                found.append((start, end, fields[1], fields[5] if len(fields) > 5 else ""))
        return found

    return read
