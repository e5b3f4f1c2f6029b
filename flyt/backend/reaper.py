# SPDX-License-Identifier: Apache-2.0
"""Unregisters host memory when nobody is hurt by it.

cudaHostUnregister waits for *all* work of the context, and while it waits it stalls the launches
and copies of every other session. So a segment that a session gave up keeps its registration, its
address unused, until no session of the worker has work in flight.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable

from flyt.backend.devices.base import Device
from flyt.errors import DeviceError, FlytError

log = logging.getLogger(__name__)

_RECHECK_SECONDS = 0.05
"""A lost wake-up costs at most this; the condition is notified in every other case."""


PATIENCE = 20
"""Looks, a twentieth of a second apart, before short work of others holds up nothing any more."""

SHORT_WORK_SECONDS = 0.05
"""A copy of 2 GiB; that long an unregistering may hold up the other sessions."""


class Activity:
    """The work that sessions of a worker have in flight."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._started: dict[int, float] = {}  # in the order in which it was begun
        self._next = 0
        self._awaited = 0

    def enter(self) -> int:
        """Work begins; the number is for `leave`."""
        with self._lock:
            self._next += 1
            self._started[self._next] = time.monotonic()
            return self._next

    def leave(self, number: int) -> None:
        with self._lock:
            del self._started[number]
            if self._awaited and not self._started:
                self._idle.notify_all()

    def wait_idle(self, seconds: float) -> bool:
        """Whether nothing is in flight, waiting for that at most ``seconds``."""
        with self._lock:
            self._awaited += 1
            try:
                return self._idle.wait_for(lambda: not self._started, seconds)
            finally:
                self._awaited -= 1

    def oldest(self) -> float:
        """Seconds that the oldest work in flight has taken so far; 0 if there is none."""
        with self._lock:
            first = next(iter(self._started.values()), None)
        return 0.0 if first is None else time.monotonic() - first


class Reaper(threading.Thread):
    """The thread that unregisters, and then unmaps, what sessions gave up."""

    def __init__(self, activity: Activity) -> None:
        super().__init__(name="flyt-reaper", daemon=True)
        self._activity = activity
        self._items: collections.deque[tuple[Device | None, int, Callable[[], None]]] = (
            collections.deque()
        )
        self._wake = threading.Condition()
        self._leaving = False
        self._patience = PATIENCE
        self._at_work = threading.Lock()

    def pause(self, seconds: float) -> bool:
        """Unregister nothing until `go_on`; False if it is at it for longer than ``seconds``."""
        return self._at_work.acquire(timeout=seconds)

    def go_on(self) -> None:
        """End a `pause`."""
        self._at_work.release()

    def take(self, device: Device | None, address: int, done: Callable[[], None]) -> None:
        """Unregister ``address`` on ``device`` at a quiet moment, then call ``done`` to unmap.

        With ``device`` None nothing is registered there, and ``done`` is only put in order behind
        what was handed over before.
        """
        with self._wake:
            self._items.append((device, address, done))
            self._wake.notify()

    def run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._items or self._leaving)
                if self._leaving:
                    return
            if self._quiet():
                with self._at_work:
                    self._reap(*self._items.popleft())

    @staticmethod
    def _reap(device: Device | None, address: int, done: Callable[[], None]) -> None:
        try:
            if device is not None:
                device.unregister(address)
        except DeviceError as exc:
            log.warning("segment at %#x could not be unregistered: %s", address, exc)
        try:
            done()
        except FlytError as exc:
            log.warning("segment at %#x could not be unmapped: %s", address, exc)

    def _quiet(self) -> bool:
        """Whether to unregister now: nobody works, or all that is in flight is short anyway.

        A worker that is never idle would else keep every segment for ever. Work that has taken
        long already may take an hour more, so that is waited for.
        """
        if self._activity.wait_idle(_RECHECK_SECONDS):
            return True
        self._patience -= 1
        if self._patience > 0 or self._activity.oldest() > SHORT_WORK_SECONDS:
            return False
        self._patience = PATIENCE
        return True

    def leave(self) -> None:
        """End the thread; what is left goes with the process."""
        with self._wake:
            self._leaving = True
            self._wake.notify()
