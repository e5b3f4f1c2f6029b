# SPDX-License-Identifier: Apache-2.0
"""Host functions in streams: who calls them, and what an end on either side makes of them."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import flyt
import flyt as cudart
from flyt.frontend.api.callbacks import launch
from flyt.frontend.host_calls import MOST_WAITING

LIMIT = 30.0
NOT_READY, NOT_PERMITTED, UNAVAILABLE = 600, 800, 46


def ok(answer: tuple[Any, ...]) -> Any:
    assert answer[0] == 0, (answer, flyt.last_failure())
    return answer[1] if len(answer) > 1 else None


def code(answer: tuple[Any, ...]) -> int:
    cudart.cudaGetLastError()
    return int(answer[0])


def test_one_thread_calls_them_and_it_is_nobody_elses(session: flyt.Session) -> None:
    streams, seen = [ok(cudart.cudaStreamCreate()) for _ in range(3)], list[int]()
    for stream in streams:
        launch(stream, lambda _: seen.append(threading.get_ident()))
    for stream in streams:
        ok(cudart.cudaStreamSynchronize(stream))
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert threading.get_ident() not in seen


def test_a_function_may_not_call_cuda(session: flyt.Session) -> None:
    stream, seen = ok(cudart.cudaStreamCreate()), list[int]()
    launch(stream, lambda _: seen.append(int(cudart.cudaStreamSynchronize(stream)[0])))
    ok(cudart.cudaStreamSynchronize(stream))
    assert seen == [NOT_PERMITTED]
    assert code(cudart.cudaGetLastError()) == 0, "that was another thread's error"


def test_a_function_that_raises_lets_its_stream_go_on(
    session: flyt.Session, caplog: pytest.LogCaptureFixture
) -> None:
    stream, seen = ok(cudart.cudaStreamCreate()), list[int]()

    def fault(_: int) -> None:
        raise RuntimeError("the program's own fault")

    launch(stream, fault)
    launch(stream, seen.append)
    ok(cudart.cudaStreamSynchronize(stream))
    assert seen == [0]
    assert "the program's own fault" in caplog.text


def test_a_function_whose_turn_comes_first_waits_for_none_before_it(session: flyt.Session) -> None:
    """The function of a stream that is held up may wait for another stream's."""
    first, second = (ok(cudart.cudaStreamCreateWithFlags(1)) for _ in range(2))
    event, done = ok(cudart.cudaEventCreateWithFlags(2)), threading.Event()
    gate, opened = ok(cudart.cudaStreamCreateWithFlags(1)), threading.Event()
    launch(gate, lambda _: opened.set())
    ok(cudart.cudaEventRecord(event, gate))
    ok(cudart.cudaStreamWaitEvent(first, event, 0))
    launch(first, lambda _: None)
    launch(second, lambda _: done.set())
    assert done.wait(LIMIT)
    for stream in (gate, first, second):
        ok(cudart.cudaStreamSynchronize(stream))


def test_more_than_may_wait(session: flyt.Session) -> None:
    stream, seen = ok(cudart.cudaStreamCreate()), list[int]()
    for number in range(MOST_WAITING + 100):
        launch(stream, lambda _, number=number: seen.append(number))  # type: ignore[misc]
    ok(cudart.cudaStreamSynchronize(stream))
    assert seen == list(range(MOST_WAITING + 100))


def test_threads_that_wait_and_functions(session: flyt.Session) -> None:
    """Whoever leads reads for all; a function's turn wakes the helper, whoever it was."""
    seen = list[int]()

    def work(number: int) -> None:
        stream = ok(cudart.cudaStreamCreateWithFlags(1))
        for turn in range(50):
            launch(stream, lambda _, n=100 * number + turn: seen.append(n))  # type: ignore[misc]
            ok(cudart.cudaStreamSynchronize(stream))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(seen) == sorted(100 * n + t for n in range(4) for t in range(50))


@pytest.mark.emulated_only("an injected fault")
def test_errors_reach_callbacks_and_no_host_functions(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    connect(backend(device_options="fault=fill:999:4:async"))
    stream, seen = ok(cudart.cudaStreamCreate()), list[tuple[str, int]]()
    address = ok(cudart.cudaMalloc(4096))
    for _ in range(3):  # with the clearing of new memory, the fourth
        ok(cudart.cudaMemsetAsync(address, 1, 4096, stream))
    launch(stream, lambda status: seen.append(("callback", status)))
    assert code(cudart.cudaStreamSynchronize(stream)) == 999
    assert seen == [("callback", 999)]


@pytest.mark.emulated_only("an injected fault")
def test_a_sticky_error_reaches_callbacks_and_no_host_functions(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    connect(backend(device_options="fault=fill:700:2:async"))
    stream, seen, go = ok(cudart.cudaStreamCreate()), list[tuple[str, int]](), threading.Event()
    address = ok(cudart.cudaMalloc(4096))  # which is cleared: the first fill
    done = threading.Event()
    native = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(("function", 0)))
    function = cudart.cudaHostFn_t(ctypes.cast(native, ctypes.c_void_p).value or 0)
    launch(stream, lambda _: go.wait(LIMIT) and None)
    ok(cudart.cudaMemsetAsync(address, 1, 4096, stream))
    ok(cudart.cudaLaunchHostFunc(stream, function, 0))

    def callback(status: int) -> None:
        seen.append(("callback", status))
        done.set()

    launch(stream, callback)
    go.set()
    assert code(cudart.cudaStreamSynchronize(stream)) == 700
    assert done.wait(LIMIT)
    assert seen == [("callback", 700)]


def test_the_backends_end_is_told(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    served = backend()
    connect(served)
    stream, seen = ok(cudart.cudaStreamCreate()), list[int]()
    begun, go = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        begun.set()
        go.wait(LIMIT)

    launch(stream, hold)
    launch(stream, seen.append)
    assert begun.wait(LIMIT)
    workers = [pid for pid in served.descendants() if b"worker" in _command(pid)]
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    go.set()
    deadline = time.monotonic() + LIMIT
    while not seen and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen == [UNAVAILABLE]
    assert code(cudart.cudaStreamSynchronize(stream)) == UNAVAILABLE


def _command(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


CLIENT = """
import threading
import flyt as cudart
from flyt.frontend.api.callbacks import launch
stream = cudart.cudaStreamCreate()[1]
begun = threading.Event()
launch(stream, lambda _: (begun.set(), threading.Event().wait()))
address = cudart.cudaMallocAsync(1 << 20, stream)[1]
begun.wait()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.emulated_only(reason="free memory, which a GPU's pools give back in their time")
def test_a_stream_does_not_wait_for_a_dead_client(
    one_backend: Any, session: flyt.Session, start_client: Callable[..., Any]
) -> None:
    before = cudart.cudaMemGetInfo()[1]
    client = start_client(CLIENT, one_backend)
    assert client.stdout.readline() == "ready\n"
    assert cudart.cudaMemGetInfo()[1] < before
    client.kill()
    client.wait(LIMIT)
    deadline = time.monotonic() + LIMIT
    while cudart.cudaMemGetInfo()[1] != before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert cudart.cudaMemGetInfo()[1] == before


def test_an_interpreter_may_end_with_functions_waiting(
    one_backend: Any, run_client: Callable[..., Any]
) -> None:
    done = run_client(CLIENT.replace("threading.Event().wait()\n", "", 1), one_backend, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")
