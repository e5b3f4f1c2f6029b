# SPDX-License-Identifier: Apache-2.0
"""``flyt suspend`` and ``flyt resume``: a client that waits meanwhile, and finds all as it was.

On CuPy the driver (570 or newer) suspends the worker; nothing here is emulated only but for faults.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import flyt as cudart
from tests.pair.raw import LIMIT, SOON, eventually, session_of, status

SIZE = 64 << 20
COMMAND_LIMIT = 60.0
"""Seconds for one suspension or resumption of so little; a driver took one for a GiB."""

HELD = 1.0
"""Seconds after which a call that waits has surely not just been slow."""

CLIENT = """
import sys, time
import numpy as np
import flyt, flyt as cudart
from flyt.frontend.api.callbacks import launch
SIZE = int(sys.argv[1])
K = cudart.cudaMemcpyKind
H2D, D2H = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost

def must(answer):
    assert not answer[0], (answer, flyt.last_failure())
    return answer[1] if len(answer) > 1 else None

data = np.random.default_rng(6).integers(0, 256, SIZE, dtype=np.uint8)
pinned = flyt.pinned_empty(1 << 20, np.uint8)
pinned[:] = data[: 1 << 20]
device = must(cudart.cudaMalloc(SIZE))
must(cudart.cudaMemcpy(device, data, SIZE, H2D))
stream = must(cudart.cudaStreamCreate())
must(cudart.cudaDeviceSynchronize())
print("ready", flush=True)
back = np.zeros_like(data)
for line in sys.stdin:
    word = line.strip()
    began = time.monotonic()
    if word == "check":
        back[:] = 0
        must(cudart.cudaMemcpy(back, device, SIZE, D2H))
        said = "right" if np.array_equal(back, data) else "WRONG"
    elif word == "work":  # of every kind: pinned, asynchronous, a new block, a free
        more = must(cudart.cudaMalloc(1 << 20))
        must(cudart.cudaMemcpyAsync(more, pinned, pinned.nbytes, H2D, stream))
        D2D = K.cudaMemcpyDeviceToDevice
        must(cudart.cudaMemcpyAsync(device, more, pinned.nbytes, D2D, stream))
        must(cudart.cudaStreamSynchronize(stream))
        must(cudart.cudaFree(more))
        another = flyt.pinned_empty(1 << 20, np.uint8)
        del another
        said = "done"
    elif word == "posts":
        for _ in range(1000):
            must(cudart.cudaMemcpyAsync(device, pinned, 4096, H2D, stream))
        must(cudart.cudaStreamSynchronize(stream))
        said = "done"
    elif word == "function":  # that goes on for a while
        launch(stream, lambda _: time.sleep(4))
        must(cudart.cudaMemcpyAsync(device, pinned, pinned.nbytes, H2D, stream))
        said = "launched"
    elif word == "free":
        said = str(must(cudart.cudaMemGetInfo()))
    elif word == "try":
        code = int(cudart.cudaMemcpy(back, device, SIZE, D2H)[0])
        said = f"{code} {flyt.last_failure() if code else ''}"
    print(f"{time.monotonic() - began:.3f} {said}", flush=True)
"""


class Client:
    """One that does what it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self.hear() == "ready"

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def does(self, word: str) -> str:
        """Its answer, without the time."""
        self.say(word)
        return self.hear().partition(" ")[2]


def flyt(served: Any, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flyt.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_LIMIT,
        env={**os.environ, **served.env, "FLYT_BACKEND": served.endpoint},
    )


def change(served: Any, command: str, client: Client, *options: str) -> None:
    entry = session_of(served, client.process.pid)
    assert entry is not None
    done = flyt(served, command, f"{entry['session']:016x}", *options)
    assert done.returncode == 0, done.stderr
    again = session_of(served, client.process.pid)
    assert again is not None
    assert again["suspended"] == (command == "suspend")


@pytest.fixture
def served(backend: Callable[..., Any]) -> Any:
    return backend(extra=["--isolation", "process", "--heartbeat", "1"])


@pytest.fixture
def started(start_client: Callable[..., Any]) -> Callable[[Any], Client]:
    return lambda served: Client(start_client(CLIENT, served, str(SIZE)))


def test_a_call_waits_and_then_finds_all_as_it_was(
    served: Any, started: Callable[[Any], Client]
) -> None:
    client = started(served)
    change(served, "suspend", client)
    client.say("check")
    time.sleep(4 * HELD)  # several heartbeats: a session that says nothing would be given up
    change(served, "resume", client)
    seconds, _, said = client.hear().partition(" ")
    assert said == "right"
    assert float(seconds) > HELD, "it waited"
    assert client.does("work") == "done"
    assert client.does("check") == "right"


def test_a_host_function_ends_while_its_session_is_being_suspended(
    served: Any, started: Callable[[Any], Client]
) -> None:
    """Work in flight waits for it, and the suspension for that work."""
    client = started(served)
    assert client.does("function") == "launched"
    change(served, "suspend", client)
    change(served, "resume", client)
    assert client.does("check") == "right"


@pytest.mark.parametrize("ring", ["0", "1"])
def test_more_posts_than_credits_wait_too(served: Any, start_client: Any, ring: str) -> None:
    """Without rings they lie in the socket, where nobody reads heartbeats behind them."""
    client = Client(start_client(CLIENT, served, str(SIZE), env={"FLYT_RING": ring}))
    change(served, "suspend", client)
    client.say("posts")
    time.sleep(4 * HELD)
    change(served, "resume", client)
    assert client.hear().endswith(" done")
    assert client.does("check") == "right"


def test_a_call_waits_no_longer_than_it_was_told(
    served: Any, started: Callable[[Any], Client]
) -> None:
    client = started(served)
    change(served, "suspend", client, "--wait", "1")
    for _ in range(2):
        client.say("try")
        seconds, code, said = client.hear().split(" ", 2)
        assert code == str(int(cudart.cudaError_t.cudaErrorSystemNotReady))
        assert "flyt resume" in said
        assert 1 <= float(seconds) < LIMIT
    change(served, "resume", client)
    assert client.does("try") == "0"
    assert client.does("check") == "right"


@pytest.mark.alone
def test_the_memory_of_the_gpu_is_free_meanwhile(
    served: Any, started: Callable[[Any], Client], device_kind: str
) -> None:
    first, second = started(served), started(served)
    if device_kind == "emulated":  # each worker has a GPU of its own: its pages tell
        entry = session_of(served, first.process.pid)
        assert entry is not None
        before = private_bytes(entry["worker"])
        change(served, "suspend", first)
        # They have moved to another place of the same process.
        assert abs(private_bytes(entry["worker"]) - before) < SIZE // 2
    else:
        before = int(second.does("free"))
        change(served, "suspend", first)
        assert int(second.does("free")) - before >= SIZE, "another session sees it"
    assert second.does("check") == "right", "who is not suspended goes on"
    change(served, "resume", first)
    assert first.does("check") == "right"


def private_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("Anonymous:"))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_client_that_dies_suspended_leaves_nothing(
    served: Any, started: Callable[[Any], Client], end: int
) -> None:
    client, other = started(served), started(served)
    entry = session_of(served, client.process.pid)
    assert entry is not None
    change(served, "suspend", client)
    client.process.send_signal(end)
    client.process.wait(LIMIT)
    assert eventually(lambda: session_of(served, client.process.pid) is None, SOON)
    assert eventually(lambda: entry["worker"] not in [w["pid"] for w in status(served)["workers"]])
    left = session_of(served, other.process.pid)
    assert left is not None
    assert eventually(lambda: status(served)["frames"]["granted"] == left["frames"])
    assert other.does("check") == "right"


def test_a_daemon_that_stops_takes_suspended_ones_along(
    served: Any, started: Callable[[Any], Client]
) -> None:
    client = started(served)
    change(served, "suspend", client)
    client.say("try")
    served.stop()
    assert client.hear().split(" ")[1] == "46"


def test_suspending_twice_is_no_error(served: Any, started: Callable[[Any], Client]) -> None:
    client = started(served)
    for command in ("suspend", "suspend", "resume", "resume"):
        change(served, command, client)
    assert client.does("check") == "right"


def test_who_may_not(served: Any, backend: Callable[..., Any], start_client: Any) -> None:
    assert "there is no session" in flyt(served, "suspend", "123abc").stderr
    assert flyt(served, "resume", "123abc").returncode == 1
    assert "flyt status lists them" in flyt(served, "suspend", "nobody").stderr
    shared = backend()
    client = Client(start_client(CLIENT, shared, str(1 << 20)))
    entry = session_of(shared, client.process.pid)
    assert entry is not None
    done = flyt(shared, "suspend", f"{entry['session']:016x}")
    assert done.returncode == 1
    assert "--isolation process" in done.stderr
    assert client.does("check") == "right"


@pytest.mark.emulated_only(reason="injects faults")
def test_a_gpu_that_has_no_room_is_told(backend: Callable[..., Any], started: Any) -> None:
    served = backend(
        extra=["--isolation", "process"], device_options="fault=suspend:801:1,fault=resume:2:1"
    )
    client = started(served)
    entry = session_of(served, client.process.pid)
    assert entry is not None
    number = f"{entry['session']:016x}"
    done = flyt(served, "suspend", number)
    assert done.returncode == 1
    assert "CUDA error 801" in done.stderr
    assert client.does("check") == "right", "it goes on"
    change(served, "suspend", client)
    done = flyt(served, "resume", number)
    assert done.returncode == 1
    assert "CUDA error 2" in done.stderr
    entry = session_of(served, client.process.pid)
    assert entry is not None
    assert entry["suspended"]
    change(served, "resume", client)
    assert client.does("check") == "right"
