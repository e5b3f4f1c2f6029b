# SPDX-License-Identifier: Apache-2.0
"""Cases that several clients run at once: processes of Flyt's, threads of a native program."""

from __future__ import annotations

import abc
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np

from flyt.bench.cases import Case, Host, Reference, Samples, compare
from flyt.bench.runtimes import Arguments, BenchFailed, Runtime

THREAD_LIMIT = 100.0
"""Seconds for the slowest of several threads of a round; a bound on hangs, below the harness's."""

NAP_SECONDS = 0.002
"""Before a start in common: long enough to sleep, and the rest is spent looking at the clock."""


class Together(Case):
    """Base of cases that several clients run at once, part by part.

    `begin`, for each part `ready` and `times`, `end`: only `times` is timed, and it starts when the
    clock that all processes share (`time.perf_counter`) says so.
    """

    PARTS: ClassVar[tuple[str, ...]]
    WAYS: ClassVar[int] = 1
    """Copies that one call of `calls` stands for in a part."""

    def begin(self) -> None:
        self._wanted = self.fresh()

    def ready(self, name: str) -> None:
        """Untimed, right before part `name`."""

    @abc.abstractmethod
    def part(self, name: str) -> None: ...

    def end(self) -> None:
        compare("copies of several clients", self.host.array, self._wanted)

    def times(self, name: str, at: float) -> tuple[float, float]:
        """Run one part at the time `at`; when it began and ended."""
        wait_until(at)
        started = time.perf_counter()
        self.part(name)
        return started, time.perf_counter()

    def round(self) -> Samples:
        raise BenchFailed("a case of several clients is run part by part")


class Stream(Together):
    """All copies one way, then all copies back."""

    PARTS = ("h2d", "d2h")

    def ready(self, name: str) -> None:
        if name == "d2h":
            self.spoil()

    def part(self, name: str) -> None:
        self.issue(self.runtime.copy, self.into if name == "h2d" else self.back)
        if name == "h2d":
            self.runtime.synchronize()


class Mix(Together):
    """Synchronous copies, half of them each way: each copy in is followed by one that brings the
    same bytes back, to another place."""

    PARTS = ("mix",)
    WAYS = 2

    def prepare(self) -> None:
        super().prepare()
        self._landed = Host(self.runtime, self.total, pinned=False)
        moved = self._landed.address - self.host.address
        self._pairs: list[Arguments] = []
        for into, (host, device, *rest) in zip(self.into, self.back, strict=True):
            self._pairs += [into, (host + moved, device, *rest)]

    def begin(self) -> None:
        super().begin()
        np.invert(self.host.array, out=self._landed.array)

    def part(self, name: str) -> None:  # noqa: ARG002 - there is one
        self.issue(self.runtime.copy, self._pairs)

    def end(self) -> None:
        compare("copies of several clients", self._landed.array, self._wanted)

    def close(self) -> None:
        self._landed.close()
        super().close()


class Threads:
    """`Mix` in several threads of one process, as a native program runs them."""

    def __init__(
        self, runtime: Runtime, *, pinned: bool, size: int, calls: int, threads: int
    ) -> None:
        self._cases: list[Mix] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for _ in range(threads):
                # Each a reference of its own: they run at the same time.
                self._cases.append(Mix(runtime, Reference(), pinned=pinned, size=size, calls=calls))
            undo.pop_all()

    def begin(self) -> None:
        for case in self._cases:
            case.begin()

    def ready(self, name: str) -> None:
        for case in self._cases:
            case.ready(name)

    def times(self, name: str, at: float) -> tuple[float, float]:
        """When the first thread began and the last one ended."""
        with ThreadPoolExecutor(len(self._cases)) as pool:
            runs = [pool.submit(case.times, name, at) for case in self._cases]
            found = [run.result(THREAD_LIMIT) for run in runs]
        return min(started for started, _ in found), max(ended for _, ended in found)

    def end(self) -> None:
        for case in self._cases:
            case.end()

    def close(self) -> None:
        while self._cases:
            self._cases.pop().close()


def wait_until(at: float) -> None:
    """Sleep until shortly before a time of `time.perf_counter`, then look at the clock."""
    while (left := at - time.perf_counter()) > 0:
        if left > NAP_SECONDS:
            time.sleep(left - NAP_SECONDS)


TOGETHER: dict[str, type[Together]] = {"stream": Stream, "mix": Mix}
"""Those that several clients run at once."""
