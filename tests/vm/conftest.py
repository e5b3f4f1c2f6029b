# SPDX-License-Identifier: Apache-2.0
"""What the tests with a guest share: its image, and how a program there is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vm.image import build
from vm.machine import Done, Image, Machine, Running

HOST = "10.0.2.2"
"""The host's loopback interface, as the guest sees it."""
MIB = 1 << 20
PAYLOADS = Path(__file__).parent / "payloads"
SLOT_SIZE = str(MIB)
"""A command costs milliseconds under TCG; the default for so small a region is 256 KiB."""
LIMIT = 60.0
"""Seconds for what takes a few under TCG."""


@pytest.fixture(scope="session")
def image() -> Image:
    """What the guests boot from."""
    return build()


@pytest.fixture(scope="module")
def backend_on_tcp(module_backend: Callable[..., Any]) -> Callable[..., Any]:
    """Start a backend that guests reach."""

    def start(**arguments: Any) -> Any:
        return module_backend(listen=["tcp://127.0.0.1:*"], **arguments)

    return start


def start(machine: Machine, backend: Any, payload: str, *arguments: str, **details: Any) -> Running:
    """Start a payload in the guest, with `backend` as its backend; `env` comes on top."""
    port = backend.endpoint.rpartition(":")[2]
    env = {"FLYT_BACKEND": f"tcp://{HOST}:{port}", "FLYT_SLOT_SIZE": SLOT_SIZE}
    env |= details.pop("env", {})
    code = (PAYLOADS / f"{payload}.py").read_text()
    return machine.start(*arguments, code=code, env=env, **details)


def run(machine: Machine, backend: Any, payload: str, *arguments: str, **details: Any) -> Done:
    """`start`, and wait for its end."""
    return start(machine, backend, payload, *arguments, **details).wait()


def copies(machine: Machine, backend: Any, region: str = "", **details: Any) -> dict[str, Any]:
    """The report of the payload ``small``."""
    env = {"FLYT_REGION": region} if region else {}
    done = run(machine, backend, "small", env=env, **details)
    assert done.code == 0, done.out
    report = json.loads(done.out.splitlines()[-1])
    assert isinstance(report, dict)
    return report
