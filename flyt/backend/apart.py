# SPDX-License-Identifier: Apache-2.0
"""`Apart`: what takes long in the driver, or in a compiler, on a thread of its own."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Protocol

from flyt.errors import DeviceError

log = logging.getLogger(__name__)

MEMORY_ALLOCATION = 2
UNKNOWN = 999


class Waiting(Protocol):
    """Counts what a session still waits for."""

    waiting: int


class Apart:
    """Work of one session apart from its thread, which alone uses this.

    Parameters
    ----------
    holdings : Waiting
    call_soon : callable
        Runs a function on the session's thread; callable from any thread.
    """

    def __init__(self, holdings: Waiting, call_soon: Callable[[Callable[[], None]], None]) -> None:
        self._holdings = holdings
        self._call_soon = call_soon
        self._count = 0

    @property
    def is_busy(self) -> bool:
        """Whether something is done apart now."""
        return self._count > 0

    def do(self, work: Callable[[], object], then: Callable[[object], None]) -> None:
        """Do ``work`` on a thread of its own; then call ``then`` on the session's, with its result
        or the DeviceError that it raised."""
        self._holdings.waiting += 1
        self._count += 1
        told = functools.partial(self._told, then)
        run = functools.partial(self._run, work, told)
        try:
            threading.Thread(target=run, name="flyt-apart", daemon=True).start()
        except RuntimeError as exc:  # the system has no thread left
            failure = DeviceError(MEMORY_ALLOCATION, str(exc))
            self._call_soon(functools.partial(told, failure))

    def _told(self, then: Callable[[object], None], result: object) -> None:
        self._holdings.waiting -= 1
        self._count -= 1
        then(result)

    def _run(self, work: Callable[[], object], told: Callable[[object], None]) -> None:
        try:
            result = work()
        except DeviceError as exc:
            result = exc
        except Exception as exc:  # a fault of ours must not leave the client waiting
            log.exception("a session's work apart failed")
            result = DeviceError(UNKNOWN, f"internal error: {exc!r}")
        self._call_soon(functools.partial(told, result))
