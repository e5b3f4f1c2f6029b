# SPDX-License-Identifier: Apache-2.0
"""A thread that waits for the events of one CUDA stream and calls back, in their order.

CUDA's own host callbacks may not call CUDA and run on a thread of the driver; here a wait that
does not hold the GIL does the same.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from flyt.backend.devices import codes
from flyt.backend.devices.base import Notification
from flyt.errors import DeviceError

_log = logging.getLogger(__name__)


class Waiter:
    """Serves one stream; its thread starts with the first notification.

    Parameters
    ----------
    wait : callable
        Waits for an event and returns the cudaError_t.
    ended : callable
        Called once, with the waiter, when it has no more to do.
    """

    def __init__(self, wait: Callable[[int], int], ended: Callable[[Waiter], None]) -> None:
        self._wait = wait
        self._ended = ended
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[int, Notification] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._finished = False

    def put(self, event: int, call: Notification) -> None:
        """Queue an event that is recorded already."""
        with self._lock:
            if self._finished:
                raise DeviceError(codes.INVALID_RESOURCE_HANDLE, "watch: the stream is destroyed")
            if self._thread is None:
                self._thread = self._start()
            self._queue.put((event, call))

    def finish(self) -> None:
        """No more will come: the thread ends after what was put. Idempotent."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            thread = self._thread
            self._queue.put(None)
        if thread is None:
            self._ended(self)

    def join(self, deadline: float) -> bool:
        """Waits until ``deadline`` (`time.monotonic`) for the end of the thread."""
        if self._thread is None:
            return True
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="flyt-cupy-waiter", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # the process has as many threads as it may have
            raise DeviceError(codes.OPERATING_SYSTEM, f"wait for a stream: {exc}") from exc
        return thread

    def _run(self) -> None:
        # An idle waiter waits here for its next event, and ends when finish() puts None.
        while (item := self._queue.get()) is not None:
            event, call = item
            code = self._wait(event)
            try:
                call(code)
            except Exception:  # noqa: BLE001 - a bug of the caller: it would silently end the waiter
                _log.exception("a notification raised; the stream goes on")
        self._ended(self)
