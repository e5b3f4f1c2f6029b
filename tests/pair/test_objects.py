# SPDX-License-Identifier: Apache-2.0
"""Streams and events as objects: what they order, what they say, and when they end."""

from __future__ import annotations

import gc
import operator
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart

H2D = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
OK = (cudart.cudaError_t.cudaSuccess,)
INVALID_HANDLE = 400
NOT_READY = 600
CONTEXT_IS_DESTROYED = 709
LATENCY = 0.7
"""Seconds of each copy on a slowed device: enough to see what waits for it and what does not."""


def code_of(call: Callable[[], Any]) -> int:
    with pytest.raises(flyt.DeviceError) as caught:
        call()
    return caught.value.code


# --- what they are ---


def test_a_stream_is_what_cuda_makes_of_its_options(session: flyt.Session) -> None:
    error, least, greatest = cudart.cudaDeviceGetStreamPriorityRange()
    assert error == 0
    for wanted in (0, greatest, greatest - 1, least + 1):
        for non_blocking in (False, True):
            with flyt.Stream(non_blocking=non_blocking, priority=wanted) as stream:
                flags = cudart.cudaStreamGetFlags(stream.handle)
                assert flags == (0, cudart.cudaStreamNonBlocking if non_blocking else 0)
                assert stream.non_blocking is non_blocking
                assert stream.priority == max(greatest, min(least, wanted))
                assert stream.is_done
                stream.sync()


def test_handles_work_wherever_cudas_do(session: flyt.Session) -> None:
    error, device = cudart.cudaMalloc(4096)
    assert error == 0
    with flyt.Stream() as stream, flyt.Event() as event:
        for handle in (stream, stream.handle, int(stream), operator.index(stream)):
            assert cudart.cudaMemsetAsync(device, 1, 4096, handle) == OK
            assert cudart.cudaEventRecord(event, handle) == OK
        assert cudart.cudaStreamWaitEvent(stream, int(event), 0) == OK
        assert cudart.cudaStreamSynchronize(stream) == OK
        assert event.is_done
    assert cudart.cudaFree(device) == OK


def test_options_are_keywords() -> None:
    for make in (lambda: flyt.Stream(True), lambda: flyt.Event(False)):  # type: ignore[misc]
        with pytest.raises(TypeError, match="positional"):
            make()


def test_default_streams_belong_to_nobody(session: flyt.Session) -> None:
    for stream, handle, name in (
        (flyt.Stream.default, 1, "Stream.default"),
        (flyt.Stream.per_thread, 2, "Stream.per_thread"),
    ):
        assert (stream.handle, int(stream), repr(stream)) == (handle, handle, name)
        with stream:
            stream.record().close()
        stream.close()
        assert not stream.closed
        stream.sync()
        assert stream.is_done
        assert stream.priority == 0


def test_reprs(session: flyt.Session) -> None:
    stream, event = flyt.Stream(non_blocking=True), flyt.Event(timing=False)
    assert repr(stream) == f"Stream({stream.handle:#x}, non_blocking=True)"
    assert repr(event) == f"Event({event.handle:#x}, timing=False, blocking=False)"
    stream.close()
    event.close()
    assert repr(stream) == "Stream(closed, non_blocking=True)"
    assert repr(event) == "Event(closed, timing=False, blocking=False)"


# --- what they order ---


def test_events_order_and_measure(session: flyt.Session) -> None:
    with flyt.Stream() as stream, flyt.Event() as start:
        assert start.is_done  # never recorded (recorded: event_sync_unrecorded)
        start.sync()
        assert stream.record(start) is start
        with flyt.to_device(np.zeros(1 << 20), stream) as made, stream.record() as end:
            end.sync()
            assert end.is_done
            assert end - start >= 0
            assert end - end == 0
            assert isinstance(end - start, float)
            made.close()


def test_subtraction_needs_recorded_events_with_timing(session: flyt.Session) -> None:
    stream = flyt.Stream.default
    with flyt.Event() as fresh, stream.record() as timed, flyt.Event(timing=False) as untimed:
        stream.record(untimed)
        stream.sync()
        assert code_of(lambda: timed - fresh) == INVALID_HANDLE
        assert code_of(lambda: untimed - timed) == INVALID_HANDLE
        with pytest.raises(TypeError):
            timed - 1  # type: ignore[operator]


@pytest.mark.emulated_only(reason="only the emulated device can slow its copies down")
def test_streams_wait_for_each_other_and_the_caller_for_none(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    connect(backend(device_options=f"latency={LATENCY}"))
    cudart.cudaGetLastError()  # of earlier tests
    source, out = flyt.pinned_empty(1000, np.uint8), flyt.pinned_empty(1000, np.uint8)
    source[:] = 7
    made = flyt.DeviceArray(1000, np.uint8)
    with (
        flyt.Stream(non_blocking=True) as one,
        flyt.Stream(non_blocking=True) as two,
        flyt.Stream(non_blocking=True) as idle,
        one.record() as start,
    ):
        assert cudart.cudaMemcpyAsync(made.ptr, source, 1000, H2D, one) == OK
        with one.record() as written, one.record(flyt.Event(blocking=True)) as blocking:
            two.wait(written)
            made.copy_to_host(out, two)
            assert [o.is_done for o in (one, two, written, blocking)] == [False] * 4
            assert idle.is_done
            assert code_of(lambda: written - start) == NOT_READY
            # Not ready is an answer, not an error (recorded: lasterror_after_notready).
            assert cudart.cudaPeekAtLastError() == OK
            blocking.sync()
            assert written.is_done
            assert not two.is_done
            two.sync()
            assert (out == 7).all()
            assert written - start >= 1000 * LATENCY * 0.9
        # A stream as what is waited for: everything on it so far.
        source[:] = 9
        assert cudart.cudaMemcpyAsync(made.ptr, source, 1000, H2D, one) == OK
        two.wait(one)
        made.copy_to_host(out, two)
        assert not one.is_done
        two.sync()
        assert (out == 9).all()
    made.close()


@pytest.mark.emulated_only(reason="only the emulated device can slow its copies down")
def test_close_neither_waits_nor_drops_work(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    connect(backend(device_options=f"latency={LATENCY}"))
    source = flyt.pinned_empty(1000, np.uint8)
    source[:] = 7
    made = flyt.DeviceArray(1000, np.uint8)
    with flyt.Stream(non_blocking=True) as watch, flyt.Stream(non_blocking=True) as stream:
        assert cudart.cudaMemcpyAsync(made.ptr, source, 1000, H2D, stream) == OK
        watch.wait(stream)
        stream.close()
        assert not watch.is_done
        watch.sync()
    assert (made.copy_to_host() == 7).all()
    made.close()


# --- when they end ---


def test_what_is_closed_says_so_once_and_for_all(session: flyt.Session) -> None:
    stream, event = flyt.Stream(), flyt.Event()
    handles = stream.handle, event.handle
    closers = [threading.Thread(target=one.close) for one in (stream, event) for _ in range(4)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(30)
    stream.close()
    event.close()
    assert stream.closed
    assert event.closed
    assert cudart.cudaStreamQuery(handles[0]) == (INVALID_HANDLE,)
    assert cudart.cudaEventQuery(handles[1]) == (INVALID_HANDLE,)
    uses: list[Callable[[], Any]] = [
        stream.sync,
        lambda: stream.is_done,
        lambda: stream.priority,
        lambda: int(stream),
        stream.record,
        event.sync,
        lambda: event.is_done,
        lambda: event - event,
        lambda: flyt.Stream.default.wait(event),
        lambda: flyt.Stream.default.record(event),
        lambda: flyt.to_device(np.zeros(3), stream),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()


def test_dropped_ones_are_given_back_by_the_next_call(session: flyt.Session) -> None:
    made = [*(flyt.Stream() for _ in range(20)), *(flyt.Event() for _ in range(20))]
    handles = [one.handle for one in made]
    facts = session.statistics()
    made.append(made)  # type: ignore[arg-type]
    del made
    gc.collect()
    now = session.statistics()
    assert (now["calls"], now["posts"]) == (facts["calls"], facts["posts"])  # nothing was sent
    for n, handle in enumerate(handles):
        query = cudart.cudaStreamQuery if n < 20 else cudart.cudaEventQuery
        assert query(handle) == (INVALID_HANDLE,)


def test_they_end_with_their_session(
    one_backend: Any, connect: Callable[..., flyt.Session]
) -> None:
    connect(one_backend)
    stream, event, dropped = flyt.Stream(), flyt.Event(), flyt.Stream()
    connect(one_backend)
    new = flyt.Stream(), flyt.Event()  # with the old handles, as like as not
    for use in (stream.sync, lambda: stream.handle, event.sync, lambda: new[0].wait(event)):
        assert code_of(use) == CONTEXT_IS_DESTROYED
    stream.close()
    event.close()
    del dropped
    gc.collect()
    new[0].record(new[1])
    new[0].sync()
    assert new[1].is_done
    for one in new:
        one.close()


def test_errors_carry_cudas_code(one_backend: Any, connect: Callable[..., flyt.Session]) -> None:
    session = connect(one_backend)
    stream, event = flyt.Stream(), flyt.Event()
    session.close()
    unavailable = cudart.cudaError_t.cudaErrorDevicesUnavailable
    for use in (stream.sync, event.sync, stream.record, flyt.Stream, flyt.Event):
        assert code_of(use) == unavailable
    stream.close()
    event.close()
