# SPDX-License-Identifier: Apache-2.0
"""Sticky errors: the worker's end, its sessions' last word, the same answer to every call."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from tests.pair.raw import Honest, eventually, session_of, status, worker_of

pytestmark = pytest.mark.emulated_only(reason="injects faults, which a GPU has no option for")

STICKY = (226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911)
"""After these, says CUDA, "the process must be terminated and relaunched" (or the context is
"in an inconsistent state")."""

K = cudart.cudaMemcpyKind
DEVICES_UNAVAILABLE = 46
LISTEN = [f"ipc:///tmp/flyt-sticky-{os.getpid()}.sock", "tcp://127.0.0.1:*"]
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


def mends() -> None:
    """This process's new session works."""
    cudart.cudaGetLastError()  # the thread's own, not the session's, may be left from the old one
    error, device = cudart.cudaMalloc(256)
    assert error == 0, flyt.last_failure()
    back = bytearray(256)
    assert cudart.cudaMemcpy(device, DATA, 256, K.cudaMemcpyHostToDevice)[0] == 0
    assert cudart.cudaMemcpy(back, device, 256, K.cudaMemcpyDeviceToHost)[0] == 0
    assert back == DATA
    assert int(cudart.cudaGetLastError()[0]) == 0


@pytest.mark.parametrize("code", STICKY)
def test_every_sticky_code(backend: Callable[..., Any], connect: Any, code: int) -> None:
    # Where and how it is met makes no difference by code: the next test has all the combinations.
    number = STICKY.index(code)
    how, isolation = ("", ":async")[number % 2], ("shared", "process")[number // 2 % 2]
    one_in_isolation(backend, connect, code, how, isolation, [number // 4 % 2])


@pytest.mark.parametrize("isolation", ["shared", "process"])
@pytest.mark.parametrize("how", ["", ":async"], ids=["at the call", "async"])
def test_both_isolations(
    backend: Callable[..., Any], connect: Any, how: str, isolation: str
) -> None:
    one_in_isolation(backend, connect, 700, how, isolation, [0, 1])


def one_in_isolation(
    backend: Callable[..., Any],
    connect: Any,
    code: int,
    how: str,
    isolation: str,
    through: list[int],
) -> None:
    """Through these endpoints: break a session, and get a new one at once."""
    served = backend(
        device_options=f"fault=copy:{code}:3{how}",
        extra=["--isolation", isolation],
        listen=LISTEN,
    )
    for number in through:
        here = SimpleNamespace(endpoint=served.endpoints[number], env=served.env)
        connect(here)
        broken = worker_of(served, os.getpid())
        breaks(code)
        connect(here)
        mends()
        assert worker_of(served, os.getpid()) != broken
    assert eventually(lambda: all(w["state"] != "leaving" for w in status(served)["workers"])), (
        "the broken workers are gone"
    )


# --- who else is hit ---------------------------------------------------------------------------


@pytest.fixture
def victim(start_client: Callable[..., Any]) -> Callable[..., subprocess.Popen[str]]:
    """Start clients that fill memory on demand: only fills fail in these tests."""

    def start(served: Any, endpoint: str = "") -> subprocess.Popen[str]:
        env = {"FLYT_BACKEND": endpoint} if endpoint else {}
        client: subprocess.Popen[str] = start_client(VICTIM, served, env=env)
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        return client

    return start


def ask(client: subprocess.Popen[str], word: str = "once") -> list[str]:
    """Have it fill memory: the code, the last error, and why."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(word + "\n")
    client.stdin.flush()
    return client.stdout.readline().strip().split(" ", 2)


FILLS_FAIL = "fault=fill:719:40"
"""Late enough for everyone to have zeroed what they allocate."""


def test_shared_every_session_of_the_worker_hears_it_and_no_other(
    backend: Callable[..., Any], victim: Callable[..., Any]
) -> None:
    served = backend(
        device_options=FILLS_FAIL,
        listen=LISTEN,
    )
    hit, beside = victim(served), victim(served)
    elsewhere = victim(served, served.endpoints[1])
    assert worker_of(served, hit.pid) == worker_of(served, beside.pid)
    assert worker_of(served, hit.pid) != worker_of(served, elsewhere.pid)
    assert ask(beside)[:2] == ["0", "0"]
    assert ask(hit, "until it fails")[:2] == ["719", "719"]
    for client in (beside, hit):
        for _ in range(2):
            code, last, why = ask(client)
            assert (code, last) == ("719", "719")
            assert "context is gone" in why
    assert ask(elsewhere)[:2] == ["0", "0"]


def test_process_only_one_session_is_hit(
    backend: Callable[..., Any], victim: Callable[..., Any]
) -> None:
    served = backend(device_options=FILLS_FAIL, extra=["--isolation", "process"])
    other, hit, beside = Honest(served), victim(served), victim(served)
    try:
        workers = [worker_of(served, client.pid) for client in (other, hit, beside)]
        before = other.rounds()
        assert ask(hit, "until it fails")[:2] == ["719", "719"]
        code, last, why = ask(hit)
        assert (code, last) == ("719", "719")
        assert "context is gone" in why
        assert ask(beside)[:2] == ["0", "0"]
        assert other.carries_on()
        assert other.rounds() > before
        assert eventually(lambda: session_of(served, hit.pid) is None)
        assert [worker_of(served, client.pid) for client in (other, beside)] == workers[::2]
    finally:
        other.close()


@pytest.mark.parametrize("isolation", ["shared", "process"])
def test_a_call_that_waits_hears_it(
    backend: Callable[..., Any], connect: Any, isolation: str
) -> None:
    """The fault comes while the client is in the middle of a large copy."""
    served = backend(
        device_options="fault=copy:700:5:async,latency=0.05", extra=["--isolation", isolation]
    )
    connect(served)
    data = np.ones(32 << 20, np.uint8)
    error, device = cudart.cudaMalloc(data.nbytes)
    assert error == 0
    answers = [
        cudart.cudaMemcpy(device, data, data.nbytes, K.cudaMemcpyHostToDevice),
        cudart.cudaMemcpy(data, device, data.nbytes, K.cudaMemcpyDeviceToHost),
        cudart.cudaDeviceSynchronize(),
    ]
    assert 700 in [int(answer[0]) for answer in answers]
    assert {int(answer[0]) for answer in answers} <= {0, 700}
    assert int(answers[-1][0]) == 700
    connect(served)
    mends()


@pytest.mark.parametrize("code", [2, 400, 600, 999])
def test_what_is_not_sticky_ends_nothing(
    backend: Callable[..., Any], connect: Any, code: int
) -> None:
    served = backend(device_options=f"fault=copy:{code}:3")
    connect(served)
    worker = worker_of(served, os.getpid())
    error, device = cudart.cudaMalloc(256)
    assert error == 0
    assert copies_until_failure(device) == code
    assert int(cudart.cudaGetLastError()[0]) == code
    assert int(cudart.cudaGetLastError()[0]) == 0
    mends()
    assert worker_of(served, os.getpid()) == worker


@pytest.mark.parametrize("isolation", ["shared", "process"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_death_without_a_word(
    backend: Callable[..., Any],
    connect: Any,
    alive: Callable[[int], bool],
    isolation: str,
    number: int,
) -> None:
    served = backend(extra=["--isolation", isolation])
    connect(served)
    error, device = cudart.cudaMalloc(256)
    assert error == 0
    _, pinned = cudart.cudaHostAlloc(256, 0)
    worker = worker_of(served, os.getpid())
    os.kill(worker, number)
    assert eventually(lambda: not alive(worker))
    answers = [cudart.cudaMemGetInfo(), *every_call(device, pinned)]
    assert [int(answer[0]) for answer in answers] == [DEVICES_UNAVAILABLE] * len(answers)
    assert "backend" in flyt.last_failure()
    connect(served)
    mends()
