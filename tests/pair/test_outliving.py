# SPDX-License-Identifier: Apache-2.0
"""What outlives its session or its handle: arrays of `flyt.pinned_empty`, and what finalizers left.

What crashed when it was wrong runs in a process of its own.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.frontend import current, leftovers

SIZE = 8 << 20
D2H = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
OK = (cudart.cudaError_t.cudaSuccess,)
ENDS = ["connect", "close", "reset"]
LIMIT = 30.0
"""Seconds; a bound against hangs."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

SETUP = """
import sys, threading
import numpy as np
import flyt
from flyt.frontend import current

def end():
    if sys.argv[1] == "connect":
        flyt.connect()
    elif sys.argv[1] == "close":
        current.existing().close()
        flyt.connect()
    else:
        assert flyt.cudaDeviceReset() == (0,), flyt.last_failure()

flyt.connect()
"""


def end_session(how: str, session: flyt.Session) -> None:
    """End it in one of three ways."""
    if how == "reset":
        assert cudart.cudaDeviceReset() == OK, flyt.last_failure()
    elif how == "connect":
        flyt.connect(session.settings.endpoint).close()
    else:
        session.close()


def pinned(value: int, size: int = SIZE) -> Bytes:
    array = flyt.pinned_empty(size, np.uint8)
    array[:] = value
    return array


def mapped(address: int) -> str:
    """The line of this process's maps that has an address; "" if none has."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return line
    return ""


def no_more_garbage(session: flyt.Session) -> None:
    gc.collect()
    assert cudart.cudaGetDeviceCount()[0] == 0, flyt.last_failure()
    assert not session.garbage


# --- other threads that use an array ---

USED = """
right = np.arange(4 << 20, dtype=np.uint32).view(np.uint8)[:4 << 20]
for _ in range(40):
    flyt.cudaMalloc(1)
    array = flyt.pinned_empty(right.size, np.uint8)
    array[:] = right
    stop, wrong, begun = threading.Event(), [], threading.Event()

    def use():
        while not stop.is_set():
            if not np.array_equal(array, right):
                wrong.append(1)
            array[5::4096] = right[5::4096]
            begun.set()

    thread = threading.Thread(target=use)
    thread.start()
    begun.wait(30)
    end()
    stop.set()
    thread.join()
    assert not wrong
    array[:] = 9
    assert (array == 9).all()
"""


@pytest.mark.parametrize("how", ENDS)
def test_a_thread_that_uses_an_array_notices_nothing(
    one_backend: Any, run_client: Run, how: str
) -> None:
    client = run_client(SETUP + USED, one_backend, how)
    assert client.returncode == 0, client.stderr


MADE_MEANWHILE = """
from flyt.frontend.users import Users
from flyt.frontend.segments import Segments

allocate, wait = Segments.allocate, Users.wait_for_none
allocated, closing = threading.Event(), threading.Event()

def slow_allocate(self, *details):
    made = allocate(self, *details)
    allocated.set()
    assert closing.wait(30)
    return made

def told_wait(self, seconds):
    closing.set()
    return wait(self, seconds)

Segments.allocate, Users.wait_for_none = slow_allocate, told_wait
made, failed = [], []

def work():
    try:
        made.append(flyt.pinned_empty(4 << 20, np.uint8))
    except flyt.FlytError as exc:
        failed.append(exc)

thread = threading.Thread(target=work)
thread.start()
assert allocated.wait(30)
Segments.allocate = allocate
end()
thread.join()
for array in made:
    array[:] = 1
assert not made
assert "closed" in str(failed[0]), failed
"""


@pytest.mark.parametrize("how", ENDS)
def test_an_array_that_is_made_meanwhile_is_refused(
    one_backend: Any, run_client: Run, how: str
) -> None:
    """Its memory was there already, and nobody had it yet when the others were kept."""
    client = run_client(SETUP + MADE_MEANWHILE, one_backend, how)
    assert client.returncode == 0, client.stderr


def test_a_closed_session_makes_no_array(session: flyt.Session) -> None:
    session.close()
    with pytest.raises(flyt.SessionLost, match="closed"):
        flyt.pinned_empty(100, np.uint8)
    assert cudart.cudaHostAlloc(100, 0)[0] == cudart.cudaError_t.cudaErrorDevicesUnavailable


# --- the bytes ---


@pytest.mark.emulated_only(reason="needs a copy that takes as long as the test wants")
@pytest.mark.parametrize("how", ENDS)
def test_what_is_in_flight_arrives_first(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session], how: str
) -> None:
    session = connect(backend(device_options="bandwidth=0.05"))
    array = pinned(1)
    device = cudart.cudaMalloc(SIZE)[1]
    assert cudart.cudaMemset(device, 7, SIZE) == OK
    assert cudart.cudaMemcpyAsync(array, device, SIZE, D2H, 0) == OK
    end_session(how, session)
    assert (array == 7).all()
    array[:] = 8
    assert (array == 8).all()
    last = current.existing()
    if last is not None:
        last.close()


@pytest.mark.emulated_only(reason="needs a copy that takes as long as the test wants")
def test_a_copy_that_comes_too_late_does_not_succeed(
    backend: Callable[..., Any],
    connect: Callable[..., flyt.Session],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread's, sent once the others have been waited for: its bytes come nowhere."""
    session = connect(backend(device_options="bandwidth=0.02"))
    array = pinned(1)
    device = cudart.cudaMalloc(SIZE)[1]
    assert cudart.cudaMemset(device, 7, SIZE) == OK
    answers: list[Any] = []
    settle = session.connection.settle
    threads: list[threading.Thread] = []

    def and_then(deadline: Any) -> None:
        settle(deadline)
        if not threads:
            thread = threading.Thread(
                target=lambda: answers.append(cudart.cudaMemcpy(array, device, SIZE, D2H))
            )
            threads.append(thread)
            thread.start()
            while not any(c.name == "CopyOut" for c in flyt.inflight()):
                assert thread.is_alive()

    monkeypatch.setattr(session.connection, "settle", and_then)
    session.close()
    threads[0].join(LIMIT)
    assert not threads[0].is_alive()
    # On a busy machine it may have come in time after all.
    assert (answers, set(array)) in (
        ([(cudart.cudaError_t.cudaErrorDevicesUnavailable,)], {1}),
        ([OK], {7}),
    )


@pytest.mark.emulated_only(reason="needs a copy that takes as long as the test wants")
def test_who_waits_for_a_copy_that_came_too_late_hears_it(
    backend: Callable[..., Any],
    connect: Callable[..., flyt.Session],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = connect(backend(device_options="bandwidth=0.02"))
    array = pinned(1)
    device = cudart.cudaMalloc(SIZE)[1]
    settle = session.connection.settle
    answers: list[Any] = []

    def around(deadline: Any) -> None:
        if answers:  # after the goodbye
            answers.append(cudart.cudaStreamSynchronize(0))
            settle(deadline)
        else:
            settle(deadline)
            answers.append(cudart.cudaMemcpyAsync(array, device, SIZE, D2H, 0))

    monkeypatch.setattr(session.connection, "settle", around)
    session.close()
    assert answers == [OK, (cudart.cudaError_t.cudaErrorDevicesUnavailable,)]


INTERRUPTED = """
def interrupt(deadline):
    raise KeyboardInterrupt

array = flyt.pinned_empty(4 << 20, np.uint8)
array[:] = 3
session = current.existing()
session.connection.settle = interrupt
try:
    end()
except KeyboardInterrupt:
    pass
else:
    raise SystemExit("nobody said it")
array[:] = 4
assert (array == 4).all()
"""


@pytest.mark.parametrize("how", ENDS)
def test_an_interrupted_end_keeps_the_arrays(one_backend: Any, run_client: Run, how: str) -> None:
    client = run_client(SETUP + INTERRUPTED, one_backend, how)
    assert client.returncode == 0, client.stderr


def test_of_a_dead_backend_what_is_there_is_kept(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    daemon = backend()
    session = connect(daemon)
    array = pinned(7, 1 << 20)
    everybody = [daemon.pid, *daemon.descendants()]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # so that nobody has time to wipe the frames
        for pid in everybody:
            os.kill(pid, number)
    daemon.kill()
    session.close()
    assert (array == 7).all()
    array[:] = 8
    assert (array == 8).all()


def test_kept_arrays_are_ordinary_memory(session: flyt.Session) -> None:
    odd, small = pinned(3, 100_001), pinned(4, 1)
    places = [int(array.ctypes.data) for array in (odd, small)]
    view = odd[70_000:]
    session.close()
    assert (odd == 3).all()
    assert (small == 4).all()
    for place in places:
        assert mapped(place).split()[1] == "rw-p"
    del odd
    gc.collect()
    assert (view == 3).all()
    del view, small
    gc.collect()
    assert [mapped(place) for place in places] == ["", ""]


@pytest.mark.parametrize("early", [True, False])
def test_a_finalizer_that_runs_meanwhile_leaves_nothing(
    session: flyt.Session, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    arrays = [pinned(1)]
    place = int(arrays[0].ctypes.data)
    keep = leftovers.keep

    def drop_and_keep(*details: Any) -> None:
        if early:
            arrays.clear()
        keep(*details)
        arrays.clear()

    monkeypatch.setattr(leftovers, "keep", drop_and_keep)
    session.close()
    assert not arrays
    assert mapped(place) == ""


NO_MEMORY = """
from flyt.shm import memory

def none(size):
    raise MemoryError(f"no {size} bytes")

array = flyt.pinned_empty(4 << 20, np.uint8)
anonymous, memory.anonymous = memory.anonymous, none
try:
    end()
except MemoryError as exc:
    assert str(exc) == f"no {4 << 20} bytes"
else:
    raise SystemExit("nobody said it")
memory.anonymous = anonymous
array[:] = 2
array.sum()
with flyt.connect():
    assert flyt.cudaDeviceSynchronize() == (0,)
"""


@pytest.mark.parametrize("how", ENDS)
def test_an_array_that_nobody_has_memory_for(one_backend: Any, run_client: Run, how: str) -> None:
    """It is said; what is mapped there stays, for whoever looks."""
    client = run_client(SETUP + NO_MEMORY, one_backend, how)
    assert client.returncode == 0, client.stderr


def test_without_a_region_they_go_with_their_last_array_too(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    with pytest.warns(flyt.FlytWarning, match="without a region"):
        session = connect(backend(extra=["--no-region"]))
    array = pinned(3, SIZE + 5)
    session.close()
    assert (array == 3).all()
    before = mapped_bytes()
    del array
    gc.collect()
    assert before - mapped_bytes() >= SIZE
    assert not session.garbage


def mapped_bytes() -> int:
    """Bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")


# --- what was freed by hand ---


def test_freed_pinned_memory_is_no_longer_its_arrays(session: flyt.Session) -> None:
    array = pinned(1, 4096)
    assert cudart.cudaFreeHost(array.ctypes.data) == OK
    del array
    error, device = cudart.cudaMalloc(100)
    assert error == 0, flyt.last_failure()
    assert device
    assert cudart.cudaGetLastError() == OK
    assert not session.garbage


def test_freed_device_memory_is_no_longer_its_arrays(session: flyt.Session) -> None:
    array = flyt.DeviceArray(100, np.uint8)
    assert cudart.cudaFree(array.ptr) == OK
    del array
    assert cudart.cudaGetDeviceCount() == (0, 1)
    assert cudart.cudaGetLastError() == OK
    assert not session.garbage


def test_a_stream_and_an_event_that_were_destroyed_by_hand(session: flyt.Session) -> None:
    stream, event = flyt.Stream(), flyt.Event()
    assert cudart.cudaStreamDestroy(int(stream)) == OK
    assert cudart.cudaEventDestroy(int(event)) == OK
    del stream, event
    assert cudart.cudaGetDeviceCount() == (0, 1)
    assert cudart.cudaGetLastError() == OK


def test_what_can_not_be_given_back_stops_nothing(
    session: flyt.Session, caplog: pytest.LogCaptureFixture
) -> None:
    """What is left behind it in the row is given back all the same, and the log says what."""
    stream, array = flyt.Stream(), pinned(1, 4096)
    address = int(array.ctypes.data)
    assert cudart.cudaStreamDestroy(int(stream)) == OK
    del stream, array
    no_more_garbage(session)
    assert "could not be given back" in caplog.text
    assert cudart.cudaPointerGetAttributes(address)[1].type == 0


@pytest.mark.emulated_only(reason="needs an address that comes back")
@pytest.mark.parametrize("dropped", [True, False])
def test_new_device_memory_at_the_address_is_not_freed(
    session: flyt.Session, dropped: bool
) -> None:
    array = flyt.DeviceArray(4096, np.uint8)
    address = array.ptr
    assert cudart.cudaFree(address) == OK
    taken: list[int] = []
    while address not in taken:
        assert len(taken) < 64, "the device gives the address to nobody"
        taken.append(cudart.cudaMalloc(4096)[1])
    if not dropped:
        with pytest.raises(flyt.DeviceError):
            array.close()
    del array
    no_more_garbage(session)
    assert cudart.cudaMemset(address, 1, 4096) == OK
    assert [cudart.cudaFree(one) for one in taken] == [OK] * len(taken)


def pinned_at(address: int) -> Bytes:
    """A new array at an address that was freed: those of a window come back late."""
    for _ in range(1000):
        array = flyt.pinned_empty(SIZE, np.uint8)
        if array.ctypes.data == address:
            break
    assert array.ctypes.data == address
    array[:] = 2
    return array


def test_new_pinned_memory_at_the_address_is_not_freed(session: flyt.Session) -> None:
    array = pinned(1)
    address = int(array.ctypes.data)
    assert cudart.cudaFreeHost(address) == OK
    other = pinned_at(address)
    del array
    no_more_garbage(session)
    assert (other == 2).all()
    assert cudart.cudaPointerGetAttributes(address)[1].type == 1
    session.close()
    assert (other == 2).all()


def test_a_late_finalizer_takes_no_kept_array(session: flyt.Session) -> None:
    """The address was freed by hand, and is another array's, which outlived the session."""
    array = pinned(1)
    address = int(array.ctypes.data)
    assert cudart.cudaFreeHost(address) == OK
    other = pinned_at(address)
    session.close()
    del array
    gc.collect()
    assert mapped(address)
    assert (other == 2).all()


FREED_BY_HAND = """
array = flyt.pinned_empty(4 << 20, np.uint8)
kept = flyt.pinned_empty(4 << 20, np.uint8)
kept[:] = 3
assert flyt.cudaFreeHost(array.ctypes.data) == (0,)
end()
assert (kept == 3).all()
del array
assert flyt.cudaDeviceSynchronize() == (0,)
"""


@pytest.mark.parametrize("how", ENDS)
def test_freed_by_hand_and_then_the_end(one_backend: Any, run_client: Run, how: str) -> None:
    client = run_client(SETUP + FREED_BY_HAND, one_backend, how)
    assert client.returncode == 0, client.stderr
