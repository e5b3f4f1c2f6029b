# SPDX-License-Identifier: Apache-2.0
"""Facts about functions of the host in streams."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from cuda.bindings.runtime import cudaHostFn_t, cudaStreamCallback_t

from flyt.testing._facts import Facts
from flyt.testing._lab import (
    D2H,
    INVALID_VALUE,
    LEGACY,
    NON_BLOCKING,
    NOT_READY,
    THREAD_LIMIT,
    Lab,
)

FACTS = Facts("callbacks")

N = 65_536
Host = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


def _launch(lab: Lab, stream: Any, function: Callable[[int | None], None], data: int = 0) -> None:
    native = Host(function)
    lab.keep(native)
    address = ctypes.cast(native, ctypes.c_void_p).value or 0
    lab.ok(lab.rt.cudaLaunchHostFunc(stream, cudaHostFn_t(address), data))


@FACTS.fact("cudaLaunchHostFunc: called once, behind the work before it, with its data")
def a_function_has_its_turn(lab: Lab) -> None:
    for stream in (lab.stream(), lab.stream(NON_BLOCKING), LEGACY):
        seen = list[int | None]()

        def observe(stream: Any = stream, seen: Any = seen) -> int:
            seen.clear()
            _launch(lab, stream, seen.append, 1234)
            return len(seen)

        lab.same(lab.while_busy(stream, observe), 0, "how often it was called at once")
        lab.same(seen, [1234], "its data")


@FACTS.fact("cudaLaunchHostFunc: later work of the stream waits for its return")
def later_work_waits(lab: Lab) -> None:
    stream, other = lab.stream(NON_BLOCKING), lab.stream(NON_BLOCKING)
    device, back = lab.device(N, 1), lab.pageable(N)
    begun, go = threading.Event(), threading.Event()

    def function(_: int | None) -> None:
        begun.set()
        go.wait(THREAD_LIMIT)

    _launch(lab, stream, function)
    lab.ok(lab.rt.cudaMemsetAsync(device, 2, N, stream))
    lab.same(begun.wait(THREAD_LIMIT), True, "whether it is called while nobody waits")
    lab.same(lab.query(stream), NOT_READY, "the stream, while the function runs")
    lab.ok(lab.rt.cudaMemcpyAsync(back.ctypes.data, device, N, D2H, other))
    lab.same_bytes(back, 1, "the memory, while the function runs")
    go.set()
    lab.ok(lab.rt.cudaStreamSynchronize(stream))
    lab.same_bytes(lab.get(device, N), 2, "what was set behind the function")


@FACTS.fact("cudaLaunchHostFunc: several are called in their stream's order")
def functions_keep_the_order(lab: Lab) -> None:
    stream, seen = lab.stream(), list[int]()
    for number in range(20):
        _launch(lab, stream, lambda _, number=number: seen.append(number))  # type: ignore[misc]
    lab.ok(lab.rt.cudaStreamSynchronize(stream))
    lab.same(seen, list(range(20)), "the order")


@FACTS.fact("cudaStreamAddCallback: gets its stream, the status and its data")
def callbacks_get_the_status(lab: Lab) -> None:
    stream, seen = lab.stream(), list[tuple[int | None, int, int | None]]()
    native = Callback(lambda *arguments: seen.append(arguments))
    lab.keep(native)
    address = ctypes.cast(native, ctypes.c_void_p).value or 0
    callback = cudaStreamCallback_t(address)
    lab.ok(lab.rt.cudaStreamAddCallback(stream, callback, 77, 0))
    lab.ok(lab.rt.cudaStreamSynchronize(stream))
    lab.same(seen, [(int(stream), 0, 77)], "the arguments")
    answer = lab.rt.cudaStreamAddCallback(stream, callback, 0, 1)
    lab.refused(answer, INVALID_VALUE, "flags 1")


@FACTS.fact("cudaEventSynchronize: an event behind a function is reached after its return")
def events_wait_for_functions(lab: Lab) -> None:
    stream, event, seen = lab.stream(), lab.event(2), list[int]()
    go = threading.Event()

    def function(_: int | None) -> None:
        go.wait(THREAD_LIMIT)
        seen.append(1)

    _launch(lab, stream, function)
    lab.ok(lab.rt.cudaEventRecord(event, stream))
    lab.same(int(lab.rt.cudaEventQuery(event)[0]), NOT_READY, "the event, while it runs")
    go.set()
    lab.ok(lab.rt.cudaEventSynchronize(event))
    lab.same(seen, [1], "the function's mark")
