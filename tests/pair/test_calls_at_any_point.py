# SPDX-License-Identifier: Apache-2.0
"""A signal's handler that calls CUDA, wherever it comes in a call of its thread: both calls do what
they would alone, and neither waits for what only the other one could read."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.frontend import session
from flyt.rpc import sockets
from flyt.shm import ring
from tests.pair.points import Points
from tests.pair.test_interrupts import faults_of

pytestmark = [
    pytest.mark.skipif(ring.usable() is None, reason="the short way needs rings"),
    pytest.mark.emulated_only(reason="it says nothing of the device"),
]

STRIDE = int(os.environ.get("FLYT_TEST_STRIDE", "7"))
"""Every so many points are tried; 1 for all, which takes minutes."""

LIMIT = 20.0
"""Seconds: what stands still for so long waits for something that is lost."""

ASLEEP = 0.01
"""Seconds after which a worker that has nothing to do sleeps."""

FILES = {str(path) for path in Path(session.__file__).parent.glob("*.py")} | {
    sockets.__file__,
    ring.__file__,
}

H2D = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
D2H = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
SMALL, PAGEABLE, LONG = 4096, 100_000, 1 << 20


class Memory:
    """What a call moves, and whether it moved it."""

    def __init__(self) -> None:
        self.device = cudart.cudaMalloc(LONG)[1]
        self.small, self.pageable = np.empty(SMALL, np.uint8), np.empty(PAGEABLE, np.uint8)
        self.pinned = flyt.pinned_empty(LONG, np.uint8)

    def begin(self, value: int, at_home: int) -> None:
        """The value on the device, and another one here."""
        for array in (self.small, self.pageable, self.pinned):
            array[:] = at_home
        assert cudart.cudaMemset(self.device, value, LONG) == (0,)
        assert cudart.cudaDeviceSynchronize() == (0,)


Call = Callable[[Memory], Any]
OUTER: dict[str, tuple[Call, str]] = {
    "fill": (lambda m: cudart.cudaMemset(m.device, 7, SMALL), ""),
    "to host": (lambda m: cudart.cudaMemcpy(m.small, m.device, SMALL, D2H), "small"),
    "to host, by slots": (
        lambda m: cudart.cudaMemcpy(m.pageable, m.device, PAGEABLE, D2H),
        "pageable",
    ),
    "to device, by slots": (lambda m: cudart.cudaMemcpy(m.device, m.pageable, PAGEABLE, H2D), ""),
    "to pinned": (lambda m: cudart.cudaMemcpy(m.pinned, m.device, LONG, D2H), "pinned"),
    "from pinned": (lambda m: cudart.cudaMemcpy(m.device, m.pinned, LONG, H2D), ""),
    "a wait": (lambda _: cudart.cudaDeviceSynchronize(), ""),
    "a question": (lambda _: (cudart.cudaStreamQuery(0)[0] % 600,), ""),
    "memory": (lambda _: cudart.cudaFree(cudart.cudaMalloc(SMALL)[1]), ""),
}
"""And the array that it fills."""


def _inner(memory: Memory, codes: list[Any]) -> None:
    """Posts, and waits by each of the ways there are."""
    codes.append(cudart.cudaMemset(memory.device, 9, LONG))
    codes.append(cudart.cudaMemcpy(memory.pinned, memory.device, LONG, D2H))
    codes.append(cudart.cudaMemcpy(memory.pageable, memory.device, PAGEABLE, D2H))
    codes.append(cudart.cudaDeviceSynchronize())


@pytest.mark.parametrize("state", ["awake", "asleep", "busy"])
@pytest.mark.parametrize("name", OUTER)
def test_a_call_at_any_point(
    one_backend: Any, connect: Callable[..., Any], name: str, state: str
) -> None:
    """The worker sleeps, is awake, or has posts to do when the outer call begins."""
    current = connect(one_backend)
    current.connection.room._step = 2 * LIMIT  # after which a lost wake-up is made up for
    if state == "asleep":
        current.express._link.hold_ns = 0  # and nothing is waited for in the library
    outer, inner = Memory(), Memory()
    call, filled = OUTER[name]
    at = 1 + list(OUTER).index(name) % STRIDE
    while True:
        value = at % 100 + 100
        outer.begin(value, 3)
        inner.begin(4, 5)
        if state == "asleep":
            time.sleep(ASLEEP)
        for _ in range(30 if state == "busy" else 0):
            cudart.cudaMemset(outer.device, value, SMALL)
        codes: list[Any] = []
        points = Points(at, FILES, lambda codes=codes: _inner(inner, codes))
        timer = threading.Timer(LIMIT, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        timer.start()
        try:
            codes.append(points.run(lambda: call(outer)))
        except KeyboardInterrupt:
            codes.append("it stands still")
        finally:
            timer.cancel()
            timer.join()
        if not points.where:
            break
        faults = faults_of(current)
        if codes != [(0,)] * 5:
            faults.append(f"it answered {codes}")
        if not ((inner.pinned == 9).all() and (inner.pageable == 9).all()):
            faults.append("the inner call's bytes are wrong")
        if filled and not (getattr(outer, filled) == value).all():
            faults.append("the outer call's bytes are wrong")
        assert not faults, points.where
        at += STRIDE
    assert at > STRIDE, "Flyt was not in it"
    assert not current.connection.link.awaited
