# SPDX-License-Identifier: Apache-2.0
"""Who uses a session's mapped memory right now, so that it is not unmapped under their hands."""

from __future__ import annotations

import threading
from types import TracebackType


class Users:
    """Counts threads that copy to or from the window; ``with users:`` around each copy."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may make a call while it is held
        self._none = threading.Condition(self._lock)
        self._count = self._awaited = 0

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._count -= 1
            if self._awaited and not self._count:
                self._none.notify_all()

    def wait_for_none(self, seconds: float) -> bool:
        """Whether nobody uses the memory any more, waiting for that at most ``seconds``."""
        with self._lock:
            self._awaited += 1
            try:
                return self._none.wait_for(lambda: not self._count, seconds)
            finally:
                self._awaited -= 1
