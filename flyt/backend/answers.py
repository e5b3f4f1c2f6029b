# SPDX-License-Identifier: Apache-2.0
"""What a session answers: one answer for each command, plain successes together, and credits."""

from __future__ import annotations

from collections.abc import Iterable

from flyt.backend.wire import Wire
from flyt.rpc import messages as m
from flyt.rpc.sockets import Payload

CREDIT_STEP = m.CREDITS // 4
"""Credits are told in a message of their own when this many came together without an answer."""

TEXT_LIMIT = 4096
VALUES_LIMIT = 64
"""As many as the protocol has room for."""


class Answers:
    """The answers of one session. Used by its thread alone.

    Parameters
    ----------
    wire : Wire

    Attributes
    ----------
    have_ended : bool
        Whether the last word was said: nothing may follow it.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._taken = self._told = 0
        self._done: list[int] = []
        self.have_ended = False

    def take(self) -> None:
        """A command was taken: that gives its credit back."""
        self._taken += 1
        if self._taken - self._told >= CREDIT_STEP:
            self._say(m.Credit(self._taken))

    @property
    def taken(self) -> int:
        """Commands taken so far."""
        return self._taken

    def were_given(self, taken: int, unanswered: int) -> None:
        """The compiled loop took commands, ``taken`` by now in all, and told of all but the last
        so many (`flyt.backend.plain`)."""
        self._taken = taken
        self._told = max(self._told, taken - unanswered)

    def give(
        self,
        number: int,
        status: int = 0,
        values: Iterable[int] = (),
        *,
        text: str = "",
        payload: Payload | None = None,
    ) -> None:
        """The one answer to command ``number``. Plain successes wait for `tell`."""
        values = tuple(values)
        if not (status or values or text or payload is not None):
            self._done.append(number)
            return
        self.tell()
        result = m.Result(number, status, self._taken, values[:VALUES_LIMIT], text[:TEXT_LIMIT])
        self._say(result, payload)

    def tell(self) -> None:
        """Tell all plain successes so far, a message for each unbroken row of numbers."""
        if not self._done:
            return
        done, self._done = sorted(self._done), []
        start = 0
        while start < len(done):
            end = start + 1
            while end < len(done) and done[end] == done[end - 1] + 1:
                end += 1
            self._say(m.Done(self._taken, done[start], end - start))
            start = end

    def end(self, word: m.Result | m.Sticky) -> None:
        """Say the last word."""
        self.tell()
        self.have_ended = True
        self._wire.last_word([m.REPLIES.encode(word)])

    def end_in_success(self, number: int) -> None:
        """The answer to Bye."""
        self.end(m.Result(number, 0, self._taken, (), ""))

    def end_in_protocol_error(self, number: int, text: str) -> None:
        """The client broke the protocol with this command, or (0) outside any."""
        self.end(m.Result(number, m.Status.PROTOCOL, self._taken, (), text[:TEXT_LIMIT]))

    def _say(self, message: object, payload: Payload | None = None) -> None:
        self._told = self._taken
        frames: list[Payload] = [m.REPLIES.encode(message)]
        if payload is not None:
            frames.append(payload)
        self._wire.reply(frames)
