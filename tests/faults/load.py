# SPDX-License-Identifier: Apache-2.0
"""A mixed load whose every byte is verified, in processes that may be killed at any point of it.

``python -m tests.faults.load PROGRESS REPORT`` imports Flyt once and forks a client for each line
``SLOT SEED TARGET`` on its input; the client's pid is the answer. TARGET names an operation that is
done every second time, or ``steady`` for a client that allocates nothing once it has started. Each
client notes in its byte of PROGRESS which operation it is in; a wrong byte goes to REPORT, and so
does the number of operations when its other byte says stop.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
from collections.abc import Callable

import numpy as np

import flyt
import flyt as cudart

K = cudart.cudaMemcpyKind
SIZE = 1 << 20
SMALL = 4096
SLOTS = 64
IDLE, STOP = 255, 1


class Wrong(Exception):
    """Flyt failed, or gave other bytes than were put there."""


def must(answer: tuple) -> int:
    if answer[0] != 0:
        raise Wrong(f"{answer[0]!r}: {flyt.last_failure()}")
    return answer[-1]


class Load:
    """One client: device memory, and what should be in it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.connect()

    def connect(self) -> None:
        self.session = flyt.connect()
        self.device = must(cudart.cudaMalloc(SIZE))
        self.pinned = flyt.pinned_empty(SIZE, np.uint8)
        self.stream = must(cudart.cudaStreamCreate())
        self.event = must(cudart.cudaEventCreate())
        self.mirror = np.zeros(SIZE, np.uint8)
        must(cudart.cudaMemset(self.device, 0, SIZE))

    def reconnect(self) -> None:
        self.session.close()
        self.connect()

    def _range(self, largest: int = SIZE) -> tuple[int, int]:
        size = self.random.randint(1, largest)
        return self.random.randint(0, SIZE - size), size

    def _data(self, size: int) -> np.ndarray:
        return np.frombuffer(self.random.randbytes(size), np.uint8)

    def _is(self, found: np.ndarray, start: int) -> None:
        expected = self.mirror[start : start + len(found)]
        if not np.array_equal(found, expected):
            at = int(np.flatnonzero(found != expected)[0])
            raise Wrong(f"byte {start + at} is {found[at]}, not {expected[at]}")

    def _write(self, largest: int) -> None:
        start, size = self._range(largest)
        data = self._data(size)
        must(cudart.cudaMemcpy(self.device + start, data, size, K.cudaMemcpyHostToDevice))
        self.mirror[start : start + size] = data

    def write_small(self) -> None:
        self._write(SMALL)

    def write_large(self) -> None:
        self._write(SIZE)

    def read(self) -> None:
        start, size = self._range()
        back = np.empty(size, np.uint8)
        must(cudart.cudaMemcpy(back, self.device + start, size, K.cudaMemcpyDeviceToHost))
        self._is(back, start)

    def write_pinned(self) -> None:
        start, size = self._range()
        self.pinned[:size] = data = self._data(size)
        copy = (self.device + start, self.pinned[:size], size, K.cudaMemcpyHostToDevice)
        must(cudart.cudaMemcpyAsync(*copy, self.stream))
        self.mirror[start : start + size] = data
        must(cudart.cudaStreamSynchronize(self.stream))

    def read_pinned(self) -> None:
        start, size = self._range()
        self.pinned[:size] = 0
        copy = (self.pinned[:size], self.device + start, size, K.cudaMemcpyDeviceToHost)
        must(cudart.cudaMemcpyAsync(*copy, self.stream))
        must(cudart.cudaEventRecord(self.event, self.stream))
        must(cudart.cudaEventSynchronize(self.event))
        self._is(self.pinned[:size], start)

    def copy_on(self) -> None:
        start, size = self._range(SIZE // 2)
        target = (start + SIZE // 2) % (SIZE // 2) if start >= SIZE // 2 else SIZE // 2
        size = min(size, SIZE // 2, SIZE - target, SIZE - start)
        if start < target < start + size or target < start < target + size:
            size = abs(target - start)
        where = (self.device + target, self.device + start)
        must(cudart.cudaMemcpy(*where, size, K.cudaMemcpyDeviceToDevice))
        self.mirror[target : target + size] = self.mirror[start : start + size].copy()

    def fill(self) -> None:
        (start, size), value = self._range(), self.random.randrange(256)
        must(cudart.cudaMemset(self.device + start, value, size))
        self.mirror[start : start + size] = value

    def wait(self) -> None:
        must(cudart.cudaDeviceSynchronize())

    def allocate(self) -> None:
        size = self.random.randint(1, SIZE)
        data, back = self._data(size), np.empty(size, np.uint8)
        block = must(cudart.cudaMalloc(size))
        must(cudart.cudaMemcpy(block, data, size, K.cudaMemcpyHostToDevice))
        must(cudart.cudaMemcpy(back, block, size, K.cudaMemcpyDeviceToHost))
        must(cudart.cudaFree(block))
        if not np.array_equal(data, back):
            raise Wrong("a block of its own came back wrong")

    def pin(self) -> None:
        array = flyt.pinned_empty(self.random.randint(1, SIZE), np.uint8)
        array[:] = self.mirror[: len(array)]
        must(cudart.cudaMemcpy(self.device, array, len(array), K.cudaMemcpyHostToDevice))

    def make_stream(self) -> None:
        stream = must(cudart.cudaStreamCreate())
        value = self.random.randrange(256)
        must(cudart.cudaMemsetAsync(self.device, value, SMALL, stream))
        self.mirror[:SMALL] = value
        must(cudart.cudaStreamSynchronize(stream))
        must(cudart.cudaStreamDestroy(stream))


STEADY = (
    Load.write_small,
    Load.write_large,
    Load.read,
    Load.write_pinned,
    Load.read_pinned,
    Load.copy_on,
    Load.fill,
    Load.wait,
)
"""What neither takes nor gives back anything."""

OPERATIONS: tuple[Callable[[Load], None], ...] = (
    Load.connect,  # at the start, and after a close
    *STEADY,
    Load.allocate,
    Load.pin,
    Load.make_stream,
    Load.reconnect,
)

NAMES = [operation.__name__ for operation in OPERATIONS]


def client(slot: int, seed: int, target: str, progress: mmap.mmap) -> str:
    """Work until told to stop; the report."""
    steady = target == "steady"
    progress[slot] = 0
    load = Load(seed)
    choice, done = random.Random(seed), 0
    while progress[SLOTS + slot] != STOP:
        number = choice.randrange(1, len(STEADY) + 1 if steady else len(OPERATIONS))
        if not steady and done % 2:
            number = NAMES.index(target)
        if number == 0:
            load.session.close()
        progress[slot] = number
        OPERATIONS[number](load)
        done += 1
    load.read()
    load.session.close()
    return f"{done} operations"


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the clients
    with open(sys.argv[1], "r+b") as file:
        progress = mmap.mmap(file.fileno(), 2 * SLOTS)
    report = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND)
    for line in iter(sys.stdin.readline, ""):
        slot, seed, target = line.split()
        pid = os.fork()
        if pid:
            sys.stdout.write(f"{pid}\n")
            sys.stdout.flush()
            continue
        os.close(0)
        try:
            text = client(int(slot), int(seed), target, progress)
        except (Wrong, flyt.FlytError) as exc:
            text = f"WRONG in {NAMES[progress[int(slot)]]}, seed {seed}: {exc!r}"
        os.write(report, f"{slot} {text}\n".encode())
        os._exit(0)


if __name__ == "__main__":
    main()
