# SPDX-License-Identifier: Apache-2.0
"""Counters of a session: what moved which way, and every fallback that was taken."""

from __future__ import annotations

import collections
import logging
import threading
import warnings

log = logging.getLogger("flyt")

COUNTERS = (
    "staged_h2d_bytes", "staged_d2h_bytes",
    "pinned_h2d_bytes", "pinned_d2h_bytes",
    "inline_h2d_bytes", "inline_d2h_bytes",
    "device_to_device_bytes", "host_to_host_bytes", "image_bytes",
    "fallback_inline", "fallback_small_staging", "fallback_doorbell",
)  # fmt: skip
"""Every counter that `flyt.statistics` shows; bytes, or how often."""


class FlytWarning(RuntimeWarning):
    """Flyt works, but slower than it could; the text says why and what to do."""


class Statistics:
    """Counts for one session; from any thread."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.RLock()  # a signal's handler may make a call while it is held

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def fallback(self, name: str, why: str) -> None:
        """Count a fallback, and warn the first time."""
        self.add(name)
        if self._counts[name] == 1:
            log.warning(why)
            warnings.warn(why, FlytWarning, stacklevel=2)

    def snapshot(self) -> dict[str, int]:
        """All counters, zeros included."""
        with self._lock:
            return {name: self._counts[name] for name in COUNTERS}
