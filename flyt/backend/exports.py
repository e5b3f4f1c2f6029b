# SPDX-License-Identifier: Apache-2.0
"""What the sessions of one worker share: blocks and events, each behind a random token.

A worker serves one principal, so whoever finds a token here is the same user as who made it. A
shared thing lives until the last of its holders lets go of it; its token ends with its exporter's
hold.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Generic, TypeVar

from flyt.errors import DeviceError

T = TypeVar("T")

DEVICE_UNINITIALIZED = 201
INVALID_HANDLE = 400

TOKEN_BYTES = 16


@dataclasses.dataclass(slots=True, eq=False)
class Shared(Generic[T]):
    """Something of which several sessions hold a part.

    Attributes
    ----------
    owner : int
        The session that shared it.
    holders : int
        Guarded by the lock of its `Exports`.
    """

    thing: T
    owner: int
    token: bytes
    holders: int = 1


class Exports(Generic[T]):
    """Tokens, and what is behind them; for all session threads of a worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[bytes, Shared[T]] = {}

    def share(self, thing: T, session: int) -> Shared[T]:
        """Give something a token."""
        shared = Shared(thing, session, os.urandom(TOKEN_BYTES))
        with self._lock:
            self._known[shared.token] = shared
        return shared

    def open(self, token: bytes, session: int) -> Shared[T]:
        """Become a holder.

        Raises
        ------
        DeviceError
            cudaErrorInvalidResourceHandle: nothing in this worker has the token;
            cudaErrorDeviceUninitialized: it is the session's own.
        """
        with self._lock:
            shared = self._known.get(token)
            if shared is None:
                raise DeviceError(
                    INVALID_HANDLE,
                    "no living client that shares a worker with this one has exported this "
                    "handle: both must be the same user's, and the backend not run with "
                    "--isolation process",
                )
            if shared.owner == session:
                raise DeviceError(
                    DEVICE_UNINITIALIZED, "a handle can't be opened by the process that made it"
                )
            shared.holders += 1
            return shared

    def withdraw(self, shared: Shared[T]) -> None:
        """The exporter is letting go: nobody opens it any more."""
        with self._lock:
            self._known.pop(shared.token, None)

    def drop(self, shared: Shared[T]) -> bool:
        """Be no holder any more; whether that was the last, who has to end the thing."""
        with self._lock:
            shared.holders -= 1
            return not shared.holders
