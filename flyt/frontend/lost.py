# SPDX-License-Identifier: Apache-2.0
"""The end of a session, as every later call reports it."""

from __future__ import annotations

from flyt.errors import SessionLost

DEVICES_UNAVAILABLE = 46
"""cudaErrorDevicesUnavailable: the worker died without a word."""

CLOSED = "the session was closed"


class Lost(SessionLost):
    """The session is gone; ``code`` is the cudaError_t that every call answers from now on."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return self.reason
