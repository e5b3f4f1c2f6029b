# SPDX-License-Identifier: Apache-2.0
"""Sticky errors: the worker's end, its sessions' last word, the same answer to every call."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from tests.pair.raw import LIMIT, Honest, eventually, session_of, status, worker_of

pytestmark = pytest.mark.emulated_only(reason="injects faults, which a GPU has no option for")

STICKY = (226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911)
"""After these, says CUDA, "the process must be terminated and relaunched" (or the context is
"in an inconsistent state")."""

K = cudart.cudaMemcpyKind
DEVICES_UNAVAILABLE = 46
MANY = 100
"""Calls in which an injected fault, and the word of it, must have come."""

DATA = bytes(range(256))

VICTIM = """
import sys
import flyt, flyt as cudart
error, device = cudart.cudaMalloc(256)
assert not error, flyt.last_failure()
print("ready", flush=True)
for line in sys.stdin:
    calls = 100 if line == "until it fails\\n" else 1
    for _ in range(calls):
        code = int(cudart.cudaMemset(device, 7, 256)[0]) or int(cudart.cudaDeviceSynchronize()[0])
        if code:
            break
    print(code, int(cudart.cudaPeekAtLastError()[0]), flyt.last_failure(), flush=True)
"""


def copies_until_failure(device: int) -> int:
    """The first code other than 0."""
    for _ in range(MANY):
        for answer in (
            cudart.cudaMemcpy(device, DATA, len(DATA), K.cudaMemcpyHostToDevice),
            cudart.cudaDeviceSynchronize(),
        ):
            if answer[0] != 0:
                return int(answer[0])
    return 0


def every_call(device: int, pinned: int) -> list[Any]:
    """What each call that says something of the device answers."""
    back = bytearray(256)
    return [
        cudart.cudaGetLastError(),
        cudart.cudaGetLastError(),
        cudart.cudaPeekAtLastError(),
        cudart.cudaMalloc(16),
        cudart.cudaMemcpy(device, DATA, 256, K.cudaMemcpyHostToDevice),
        cudart.cudaMemcpy(back, device, 256, K.cudaMemcpyDeviceToHost),
        cudart.cudaMemcpy(device, device + 128, 128, K.cudaMemcpyDeviceToDevice),
        cudart.cudaMemcpy(device, pinned, 256, K.cudaMemcpyDefault),
        cudart.cudaMemset(device, 0, 256),
        cudart.cudaMemGetInfo(),
        cudart.cudaDeviceSynchronize(),
        cudart.cudaHostAlloc(16, 0),
        cudart.cudaPeekAtLastError(),
        cudart.cudaGetLastError(),
        cudart.cudaGetLastError(),
    ]


def breaks(code: int) -> None:
    """Make this process's session hit its fault; the code is the answer to everything."""
    error, device = cudart.cudaMalloc(256)
    assert error == 0, flyt.last_failure()
    _, pinned = cudart.cudaHostAlloc(256, 0)
    assert copies_until_failure(device) == code
    assert flyt.last_failure()
    for _ in range(2):
        answers = every_call(device, pinned)
        assert [int(answer[0]) for answer in answers] == [code] * len(answers)
    assert "context" in flyt.last_failure()
    assert int(cudart.cudaGetLastError()[0]) == code, "it never resets"


def mends(code: int) -> None:
    """The new session of this process works, and its thread has forgotten the code."""
    error, device = cudart.cudaMalloc(256)
    assert error == 0, flyt.last_failure()
    back = bytearray(256)
    assert cudart.cudaMemcpy(device, DATA, 256, K.cudaMemcpyHostToDevice)[0] == 0
    assert cudart.cudaMemcpy(back, device, 256, K.cudaMemcpyDeviceToHost)[0] == 0
    assert back == DATA
    assert int(cudart.cudaPeekAtLastError()[0]) != code or not code


@pytest.mark.parametrize("how", ["", ":async"], ids=["at the call", "async"])
@pytest.mark.parametrize("code", STICKY)
def test_every_sticky_code(
    backend: Callable[..., Any], connect: Any, code: int, how: str
) -> None:
    # Each code is met in both isolations, once at the call and once later.
    isolation = ("shared", "process")[(STICKY.index(code) + bool(how)) % 2]
    one_in_isolation(backend, connect, code, how, isolation)


@pytest.mark.parametrize("isolation", ["shared", "process"])
@pytest.mark.parametrize("how", ["", ":async"], ids=["at the call", "async"])
def test_both_isolations(
    backend: Callable[..., Any], connect: Any, how: str, isolation: str
) -> None:
    one_in_isolation(backend, connect, 700, how, isolation)


def one_in_isolation(
    backend: Callable[..., Any], connect: Any, code: int, how: str, isolation: str
) -> None:
    """Over ipc and over tcp: break a session, get a new one, break that, too."""
    served = backend(
        device_options=f"fault=copy:{code}:3{how}",
        extra=["--isolation", isolation],
        listen=[f"ipc:///tmp/flyt-sticky-{os.getpid()}.sock", "tcp://127.0.0.1:*"],
    )
    for endpoint in served.endpoints:
        served.endpoints.sort(key=lambda other, first=endpoint: other != first)
        connect(served)
        workers = [worker for worker in served.descendants()]
        breaks(code)
        connect(served)
        mends(code)
        assert set(served.descendants()) - set(workers), "in a fresh worker"
