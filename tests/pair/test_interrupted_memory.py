# SPDX-License-Identifier: Apache-2.0
"""An interrupt while memory is allocated or freed, or while bytes go inline: nothing is lost."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.frontend import allocating, attempt, connection, pinned, pinning, pools, segments, wire
from flyt.rpc import frames, messages as m, sockets
from flyt.rpc.patience import Deadline
from flyt.shm import ring
from flyt.shm.layout import FrameState
from tests.pair.conftest import free_bytes
from tests.pair.interrupter import Interrupter, Lines
from tests.pair.raw import eventually

K = cudart.cudaMemcpyKind
H2D, D2H = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost
OK = (0,)

SIZE = 3 << 20
"""More than a granule of reserved addresses, and more than one page frame."""

SETTLE = 5.0
"""Seconds: all that is on its way has come by then."""

SENDING: Lines = {
    connection.__file__: {"submit", "_made", "_send", "call"},
    attempt.__file__: None,
    wire.__file__: {"send", "_by_dialer", "_wake"},
    sockets.__file__: {"send"},
    frames.__file__: {"send"},
}
MEMORY: Lines = {
    **SENDING,
    pinning.__file__: None,
    allocating.__file__: {"allocate", "_abandon", "free"},
    segments.__file__: {"allocate", "_grow", "_abandon", "free", "_postpone", "_forget"},
    pools.__file__: {"allocate", "free"},
    pinned.__file__: {"pinned_empty"},
}
"""What is done once when an answer comes, or frames are let go, is left out: where a handler tears
that, an address or a place is lost, but never used twice."""

WAYS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "malloc": (lambda: cudart.cudaMalloc(SIZE)[1], cudart.cudaFree),
    "async": (
        lambda: cudart.cudaMallocAsync(SIZE, 0)[1],
        lambda block: cudart.cudaFreeAsync(block, 0),
    ),
    "pinned": (lambda: cudart.cudaHostAlloc(SIZE, 0)[1], cudart.cudaFreeHost),
    "array": (lambda: flyt.pinned_empty(SIZE, np.uint8), lambda array: OK),
}


def settled(session: Any) -> None:
    """All has come, and what interrupts have left is freed."""
    for _ in range(2):  # what the second call frees may have come during the first
        session.connection.settle(Deadline.after(SETTLE))
        assert cudart.cudaDeviceSynchronize() == OK, flyt.last_failure()
    assert not flyt.inflight()


def holdings(session: Any, device_kind: str) -> dict[str, Any]:
    """What a session has, here and at the backend. A GPU's free memory is not its alone."""
    wire = session.connection
    wire.call(m.Ping)
    found: dict[str, Any] = {
        "free": free_bytes() if device_kind == "emulated" else 0,
        "reserved": dict(session.reservations._uses),
        "pointers": list(session.pointers._addresses),
        "lost credits": wire.flow.sent - wire.flow.taken,
        "garbage": list(session.garbage),
    }
    if session.memory is not None:
        found["places"] = dict(session.memory.segments._used)
        found["mapped"] = dict(session.memory.window.segments)
        found["half freed"] = (
            set(session.memory.segments._leaving),
            dict(session.memory.segments._ungranted),
        )
    return found


def owned_frames(session: Any) -> int:
    """Page frames of this session that are not free; the one before may still be cleaned up."""
    table = session.memory._table
    return sum(
        state != FrameState.FREE and table.owner(frame).session == session.welcome.session
        for frame, state in enumerate(table.states())
    )


@pytest.mark.parametrize(
    ("act", "way"),
    [(act, way) for act in ("allocate", "free") for way in WAYS if (act, way) != ("free", "array")],
)
def test_an_interrupt_at_any_line_loses_no_memory(
    one_backend: Any, connect: Callable[..., Any], device_kind: str, way: str, act: str
) -> None:
    session, bad, at = connect(one_backend), [], 0
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    allocate, free = WAYS[way]
    kept = cudart.cudaMalloc(1)[1]  # so that the granule of small blocks stays
    settled(session)
    frames_before = owned_frames(session) if session.memory is not None else 0
    interrupter = None
    while interrupter is None or interrupter.where:
        at += 1
        interrupter = Interrupter(at, MEMORY)
        before = holdings(session, device_kind)
        if act == "allocate":
            block = interrupter.interrupt(allocate)
            assert block is None or free(block) == OK
        else:
            block = allocate()
            interrupter.interrupt(functools.partial(free, block))
            settled(session)
            if session.pointers.find(block) is not None:  # it had not begun
                assert free(block) == OK
        block = None
        settled(session)
        after = holdings(session, device_kind)
        if changed := [f"{k}: {v} -> {after[k]}" for k, v in before.items() if v != after[k]]:
            bad.append(f"{interrupter.where}: {changed}")
    assert at > 20, "the way was not taken"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask, "signals stay blocked"
    assert not bad, "\n".join(bad)
    assert cudart.cudaFree(kept) == OK
    if session.memory is not None:
        assert eventually(lambda: owned_frames(session) == frames_before, SETTLE)


# --- while the worker is stopped: the answer comes late ---

STOPPED = """
import signal, sys, threading, time
import flyt, flyt as cudart

MIB = 1 << 20
CALLS = {
    "pinned": lambda: flyt.pinned_empty(16 * MIB, "u1"),
    "host": lambda: cudart.cudaHostAlloc(16 * MIB, 0),
    "malloc": lambda: cudart.cudaMalloc(1 << 30),
    "free host": lambda: cudart.cudaFreeHost(block),
    "free": lambda: cudart.cudaFree(block),
}
assert cudart.cudaFree(0) == (0,)
session = flyt.frontend.current.existing()

def all_there_is():
    blocks = []
    while True:
        error, address = cudart.cudaHostAlloc(MIB, 0)
        if error:
            break
        blocks.append(address)
    for address in blocks:
        assert cudart.cudaFreeHost(address) == (0,), flyt.last_failure()
    return len(blocks), cudart.cudaMemGetInfo()[1], len(session.reservations._uses)

def watch():
    while not any(c.name in ("Grow", "Malloc", "Shrink", "Free") for c in flyt.inflight()):
        time.sleep(0.001)
    print("sent", flush=True)

print(all_there_is(), flush=True)
for name in sys.stdin:
    call = CALLS[name.strip()]
    if name.startswith("free"):
        block = CALLS["host" if "host" in name else "malloc"]()[1]
    print("ready", flush=True)
    sys.stdin.readline()
    threading.Thread(target=watch).start()
    try:
        call()
        print("not interrupted", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    sys.stdin.readline()
    cudart.cudaDeviceSynchronize()
    deadline = time.monotonic() + 20
    while flyt.inflight() and time.monotonic() < deadline:
        time.sleep(0.01)
        cudart.cudaDeviceSynchronize()
    print(all_there_is(), flush=True)
"""

OTHER = """
import flyt as cudart
print(int(cudart.cudaHostAlloc(40 << 20, 0)[0]))
"""


@pytest.mark.emulated_only(reason="a driver's threads may not like to be stopped")
@pytest.mark.parametrize("region", ["shared", "per-client"])
@pytest.mark.parametrize("name", ["pinned", "host", "malloc", "free host", "free"])
def test_what_is_granted_behind_an_interrupt_comes_back(
    backend: Callable[..., Any],
    start_client: Callable[..., subprocess.Popen[str]],
    run_client: Callable[..., subprocess.CompletedProcess[str]],
    name: str,
    region: str,
) -> None:
    extra = ["--region", "per-client"] if region == "per-client" else []
    daemon = backend(size="64M", extra=extra)
    client = start_client(STOPPED, daemon)
    assert client.stdin is not None
    assert client.stdout is not None

    def tell(line: str) -> None:
        assert client.stdin is not None
        client.stdin.write(line + "\n")
        client.stdin.flush()

    hear = client.stdout.readline
    before = hear()
    assert before.startswith("("), before
    for _ in range(3):
        tell(name)
        assert hear() == "ready\n"
        workers = daemon.descendants()
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        try:
            tell("go")
            assert hear() == "sent\n"
            client.send_signal(signal.SIGINT)
            assert hear() == "interrupted\n"
        finally:
            for worker in workers:
                os.kill(worker, signal.SIGCONT)
        tell("and?")
        assert hear() == before, "pinned blocks of 1 MiB, free bytes, reserved granules"
    assert run_client(OTHER, daemon).stdout == "0\n"


@pytest.mark.emulated_only(reason="only the emulated device fails on demand")
def test_a_free_that_fails_gives_its_addresses_back(
    backend: Callable[..., Any], connect: Callable[..., Any]
) -> None:
    session = connect(backend(device_options="fault=free:1:1:async"))
    block = cudart.cudaMalloc(SIZE)[1]
    assert cudart.cudaFree(block) != OK
    assert not session.reservations._uses


# --- sending: by sockets alone, and what is announced in the ring ---


@pytest.fixture(params=["inline", "no ring", "elsewhere"])
def sockets_only(
    request: pytest.FixtureRequest,
    backend: Callable[..., Any],
    connect: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """A session whose commands go by ZeroMQ."""
    if request.param == "inline":
        with pytest.warns(flyt.FlytWarning, match="without a region"):
            return connect(backend(extra=["--no-region"]))
    session = connect(backend(), **({"FLYT_RING": "0"} if request.param == "no ring" else {}))
    if request.param == "elsewhere":
        if session.connection.link is None:
            pytest.skip("no rings here")
        monkeypatch.setattr(session, "express", None)
        monkeypatch.setattr(session.transfers._way, "_express", None)  # parts of a copy, too
        monkeypatch.setattr(ring, "LARGEST", 0)
    return session


def test_an_interrupt_at_any_line_of_sending_tears_no_message(sockets_only: Any) -> None:
    session, bad, at = sockets_only, [], 0
    size = (1 << 20) + 5  # two messages with a payload, where they go inline
    device, back = cudart.cudaMalloc(size)[1], np.zeros(size, np.uint8)
    interrupter = None
    while interrupter is None or interrupter.where:
        at += 1
        interrupter = Interrupter(at, SENDING)
        data = np.full(size, at % 256, np.uint8)
        interrupter.interrupt(functools.partial(cudart.cudaMemcpy, device, data, size, H2D))
        settled(session)
        session.connection.call(m.Ping)
        if lost := session.connection.flow.sent - session.connection.flow.taken:
            bad.append(f"{interrupter.where}: {lost} credits are lost")
        data = np.full(size, (at + 1) % 256, np.uint8)
        assert cudart.cudaMemcpy(device, data, size, H2D) == OK, interrupter.where
        assert cudart.cudaMemcpy(back, device, size, D2H) == OK, interrupter.where
        assert (back == data).all(), interrupter.where
    assert at > 20, "nothing was sent"
    assert not bad, "\n".join(bad)


def test_a_command_that_was_not_sent_is_not_its_streams_last(
    one_backend: Any, connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = connect(one_backend)
    session.express = None
    device = cudart.cudaMalloc(SIZE)[1]
    assert cudart.cudaMemset(device, 1, SIZE) == OK
    last = session.scheduler.table._legacy[0].last

    def interrupted(_: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session.connection._wire, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cudart.cudaMemset(device, 2, SIZE)
    assert session.scheduler.table._legacy[0].last is last, "nobody waits for the work before"
    settled(session)
    assert cudart.cudaFree(device) == OK


TORN = """
import itertools, signal, sys, threading, time
import numpy as np
import flyt, flyt as cudart
K = cudart.cudaMemcpyKind
SIZE = 5 << 20

def must(answer):
    assert answer[0] == 0, (answer, flyt.last_failure())
    return answer[-1]

device, back = must(cudart.cudaMalloc(SIZE)), np.zeros(SIZE, np.uint8)
datas = [np.full(SIZE, n, np.uint8) for n in (1, 2)]
due, ended = threading.Event(), False

def interrupt():
    # The handler runs in the main thread, wherever that is: its own mask keeps nothing off.
    pauses = np.random.default_rng(1).random(int(sys.argv[1])) * 0.004
    for pause in pauses:
        due.wait()
        due.clear()
        time.sleep(pause)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
caught = 0
while caught < int(sys.argv[1]):
    try:
        due.set()
        for data in itertools.cycle(datas):
            must(cudart.cudaMemcpy(device, data, SIZE, K.cudaMemcpyHostToDevice))
            must(cudart.cudaMemcpy(back, device, SIZE, K.cudaMemcpyDeviceToHost))
    except KeyboardInterrupt:
        caught += 1
    data = datas[caught % 2]
    must(cudart.cudaMemcpy(device, data, SIZE, K.cudaMemcpyHostToDevice))
    back[:] = 0
    must(cudart.cudaMemcpy(back, device, SIZE, K.cudaMemcpyDeviceToHost))
    assert (back == data).all(), caught
    must(cudart.cudaDeviceSynchronize())
    assert flyt.inflight() == [], flyt.inflight()
must(cudart.cudaFree(device))
print(caught, flyt.statistics()["inline_h2d_bytes"] > 0)
"""

TEARS = 300


@pytest.mark.parametrize("way", ["inline", "staged"])
def test_signals_that_another_thread_gets_cost_no_session(
    backend: Callable[..., Any],
    run_client: Callable[..., subprocess.CompletedProcess[str]],
    way: str,
) -> None:
    daemon = backend(size="24M", extra=["--no-region"] if way == "inline" else [])
    client = run_client(TORN, daemon, str(TEARS), env={"FLYT_RING": "0"}, timeout=60)
    assert client.returncode == 0, client.stderr
    assert client.stdout == f"{TEARS} {way == 'inline'}\n"
