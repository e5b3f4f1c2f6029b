# SPDX-License-Identifier: Apache-2.0
"""Patience: a deadline that several steps share, and how long to ask before going to sleep.

A wake-up of a sleeping thread costs up to 100 µs in a virtual machine, and a copy crosses several.
A copy of 256 MiB takes 5 ms, so spinning for that long is what CUDA's own cudaMemcpy does too. On
few cores the spinner would take the time from the thread that it waits for.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time

SPIN_SECONDS = 0.02
"""About a gigabyte of DMA; whoever waits longer does not notice a wake-up."""

LINGER_SECONDS = 0.0005
"""A program that calls in a loop sends its next command well within that time."""

CORES_TO_SPIN = 4
"""Client, session thread, and the I/O thread of each side want to run at the same time."""


@functools.cache
def linger_seconds() -> float:
    """Seconds that a session's thread looks for the next command; 0 on few cores."""
    return LINGER_SECONDS if spin_seconds() else 0.0


@functools.cache
def spin_seconds() -> float:
    """Seconds to spin in this process; 0 on few cores."""
    return SPIN_SECONDS if len(os.sched_getaffinity(0)) >= CORES_TO_SPIN else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time that several steps share."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds left, 0 when over."""
        return max(0.0, self.at - time.monotonic())
