# SPDX-License-Identifier: Apache-2.0
"""An open device with a stream, a pool and pinned host memory."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from flyt.backend.devices import open_devices
from flyt.backend.devices.base import Device

LIMIT = 30.0
"""Seconds after which something hangs; all these tests take milliseconds."""


class Bench:
    """A device and what a session would hold of it."""

    def __init__(self, devices: list[Device]) -> None:
        self.devices = devices
        self.device = devices[0]
        self.pool = self.device.create_pool()
        self.stream = self.device.create_stream()
        self._gates: list[threading.Event] = []
        self._pinned: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    def pageable(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Page-aligned memory of its own mapping, zero."""
        return np.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=np.uint8)

    def pinned(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        array = self.pageable(size)
        self.device.register(array.ctypes.data, array.nbytes)
        self._pinned.append(array)
        return array

    def random(self, size: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Pinned memory of random bytes."""
        array = self.pinned(size)
        array[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        return array

    def allocate(self, size: int) -> int:
        return self.device.allocate(size, self.pool, self.stream)

    def wait(self, stream: Any = None, device: Device | None = None) -> int:
        """Until the work of a stream is done; the code it ended with."""
        done, codes = threading.Event(), []
        (device or self.device).notify(
            self.stream if stream is None else stream, lambda c: (codes.append(c), done.set())
        )
        assert done.wait(LIMIT), "the stream hangs"
        return codes[0]

    def read(self, address: int, size: int) -> bytes:
        """The bytes of device memory, once the work of the stream is done."""
        host = self.pinned(size)
        self.device.copy(host.ctypes.data, address, size, self.stream)
        assert self.wait() == 0
        return host.tobytes()

    def hold(self, stream: Any = None, device: Device | None = None) -> threading.Event:
        """Stops a stream until the event that it returns is set (emulated device only)."""
        gate = threading.Event()
        self._gates.append(gate)
        stream = self.stream if stream is None else stream
        (device or self.device).notify(stream, lambda code: gate.wait(LIMIT))
        return gate

    def close(self) -> None:
        for gate in self._gates:
            gate.set()
        if self.device.snapshot().kind == "cupy":  # its context outlives close()
            for array in self._pinned:
                self.device.unregister(array.ctypes.data)
        for device in self.devices:
            device.close()


@pytest.fixture
def open_bench(device_kind: str) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(options: str = "") -> Bench:
        benches.append(Bench(open_devices(device_kind, options)))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture
def bench(open_bench: Callable[..., Bench], device_kind: str) -> Bench:
    return open_bench("memory=1G" if device_kind == "emulated" else "")
