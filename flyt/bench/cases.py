# SPDX-License-Identifier: Apache-2.0
"""What one round of a case does: time some calls, then compare every byte that they moved.

Each call moves bytes of its own, from and to places of its own, so one comparison after the clock
has stopped covers all of them. Before each round the source changes in every byte and the target
is overwritten: bytes of an earlier copy can't pass for this one's.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flyt.bench.runtimes import Arguments, Asynchronous, BenchFailed, Runtime, pageable

Bytes = npt.NDArray[np.uint8]
Samples = dict[str, float]
"""Seconds, by what was timed."""

COMPARED_AT_ONCE = 4 << 20
"""A comparison makes an array of truth values as large as its operands."""

WARM_BYTES, WARM_COPIES = 4096, 4
"""The comparison of a large copy pushes all code out of the caches, and threads that wait fall
asleep meanwhile: a first call pays some 0.7 ms for that (docs/performance.md)."""


class Reference:
    """The bytes that copies are compared with; one for all cases of a process, which take turns."""

    def __init__(self) -> None:
        self._random = np.random.default_rng()
        self._bytes = np.zeros(0, np.uint8)

    def renew(self, size: int) -> Bytes:
        """`size` bytes, each of them another than when so many were asked for last."""
        if self._bytes.size < size:
            self._bytes = self._random.integers(0, 256, size, dtype=np.uint8)
        else:
            part = self._bytes[:size]
            np.add(part, 1, out=part)  # a byte comes back after 256 calls
        return self._bytes[:size]


class Host:
    """Host memory of one case, pageable or pinned, as an address and as an array."""

    def __init__(self, runtime: Runtime, size: int, *, pinned: bool) -> None:
        self._runtime = runtime
        self._block: Any = None
        if pinned:
            self.address = runtime.host_alloc(size)
        else:
            self.address, self._block = pageable(size)
        memory = (ctypes.c_uint8 * size).from_address(self.address)
        self.array: Bytes = np.frombuffer(memoryview(memory).cast("B"), np.uint8)

    def close(self) -> None:
        if self._block is None:
            self._runtime.free_host(self.address)
        else:
            self._block.close()


def compare(what: str, got: Bytes, wanted: Bytes) -> None:
    """Raise `BenchFailed` unless all bytes are equal."""
    for at in range(0, wanted.size, COMPARED_AT_ONCE):
        piece = slice(at, at + COMPARED_AT_ONCE)
        if not np.array_equal(got[piece], wanted[piece]):
            wrong = np.flatnonzero(got != wanted)
            raise BenchFailed(
                f"{what}: {wrong.size} of {wanted.size} bytes are wrong, "
                f"the first at offset {wrong[0]}"
            )


class Case(abc.ABC):
    """One case in one contender's process.

    Parameters
    ----------
    runtime : Runtime
    reference : Reference
    pinned : bool
        Kind of the host memory.
    size : int
        Bytes of one copy.
    calls : int
        Copies of a round (one way).
    """

    def __init__(
        self, runtime: Runtime, reference: Reference, *, pinned: bool, size: int, calls: int
    ) -> None:
        self.runtime, self.reference = runtime, reference
        self.size, self.calls = size, calls
        self.total = size * calls
        with contextlib.ExitStack() as undo:
            self.device = runtime.malloc(self.total)
            undo.callback(runtime.free, self.device)
            self.host = Host(runtime, self.total, pinned=pinned)
            undo.callback(self.host.close)
            self.aside = self._aside(runtime, undo, pinned=pinned)
            self.prepare()
            self._release = undo.pop_all()

    @staticmethod
    def _aside(runtime: Runtime, undo: contextlib.ExitStack, *, pinned: bool) -> list[Arguments]:
        """Arguments of a small copy each way, of bytes that nobody compares."""
        device = runtime.malloc(WARM_BYTES)
        undo.callback(runtime.free, device)
        host = Host(runtime, WARM_BYTES, pinned=pinned)
        undo.callback(host.close)
        return [
            runtime.copy_arguments(device, host.address, WARM_BYTES, to_device=True),
            runtime.copy_arguments(host.address, device, WARM_BYTES, to_device=False),
        ]

    def prepare(self) -> None:
        """Build the arguments of all calls: nothing but the calls is timed."""
        self.into = [self._arguments(i, to_device=True) for i in range(self.calls)]
        self.back = [self._arguments(i, to_device=False) for i in range(self.calls)]

    def _arguments(self, i: int, *, to_device: bool) -> Arguments:
        device, host = self.device + i * self.size, self.host.address + i * self.size
        dst, src = (device, host) if to_device else (host, device)
        return self.runtime.copy_arguments(dst, src, self.size, to_device=to_device)

    @abc.abstractmethod
    def round(self) -> Samples:
        """Time the case once; `BenchFailed` if a byte is wrong."""

    def close(self) -> None:
        self._release.close()

    # --- steps of a round ---

    def warm(self) -> None:
        """Small untimed copies, and a synchronise: what is timed is a call of a program that
        copies, not its first one after the comparison of a gigabyte."""
        for _ in range(WARM_COPIES):
            self.issue(self.runtime.copy, self.aside)
        self.runtime.synchronize()

    def fresh(self) -> Bytes:
        """New bytes in the source; returns what must arrive."""
        wanted = self.reference.renew(self.total)
        self.host.array[:] = wanted
        return wanted

    def spoil(self) -> None:
        """Other bytes, all of them, where the copies back will go."""
        np.invert(self.host.array, out=self.host.array)

    def fetch(self, wanted: Bytes, what: str) -> None:
        """Bring back what the device holds, untimed and at once, and compare it."""
        self.spoil()
        whole = self.runtime.copy_arguments(
            self.host.address, self.device, self.total, to_device=False
        )
        self.issue(self.runtime.copy, [whole])
        compare(what, self.host.array, wanted)

    def issue(self, call: Callable[..., Any], arguments: list[Arguments]) -> float:
        """Seconds that all calls together took."""
        clock = time.perf_counter
        started = clock()
        answers = [call(*a) for a in arguments]
        seconds = clock() - started
        self.runtime.check(answers)
        return seconds

    def each(self, call: Callable[..., Any], arguments: list[Arguments]) -> list[float]:
        """Seconds of each call."""
        clock, seconds, answers = time.perf_counter, [], []
        for a in arguments:
            started = clock()
            answers.append(call(*a))
            seconds.append(clock() - started)
        self.runtime.check(answers)
        return seconds


class Copy(Case):
    """``h2d``, ``d2h``: seconds of one copy, until the last byte is in place.

    All bytes are compared and changed between two large ones, which takes tens of milliseconds:
    each comes out of rest.
    """

    def lead(self, *, to_device: bool) -> None:  # noqa: ARG002 - for those who need it
        """What comes just before the timed calls."""
        self.warm()

    def round(self) -> Samples:
        wanted = self.fresh()
        self.lead(to_device=True)
        started = time.perf_counter()
        self.issue(self.runtime.copy, self.into)
        self.runtime.synchronize()  # H2D may return when its source is taken
        h2d = time.perf_counter() - started
        self.spoil()
        self.lead(to_device=False)
        d2h = self.issue(self.runtime.copy, self.back)
        compare(f"copies of {self.size} bytes", self.host.array, wanted)
        return {"h2d": h2d / self.calls, "d2h": d2h / self.calls}


class Loop(Copy):
    """The same right behind untimed copies of as many bytes, as in a program that copies all the
    time. They bring each half to the other one's place: they can't pass for what is timed."""

    def lead(self, *, to_device: bool) -> None:
        super().lead(to_device=to_device)
        half = self.total // 2
        for there, here in ((0, half), (half, 0)):
            device, host = self.device + there, self.host.address + here
            dst, src = (device, host) if to_device else (host, device)
            arguments = self.runtime.copy_arguments(dst, src, half, to_device=to_device)
            self.issue(self.runtime.copy, [arguments])
        self.runtime.synchronize()


class Latency(Case):
    """``d2h_p50``, ``d2h_p99``: seconds of one synchronous call; ``h2d_…``: with a synchronise."""

    def round(self) -> Samples:
        wanted = self.fresh()
        copy, synchronize = self.runtime.copy, self.runtime.synchronize

        def copy_and_wait(*arguments: Any) -> Any:
            answer = copy(*arguments)
            synchronize()
            return answer

        self.warm()
        h2d = self.each(copy_and_wait, self.into)
        self.spoil()
        self.warm()
        d2h = self.each(copy, self.back)
        compare("copies one by one", self.host.array, wanted)
        return {**_percentiles("h2d", h2d), **_percentiles("d2h", d2h)}


class Burst(Case):
    """``return``: seconds until one H2D of a short burst returns; nothing was under way before."""

    def round(self) -> Samples:
        wanted = self.fresh()
        self.warm()
        seconds = self.issue(self.runtime.copy, self.into)
        self.runtime.synchronize()
        self.fetch(wanted, "a burst of copies")
        return {"return": seconds / self.calls}


class Train(Case):
    """``each``: seconds of one H2D among many back to back, the closing synchronise included."""

    def round(self) -> Samples:
        wanted = self.fresh()
        self.warm()
        started = time.perf_counter()
        self.issue(self.runtime.copy, self.into)
        self.runtime.synchronize()
        seconds = time.perf_counter() - started
        self.fetch(wanted, "copies back to back")
        return {"each": seconds / self.calls}


class Post(Case):
    """``issue``: seconds that one cudaMemsetAsync takes to return."""

    def prepare(self) -> None:
        super().prepare()
        if not isinstance(self.runtime, Asynchronous):
            raise BenchFailed("a plain memcpy has no asynchronous calls")
        self._fill = self.runtime.fill
        self._stream = self.runtime.create_stream()
        self._value = 0

    def round(self) -> Samples:
        self._value += 1
        values = [(self._value + i) % 256 for i in range(self.calls)]
        arguments = [
            (self.device + i * self.size, value, self.size, self._stream)
            for i, value in enumerate(values)
        ]
        self.warm()
        seconds = self.issue(self._fill, arguments)
        self.runtime.synchronize()
        self.fetch(np.repeat(np.array(values, np.uint8), self.size), "memsets")
        return {"issue": seconds / self.calls}

    def close(self) -> None:
        if isinstance(self.runtime, Asynchronous):
            self.runtime.destroy_stream(self._stream)
        super().close()


def _percentiles(name: str, seconds: list[float]) -> Samples:
    return {
        f"{name}_p50": float(np.percentile(seconds, 50)),
        f"{name}_p99": float(np.percentile(seconds, 99)),
    }


CASES: dict[str, type[Case]] = {
    "copy": Copy,
    "loop": Loop,
    "latency": Latency,
    "burst": Burst,
    "train": Train,
    "post": Post,
}
