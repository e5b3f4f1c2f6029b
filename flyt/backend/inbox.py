# SPDX-License-Identifier: Apache-2.0
"""An inbox: functions that other threads hand to a session's thread, and the wake-up for them."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable


class Inbox:
    """Any thread puts, one thread takes."""

    def __init__(self) -> None:
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """The descriptor to poll for input."""
        return self._wake

    def __bool__(self) -> bool:
        """Whether there is something to run."""
        return bool(self._calls)

    def put(self, call: Callable[[], None]) -> None:
        """Have ``call`` run on the taking thread; never waits. After `close` it is dropped."""
        self._calls.append(call)
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def run(self) -> bool:
        """Run what is there; whether there was anything. What a call raises goes to the caller,
        and the rest stays for the next time."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return False
        while self._calls:
            self._calls.popleft()()
        return True

    def close(self) -> None:
        with self._lock:
            os.close(self._wake)
            self._wake = -1
