# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies: what returns when, what waits for what, and what does not.

Nothing here is timed: a copy that the emulated device makes slow is either done or not when
something else is.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.rpc import messages as m

K = cudart.cudaMemcpyKind
H2D, D2H, D2D = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost, K.cudaMemcpyDeviceToDevice
OK = (cudart.cudaError_t.cudaSuccess,)
BUSY = (cudart.cudaError_t.cudaErrorNotReady,)
SIZE = 1 << 20

slow = pytest.mark.emulated_only(reason="needs copies that take as long as the test wants")


def made(answer: tuple[Any, Any]) -> Any:
    assert answer[0] == 0, flyt.last_failure()
    return answer[1]


def ok(answer: tuple[Any, ...]) -> None:
    assert answer == OK, flyt.last_failure()


@pytest.fixture
def slow_session(backend: Callable[..., Any], connect: Callable[..., flyt.Session]) -> flyt.Session:
    """Every copy takes 0.4 s, and moves its bytes at the end."""
    return connect(backend(device_options="latency=0.4"))


def pinned(value: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    array = flyt.pinned_empty(SIZE, np.uint8)
    array[:] = value
    return array


@slow
def test_pinned_copies_return_before_their_dma_ends(slow_session: flyt.Session) -> None:
    stream, device = made(cudart.cudaStreamCreate()), made(cudart.cudaMalloc(SIZE))
    source, target = pinned(7), pinned(0)
    ok(cudart.cudaMemcpyAsync(device, source, SIZE, H2D, stream))
    assert cudart.cudaStreamQuery(stream) == BUSY
    ok(cudart.cudaMemcpyAsync(target, device, SIZE, D2H, stream))
    assert (target == 0).all()
    assert [c.name for c in flyt.inflight()][-2:] == ["CopyIn", "CopyOut"]
    ok(cudart.cudaStreamSynchronize(stream))
    assert (target == 7).all()
    assert cudart.cudaStreamQuery(stream) == OK


@slow
def test_one_stream_keeps_its_order(slow_session: flyt.Session) -> None:
    stream, device = made(cudart.cudaStreamCreate()), made(cudart.cudaMalloc(SIZE))
    target = pinned(0)
    for value in (1, 2):
        ok(cudart.cudaMemsetAsync(device, value, SIZE, stream))
        ok(cudart.cudaMemcpyAsync(target[value * 1000 :], device, 1000, D2H, stream))
    ok(cudart.cudaMemsetAsync(device, 3, SIZE, stream))
    ok(cudart.cudaStreamSynchronize(stream))
    assert (target[1000:2000] == 1).all()
    assert (target[2000:3000] == 2).all()


@slow
def test_two_streams_overlap(slow_session: flyt.Session) -> None:
    one, two = (made(cudart.cudaStreamCreate()) for _ in range(2))
    device, source = made(cudart.cudaMalloc(SIZE)), pinned(1)
    for _ in range(4):
        ok(cudart.cudaMemcpyAsync(device, source, 1000, H2D, one))
    ok(cudart.cudaMemcpyAsync(device + 5000, source, 1000, H2D, two))
    ok(cudart.cudaStreamSynchronize(two))
    assert cudart.cudaStreamQuery(one) == BUSY  # it was first, and is not done
    ok(cudart.cudaStreamSynchronize(one))


@slow
def test_events_order_two_streams(slow_session: flyt.Session) -> None:
    one, two = (made(cudart.cudaStreamCreateWithFlags(1)) for _ in range(2))
    event, device = made(cudart.cudaEventCreate()), made(cudart.cudaMalloc(SIZE))
    source, target = pinned(9), pinned(0)
    ok(cudart.cudaMemcpyAsync(device, source, SIZE, H2D, one))
    ok(cudart.cudaEventRecord(event, one))
    assert cudart.cudaEventQuery(event) == BUSY
    assert cudart.cudaPeekAtLastError() == OK  # an answer, not an error
    ok(cudart.cudaStreamWaitEvent(two, event, 0))
    ok(cudart.cudaMemcpyAsync(target, device, SIZE, D2H, two))
    ok(cudart.cudaStreamSynchronize(two))
    assert cudart.cudaEventQuery(event) == OK
    assert (target == 9).all()


@slow
def test_a_wait_captures_the_record_before_it(slow_session: flyt.Session) -> None:
    one, two = (made(cudart.cudaStreamCreateWithFlags(1)) for _ in range(2))
    event, device = made(cudart.cudaEventCreate()), made(cudart.cudaMalloc(SIZE))
    source = pinned(1)
    ok(cudart.cudaMemcpyAsync(device, source, 100, H2D, one))
    ok(cudart.cudaEventRecord(event, one))
    ok(cudart.cudaStreamWaitEvent(two, event, 0))
    for _ in range(3):
        ok(cudart.cudaMemcpyAsync(device, source, 100, H2D, one))
    ok(cudart.cudaEventRecord(event, one))
    ok(cudart.cudaMemsetAsync(device + 5000, 1, 100, two))
    ok(cudart.cudaStreamSynchronize(two))
    assert cudart.cudaEventQuery(event) == BUSY  # the later record; the wait did not wait for it
    ok(cudart.cudaEventSynchronize(event))


@slow
def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it(
    slow_session: flyt.Session,
) -> None:
    blocking, device = made(cudart.cudaStreamCreate()), made(cudart.cudaMalloc(SIZE))
    first, second, target = pinned(1), pinned(2), pinned(0)
    ok(cudart.cudaMemcpyAsync(device, first, SIZE, H2D, blocking))
    ok(cudart.cudaMemcpyAsync(device, second, 1000, H2D, 0))
    assert cudart.cudaStreamQuery(0) == BUSY
    ok(cudart.cudaMemcpyAsync(target, device, SIZE, D2H, blocking))
    ok(cudart.cudaStreamSynchronize(blocking))
    assert (target[:1000] == 2).all()
    assert (target[1000:] == 1).all()


@slow
def test_a_non_blocking_stream_has_no_part_in_it(slow_session: flyt.Session) -> None:
    free, device = made(cudart.cudaStreamCreateWithFlags(1)), made(cudart.cudaMalloc(SIZE))
    source = pinned(1)
    for _ in range(4):
        ok(cudart.cudaMemcpyAsync(device, source, 100, H2D, free))
    assert cudart.cudaStreamQuery(0) == OK
    ok(cudart.cudaMemset(device + 5000, 1, 100))
    ok(cudart.cudaStreamSynchronize(0))
    assert cudart.cudaStreamQuery(free) == BUSY
    ok(cudart.cudaDeviceSynchronize())
    assert cudart.cudaStreamQuery(free) == OK


@slow
def test_the_per_thread_stream_is_a_blocking_one(slow_session: flyt.Session) -> None:
    device, source, target = made(cudart.cudaMalloc(SIZE)), pinned(4), pinned(0)
    ok(cudart.cudaMemcpyAsync(device, source, SIZE, H2D, 2))
    assert cudart.cudaStreamQuery(2) == BUSY
    assert cudart.cudaStreamQuery(0) == BUSY
    ok(cudart.cudaMemcpy(target, device, SIZE, D2H))
    assert (target == 4).all()


@slow
def test_asynchronous_copies_of_pageable_memory(slow_session: flyt.Session) -> None:
    stream, device = made(cudart.cudaStreamCreate()), made(cudart.cudaMalloc(SIZE))
    source, target = np.full(SIZE, 5, np.uint8), np.zeros(SIZE, np.uint8)
    ok(cudart.cudaMemcpyAsync(device, source, 1000, H2D, stream))
    assert cudart.cudaStreamQuery(stream) == BUSY
    source[:] = 6  # taken already
    ok(cudart.cudaMemcpyAsync(target, device, 1000, D2H, stream))
    assert cudart.cudaStreamQuery(stream) == OK  # complete at return (L#590)
    assert (target[:1000] == 5).all()


@slow
def test_host_to_host_waits_for_its_stream(slow_session: flyt.Session) -> None:
    """Its bytes may come from what is on the stream (recorded: h2h_async_waits_stream)."""
    stream, device = made(cudart.cudaStreamCreate()), made(cudart.cudaMalloc(SIZE))
    source, middle = pinned(3), pinned(0)
    target = np.zeros(SIZE, np.uint8)
    ok(cudart.cudaMemcpyAsync(device, source, SIZE, H2D, stream))
    ok(cudart.cudaMemcpyAsync(middle, device, SIZE, D2H, stream))
    ok(cudart.cudaMemcpyAsync(target, middle, SIZE, K.cudaMemcpyHostToHost, stream))
    assert (target == 3).all()


@slow
def test_free_waits_for_work_in_flight(slow_session: flyt.Session) -> None:
    stream, device = made(cudart.cudaStreamCreateWithFlags(1)), made(cudart.cudaMalloc(SIZE))
    target = flyt.pinned_empty(SIZE, np.uint8)
    ok(cudart.cudaMemset(device, 8, SIZE))
    ok(cudart.cudaDeviceSynchronize())
    ok(cudart.cudaMemcpyAsync(target, device, SIZE, D2H, stream))
    ok(cudart.cudaFree(device))
    assert cudart.cudaStreamQuery(stream) == OK
    assert (target == 8).all()


@slow
def test_a_destroyed_stream_finishes_its_work(slow_session: flyt.Session) -> None:
    stream, device = made(cudart.cudaStreamCreate()), made(cudart.cudaMalloc(SIZE))
    source, target = pinned(6), pinned(0)
    ok(cudart.cudaMemcpyAsync(device, source, SIZE, H2D, stream))
    ok(cudart.cudaMemcpyAsync(target, device, SIZE, D2H, stream))
    ok(cudart.cudaStreamDestroy(stream))
    assert (target == 0).all()
    assert cudart.cudaStreamQuery(stream)[0] == 400
    ok(cudart.cudaStreamSynchronize(0))  # the legacy stream still waits for it
    assert (target == 6).all()


@slow
def test_elapsed_time(slow_session: flyt.Session) -> None:
    start, end, untimed = (
        made(cudart.cudaEventCreate()),
        made(cudart.cudaEventCreate()),
        made(cudart.cudaEventCreateWithFlags(cudart.cudaEventDisableTiming)),
    )
    device, source = made(cudart.cudaMalloc(SIZE)), pinned(1)
    assert cudart.cudaEventElapsedTime(start, end) == (400, None)
    ok(cudart.cudaEventRecord(start, 0))
    ok(cudart.cudaMemcpyAsync(device, source, 100, H2D, 0))
    ok(cudart.cudaEventRecord(end, 0))
    ok(cudart.cudaEventRecord(untimed, 0))
    assert cudart.cudaEventElapsedTime(start, end) == (600, None)
    ok(cudart.cudaEventSynchronize(end))
    assert cudart.cudaEventElapsedTime(start, untimed) == (400, None)
    assert 400 <= made(cudart.cudaEventElapsedTime(start, end)) < 60_000


@pytest.mark.emulated_only(reason="injects a fault into a copy")
def test_an_asynchronous_error_surfaces_once_at_a_later_call(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    connect(backend(device_options="fault=copy:999:1:async"))
    device, source = made(cudart.cudaMalloc(SIZE)), pinned(1)
    ok(cudart.cudaMemcpyAsync(device, source, 100, H2D, 0))
    assert cudart.cudaStreamSynchronize(0)[0] == 999
    assert cudart.cudaGetLastError()[0] == 999
    assert cudart.cudaGetLastError() == OK
    ok(cudart.cudaMemcpyAsync(device, source, 100, H2D, 0))
    ok(cudart.cudaDeviceSynchronize())


@pytest.mark.emulated_only(reason="injects a fault into a fill")
def test_an_asynchronous_error_is_not_reported_twice(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    """The fill and the copy behind it may share the device's mark: then both are answered so."""
    connect(backend(device_options="fault=fill:999:2:async"))
    device, target = made(cudart.cudaMalloc(100)), np.zeros(100, np.uint8)
    ok(cudart.cudaMemset(device, 1, 100))
    copied = cudart.cudaMemcpy(target, device, 100, D2H)
    assert sorted([copied[0], cudart.cudaDeviceSynchronize()[0]]) == [0, 999]
    ok(cudart.cudaMemcpy(target, device, 100, D2H))
    ok(cudart.cudaDeviceSynchronize())


@pytest.mark.emulated_only(reason="a driver may have a limit of its own")
@pytest.mark.parametrize(
    ("create", "destroy", "limit"),
    [
        (cudart.cudaStreamCreate, cudart.cudaStreamDestroy, m.MAX_STREAMS),
        (cudart.cudaEventCreate, cudart.cudaEventDestroy, m.MAX_EVENTS),
    ],
    ids=["streams", "events"],
)
def test_one_too_many_is_refused_at_the_call(
    session: flyt.Session, create: Any, destroy: Any, limit: int
) -> None:
    handles = [made(create()) for _ in range(limit)]
    for _ in range(2):
        assert create() == (cudart.cudaError_t.cudaErrorMemoryAllocation, None)
        assert str(limit) in flyt.last_failure()
    ok(destroy(handles.pop()))
    handles.append(made(create()))
    assert create()[0] == 2
    ok(cudart.cudaDeviceSynchronize())
    for handle in handles:
        ok(destroy(handle))
    ok(cudart.cudaDeviceSynchronize())


BUSY_CLIENT = """
import sys, numpy as np, flyt
source = flyt.pinned_empty(100_000, np.uint8)
device = flyt.cudaMalloc(source.nbytes)[1]
stream = flyt.cudaStreamCreate()[1]
assert flyt.cudaMemcpyAsync(device, source, source.nbytes, 1, stream) == (0,)
print("busy", flush=True)
sys.stdin.readline()
print(int(flyt.cudaStreamQuery(stream)[0]), flush=True)
"""


@slow
def test_nobody_waits_for_another_sessions_slow_copy(
    backend: Callable[..., Any],
    connect: Callable[..., flyt.Session],
    start_client: Callable[..., subprocess.Popen[str]],
) -> None:
    daemon = backend(device_options="latency=600")
    busy = start_client(BUSY_CLIENT, daemon)
    assert busy.stdout is not None
    assert busy.stdin is not None
    assert busy.stdout.readline() == "busy\n"
    connect(daemon)
    for _ in range(3):
        device, block = made(cudart.cudaMalloc(SIZE)), pinned(1)
        ok(cudart.cudaMemset(device, 1, SIZE))
        ok(cudart.cudaDeviceSynchronize())
        ok(cudart.cudaFree(device))
        ok(cudart.cudaFreeHost(made(cudart.cudaHostAlloc(SIZE, 0))))
        del block
        ok(cudart.cudaStreamDestroy(made(cudart.cudaStreamCreate())))
    connect(daemon).close()
    print(file=busy.stdin, flush=True)
    assert busy.stdout.readline() == "600\n"  # its copy is still on its way
    busy.kill()


def test_streams_and_events_come_and_go(session: flyt.Session) -> None:
    device, source = made(cudart.cudaMalloc(SIZE)), pinned(1)
    for _ in range(300):
        stream, event = made(cudart.cudaStreamCreate()), made(cudart.cudaEventCreate())
        ok(cudart.cudaMemcpyAsync(device, source, 100, H2D, stream))
        ok(cudart.cudaEventRecord(event, stream))
        ok(cudart.cudaStreamDestroy(stream))
        ok(cudart.cudaEventSynchronize(event))
        ok(cudart.cudaEventDestroy(event))
    ok(cudart.cudaDeviceSynchronize())
    assert cudart.cudaMemGetInfo()[0] == 0  # a call: all that was sent before is answered too
    assert flyt.inflight() == []


@pytest.mark.parametrize("count", [1, 4096, SIZE])
def test_async_round_trips_on_many_streams(session: flyt.Session, count: int) -> None:
    streams = [made(cudart.cudaStreamCreate()) for _ in range(4)]
    sources = [np.random.default_rng(n).integers(0, 256, count, dtype=np.uint8) for n in range(4)]
    devices = [made(cudart.cudaMalloc(count)) for _ in range(4)]
    copies = [made(cudart.cudaMalloc(count)) for _ in range(4)]
    targets = [np.zeros(count, np.uint8) for _ in range(4)]
    for _ in range(20):
        for stream, source, device, copy in zip(streams, sources, devices, copies, strict=True):
            ok(cudart.cudaMemcpyAsync(device, source, count, H2D, stream))
            ok(cudart.cudaMemcpyAsync(copy, device, count, D2D, stream))
    for stream, copy, target in zip(streams, copies, targets, strict=True):
        ok(cudart.cudaMemcpyAsync(target, copy, count, D2H, stream))
    for source, target in zip(sources, targets, strict=True):
        assert (source == target).all()
