# SPDX-License-Identifier: Apache-2.0
"""A long synchronous copy of pinned memory: its thread looks for the answer itself, by the library.

`flyt.frontend.express_link.ExpressLink.hears`, and what has to hold when it is not alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.frontend import express_link, session as session_module
from flyt.rpc import messages as m
from flyt.shm import ring

pytestmark = pytest.mark.skipif(ring.usable() is None, reason="the short way needs rings")

H2D, D2H = (
    cudart.cudaMemcpyKind.cudaMemcpyHostToDevice,
    cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost,
)
SIZE = 1 << 20
PATIENT = 10.0
"""Seconds that a thread looks for an answer here, however few processors there are."""
DEVICES_UNAVAILABLE = 46


def copier(session: flyt.Session, *ends: Any) -> tuple[threading.Thread, list[Any]]:
    """A thread that copies, and what it was told. Its worker is awake, so nobody wakes it first."""
    said: list[Any] = []

    def copy() -> None:
        session.connection.call(m.Ping)
        said.append(cudart.cudaMemcpy(*ends))

    thread = threading.Thread(target=copy)
    thread.start()
    return thread, said


def ends_of(to_device: bool) -> tuple[Any, ...]:
    """Arguments of a long copy of pinned memory."""
    pinned, device = flyt.pinned_empty(SIZE, np.uint8), cudart.cudaMalloc(SIZE)[1]
    return (device, pinned, SIZE, H2D) if to_device else (pinned, device, SIZE, D2H)


def read_for(session: flyt.Session, thread: threading.Thread) -> None:
    """Read all answers until the thread ends, or has had time enough."""
    deadline = time.monotonic() + PATIENT / 2
    while thread.is_alive() and time.monotonic() < deadline:
        with session.connection.lock:  # brings the tables up to date, and reads
            session.connection.drain()


def await_copy() -> None:
    """Return once a copy is on its way."""
    while not any(command.size == SIZE for command in flyt.inflight()):
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(express_link, "spin_seconds", lambda: PATIENT)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[flyt.Session], list[str]]:
    """Commands that are waited for the general way from now on."""

    def noting(session: flyt.Session) -> list[str]:
        seen: list[str] = []
        wait = session.connection.wait

        def noted(pending: Any) -> None:
            seen.append(pending.name)
            wait(pending)

        monkeypatch.setattr(session.connection, "wait", noted)
        return seen

    return noting


def test_it_ends_without_the_general_way(
    one_backend: Any, connect: Callable[..., flyt.Session], waits: Any
) -> None:
    session = connect(one_backend)
    there, back = (flyt.pinned_empty(SIZE, np.uint8) for _ in range(2))
    device = cudart.cudaMalloc(SIZE)[1]
    general = waits(session)
    for n in range(50):
        there[:] = n
        assert cudart.cudaMemcpy(device, there, SIZE, H2D) == (0,)
        assert cudart.cudaMemcpy(back, device, SIZE, D2H) == (0,)
        assert (back == n).all()
        assert not flyt.inflight()
    assert len(general) < 5, "now and then the worker sleeps, and has to be woken"


@pytest.mark.emulated_only(reason="a device that fails")
@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
@pytest.mark.parametrize("by_another", [False, True], ids=["alone", "read by another thread"])
@pytest.mark.parametrize("to_device", [True, False], ids=["to device", "to host"])
def test_its_error_is_its_own(
    backend: Callable[..., Any],
    connect: Callable[..., flyt.Session],
    monkeypatch: pytest.MonkeyPatch,
    to_device: bool,
    by_another: bool,
    asleep: bool,
) -> None:
    """Of the third copy, not of a later call, and told once."""
    session = connect(backend(device_options="fault=copy:1:3"))
    ends = ends_of(to_device)
    if by_another:

        def hears(number: int) -> bool:
            while True:  # what another thread would do just before this one looks
                with session.connection.lock:
                    session.connection.drain()
                    if session.connection.inflight.get(number) is None:
                        return False

        monkeypatch.setattr(session.express._link, "hears", hears)
    said: list[int] = []

    def copy() -> None:
        for _ in range(5):
            session.connection.call(m.Ping)
            if asleep:
                time.sleep(0.05)
            said.append(cudart.cudaMemcpy(*ends)[0])

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(PATIENT / 2)
    assert said == [0, 0, 1, 0, 0]
    assert cudart.cudaDeviceSynchronize() == (0,)


@pytest.mark.emulated_only(reason="a device that fails")
@pytest.mark.parametrize("to_device", [True, False], ids=["to device", "to host"])
def test_its_error_is_told_to_no_other_thread(
    backend: Callable[..., Any],
    connect: Callable[..., flyt.Session],
    monkeypatch: pytest.MonkeyPatch,
    to_device: bool,
) -> None:
    """One that reads the answer, and whose call would tell of errors that nobody waits for."""
    session = connect(backend(device_options="fault=copy:1:3"))
    ends = ends_of(to_device)
    others: list[Any] = []

    def hears(_: int) -> bool:  # another thread comes first, and sees to all there is
        other = threading.Thread(target=lambda: others.append(cudart.cudaDeviceSynchronize()))
        other.start()
        other.join(PATIENT)
        return False

    monkeypatch.setattr(session.express._link, "hears", hears)
    said = []
    for _ in range(5):
        session.connection.call(m.Ping)
        said.append(cudart.cudaMemcpy(*ends)[0])
    assert said == [0, 0, 1, 0, 0]
    assert others == [(0,)] * 5


@pytest.mark.emulated_only(reason="a slowed device")
def test_another_thread_may_read_its_answer(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    session = connect(backend(device_options="latency=0.3"))
    pinned, device = flyt.pinned_empty(SIZE, np.uint8), cudart.cudaMalloc(SIZE)[1]
    pinned[:] = 7
    assert cudart.cudaMemcpy(device, pinned, SIZE, H2D) == (0,)
    pinned[:] = 0
    thread, said = copier(session, pinned, device, SIZE, D2H)
    read_for(session, thread)
    thread.join(PATIENT / 4)
    assert not thread.is_alive(), "it looks for an answer that another thread has read"
    assert said == [(0,)]
    assert (pinned == 7).all()


@pytest.mark.emulated_only(reason="a slowed device")
def test_a_session_may_end_meanwhile(
    backend: Callable[..., Any],
    connect: Callable[..., flyt.Session],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its window is not unmapped under the hands of who looks."""
    monkeypatch.setattr(express_link, "TURN_SECONDS", 1.5)
    monkeypatch.setattr(session_module, "GOODBYE_SECONDS", 1.0)
    session = connect(backend(device_options="latency=4"))
    pinned, device = flyt.pinned_empty(SIZE, np.uint8), cudart.cudaMalloc(SIZE)[1]
    thread, said = copier(session, device, pinned, SIZE, H2D)
    await_copy()
    session.close()
    thread.join(PATIENT / 2)
    assert not thread.is_alive()
    assert said in ([(0,)], [(DEVICES_UNAVAILABLE,)])


@pytest.mark.emulated_only(reason="a slowed device")
def test_other_threads_go_on_meanwhile(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    """Nobody holds the lock while it looks: what needs no answer of the worker returns at once."""
    session = connect(backend(device_options="latency=1"))
    pinned, device = flyt.pinned_empty(SIZE, np.uint8), cudart.cudaMalloc(SIZE)[1]
    thread, said = copier(session, device, pinned, SIZE, H2D)
    await_copy()
    calls = 0
    while thread.is_alive():
        assert cudart.cudaPointerGetAttributes(device)[0] == 0
        calls += 1
    assert calls > 20
    assert said == [(0,)]
