# SPDX-License-Identifier: Apache-2.0
"""`EventLoop`: one thread that waits for sockets, descriptors and times, and for nothing else."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Callable

import zmq

Source = int | zmq.Socket[bytes]
Call = Callable[[], None]

_LONGEST_WAIT = 60.0
"""Seconds. Nothing needs the wake-up; it only bounds the wait."""


@dataclasses.dataclass(slots=True)
class Timer:
    """A call to come; `cancel` it when it is not wanted any more."""

    due: float
    call: Call | None

    def cancel(self) -> None:
        """The call will not be made."""
        self.call = None


class EventLoop:
    """Level-triggered: a source's call is made as long as the source has input."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._calls: dict[Source, Call] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def watch(self, source: Source, call: Call) -> None:
        """Make ``call`` whenever ``source`` (descriptor or ZeroMQ socket) has input or ended."""
        self._poller.register(source, zmq.POLLIN)
        self._calls[source] = call

    def unwatch(self, source: Source) -> None:
        """Forget a source, before it is closed."""
        if self._calls.pop(source, None) is not None:
            self._poller.unregister(source)

    def call_later(self, seconds: float, call: Call) -> Timer:
        """Make ``call`` once, in so many seconds."""
        timer = Timer(time.monotonic() + seconds, call)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def turn(self, limit: float = _LONGEST_WAIT) -> None:
        """Wait for at most ``limit`` seconds, then make the calls that are due."""
        for source, _ in self._poller.poll(math.ceil(self._wait(limit) * 1000)):
            call = self._calls.get(source)  # an earlier call of this turn may have unwatched it
            if call is not None:
                call()
        self._run_timers()

    def turn_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Turn until ``done()``; False when that took longer than ``seconds``."""
        deadline = time.monotonic() + seconds
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.turn(left)
        return True

    def _wait(self, limit: float) -> float:
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if self._timers:
            limit = min(limit, self._timers[0][0] - time.monotonic())
        return max(0.0, min(limit, _LONGEST_WAIT))

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            call = heapq.heappop(self._timers)[2].call
            if call is not None:
                call()
