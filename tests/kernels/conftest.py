# SPDX-License-Identifier: Apache-2.0
"""Sessions for tests of code; those that run kernels need ``--device cupy``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import flyt
from tests.pair.conftest import connect, one_backend, session  # noqa: F401 - fixtures, shared


@pytest.fixture
def gpu(device_kind: str) -> None:
    """Skip where no kernel runs."""
    if device_kind == "emulated":
        pytest.skip("the emulated device runs no kernels: needs a GPU, and --device cupy")


@pytest.fixture
def emulated(device_kind: str) -> None:
    """Skip where kernels run."""
    if device_kind != "emulated":
        pytest.skip("shows what a device without kernels says")


@pytest.fixture(scope="session")
def numba_compiles() -> None:
    """Skip where numba-cuda can compile nothing, natively no more than through Flyt: each of its
    versions needs a NumPy of its time."""
    done = subprocess.run(
        [sys.executable, "-c", "import numba.cuda.np.arrayobj"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"numba-cuda can't be imported whole: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture
def gpu_session(
    gpu: None,
    one_backend: Any,  # noqa: F811 - the fixture
    connect: Callable[..., flyt.Session],  # noqa: F811 - the fixture
) -> flyt.Session:
    """A session of this process, on a GPU."""
    return connect(one_backend)
