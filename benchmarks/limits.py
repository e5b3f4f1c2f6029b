# SPDX-License-Identifier: Apache-2.0
"""What the parts of a small call and of a staged copy cost by themselves: ``limits.py [JSON]``.

The floors under the figures of ``flyt bench`` that miss their bounds (docs/performance.md). Needs
the compiled library and 64 MiB of /dev/shm; no GPU, no backend. Medians, in microseconds or GB/s.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import flyt
from flyt.bench.machine import describe
from flyt.frontend.inflight import Pending
from flyt.frontend.shield import ShieldedLock
from flyt.rpc import messages as m
from flyt.shm import layout, ring
from flyt.shm.copy import CopyEngine
from flyt.shm.native import native

ROUNDS = 2000
BLOCK = 64 << 20
SLOT = 8 << 20
HANG = 20.0
"""Seconds; nothing here takes so long."""


def per_call(call: Callable[[], object], batches: int = 15) -> float:
    """Microseconds: median over batches of the mean of a batch."""
    means = []
    for _ in range(batches):
        started = time.perf_counter()
        for _ in range(ROUNDS):
            call()
        means.append((time.perf_counter() - started) / ROUNDS * 1e6)
    return statistics.median(means)


def echo() -> float:
    """Microseconds for a message through one ring and back through the other, between two
    processes that do nothing else and never sleep: no client can be faster than this."""
    library = native()
    if library is None:
        raise SystemExit("the compiled library is missing: python3 flyt/shm/native/build.py")
    page = mmap.mmap(-1, layout.RINGS_END)
    address = np.frombuffer(page, np.uint8).ctypes.data
    message = bytes(64)
    child = os.fork()
    if child == 0:
        commands, replies = ring.backend_rings(library, address)
        while commands.wait(HANG, polite=False) and (got := commands.read()):
            replies.write(got)
        os._exit(0)
    commands, replies = ring.frontend_rings(library, address)

    def there_and_back() -> None:
        commands.write(message)
        if not replies.wait(HANG, polite=False):
            raise SystemExit("the echo stopped")
        replies.read()

    taken = per_call(there_and_back)
    commands.write(ring.ELSEWHERE)
    os.waitpid(child, 0)
    return taken


def wake_up(rest: float) -> float:
    """Microseconds until a sleeping thread of another process has answered, after a rest."""
    there, back = os.eventfd(0), os.eventfd(0)
    child = os.fork()
    if child == 0:
        while os.eventfd_read(there) == 1:
            os.eventfd_write(back, 1)
        os._exit(0)
    times = []
    for _ in range(50):
        time.sleep(rest)
        started = time.perf_counter()
        os.eventfd_write(there, 1)
        os.eventfd_read(back)
        times.append((time.perf_counter() - started) * 1e6)
    os.eventfd_write(there, 2)
    os.waitpid(child, 0)
    os.close(there)
    os.close(back)
    return statistics.median(times)


def after_a_wait(seconds: float) -> float:
    """Microseconds of the same Python code after the thread has spun for a while in the library."""
    library = native()
    page = mmap.mmap(-1, layout.RINGS_END)
    _, replies = ring.frontend_rings(library, np.frombuffer(page, np.uint8).ctypes.data)  # type: ignore[arg-type]
    times = []
    for _ in range(60):
        replies.wait(seconds, polite=False)
        started = time.perf_counter()
        for number in range(8):
            m.COMMANDS.decode(m.COMMANDS.encode(m.CopyIn(number, 1, 2, 3, 4)))
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


def staging(threads: int, piece: int) -> float:
    """GB/s into memory that another process maps, queued in pieces, two at a time."""
    fd = os.memfd_create("limits")
    os.ftruncate(fd, BLOCK)
    shared = np.frombuffer(mmap.mmap(fd, BLOCK), np.uint8)
    own = np.ones(BLOCK, np.uint8)
    shared[:] = 0
    engine = CopyEngine(threads)
    speeds = []
    for _ in range(12):
        jobs: list[Any] = []
        started = time.perf_counter()
        for at in range(0, BLOCK, piece):
            jobs.append(now := [])
            engine.post(now, shared.ctypes.data + at, own.ctypes.data + at, piece)
            while len(jobs) > 2:
                engine.wait(jobs.pop(0))
        for left in jobs:
            engine.wait(left)
        speeds.append(BLOCK / (time.perf_counter() - started) / 1e9)
    engine.close()
    os.close(fd)
    return statistics.median(speeds)


def microseconds() -> dict[str, float]:
    """Costs by what they are the cost of."""
    copy_out = m.COMMANDS.encode(m.CopyOut(1, 2, 3, 4096, 5))
    result = m.REPLIES.encode(m.Result(1, 0, 1, [], ""))
    lock = ShieldedLock()

    def locked() -> None:
        with lock:
            pass

    return {
        "a call of the API that asks nobody (cudaGetErrorString)": per_call(
            lambda: flyt.cudaGetErrorString(2)
        ),
        "make and encode a command": per_call(
            lambda: m.COMMANDS.encode(m.CopyOut(1, 2, 3, 4096, 5))
        ),
        "decode a command": per_call(lambda: m.COMMANDS.decode(copy_out)),
        "decode an answer": per_call(lambda: m.REPLIES.decode(result)),
        "note a command in flight": per_call(lambda: Pending(1, "CopyOut", 4096, (0, 0))),
        "take and give the connection's lock": per_call(locked),
        "a message there and back through the rings": echo(),
        "wake a thread of another process, both warm": wake_up(0.0),
        "wake it after 5 ms of rest": wake_up(0.005),
        "eight messages encoded and decoded": after_a_wait(0.0),
        "the same after a spin of 1 ms": after_a_wait(0.001),
        "the same after a spin of 5 ms": after_a_wait(0.005),
    }


def main(target: str | None) -> None:
    """Measure, print, and write JSON if asked to."""
    cores = len(os.sched_getaffinity(0))
    counts = sorted({n for n in (1, 2, 4, 8, 12, 16) if n <= max(2, cores)})
    times = microseconds()
    speeds = {f"{n} threads": staging(n, SLOT) for n in counts}
    for name, value in times.items():
        print(f"{name:55s} {value:8.2f} us")
    for name, value in speeds.items():
        print(f"{f'copy into the region in slots of 8 MiB, {name}':55s} {value:8.2f} GB/s")
    if target:
        with open(target, "w", encoding="utf-8") as file:
            found = {"machine": describe(), "microseconds": times, "gb_per_s": speeds}
            json.dump(found, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
