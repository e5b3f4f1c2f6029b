# SPDX-License-Identifier: Apache-2.0
"""Threads of one client, Ctrl-C in the middle of a copy, and the interpreter's exit."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from tests.pair.raw import eventually, status

THREADS = 8
OPERATIONS = int(os.environ.get("FLYT_TEST_OPERATIONS", "24000"))
"""Calls of all threads together; ``FLYT_TEST_OPERATIONS=1000000`` is the long run."""

SLOWEST_RATE = 400
"""Calls a second of all threads on a crowded machine; it only bounds a hang."""

LARGEST = 96 << 10
"""Bytes of a block; above what one command carries in a slot there are other tests."""

BLOCKS = 6
"""Blocks that a thread has at a time."""

INVALID_VALUE = 1
INVALID_DEVICE = 101
INVALID_HANDLE = 400
OK = (cudart.cudaError_t.cudaSuccess,)

K = cudart.cudaMemcpyKind
H2D, D2H, D2D = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost, K.cudaMemcpyDeviceToDevice

Array = np.ndarray[Any, np.dtype[Any]]


class Worker:
    """One thread's blocks, each with a shadow of what has to be in it.

    Its synchronous copies wait for its asynchronous work, since all its streams are blocking ones
    (CUDA's rule of the legacy default stream); among its streams, events make the order.
    """

    def __init__(self, number: int, device: int) -> None:
        self.device = device
        self.calls = 0
        self.last_error = 0
        self.random = np.random.default_rng(number)
        self.blocks: list[tuple[int, Array]] = []
        self.streams: list[flyt.Stream] = [flyt.Stream.default, flyt.Stream.per_thread]
        self.current = flyt.Stream.default

    # --- a step each ---

    def allocate(self) -> None:
        if len(self.blocks) == BLOCKS:
            self.free()
        size = int(self.random.integers(1, LARGEST))
        self.blocks.append((self.must(cudart.cudaMalloc(size)), np.zeros(size, np.uint8)))

    def free(self) -> None:
        if not self.blocks:
            return
        address, _ = self.blocks.pop(int(self.random.integers(len(self.blocks))))
        self.must(cudart.cudaFree(address))

    def write(self) -> None:
        address, shadow, part = self.part()
        data = self.random.integers(0, 256, len(shadow[part]), np.uint8)
        self.must(cudart.cudaMemcpy(address + part.start, data, len(data), H2D))
        shadow[part] = data

    def write_later(self) -> None:
        address, shadow, part = self.part()
        data = self.random.integers(0, 256, len(shadow[part]), np.uint8)
        shadow[part] = data
        answer = cudart.cudaMemcpyAsync(address + part.start, data, len(data), H2D, self.stream())
        data[:] = 0  # the source may be changed at once
        self.must(answer)

    def read(self) -> None:
        address, shadow, part = self.part()
        back = np.empty(len(shadow[part]), np.uint8)
        self.must(cudart.cudaMemcpy(back, address + part.start, len(back), D2H))
        assert (back == shadow[part]).all(), "wrong bytes"

    def read_pinned(self) -> None:
        address, shadow, part = self.part()
        back = flyt.pinned_empty(len(shadow[part]), np.uint8)  # dropped: a finalizer's work
        stream = self.stream()
        self.must(cudart.cudaMemcpyAsync(back, address + part.start, len(back), D2H, stream))
        self.must(cudart.cudaStreamSynchronize(stream))
        assert (back == shadow[part]).all(), "wrong bytes in pinned memory"

    def fill(self) -> None:
        address, shadow, part = self.part()
        value = int(self.random.integers(256))
        length = len(shadow[part])
        if value % 2:
            self.must(cudart.cudaMemset(address + part.start, value, length))
        else:
            self.must(cudart.cudaMemsetAsync(address + part.start, value, length, self.stream()))
        shadow[part] = value

    def move(self) -> None:
        address, shadow, part = self.part()
        target, copy, _ = self.part()
        length = min(len(shadow[part]), len(copy))
        if address == target or not length:
            return
        origin = address + part.start
        self.must(cudart.cudaMemcpyAsync(target, origin, length, D2D, self.stream()))
        copy[:length] = shadow[part][:length]

    def array(self) -> None:
        wanted = self.random.integers(0, 256, (20, 30), np.uint8)[:, ::2]
        with flyt.to_device(wanted, self.stream()) as made:
            assert (made.copy_to_host() == wanted).all(), "wrong bytes in an array"
        self.calls += 4

    def streams_and_events(self) -> None:
        if len(self.streams) > 4:
            self.streams.pop(2)  # dropped: a finalizer's work
        self.streams.append(flyt.Stream())
        with self.stream().record() as event:
            self.stream().wait(event)
            event.sync()
            assert event.is_done
        self.calls += 6

    def fail(self) -> None:
        """Each kind of error, and the last one stays until it is asked for."""
        address, _, _ = self.part()
        call, self.last_error = (
            (lambda: cudart.cudaFree(address + 1), INVALID_VALUE),
            (lambda: cudart.cudaSetDevice(99), INVALID_DEVICE),
            (lambda: cudart.cudaStreamQuery(0xBAD1), INVALID_HANDLE),
        )[int(self.random.integers(3))]
        assert call() == (self.last_error,)
        self.calls += 1

    def ask(self) -> None:
        """What belongs to the thread is its own."""
        assert cudart.cudaPeekAtLastError() == (self.last_error,)
        assert cudart.cudaGetLastError() == (self.last_error,)
        assert cudart.cudaGetLastError() == OK
        assert cudart.cudaGetDevice() == (0, self.device)
        address, shadow, _ = self.part()
        error, facts = cudart.cudaPointerGetAttributes(address + len(shadow) - 1)
        assert (error, facts.device) == (0, self.device)
        self.last_error = 0
        self.calls += 5

    STEPS = (
        *(allocate, free, write, write, write_later, read, read, read_pinned),
        *(fill, fill, move, array, streams_and_events, fail, ask, ask),
    )

    # --- what they share ---

    def must(self, answer: tuple[Any, ...]) -> int:
        self.calls += 1
        assert answer[0] == 0, f"{answer[0]!r}: {flyt.last_failure()}"
        return int(answer[-1])

    def stream(self) -> flyt.Stream:
        """A stream that waits for what the thread put on the one before."""
        before = self.current
        self.current = self.streams[int(self.random.integers(len(self.streams)))]
        if self.current is not before:
            self.current.wait(before)
            self.calls += 4
        return self.current

    def part(self) -> tuple[int, Array, slice]:
        """A block, its shadow, and a part of both; short ones are as frequent as long ones."""
        if not self.blocks:
            self.allocate()
        address, shadow = self.blocks[int(self.random.integers(len(self.blocks)))]
        start = int(self.random.integers(len(shadow)))
        length = int((len(shadow) - start) ** self.random.random())
        return address, shadow, slice(start, start + max(1, length))

    def run(self, calls: int) -> None:
        self.must(cudart.cudaSetDevice(self.device))
        while self.calls < calls:
            self.STEPS[int(self.random.integers(len(self.STEPS)))](self)
        while self.blocks:
            self.free()
        for stream in self.streams:
            stream.close()


@pytest.mark.timeout(120 + OPERATIONS // SLOWEST_RATE)
def test_eight_threads_mix_their_calls(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session], device_kind: str
) -> None:
    connect(backend(device_options="devices=2" if device_kind == "emulated" else ""))
    error, devices = cudart.cudaGetDeviceCount()
    assert error == 0
    before = [free_bytes(device) for device in range(devices)]
    workers = [Worker(number, number % devices) for number in range(THREADS)]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        runs = [pool.submit(worker.run, OPERATIONS // THREADS) for worker in workers]
        for run in runs:
            run.result(100 + OPERATIONS / SLOWEST_RATE)
    assert sum(worker.calls for worker in workers) >= OPERATIONS
    if device_kind == "emulated":  # a GPU's driver gives memory back in its own time
        assert [free_bytes(device) for device in range(devices)] == before
    for device in range(devices):  # destroying a stream is a post
        assert cudart.cudaSetDevice(device) == (0,)
        assert cudart.cudaDeviceSynchronize() == (0,)
    assert flyt.inflight() == []


@pytest.mark.emulated_only(reason="needs two devices and a slowed copy")
def test_a_free_on_one_device_leaves_the_order_on_another(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    """cudaFree waits for everything; what another thread does meanwhile keeps its order."""
    connect(backend(device_options="devices=2,bandwidth=0.004"))
    block = flyt.DeviceArray(1000)  # on device 0
    assert cudart.cudaSetDevice(1) == OK
    source = flyt.pinned_empty(4 << 20, np.uint8)  # takes a second
    source[:] = 7
    last = np.zeros(8, np.uint8)
    with flyt.Stream() as stream, flyt.to_device(source, stream) as made:
        freeing = threading.Thread(target=block.close)
        freeing.start()
        assert eventually(lambda: any(one.name == "Free" for one in flyt.inflight()))
        # On the legacy stream of device 1, which waits for the other stream's copy.
        assert cudart.cudaMemcpy(last, made.ptr + source.nbytes - 8, 8, D2H) == OK
        assert (last == 7).all()
        freeing.join(30)
        assert not freeing.is_alive()
    assert cudart.cudaSetDevice(0) == OK


def free_bytes(device: int) -> int:
    assert cudart.cudaSetDevice(device) == OK
    assert cudart.cudaDeviceSynchronize() == OK
    error, free, _ = cudart.cudaMemGetInfo()
    assert error == 0
    assert cudart.cudaSetDevice(0) == OK
    return int(free)


# --- Ctrl-C ---

INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
import flyt, flyt as cudart
K = cudart.cudaMemcpyKind
H2D, D2H = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost
way, where, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])

def must(answer):
    assert answer[0] == 0, (answer, flyt.last_failure())
    return answer[-1]

window = flyt.connect().statistics()["window_size"]
size = 6 * window + 12345 if where == "pageable" else 8 << 20
device = must(cudart.cudaMalloc(size))
host = np.zeros(size, np.uint8) if where == "pageable" else flyt.pinned_empty(size, np.uint8)
random = np.random.default_rng(1)
main = threading.main_thread().ident
began = time.monotonic()
must(cudart.cudaMemcpy(device, host, size, H2D))
must(cudart.cudaMemcpy(host, device, size, D2H))
takes = (time.monotonic() - began) / 2
caught = 0
for n in range(rounds):
    timer = threading.Timer(takes * random.random(), signal.pthread_kill, (main, signal.SIGINT))
    try:
        timer.start()
        while True:  # until the interrupt comes
            if way == "h2d":
                must(cudart.cudaMemcpy(device, host, size, H2D))
            else:
                must(cudart.cudaMemcpy(host, device, size, D2H))
    except KeyboardInterrupt:
        caught += 1
    timer.join()
    data = random.integers(0, 256, size, np.uint8)
    must(cudart.cudaMemcpy(device, data, size, H2D))
    back = np.zeros_like(data)
    must(cudart.cudaMemcpy(back, device, size, D2H))
    assert (back == data).all(), n
    host[:] = data
    must(cudart.cudaMemcpy(device, host, size, H2D))
    host[:] = 0
    must(cudart.cudaMemcpy(host, device, size, D2H))
    assert (host == data).all(), n
must(cudart.cudaDeviceSynchronize())
assert flyt.inflight() == [], flyt.inflight()
must(cudart.cudaFree(device))
print(caught)
"""

INTERRUPTS = 8


@pytest.mark.parametrize("where", ["pageable", "pinned"])
@pytest.mark.parametrize("way", ["h2d", "d2h"])
def test_an_interrupted_copy_leaves_a_usable_session(
    backend: Callable[..., Any],
    run_client: Callable[..., subprocess.CompletedProcess[str]],
    device_kind: str,
    way: str,
    where: str,
) -> None:
    options = "latency=0.004" if device_kind == "emulated" else ""
    client = run_client(
        INTERRUPTED, backend(size="24M", device_options=options), way, where, str(INTERRUPTS)
    )
    assert client.returncode == 0, client.stderr
    assert int(client.stdout) == INTERRUPTS


# --- the interpreter's exit ---

EVERYTHING = """
import sys, threading, time
import numpy as np
import flyt, flyt as cudart

def everything():
    stream = flyt.Stream()
    pinned = flyt.pinned_empty(5000, np.uint8)
    pinned[:] = 1
    made = flyt.to_device(pinned, stream)
    made.copy_to_host(pinned, stream)
    return [stream, flyt.Event(timing=False), stream.record(), pinned, made,
            flyt.to_device(np.asfortranarray(np.ones((30, 40)))), flyt.DeviceArray((0, 3)),
            made.copy_to_host(), pinned[10:20]]
"""

EXITS = {
    "in globals": "kept = everything()",
    "in a cycle": """
class Node: pass
node = Node(); node.kept = everything(); node.itself = node
del node
""",
    "in an object with a finalizer": """
class Holder:
    def __init__(self): self.kept = everything()
    def __del__(self): self.kept[0].close(); self.kept[4].close(); del self.kept[:]
holder = Holder()
""",
    "in another module": "sys.kept = everything(); threading.kept = everything()",
    "in a thread that ended": """
local = threading.local()
def work(): local.kept = everything(); globals()['kept'] = everything()
thread = threading.Thread(target=work); thread.start(); thread.join()
""",
    "in a thread that outlives the main one": """
def work(): kept = everything(); time.sleep(0.3); kept.append(everything())
threading.Thread(target=work).start()
""",
    "in a daemon thread that sleeps": """
ready = threading.Event()
def work(): kept = everything(); ready.set(); time.sleep(60)
threading.Thread(target=work, daemon=True).start(); ready.wait(30)
""",
    "dropped and not collected yet": "kept = everything(); del kept",
    "after the session's end": "kept = everything(); flyt.connect().close(); more = kept[:]",
    "closed at exit": """
import atexit
kept = everything()
atexit.register(lambda: [one.close() for one in kept if hasattr(one, 'close')])
""",
    "by an exit in a with block": """
with flyt.Stream() as stream, flyt.to_device(np.ones(9), stream) as made:
    sys.exit(0)
""",
}


@pytest.mark.parametrize("how", EXITS)
def test_what_lives_at_exit_neither_raises_nor_hangs(
    one_backend: Any, run_client: Callable[..., subprocess.CompletedProcess[str]], how: str
) -> None:
    client = run_client(EVERYTHING + EXITS[how], one_backend, timeout=60)
    assert (client.returncode, client.stdout, client.stderr) == (0, "", "")
    assert ended(one_backend)


COPYING = """
ready = threading.Event()
def work():
    data, back = np.ones(1 << 20, np.uint8), flyt.pinned_empty(1 << 20, np.uint8)
    made = flyt.to_device(data)
    while True:
        made.copy_to_host(back)
        made.copy_to_host(data)
        ready.set()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
ready.wait(30)
"""


def test_exit_while_daemon_threads_copy(
    one_backend: Any, run_client: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """A copy may be cut off, and its thread may say so; the process ends all the same."""
    client = run_client(EVERYTHING + COPYING, one_backend, timeout=60)
    assert client.returncode == 0, client.stderr
    for word in ("Fatal", "Segmentation", "Aborted", "Assertion"):
        assert word not in client.stderr
    assert ended(one_backend)


def ended(backend: Any) -> bool:
    """Whether the backend's sessions are over, soon."""
    return eventually(lambda: not status(backend)["sessions"])
