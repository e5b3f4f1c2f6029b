# SPDX-License-Identifier: Apache-2.0
"""How long a receiver looks for the next message before it sleeps.

A wake-up of a sleeping thread costs up to 100 µs in a virtual machine, several times what all the
rest of a hand-off takes.
"""

from __future__ import annotations

import functools
import os

from flyt.environment import SPIN_US

SPIN_SECONDS = 0.0005
"""Who hands over in a loop sends its next array well within that time."""

BRIEF_SECONDS = 0.0003
"""Where few processors are."""

CORES_TO_SPIN = 4
CORES_TO_BE_POLITE = 2
"""With so many, who looks offers its processor to others all the while; with one nobody looks."""


@functools.cache
def _cores() -> int:
    return len(os.sched_getaffinity(0))


@functools.cache
def spin_seconds() -> float:
    """Seconds that ``recv`` looks before it sleeps; ``FLYT_SPIN_US`` makes it less.

    Raises
    ------
    ConfigurationError
        The variable is no number of microseconds.
    """
    default = SPIN_SECONDS if _cores() >= CORES_TO_SPIN else BRIEF_SECONDS
    if _cores() < CORES_TO_BE_POLITE:
        default = 0.0
    chosen = SPIN_US.read()
    return default if chosen is None else min(SPIN_SECONDS, chosen / 1e6)


def give_way() -> None:
    """Between two looks: let others run where processors are few."""
    if _cores() < CORES_TO_SPIN:
        os.sched_yield()
