# SPDX-License-Identifier: Apache-2.0
"""`Inbox`: what a peer has sent and nobody has taken yet, and the threads that wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from flyt.errors import FlytError, PeerTimeout
from flyt.ipc.messages import Refusal, Share

MAX_UNREAD = 256
"""Arrays that may wait to be received; the peer's `send` blocks behind them."""

MAX_UNREAD_FDS = 512
"""Their descriptors: half of the usual limit of a process (1,024)."""

Parcel = tuple[Share, tuple[int, ...]]
"""A share and its descriptors, which belong to whoever holds the parcel."""

Answer = tuple[Share | Refusal, tuple[int, ...]]


class Inbox:
    """Shares in order, answers by token, and why no more come.

    Attributes
    ----------
    lock : threading.RLock
        Guards all of it; the connection's own tables too.
    changed : threading.Condition
        Of that lock, which is quicker to take by itself.
    reason : FlytError or None
        Why nothing more comes; what came before can still be taken.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._waiting = 0
        self.reason: FlytError | None = None
        self._parcels: deque[Parcel] = deque()
        self._answers: dict[bytes, Answer | None] = {}
        self._fds = 0

    def has_room(self) -> bool:
        return len(self._parcels) < MAX_UNREAD and self._fds < MAX_UNREAD_FDS

    def put(self, parcel: Parcel) -> None:
        with self.lock:
            self._parcels.append(parcel)
            self._fds += len(parcel[1])
            if self._waiting:
                self.changed.notify_all()

    def put_answer(self, token: bytes, answer: Answer) -> bool:
        """False if nobody waits for it: its claimer has given up, or the peer made it up."""
        with self.changed:
            awaited = token in self._answers and self._answers[token] is None
            if awaited:
                self._answers[token] = answer
                self.changed.notify_all()
            return awaited

    def end(self, reason: FlytError) -> None:
        """Nothing more comes; the first reason counts."""
        with self.changed:
            self.reason = self.reason or reason
            self.changed.notify_all()

    def check(self) -> None:
        """Raise the reason for which nothing more comes, if there is one."""
        if self.reason is not None:
            raise type(self.reason)(*self.reason.args) from self.reason

    def has_parcel(self) -> bool:
        return bool(self._parcels) or self.reason is not None

    def has_answer(self, token: bytes) -> bool:
        return self._answers.get(token) is not None or self.reason is not None

    def take(self, peer: int, timeout: float) -> Parcel:
        """The next share."""
        with self.lock:
            if not self._parcels:
                self._wait(lambda: bool(self._parcels), peer, timeout)
            parcel = self._parcels.popleft()
            self._fds -= len(parcel[1])
            return parcel

    def expect(self, token: bytes) -> None:
        """An answer to this token will be asked for."""
        with self.changed:
            self._answers[token] = None

    def forget(self, token: bytes) -> None:
        with self.changed:
            self._answers.pop(token, None)

    def take_answer(self, token: bytes, peer: int, timeout: float) -> Answer:
        with self.changed:
            self._wait(lambda: self._answers[token] is not None, peer, timeout)
            answer = self._answers[token]
            if answer is None:
                raise PeerTimeout("the answer was taken by another thread")
            return answer

    def _wait(self, condition: Callable[[], bool], peer: int, timeout: float) -> None:
        self._waiting += 1
        try:
            self.changed.wait_for(lambda: condition() or self.reason is not None, timeout)
        finally:
            self._waiting -= 1
        if not condition():
            self.check()
            raise PeerTimeout(f"process {peer} has sent nothing within {timeout} s")

    def drain(self) -> list[Parcel]:
        """All that nobody will take."""
        with self.changed:
            parcels = list(self._parcels)
            self._parcels.clear()
            self._fds = 0
            return parcels
