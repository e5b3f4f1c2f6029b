# SPDX-License-Identifier: Apache-2.0
"""Whoever dies, takes nothing with it: clients, forked children, workers, the backend."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flyt.shm import runs
from flyt.shm.frames import FrameTaker
from flyt.shm.locks import FrameLocks
from tests.pair.raw import (
    LIMIT,
    SOON,
    Honest,
    RegionView,
    eventually,
    session_of,
    status,
    threads_of,
    worker_of,
)

DEVICES_UNAVAILABLE = 46
INITIALIZATION_ERROR = 3
MIB = 1 << 20
SLACK = 4 * MIB
"""A GPU's driver hands memory out and takes it back in granules of 2 MiB."""

Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

PRELUDE = """
import os, sys, signal, threading, time
import numpy as np
import flyt, flyt as cudart
K = cudart.cudaMemcpyKind
H2D, D2H = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost

def must(answer):
    if answer[0] != 0:
        raise SystemExit(f"{answer[0]!r}: {flyt.last_failure()}")
    return answer[-1]

def say(*words):
    print(*words, flush=True)

def round_trip(device, size, seed):
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    back = np.zeros_like(data)
    must(cudart.cudaMemcpy(device, data, size, H2D))
    must(cudart.cudaMemcpy(back, device, size, D2H))
    return bool(np.array_equal(back, data))
"""


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], word: str = "go") -> None:
    assert process.stdin is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()


def slow(device_kind: str, seconds: float = 0.02) -> str:
    """Device options that make each copy last some time, where the device has such options."""
    return f"latency={seconds}" if device_kind == "emulated" else ""


@pytest.fixture
def honest() -> Iterator[Callable[..., Honest]]:
    """Start clients that copy and verify until the test's end."""
    started: list[Honest] = []

    def start(backend: Any, size: int = 200_000) -> Honest:
        started.append(Honest(backend, size))
        return started[-1]

    yield start
    for one in started:
        one.close()


# --- a client dies ------------------------------------------------------------------------------

BUSY = (
    PRELUDE
    + """
size = 64 << 20
device = must(cudart.cudaMalloc(size))
pinned = flyt.pinned_empty(4 << 20, np.uint8)
pinned[:] = 0xEE
data = np.full(size, 0xDD, np.uint8)
def work():
    while True:
        must(cudart.cudaMemcpy(device, data, size, H2D))
        must(cudart.cudaMemcpy(data, device, size, D2H))
threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
while True:
    must(cudart.cudaMemcpy(device, pinned, pinned.nbytes, H2D))
    if flyt.inflight():
        break
say("copying")
threading.Event().wait()
"""
)


@pytest.mark.alone
def test_a_client_killed_in_mid_copy_leaves_nothing(
    backend: Any,
    honest: Callable[..., Honest],
    start_client: Start,
    device_kind: str,
) -> None:
    served = backend(device_options=slow(device_kind))
    others = [honest(served, 300_000), honest(served, 50_000)]
    assert all(other.carries_on(1) for other in others)
    worker = worker_of(served, others[0].pid)
    threads, memory = threads_of(worker), others[0].free_memory()
    sessions = len(status(served)["sessions"])

    victim = start_client(BUSY, served)
    assert line_of(victim) == "copying"
    with RegionView(served.region) as region:
        frames = region.frames_of(victim.pid)
        geometry = region.table.geometry
        assert len(frames) * geometry.page_size > 4 * MIB
        assert region.dirty(frames)
        assert others[0].free_memory() <= memory - 64 * MIB + SLACK
        assert threads_of(worker) > threads
        before = [other.rounds() for other in others]

        victim.kill()
        victim.wait(LIMIT)
        deadline = time.monotonic() + SOON

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        assert eventually(lambda: region.are_free(frames), left()), "frames"
        assert region.dirty(frames) == []
        assert eventually(lambda: others[0].free_memory() >= memory - SLACK, left()), "memory"
        assert eventually(lambda: threads_of(worker) == threads, left()), "threads"
        assert len(status(served)["sessions"]) == sessions
    for other, rounds in zip(others, before, strict=True):
        assert other.carries_on()
        assert other.rounds() > rounds
    assert worker_of(served, others[0].pid) == worker


@pytest.mark.alone
def test_many_sessions_leave_no_threads_descriptors_or_mappings(
    backend: Any, honest: Callable[..., Honest], run_client: Run
) -> None:
    code = (
        PRELUDE
        + """
for _ in range(10):
    with flyt.connect():
        device = must(cudart.cudaMalloc(1 << 20))
        pinned = must(cudart.cudaHostAlloc(100_000, 0))
        must(cudart.cudaMemcpy(device, pinned, 100_000, H2D))
"""
    )
    served = backend()
    other = honest(served)
    worker = worker_of(served, other.pid)
    free = other.free_memory()

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{worker}/fd"))

    def sections() -> int:
        return len(Path(f"/proc/{worker}/maps").read_text().splitlines())

    assert run_client(code, served).returncode == 0
    assert eventually(lambda: len(status(served)["sessions"]) == 1)
    counts = threads_of(worker), descriptors()
    mappings = sections()
    assert run_client(code, served).returncode == 0
    assert eventually(lambda: (threads_of(worker), descriptors()) == counts)
    assert sections() <= mappings + 9  # malloc's arenas may grow; a leak would be one a session
    assert other.free_memory() >= free - SLACK


# --- a client stands still ----------------------------------------------------------------------

STOPPED = (
    PRELUDE
    + """
arrays = [flyt.pinned_empty(1 << 20, np.uint8) for _ in range(4)]
for array in arrays:
    array[:] = 0xAA
say("ready")
sys.stdin.readline()
for array in arrays:
    array[:] = 0xAA
answer = cudart.cudaMemGetInfo()
say(int(answer[0]), flyt.last_failure())
say(int(cudart.cudaGetLastError()[0]), int(cudart.cudaMalloc(16)[0]))
with flyt.connect():
    say(round_trip(must(cudart.cudaMalloc(100_000)), 100_000, 1))
"""
)

TAKES_ALL = (
    PRELUDE
    + """
import ctypes
error, blocks = 0, []
while not error:
    error, address = cudart.cudaHostAlloc(65536, 0)
    if not error:
        blocks.append(address)
views = [(ctypes.c_ubyte * 65536).from_address(address) for address in blocks]
nonzero = sum(bytes(view) != bytes(65536) for view in views)
for view in views:
    ctypes.memset(view, 0xBB, 65536)
say(len(blocks), int(error), nonzero)
sys.stdin.readline()
say(sum(bytes(view) != b"\\xbb" * 65536 for view in views))
"""
)


def test_a_stopped_client_writes_into_nobodys_frames(backend: Any, start_client: Start) -> None:
    served = backend(size="12M", extra=["--heartbeat", "1", "--sweep-seconds", "0.2"])
    first = start_client(STOPPED, served)
    assert line_of(first) == "ready"
    with RegionView(served.region) as region:
        frames = region.frames_of(first.pid)
        assert len(frames) >= 64
        first.send_signal(signal.SIGSTOP)
        assert eventually(lambda: session_of(served, first.pid) is None), "past its heartbeat"
        assert not any(region.are_free([frame]) for frame in frames), "it has them locked"

        second = start_client(TAKES_ALL, served)
        taken, error, nonzero = line_of(second).split()
        assert nonzero == "0"
        assert int(error) == 2, "all that can be had is taken: cudaErrorMemoryAllocation"
        theirs = region.frames_of(second.pid)
        assert len(theirs) > int(taken) > 0
        assert not set(theirs) & set(frames), "the stopped client still maps these"
        assert len(theirs) + len(frames) == region.table.geometry.page_count

        tell(first)
        first.send_signal(signal.SIGCONT)
        code, _, why = line_of(first).partition(" ")
        assert int(code) == DEVICES_UNAVAILABLE
        assert "closed the connection" in why
        tell(second)
        assert line_of(second) == "0", "blocks of the second client were changed"
        assert line_of(first) == f"{DEVICES_UNAVAILABLE} {DEVICES_UNAVAILABLE}"
        assert second.wait(LIMIT) == 0
        assert line_of(first) == "True", "a new session works"
        assert first.wait(LIMIT) == 0
        # Unlocked at last, they may be had again, without what it wrote late.
        assert eventually(lambda: len(region.free()) == region.table.geometry.page_count)
        assert region.dirty(frames) == []
        third = start_client(TAKES_ALL, served)
        blocks, _, nonzero = line_of(third).split()
        assert int(blocks) > int(taken)
        assert nonzero == "0"


# --- the backend's side dies --------------------------------------------------------------------

WAITING = (
    PRELUDE
    + """
size = 8 << 20
device = must(cudart.cudaMalloc(size))
data = np.ones(size, np.uint8)
pinned = flyt.pinned_empty(65536, np.uint8)
def copies():
    while True:
        if sys.argv[1] == "staged":
            answer = cudart.cudaMemcpy(device, data, size, H2D)
        elif sys.argv[1] == "back":
            answer = cudart.cudaMemcpy(data, device, size, D2H)
        else:
            answer = cudart.cudaMemcpy(device, pinned, pinned.nbytes, H2D)
        if answer[0] != 0:
            return answer
must(cudart.cudaMemcpy(device, pinned, 1, H2D))
say("copying")
answer = copies()
say(int(answer[0]), flyt.last_failure())
say(int(cudart.cudaDeviceSynchronize()[0]), int(cudart.cudaGetLastError()[0]))
sys.stdin.readline()
with flyt.connect():
    say(round_trip(must(cudart.cudaMalloc(100_000)), 100_000, 2))
"""
)

WAYS = ("staged", "back", "pinned")


def waiting_clients(start: Start, served: Any) -> list[subprocess.Popen[str]]:
    """Clients of all ways, each in the middle of a copy."""
    clients = [start(WAITING, served, way) for way in WAYS]
    for client in clients:
        assert line_of(client) == "copying"
    return clients


def all_fail_soon(clients: list[subprocess.Popen[str]], since: float) -> None:
    for client in clients:
        code, _, why = line_of(client).partition(" ")
        assert time.monotonic() - since < SOON
        assert int(code) == DEVICES_UNAVAILABLE
        assert why
        assert line_of(client) == f"{DEVICES_UNAVAILABLE} {DEVICES_UNAVAILABLE}"


def test_a_killed_backend_is_an_error_at_once(
    backend: Any, start_client: Start, run_client: Run, device_kind: str, alive: Any
) -> None:
    served = backend(device_options=slow(device_kind, 0.2))
    clients = waiting_clients(start_client, served)
    processes = served.descendants()
    assert len(processes) >= 2, "a worker and the keeper"
    since = time.monotonic()
    served.kill()
    all_fail_soon(clients, since)
    assert eventually(lambda: not any(alive(pid) for pid in processes)), "they end with it"
    code = (
        PRELUDE
        + "answer = cudart.cudaMalloc(16)\nsay(int(answer[0]), answer[1], flyt.last_failure())"
    )
    newcomer = run_client(code, served)
    assert newcomer.stdout.startswith("100 None"), newcomer
    assert "is flyt-backend running?" in newcomer.stdout

    # Another daemon takes the region over; clients of the dead one may come to it.
    listen = [served.endpoint]
    backend(region=served.region_name, listen=listen, extra=["--keep-region"])
    for client in clients:
        tell(client)
        assert line_of(client) == "True"
        assert client.wait(LIMIT) == 0


def test_a_killed_worker_is_replaced(
    backend: Any, start_client: Start, device_kind: str, alive: Any
) -> None:
    served = backend(device_options=slow(device_kind, 0.2))
    clients = waiting_clients(start_client, served)
    worker = worker_of(served, clients[0].pid)
    sockets = [path for path in served.folder.glob("b.sock.*") if path.is_socket()]
    assert len(sockets) == len(clients)
    since = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    all_fail_soon(clients, since)
    # Its sockets are closed before its memory is torn down: clients may know first.
    assert eventually(lambda: not alive(worker))
    assert eventually(lambda: status(served)["sessions"] == [], SOON)
    for client in clients:
        tell(client)
    for client in clients:
        assert line_of(client) == "True", "a new session with a new worker"
        assert client.wait(LIMIT) == 0
    with RegionView(served.region) as region:
        every = range(region.table.geometry.page_count)
        assert eventually(lambda: region.are_free(every), SOON)
        assert region.dirty(every) == []
    workers = [w["pid"] for w in status(served)["workers"]]
    assert len(workers) == 1
    assert worker not in workers
    assert not any(path.exists() for path in sockets), "the dead worker's sockets are removed"


def test_a_worker_that_stands_still_is_an_error_not_a_hang(
    backend: Any, start_client: Start
) -> None:
    served = backend(extra=["--heartbeat", "1"])
    clients = waiting_clients(start_client, served)
    worker = worker_of(served, clients[0].pid)
    os.kill(worker, signal.SIGSTOP)
    try:
        for client in clients:
            code, _, why = line_of(client).partition(" ")
            assert int(code) == DEVICES_UNAVAILABLE
            assert why
    finally:
        os.kill(worker, signal.SIGCONT)
    for client in clients:
        tell(client)
    for client in clients:
        assert line_of(client) == f"{DEVICES_UNAVAILABLE} {DEVICES_UNAVAILABLE}"
        assert line_of(client) == "True"


# --- fork ---------------------------------------------------------------------------------------

CHILD = (
    PRELUDE
    + """
def every_call(device, pinned):
    host = bytearray(16)
    memory = pinned.ctypes.data
    calls = [
        cudart.cudaMalloc(16), cudart.cudaMalloc(0), cudart.cudaFree(device), cudart.cudaFree(0),
        cudart.cudaHostAlloc(16, 0), cudart.cudaMallocHost(16), cudart.cudaFreeHost(memory),
        cudart.cudaHostGetDevicePointer(memory, 0), cudart.cudaHostGetFlags(memory),
        *(cudart.cudaMemcpy(device, host, 16, kind) for kind in K),
        cudart.cudaMemcpy(host, device, 0, D2H), cudart.cudaMemcpy(host, device, 16, D2H),
        cudart.cudaMemcpy(device, memory, 16, H2D),
        cudart.cudaMemset(device, 0, 16), cudart.cudaMemGetInfo(),
        cudart.cudaPointerGetAttributes(device), cudart.cudaGetDeviceCount(),
        cudart.cudaGetDevice(), cudart.cudaSetDevice(0), cudart.cudaDeviceSynchronize(),
        cudart.cudaRuntimeGetVersion(), cudart.cudaDriverGetVersion(),
        cudart.cudaPeekAtLastError(), cudart.cudaGetLastError(),
    ]
    codes = {int(answer[0]) for answer in calls}
    assert all(value is None for answer in calls[:-2] for value in answer[1:])
    try:
        flyt.pinned_empty(16, np.uint8)
    except flyt.DeviceError as exc:
        codes.add(exc.code)
    assert "forked" in flyt.last_failure(), flyt.last_failure()
    assert flyt.inflight() == [] and flyt.statistics() == {}
    return codes
"""
)

FORKS = (
    CHILD
    + """
device = must(cudart.cudaMalloc(1 << 20))
pinned = flyt.pinned_empty(1 << 20, np.uint8)
pinned[:] = 0x77
stop, faults = threading.Event(), []

def copies():
    own, seed = must(cudart.cudaMalloc(300_000)), 0
    while not stop.wait(0.002):
        seed += 1
        if not round_trip(own, 300_000, seed):
            faults.append(seed)

thread = threading.Thread(target=copies, daemon=True)  # a failed check must end the process
thread.start()

def check_parent(seed):
    assert round_trip(device, 1 << 20, seed)
    assert (pinned == 0x77).all()
    must(cudart.cudaMemcpy(device, pinned, pinned.nbytes, H2D))
    back = np.zeros_like(pinned)
    must(cudart.cudaMemcpy(back, device, back.nbytes, D2H))
    assert (back == 0x77).all()

for number, way in enumerate(["_exit", "exit", "exception", "kill", "exec", "end"]):
    gone, end = os.pipe()
    hold, release = os.pipe()
    child = os.fork()
    if not child:
        os.close(gone); os.close(release)
        codes = every_call(device, pinned.view())
        os.write(end, repr(codes).encode())
        os.read(hold, 1)
        if way == "_exit":
            os._exit(0)
        if way == "exit":
            sys.exit(0)
        if way == "exception":
            sys.excepthook = lambda *_: None
            raise ValueError("a child may end like this")
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "exec":
            os.execv("/bin/true", ["true"])
        break
    os.close(end); os.close(hold)
    codes = os.read(gone, 100).decode()
    assert codes == "{3}", (way, codes)
    check_parent(number)
    os.close(release)
    status = os.waitpid(child, 0)[1]
    wanted = {"kill": -9, "exception": 1}.get(way, 0)
    assert os.waitstatus_to_exitcode(status) == wanted, (way, status)
    os.close(gone)
    check_parent(number + 100)
else:
    stop.set()
    thread.join()
    assert not faults, faults
    check_parent(1000)
    say("right", os.getpid())
"""
)


def test_a_forked_child_has_no_session_and_harms_nothing(backend: Any, run_client: Run) -> None:
    served = backend()
    done = run_client(FORKS, served)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("right"), (done.stdout, done.stderr)
    assert eventually(lambda: status(served)["sessions"] == [])


def test_a_forked_child_may_connect_anew(backend: Any, run_client: Run) -> None:
    code = (
        PRELUDE
        + """
device = must(cudart.cudaMalloc(300_000))
assert round_trip(device, 300_000, 1)
child = os.fork()
if not child:
    assert int(cudart.cudaMalloc(16)[0]) == 3
    with flyt.connect():
        own = must(cudart.cudaMalloc(300_000))
        assert all(round_trip(own, 300_000, seed) for seed in range(20))
    say("child")
    sys.exit(0)
assert all(round_trip(device, 300_000, seed) for seed in range(20))
assert os.waitpid(child, 0)[1] == 0
assert round_trip(device, 300_000, 3)
say("parent")
"""
    )
    done = run_client(code, backend())
    assert (done.returncode, done.stdout) == (0, "child\nparent\n"), done.stderr


def test_a_child_of_a_process_without_a_session_has_its_own(backend: Any, run_client: Run) -> None:
    code = (
        PRELUDE
        + """
children = []
for seed in range(2):
    child = os.fork()
    if not child:
        assert round_trip(must(cudart.cudaMalloc(300_000)), 300_000, seed)
        sys.exit(0)
    children.append(child)
assert round_trip(must(cudart.cudaMalloc(300_000)), 300_000, 9)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
assert round_trip(must(cudart.cudaMalloc(300_000)), 300_000, 9)
say("right")
"""
    )
    done = run_client(code, backend())
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_a_killed_parents_session_ends_although_its_child_lives(
    backend: Any, start_client: Start, alive: Any
) -> None:
    code = (
        PRELUDE
        + """
pinned = flyt.pinned_empty(1 << 20, np.uint8)
pinned[:] = 0x99
device = must(cudart.cudaMalloc(32 << 20))
child = os.fork()
if child:
    say(child)
signal.pause()
"""
    )
    served = backend()
    parent = start_client(code, served)
    child = int(line_of(parent))
    try:
        with RegionView(served.region) as region:
            frames = region.frames_of(parent.pid)
            assert region.dirty(frames)
            parent.kill()
            parent.wait(LIMIT)
            assert eventually(lambda: region.are_free(frames), SOON), "the session ended"
            assert status(served)["sessions"] == []
            assert region.dirty(frames) == []
            assert alive(child)
            # Not even their locks are held on by the child.
            locks = FrameLocks(served.runtime_dir / f"{served.region_name}.lock")
            taker = FrameTaker(region.table, locks, 1, os.getpid())
            taken = taker.take(region.table.geometry.page_count, 0)
            assert set(frames) <= set(runs.frames_of(taken))
            taker.give_up(taken)
            locks.close()
    finally:
        os.kill(child, signal.SIGKILL)


WORK = (
    CHILD
    + """
def task(seed):
    error, device = cudart.cudaMalloc(200_000)
    return int(error), bool(device) and round_trip(device, 200_000, seed)

def pinned(size):
    return flyt.pinned_empty(size, np.uint8).size
"""
)

POOLS = """
import multiprocessing, sys
import flyt, forkwork
device = forkwork.must(flyt.cudaMalloc(200_000))
assert forkwork.round_trip(device, 200_000, 5)
with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
    answers = pool.map(forkwork.task, range(4))
    try:
        answers.append(pool.apply(forkwork.pinned, (1000,)))
    except flyt.DeviceError as exc:
        answers.append(exc.code)
    assert forkwork.round_trip(device, 200_000, 6)
    pool.close()
    pool.join()
assert forkwork.round_trip(device, 200_000, 7)
print(answers)
"""


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("fork", [(INITIALIZATION_ERROR, False)] * 4 + [INITIALIZATION_ERROR]),
        ("spawn", [(0, True)] * 4 + [1000]),
    ],
)
def test_multiprocessing(
    backend: Any, run_client: Run, tmp_path: Path, method: str, expected: list[Any]
) -> None:
    (tmp_path / "forkwork.py").write_text(WORK)
    path = f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
    done = run_client(POOLS, backend(), method, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == repr(expected)


def test_a_child_leaves_the_descriptors_of_a_closed_session_alone(
    backend: Any, run_client: Run
) -> None:
    code = (
        PRELUDE
        + """
with flyt.connect():
    assert round_trip(must(cudart.cudaMalloc(300_000)), 300_000, 1)
files = [os.open("/dev/zero", os.O_RDONLY) for _ in range(40)]  # numbers that the session had
child = os.fork()
if not child:
    for file in files:
        os.read(file, 1)
    assert int(cudart.cudaMalloc(16)[0]) == 3  # cudaErrorInitializationError
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
say("parent")
"""
    )
    done = run_client(code, backend())
    assert (done.returncode, done.stdout) == (0, "parent\n"), done.stderr
