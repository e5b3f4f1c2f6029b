# SPDX-License-Identifier: Apache-2.0
"""Sessions for tests of code; those that run kernels need ``--device cupy``."""

from __future__ import annotations

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


@pytest.fixture
def gpu_session(
    gpu: None,
    one_backend: Any,  # noqa: F811 - the fixture
    connect: Callable[..., flyt.Session],  # noqa: F811 - the fixture
) -> flyt.Session:
    """A session of this process, on a GPU."""
    return connect(one_backend)
