# SPDX-License-Identifier: Apache-2.0
"""A session may end through no fault of its client; the bytes of the client's own pinned memory are
no part of what ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.pair.raw import LIMIT, SOON, Evaluator, RegionView, eventually, session_of, worker_of

DEVICES_UNAVAILABLE = 46
ILLEGAL_ADDRESS = 700
FAULT = f"fault=fill:{ILLEGAL_ADDRESS}:20:async"
"""Later than any fill of the bystander, sooner than the other client gives up."""

PER_CLIENT = ["--region", "per-client"]

Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

BYSTANDER = """
import sys
import numpy as np
import flyt, flyt as cudart
K = cudart.cudaMemcpyKind
SIZE = 1 << 20
session = flyt.connect()
a = flyt.pinned_empty(SIZE, np.uint8)
error, device = cudart.cudaMalloc(SIZE)
assert not error, flyt.last_failure()
host = np.full(SIZE, 5, np.uint8)
assert not cudart.cudaMemcpy(device, host, SIZE, K.cudaMemcpyHostToDevice)[0]
assert not cudart.cudaMemcpy(a, device, SIZE, K.cudaMemcpyDeviceToHost)[0]
assert (a == 5).all()
print("ready", flush=True)
for line in sys.stdin:
    if line == "drop\\n":
        del a
        print(cudart.cudaGetDevice(), flush=True)  # it goes back at the next call
    else:
        print(eval(line), flush=True)
"""

FAULTY = """
import flyt, flyt as cudart
error, device = cudart.cudaMalloc(256)
for _ in range(100):
    code = int(cudart.cudaMemset(device, 7, 256)[0]) or int(cudart.cudaDeviceSynchronize()[0])
    if code:
        break
print(code)
"""

NEWCOMER = """
import numpy as np
import flyt
a = flyt.pinned_empty(1 << 20, np.uint8)
print(a.any())
"""


class Bystander(Evaluator):
    """A client whose array holds 5s, which evaluates what it is told."""

    def has_its_bytes(self) -> bool:
        return self.says("(a == 5).all()") == "True"

    def ends(self) -> None:
        self.process.communicate(timeout=LIMIT)
        assert self.process.returncode == 0


@pytest.fixture
def bystander(start_client: Start) -> Callable[[Any], Bystander]:
    return lambda served: Bystander(start_client(BYSTANDER, served))


def is_over(served: Any, one: Bystander) -> bool:
    return session_of(served, one.pid) is None


def settle(served: Any, run_client: Run) -> None:
    """Whatever the keeper was to do before is done: it does things in turn, and a newcomer's
    frames are done. The newcomer sees zeros."""
    done = run_client(NEWCOMER, served)
    assert done.stdout == "False\n", done.stderr


# --- how a session ends ------------------------------------------------------------------------


def another_faults(served: Any, one: Bystander, run_client: Run) -> int:
    done = run_client(FAULTY, served)
    assert done.stdout == f"{ILLEGAL_ADDRESS}\n", done.stderr
    return ILLEGAL_ADDRESS


def worker_killed(served: Any, one: Bystander, run_client: Run) -> int:
    os.kill(worker_of(served, one.pid), signal.SIGKILL)
    return DEVICES_UNAVAILABLE


def stopped_too_long(served: Any, one: Bystander, run_client: Run) -> int:
    one.process.send_signal(signal.SIGSTOP)
    assert eventually(lambda: is_over(served, one)), "past its heartbeat"
    settle(served, run_client)
    one.process.send_signal(signal.SIGCONT)
    return DEVICES_UNAVAILABLE


CAUSES = [
    pytest.param(
        another_faults,
        marks=pytest.mark.emulated_only(reason="injects faults, which a GPU has no option for"),
    ),
    worker_killed,
    stopped_too_long,
]


def serve(backend: Callable[..., Any], device_kind: str, *extra: str) -> Any:
    options = FAULT if device_kind == "emulated" else ""
    extra = ("--heartbeat", "1", "--sweep-seconds", "0.2", *extra)
    return backend(device_options=options, extra=list(extra))


@pytest.mark.parametrize("extra", [[], PER_CLIENT], ids=["shared", "per-client"])
@pytest.mark.parametrize("cause", CAUSES)
def test_its_array_keeps_its_bytes(
    backend: Any,
    bystander: Callable[[Any], Bystander],
    run_client: Run,
    device_kind: str,
    cause: Any,
    extra: list[str],
) -> None:
    served = serve(backend, device_kind, *extra)
    one = bystander(served)
    code = cause(served, one, run_client)
    assert eventually(lambda: is_over(served, one))
    settle(served, run_client)
    assert one.has_its_bytes()
    assert one.says("int(cudart.cudaDeviceSynchronize()[0])") == str(code), "it is told"
    assert one.has_its_bytes()
    assert one.says("session.close()") == "None"
    assert one.has_its_bytes()
    one.ends()


@pytest.mark.parametrize("way", ["exits", "killed", "session.close()", "drop"])
@pytest.mark.parametrize("cause", CAUSES)
def test_its_frames_come_back_once_it_lets_go(
    backend: Any,
    bystander: Callable[[Any], Bystander],
    run_client: Run,
    device_kind: str,
    cause: Any,
    way: str,
) -> None:
    served = serve(backend, device_kind)
    one = bystander(served)
    with RegionView(served.region) as region:
        frames = region.frames_of(one.pid)
        one.says("a.fill(6)")  # 5s went through staging memory as well
        array = [frame for frame in frames if region.holds(frame, 6)]
        assert len(array) == (1 << 20) // region.table.geometry.page_size
        cause(served, one, run_client)
        assert eventually(lambda: is_over(served, one))
        settle(served, run_client)
        assert all(region.holds(frame, 6) for frame in array)
        assert not any(region.are_free([frame]) for frame in frames), "nobody else is to try them"
        if way == "drop":
            frames = array
        if way == "exits":
            one.ends()
        elif way == "killed":
            one.process.kill()
        else:
            one.says(way)
        assert eventually(lambda: region.are_free(frames), SOON)
        assert region.dirty(frames) == []


# --- the daemon ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [[], ["--keep-region"], PER_CLIENT])
def test_a_daemon_that_stops_leaves_them(
    backend: Any, bystander: Callable[[Any], Bystander], extra: list[str]
) -> None:
    served = backend(extra=extra)
    one = bystander(served)
    served.stop()
    assert one.has_its_bytes()
    assert one.says("int(cudart.cudaDeviceSynchronize()[0])") == str(DEVICES_UNAVAILABLE)
    assert one.has_its_bytes()
    one.ends()


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_the_next_daemon_leaves_them_until_they_are_let_go(
    backend: Any, bystander: Callable[[Any], Bystander], run_client: Run, end: str
) -> None:
    served = backend(extra=["--keep-region"])
    one, other = bystander(served), bystander(served)
    with RegionView(served.region) as region:
        frames, others = region.frames_of(one.pid), region.frames_of(other.pid)
        getattr(served, end)()
        other.ends()
        assert region.dirty(others), "whose bytes nobody has cleaned yet"
        successor = backend(
            region=served.region_name,
            listen=[served.endpoint],
            env={"FLYT_RUNTIME_DIR": str(served.runtime_dir)},
            extra=["--keep-region"],
        )
        assert region.are_free(others)
        assert region.dirty(others) == [], "whoever has gone left nothing to the newcomers"
        settle(successor, run_client)
        assert one.has_its_bytes()
        assert not any(region.are_free([frame]) for frame in frames)
        assert one.says("session.close()") == "None"
        assert eventually(lambda: region.are_free(frames), LIMIT)
        assert region.dirty(frames) == []
        assert one.has_its_bytes()
        # Last, since a new session may get the very frames.
        assert one.says("flyt.connect() and int(cudart.cudaMalloc(16)[0])") == "0"
        assert one.has_its_bytes()
        one.ends()
