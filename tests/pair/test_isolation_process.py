# SPDX-License-Identifier: Apache-2.0
"""``--isolation process``: a worker for each session, a spare one ready, none left over."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.errors import HandshakeError
from tests.pair.raw import (
    LIMIT,
    SOON,
    Honest,
    RegionView,
    eventually,
    session_of,
    status,
    worker_of,
)

K = cudart.cudaMemcpyKind
DEVICES_UNAVAILABLE = 46
PROCESS = ["--isolation", "process"]

HOLDS = """
import os, sys
import numpy as np
import flyt, flyt as cudart
error, device = cudart.cudaMalloc(8 << 20)
assert not error, flyt.last_failure()
pinned = flyt.pinned_empty(1 << 20, np.uint8)
pinned[:] = 0xEE
for address, array in ((device, pinned), (pinned, device)):
    answer = cudart.cudaMemcpy(address, array, pinned.nbytes, cudart.cudaMemcpyKind(4))
    assert not answer[0], flyt.last_failure()
print("ready", flush=True)
if sys.stdin.readline() == "vanish\\n":
    os._exit(0)
print(int(cudart.cudaMemGetInfo()[0]), flyt.last_failure(), flush=True)
"""


@pytest.fixture
def served(backend: Callable[..., Any]) -> Any:
    return backend(extra=PROCESS)


@pytest.fixture
def holder(start_client: Callable[..., Any]) -> Callable[[Any], subprocess.Popen[str]]:
    """Start a client that has memory of every kind and waits for a word."""

    def start(served: Any) -> subprocess.Popen[str]:
        client: subprocess.Popen[str] = start_client(HOLDS, served)
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        return client

    return start


def round_trip(size: int = 100_000, seed: int = 1) -> bool:
    """Whether bytes come back right through this process's session."""
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    back = np.zeros_like(data)
    error, device = cudart.cudaMalloc(size)
    assert error == 0, flyt.last_failure()
    for answer in (
        cudart.cudaMemcpy(device, data, size, K.cudaMemcpyHostToDevice),
        cudart.cudaMemcpy(back, device, size, K.cudaMemcpyDeviceToHost),
        cudart.cudaFree(device),
    ):
        assert answer[0] == 0, flyt.last_failure()
    return bool(np.array_equal(back, data))


def spares(served: Any) -> list[int]:
    """Workers that are ready and nobody's."""
    return [
        w["pid"]
        for w in status(served)["workers"]
        if w["state"] == "ready" and not w["principal"] and not w["sessions"]
    ]


def settles(served: Any, workers: int, seconds: float = LIMIT) -> bool:
    """Whether so many workers remain in the end, one of them a ready spare."""
    return eventually(
        lambda: len(status(served)["workers"]) == workers and len(spares(served)) == 1, seconds
    )


def test_each_session_has_a_worker_of_its_own(
    served: Any, holder: Callable[[Any], Any], connect: Any
) -> None:
    clients = [holder(served) for _ in range(2)]
    connect(served)
    assert round_trip()
    report = status(served)
    assert report["isolation"] == "process"
    hosts = [s["worker"] for s in report["sessions"]]
    assert len(set(hosts)) == len(hosts) == 3
    assert {s["principal"] for s in report["sessions"]} == {f"uid {os.getuid()}"}
    with RegionView(served.region) as region:
        frames = [set(region.frames_of(pid)) for pid in (*(c.pid for c in clients), os.getpid())]
    assert all(frames)
    assert len(set.union(*frames)) == sum(map(len, frames)), "one region, split between them"
    assert settles(served, 4), "one spare beside them"


def test_by_default_the_sessions_of_a_user_share_one(
    backend: Callable[..., Any], holder: Callable[[Any], Any]
) -> None:
    served = backend()
    for _ in range(2):
        holder(served)
    report = status(served)
    assert report["isolation"] == "shared"
    assert len({s["worker"] for s in report["sessions"]}) == len(report["workers"]) == 1


def test_a_session_gets_the_spare_that_was_ready(served: Any, connect: Any) -> None:
    taken = []
    for _ in range(3):
        assert eventually(lambda: len(spares(served)) == 1)
        taken += spares(served)
        connect(served)
        assert round_trip()
        assert worker_of(served, os.getpid()) == taken[-1]
    assert len(set(taken)) == 3


def test_over_tcp_too(backend: Callable[..., Any], start_client: Any, connect: Any) -> None:
    served = backend(
        extra=PROCESS, listen=[f"ipc:///tmp/flyt-process-{os.getpid()}.sock", "tcp://127.0.0.1:*"]
    )
    remote = [start_client(HOLDS, served, env={"FLYT_BACKEND": served.endpoints[1]}) for _ in "ab"]
    for client in remote:
        assert client.stdout.readline() == "ready\n"
    connect(served)
    assert round_trip()
    assert len({s["worker"] for s in status(served)["sessions"]}) == 3


# --- the end of a session ------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["leaves", "vanishes", "is killed"])
def test_the_worker_goes_with_its_session(
    served: Any, holder: Callable[[Any], Any], way: str, alive: Callable[[int], bool]
) -> None:
    other, client = Honest(served), holder(served)
    try:
        worker = worker_of(served, client.pid)
        assert worker != worker_of(served, other.pid)
        with RegionView(served.region) as region:
            frames = region.frames_of(client.pid)
            assert region.dirty(frames)
            if way == "is killed":
                client.kill()
                client.wait(LIMIT)
            else:
                client.communicate("vanish\n" if way == "vanishes" else "\n", timeout=LIMIT)
            assert eventually(lambda: region.are_free(frames), SOON)
            assert region.dirty(frames) == []
        assert session_of(served, client.pid) is None
        assert eventually(lambda: not alive(worker))
        assert other.carries_on()
        assert settles(served, 2)
    finally:
        other.close()


def test_the_last_words_are_heard_before_the_worker_exits(served: Any, holder: Any) -> None:
    for _ in range(3):
        client = holder(served)
        output, _ = client.communicate("\n", timeout=LIMIT)
        assert output == "0 \n"
        assert client.returncode == 0


def test_many_sessions_leave_no_worker_and_no_descriptor(served: Any, connect: Any) -> None:
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{served.pid}/fd"))

    assert settles(served, 1)
    before = descriptors()
    for seed in range(6):
        with connect(served):
            assert round_trip(seed=seed)
    assert settles(served, 1)
    assert eventually(lambda: descriptors() <= before)
    assert len(served.descendants()) == 2, "the keeper and the spare"


# --- deaths --------------------------------------------------------------------------------------


def test_a_killed_worker_ends_its_own_session_only(
    served: Any, holder: Callable[[Any], Any]
) -> None:
    other, client = Honest(served), holder(served)
    try:
        neighbour, before = worker_of(served, other.pid), other.rounds()
        os.kill(worker_of(served, client.pid), signal.SIGKILL)
        output, _ = client.communicate("\n", timeout=LIMIT)
        code, _, why = output.strip().partition(" ")
        assert int(code) == DEVICES_UNAVAILABLE
        assert why
        assert other.carries_on()
        assert other.rounds() > before
        assert worker_of(served, other.pid) == neighbour
        assert settles(served, 2)
    finally:
        other.close()


def test_a_killed_spare_is_missed_by_nobody(served: Any, connect: Any) -> None:
    assert settles(served, 1)
    (dead,) = spares(served)
    os.kill(dead, signal.SIGKILL)
    connect(served)
    assert round_trip()
    assert worker_of(served, os.getpid()) != dead
    assert settles(served, 2)


# --- the limit -----------------------------------------------------------------------------------


def test_one_session_too_many_is_refused_until_another_leaves(
    backend: Callable[..., Any], holder: Callable[[Any], Any], connect: Any
) -> None:
    served = backend(extra=[*PROCESS, "--max-workers", "2"])
    clients = [holder(served) for _ in range(2)]
    with pytest.raises(HandshakeError, match=r"serves 2 sessions already.*--max-workers"):
        connect(served)
    assert len(status(served)["workers"]) == 2, "at the limit there is no room for a spare"
    clients[0].communicate("\n", timeout=LIMIT)
    connect(served)
    assert round_trip()
    connect(served)
    assert round_trip(), "whoever gives a session up gets the next one at once"
    output, _ = clients[1].communicate("\n", timeout=LIMIT)
    assert output.startswith("0 ")


# --- idleness ------------------------------------------------------------------------------------


def cpu_ticks(pid: int) -> int:
    """Time on a processor, user and system, of all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize("isolation", ["shared", "process"])
def test_idle_processes_use_no_cpu(
    backend: Callable[..., Any], connect: Any, isolation: str
) -> None:
    served = backend(extra=["--isolation", isolation])
    connect(served)
    assert round_trip()
    workers = 2 if isolation == "process" else 1
    assert eventually(
        lambda: [w["state"] for w in status(served)["workers"]] == ["ready"] * workers
    )
    pids = [served.pid, *served.descendants()]
    assert len(pids) == 2 + workers, "supervisor, keeper, workers"
    time.sleep(0.2)  # what was just done ends; a session's thread spins for milliseconds
    before = {pid: cpu_ticks(pid) for pid in pids}
    seconds = 1.5
    time.sleep(seconds)  # the span that is measured
    spent = {pid: cpu_ticks(pid) - before[pid] for pid in pids}
    # It is below 1 %; a thread that polls every millisecond would take more than these 3 %.
    bound = 0.03 * seconds * os.sysconf("SC_CLK_TCK")
    assert all(ticks <= bound for ticks in spent.values()), spent


def test_ordinary_ends_are_no_warnings(served: Any, connect: Any) -> None:
    connect(served).close()
    assert eventually(lambda: "ended: exit status 0" in served.log)
    served.stop()
    assert "WARNING" not in served.log, served.log
