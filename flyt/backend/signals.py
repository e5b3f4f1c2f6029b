# SPDX-License-Identifier: Apache-2.0
"""`StopSignals`: SIGTERM and SIGINT as input of the event loop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from flyt.backend.loop import EventLoop


def _noted(number: int, frame: FrameType | None) -> None:
    """Python writes the number to the wake-up descriptor; nothing else is safe to do here."""


class StopSignals:
    """While open, the two signals make ``call`` in the loop instead of ending the process.

    Parameters
    ----------
    loop : EventLoop
    call : callable
        Gets the signal's name, once for each signal.
    """

    NUMBERS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, loop: EventLoop, call: Callable[[str], None]) -> None:
        self._loop = loop
        self._call = call
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old = {number: signal.signal(number, _noted) for number in self.NUMBERS}
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        loop.watch(self._read, self._woken)

    def _woken(self) -> None:
        for number in os.read(self._read, 64):
            if number in self._old:
                self._call(signal.Signals(number).name)

    def close(self) -> None:
        """Put everything back."""
        self._loop.unwatch(self._read)
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)
