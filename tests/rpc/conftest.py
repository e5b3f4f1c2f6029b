# SPDX-License-Identifier: Apache-2.0
"""A ZeroMQ context, short socket paths, and a bounded wait for the tests of flyt.rpc."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from flyt.rpc.sockets import open_context

LIMIT = 20.0
"""Seconds; a bound on hangs, nothing is timed."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder whose name is short enough for sockets (tmp_path may not be)."""
    path = Path(tempfile.mkdtemp(prefix="flyt-"))
    yield path
    left = sorted(p.name for p in path.iterdir() if p.is_socket())
    shutil.rmtree(path)
    assert not left, f"left behind: {left}"


@pytest.fixture
def context(folder: Path) -> Iterator[zmq.Context[Any]]:
    """Terminated before the folder is looked at; hangs if a test left a socket open."""
    context = open_context()
    yield context
    context.term()


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """``eventually(f)``: call ``f`` until it returns something true, and return that."""

    def run(condition: Callable[[], Any], limit: float = LIMIT) -> Any:
        deadline = time.monotonic() + limit
        while not (value := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"did not happen within {limit} s")
            time.sleep(0.002)  # bounded by the deadline: other threads and processes act
        return value

    return run
