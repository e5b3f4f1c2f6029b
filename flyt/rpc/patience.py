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

from flyt.environment import SPIN_US

SPIN_SECONDS = 0.02
"""About a gigabyte of DMA; whoever waits longer does not notice a wake-up."""

LINGER_SECONDS = 0.0005
"""A program that calls in a loop sends its next command well within that time."""

BRIEF_SECONDS = 0.0003
"""Where few processors are: three times what going to sleep and waking up cost, and more than a
program needs between two small calls."""

CORES_TO_SPIN = 4
"""Client, session thread, and the I/O thread of each side want to run at the same time."""

CORES_TO_BE_POLITE = 2
"""With so many the spinner offers its processor to others all the while; with one nobody spins."""


@functools.cache
def _cores() -> int:
    return len(os.sched_getaffinity(0))


def is_polite() -> bool:
    """Whether who spins has to let others run."""
    return _cores() < CORES_TO_SPIN


@functools.cache
def spin_seconds() -> float:
    """Seconds that a client's thread looks for an answer before it sleeps.

    ``FLYT_SPIN_US`` sets it.

    Raises
    ------
    ConfigurationError
        The variable is no number of microseconds.
    """
    default = SPIN_SECONDS if _cores() >= CORES_TO_SPIN else BRIEF_SECONDS
    if _cores() < CORES_TO_BE_POLITE:
        default = 0.0
    chosen = SPIN_US.read()
    return default if chosen is None else chosen / 1e6


def linger_seconds() -> float:
    """Seconds that a session's thread looks for the next command before it sleeps."""
    return min(LINGER_SECONDS, spin_seconds())


def device_spin_seconds() -> float:
    """Seconds that a session's thread asks the device itself before it has it tell; asking takes
    the GIL, so not where processors are few."""
    return spin_seconds() if _cores() >= CORES_TO_SPIN else 0.0


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
