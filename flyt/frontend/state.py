# SPDX-License-Identifier: Apache-2.0
"""Looking at the current session: what is in flight, what moved, what went wrong last."""

from __future__ import annotations

from flyt.frontend import current
from flyt.frontend.inflight import InflightCommand


def inflight() -> list[InflightCommand]:
    """Commands of this process that were sent and not answered yet, oldest first."""
    session = current.existing()
    return session.inflight() if session is not None else []


def statistics() -> dict[str, int]:
    """Counters of the current session: bytes by way and direction, fallbacks, staging sizes.

    Returns
    -------
    dict of str to int
        Empty before the first CUDA call.
    """
    session = current.existing()
    return session.statistics() if session is not None else {}


def last_failure() -> str:
    """Why the last call of this thread that failed did so, in words; "" if none did."""
    return current.thread.last_failure
