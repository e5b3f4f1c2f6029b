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
from collections.abc import Callable

from flyt.backend.devices.base import Device
from flyt.errors import DeviceError

log = logging.getLogger(__name__)

_RECHECK_SECONDS = 0.05
"""A lost wake-up costs at most this; the condition is notified in every other case."""


class Activity:
    """Counts the work that sessions of a worker have in flight."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    def enter(self) -> None:
        with self._condition:
            self._count += 1

    def leave(self) -> None:
        with self._condition:
            self._count -= 1
            if self._count == 0:
                self._condition.notify_all()

    def wait_idle(self, seconds: float) -> bool:
        """Whether nothing is in flight, waiting for that at most ``seconds``."""
        with self._condition:
            return self._condition.wait_for(lambda: self._count == 0, seconds)


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
            if not self._activity.wait_idle(_RECHECK_SECONDS):
                continue
            device, address, done = self._items.popleft()
            try:
                if device is not None:
                    device.unregister(address)
            except DeviceError as exc:
                log.warning("segment at %#x could not be unregistered: %s", address, exc)
            done()

    def leave(self) -> None:
        """End the thread; what is left goes with the process."""
        with self._wake:
            self._leaving = True
            self._wake.notify()
