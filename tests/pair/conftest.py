# SPDX-License-Identifier: Apache-2.0
"""Sessions of the test process itself, next to the real clients of ``tests/conftest.py``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import flyt


@pytest.fixture
def connect() -> Iterator[Callable[..., flyt.Session]]:
    """``connect(backend)``: make a session of this process; closed at the test's end."""
    sessions: list[flyt.Session] = []
    saved = {name: value for name, value in os.environ.items() if name.startswith("FLYT_")}

    def start(backend: Any, **environment: str) -> flyt.Session:
        os.environ["FLYT_RUNTIME_DIR"] = backend.env["FLYT_RUNTIME_DIR"]
        os.environ.update(environment)
        sessions.append(flyt.connect(backend.endpoint))
        return sessions[-1]

    yield start
    for session in sessions:
        session.close()
    for name in [name for name in os.environ if name.startswith("FLYT_")]:
        del os.environ[name]
    os.environ.update(saved)


@pytest.fixture(scope="module")
def one_backend(module_backend: Callable[..., Any]) -> Any:
    """A backend with a 48-MiB region that a module's tests share."""
    return module_backend()


@pytest.fixture
def session(one_backend: Any, connect: Callable[..., flyt.Session]) -> flyt.Session:
    """A fresh session of this process with the shared backend."""
    return connect(one_backend)


def free_bytes() -> int:
    """Of the current device, for this process's session."""
    error, free, _ = flyt.cudaMemGetInfo()
    assert error == 0, flyt.last_failure()
    return int(free)


@pytest.fixture
def is_back(device_kind: str) -> Callable[[int], bool]:
    """Whether so much memory is free, to the byte; on a GPU to the grain of its pools."""
    grain = 0 if device_kind == "emulated" else 32 << 20
    return lambda wanted: abs(free_bytes() - wanted) <= grain
