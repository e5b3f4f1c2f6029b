# SPDX-License-Identifier: Apache-2.0
"""A lock inside which no signal handler runs, so that Ctrl-C can't tear what it guards.

Python runs signal handlers on the main thread between any two steps. A KeyboardInterrupt between
sending a command and noting it would leave a table that is wrong. Signals that come while the lock
is held are delivered when it is given back: `with` then raises at its end, with all tables whole.
"""

from __future__ import annotations

import signal
import threading
from types import TracebackType

_SHIELDED = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGALRM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGCHLD,
        signal.SIGPROF,
        signal.SIGVTALRM,
    }
)
"""Signals whose handlers programs write in Python."""


class ShieldedLock:
    """A reentrant lock. Nobody waits or copies while holding it, so it is held for microseconds."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._main = threading.main_thread().ident
        self._depth = 0  # of the main thread
        self._mask: set[int] = set()

    def __enter__(self) -> None:
        if threading.get_ident() != self._main:
            self._lock.acquire()
            return
        if not self._depth:
            # What has come already is raised here, before anything is touched.
            mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, _SHIELDED)
            except BaseException:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                raise
            self._mask = mask
        self._depth += 1
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()
        if threading.get_ident() != self._main:
            return
        self._depth -= 1
        if not self._depth:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
