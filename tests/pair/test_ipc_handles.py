# SPDX-License-Identifier: Apache-2.0
"""cudaIpc*: memory and events that clients of one backend share; whom they serve, and how long."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from tests.pair.conftest import free_bytes

K = cudart.cudaMemcpyKind
H2D, D2H = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost
LAZY = 1
SIZE = 1 << 20
LARGE = 256 << 20
"""Bytes that a GPU's pools can't hide."""
MIB = 1 << 20
LIMIT = 30.0

COMMON = """
import ctypes, json, sys
import numpy as np
import flyt as cudart
K = cudart.cudaMemcpyKind
H2D, D2H = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost

def ok(answer):
    assert answer[0] == 0, (answer, cudart.last_failure())
    return answer[1] if len(answer) > 1 else None

def struct(kind, content):
    made = kind()
    ctypes.memmove(made.getPtr(), bytes.fromhex(content), 64)
    return made

def say(*words):
    print(json.dumps(words), flush=True)

def hear():
    return json.loads(sys.stdin.readline())
"""

IMPORTER = (
    COMMON
    + """
handle = struct(cudart.cudaIpcMemHandle_t, sys.argv[1])
code, address = cudart.cudaIpcOpenMemHandle(handle, 1)
say(int(code), address)
if not code:
    hear()
    back = np.zeros(1 << 20, np.uint8)
    ok(cudart.cudaMemcpy(back, address, back.size, D2H))
    ok(cudart.cudaMemset(address, 9, 4096))
    ok(cudart.cudaDeviceSynchronize())
    say(int(back.min()), int(back.max()), int(cudart.cudaFree(address)[0]))
    hear()
    ok(cudart.cudaMemcpy(back, address, back.size, D2H))
    codes = [int(cudart.cudaIpcCloseMemHandle(address)[0]) for _ in range(2)]
    say(int(back.min()), int(back.max()), codes, int(cudart.cudaMemcpy(back, address, 16, D2H)[0]))
"""
)


def ok(answer: tuple[Any, ...]) -> Any:
    assert answer[0] == 0, (answer, flyt.last_failure())
    return answer[1] if len(answer) > 1 else None


def code(answer: tuple[Any, ...]) -> int:
    cudart.cudaGetLastError()
    return int(answer[0])


def content(handle: Any) -> str:
    return ctypes.string_at(handle.getPtr(), 64).hex()


def said(client: subprocess.Popen[str]) -> list[Any]:
    assert client.stdout is not None
    line = client.stdout.readline()
    assert line, "the client ended"
    words: list[Any] = json.loads(line)
    return words


def tell(client: subprocess.Popen[str], *words: Any) -> None:
    assert client.stdin is not None
    client.stdin.write(json.dumps(words) + "\n")
    client.stdin.flush()


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def shared_block() -> tuple[int, str]:
    address = ok(cudart.cudaMalloc(SIZE))
    ok(cudart.cudaMemset(address, 5, SIZE))
    ok(cudart.cudaDeviceSynchronize())
    return address, content(ok(cudart.cudaIpcGetMemHandle(address)))


@pytest.mark.alone
def test_both_see_the_same_memory(
    one_backend: Any,
    session: flyt.Session,
    start_client: Callable[..., Any],
    is_back: Callable[[int], bool],
) -> None:
    before = free_bytes()
    address, handle = shared_block()
    assert content(ok(cudart.cudaIpcGetMemHandle(address))) == handle, "one handle a block"
    client = start_client(IMPORTER, one_backend, handle)
    assert said(client) == [0, address]
    tell(client)
    assert said(client) == [5, 5, 1], "its bytes; cudaFree of opened memory is refused"
    back = np.zeros(8192, np.uint8)
    ok(cudart.cudaMemcpy(back, address, back.size, D2H))
    assert (back[:4096] == 9).all()
    assert (back[4096:] == 5).all()
    ok(cudart.cudaFree(address))  # the importer keeps it
    assert code(cudart.cudaIpcGetMemHandle(address)) == 1
    again = ok(cudart.cudaMalloc(SIZE))
    assert again != address, "memory that another has open serves nobody else"
    ok(cudart.cudaMemset(again, 0xEE, SIZE))
    ok(cudart.cudaDeviceSynchronize())
    tell(client)
    assert said(client) == [5, 9, [0, 1], 1], "the same bytes; closed once; gone after that"
    assert client.wait(LIMIT) == 0
    ok(cudart.cudaFree(again))
    assert eventually(lambda: is_back(before)), "the last to close it frees it"


@pytest.mark.alone
def test_memory_outlives_its_exporter(
    one_backend: Any,
    session: flyt.Session,
    start_client: Callable[..., Any],
    is_back: Callable[[int], bool],
) -> None:
    exporter = start_client(
        COMMON
        + f"size = {LARGE}"
        + """
address = ok(cudart.cudaMalloc(size))
ok(cudart.cudaMemset(address, 5, size))
ok(cudart.cudaDeviceSynchronize())
handle = ok(cudart.cudaIpcGetMemHandle(address))
say(address, ctypes.string_at(handle.getPtr(), 64).hex())
hear()
""",
        one_backend,
    )
    address, handle = said(exporter)
    before = free_bytes() + LARGE
    struct = cudart.cudaIpcMemHandle_t()
    ctypes.memmove(struct.getPtr(), bytes.fromhex(handle), 64)
    assert [ok(cudart.cudaIpcOpenMemHandle(struct, LAZY)) for _ in range(2)] == [address] * 2
    exporter.kill()
    exporter.wait(LIMIT)
    back = np.zeros(SIZE, np.uint8)
    unknown = 400  # nobody opens it any more once the backend has seen the end
    assert eventually(lambda: code(_opened_elsewhere(one_backend, handle, start_client)) == unknown)
    ok(cudart.cudaMemcpy(back, address, SIZE, D2H))
    assert (back == 5).all()
    ok(cudart.cudaIpcCloseMemHandle(address))
    ok(cudart.cudaMemcpy(back, address, SIZE, D2H))  # it was opened twice
    ok(cudart.cudaIpcCloseMemHandle(address))
    assert code(cudart.cudaIpcCloseMemHandle(address)) == 1
    assert eventually(lambda: is_back(before))


def _opened_elsewhere(
    backend: Any, handle: str, start_client: Callable[..., Any]
) -> tuple[Any, ...]:
    client = start_client(IMPORTER, backend, handle)
    answer = said(client)
    client.kill()
    client.wait(LIMIT)
    return tuple(answer)


@pytest.mark.alone
def test_an_importer_that_is_killed_lets_go(
    one_backend: Any,
    session: flyt.Session,
    start_client: Callable[..., Any],
    is_back: Callable[[int], bool],
) -> None:
    before = free_bytes()
    address, handle = shared_block()
    client = start_client(IMPORTER, one_backend, handle)
    assert said(client) == [0, address]
    ok(cudart.cudaFree(address))
    assert free_bytes() <= before
    client.kill()
    client.wait(LIMIT)
    assert eventually(lambda: is_back(before))


def test_what_is_no_handle(session: flyt.Session) -> None:
    address, handle = shared_block()
    own = cudart.cudaIpcMemHandle_t()
    ctypes.memmove(own.getPtr(), bytes.fromhex(handle), 64)
    assert code(cudart.cudaIpcOpenMemHandle(own, LAZY)) == 201, "the process's own"
    assert code(cudart.cudaIpcOpenMemHandle(own, 0)) == 1, "flags"
    assert code(cudart.cudaIpcOpenMemHandle(cudart.cudaIpcMemHandle_t(), LAZY)) == 1
    ctypes.memmove(own.getPtr(), b"x" * 16, 16)
    assert code(cudart.cudaIpcOpenMemHandle(own, LAZY)) == 400, "a token that nobody gave"
    assert code(cudart.cudaIpcGetMemHandle(address + 512)) == 1, "not the start"
    stream = ok(cudart.cudaStreamCreate())
    pooled = ok(cudart.cudaMallocAsync(4096, stream))
    assert code(cudart.cudaIpcGetMemHandle(pooled)) == 1, "of a pool"
    pinned = ok(cudart.cudaHostAlloc(4096, 0))
    assert code(cudart.cudaIpcGetMemHandle(pinned)) == 1, "pinned memory"
    assert code(cudart.cudaIpcCloseMemHandle(address)) == 1, "its own"
    event = ok(cudart.cudaEventCreate())
    assert code(cudart.cudaIpcGetEventHandle(event)) == 400, "no cudaEventInterprocess"


def test_sessions_with_workers_of_their_own_share_nothing(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session], start_client: Any
) -> None:
    served = backend(extra=["--isolation", "process"])
    connect(served)
    _, handle = shared_block()
    client = start_client(IMPORTER, served, handle)
    assert said(client) == [400, None]
    assert client.wait(LIMIT) == 0


def test_another_principal_does_not_get_it(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session], start_client: Any
) -> None:
    served = backend(listen=[f"ipc:///tmp/flyt-{os.getpid()}-h.sock", "tcp://127.0.0.1:0"])
    connect(served)
    _, handle = shared_block()
    there = {"FLYT_BACKEND": served.endpoints[1]}
    client = start_client(IMPORTER, served, handle, env=there)
    assert said(client) == [400, None]
    assert client.wait(LIMIT) == 0


def test_who_opens_memory_pays_for_it(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session], start_client: Any
) -> None:
    served = backend(extra=["--memory-limit", "3M"])
    connect(served)
    _, handle = shared_block()
    client = start_client(
        COMMON
        + """
handle = struct(cudart.cudaIpcMemHandle_t, sys.argv[1])
own = ok(cudart.cudaMalloc(5 << 19))
first = int(cudart.cudaIpcOpenMemHandle(handle, 1)[0])
ok(cudart.cudaFree(own))
address = ok(cudart.cudaIpcOpenMemHandle(handle, 1))
say(first, int(cudart.cudaMalloc(5 << 19)[0]), int(cudart.cudaMalloc(2 << 20)[0]))
""",
        served,
        handle,
    )
    assert said(client) == [2, 2, 0], "2.5 of 3 MiB taken: no room for 1 MiB, and the reverse"
    assert client.wait(LIMIT) == 0


# --- events ---

WAITER = (
    COMMON
    + """
memory, event = sys.argv[1:]
address = ok(cudart.cudaIpcOpenMemHandle(struct(cudart.cudaIpcMemHandle_t, memory), 1))
event = ok(cudart.cudaIpcOpenEventHandle(struct(cudart.cudaIpcEventHandle_t, event)))
stream = ok(cudart.cudaStreamCreateWithFlags(1))
say(int(cudart.cudaEventQuery(event)[0]))
hear()  # recorded behind a function that waits
say(int(cudart.cudaEventQuery(event)[0]))
ok(cudart.cudaStreamWaitEvent(stream, event, 0))
there = ok(cudart.cudaMalloc(1 << 20))
ok(cudart.cudaMemcpyAsync(there, address, 1 << 20, K.cudaMemcpyDeviceToDevice, stream))
say(int(cudart.cudaStreamQuery(stream)[0]))
ok(cudart.cudaEventSynchronize(event))
ok(cudart.cudaStreamSynchronize(stream))
back = np.zeros(1 << 20, np.uint8)
ok(cudart.cudaMemcpy(back, there, back.size, D2H))
say(int(back.min()), int(back.max()), int(cudart.cudaEventQuery(event)[0]))
ok(cudart.cudaEventRecord(event, stream))
ok(cudart.cudaEventDestroy(event))
say(int(cudart.cudaEventQuery(event)[0]))
"""
)


def test_an_event_orders_two_processes(
    one_backend: Any, session: flyt.Session, start_client: Callable[..., Any]
) -> None:
    address, memory = shared_block()
    stream = ok(cudart.cudaStreamCreateWithFlags(1))
    event = ok(cudart.cudaEventCreateWithFlags(2 | 4))
    handle = content(ok(cudart.cudaIpcGetEventHandle(event)))
    assert content(ok(cudart.cudaIpcGetEventHandle(event))) == handle
    client = start_client(WAITER, one_backend, memory, handle)
    assert said(client) == [0], "nothing was recorded"
    gate = Gate(stream)
    ok(cudart.cudaMemsetAsync(address, 8, SIZE, stream))
    ok(cudart.cudaEventRecord(event, stream))
    tell(client)
    assert said(client) == [600], "recorded in this process, not reached"
    assert said(client) == [600], "its stream waits for ours"
    assert code(cudart.cudaEventQuery(event)) == 600
    gate.open()
    assert said(client) == [8, 8, 0]
    assert said(client) == [400], "destroyed there"
    ok(cudart.cudaEventSynchronize(event))  # here it lives on
    ok(cudart.cudaEventRecord(event, stream))
    ok(cudart.cudaEventSynchronize(event))
    ok(cudart.cudaEventDestroy(event))
    assert client.wait(LIMIT) == 0


class Gate:
    """A host function that holds a stream until it is opened."""

    def __init__(self, stream: Any) -> None:
        self._go = threading.Event()
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: self._wait())
        address = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        ok(cudart.cudaLaunchHostFunc(stream, cudart.cudaHostFn_t(address), 0))

    def _wait(self) -> None:
        self._go.wait(LIMIT)

    def open(self) -> None:
        self._go.set()


@pytest.fixture(autouse=True)
def no_error_left() -> None:
    cudart.cudaGetLastError()
