# SPDX-License-Identifier: Apache-2.0
"""A command that is noted as sent just before it is, and how to undo that if it never was."""

from __future__ import annotations

from flyt.frontend.flow import Flow
from flyt.frontend.inflight import InflightTable, Pending
from flyt.frontend.streams import Event, Stream


class Attempt:
    """Under the connection's lock; remembers how all was before.

    Parameters
    ----------
    inflight : InflightTable
    flow : Flow
    stream : Stream, optional
        The command is to be its last one.
    event : Event, optional
        The command is to be its record.
    sent : list of Pending, optional
        Empty; gets the command before it goes out. Who is interrupted finds it there if it is on
        its way, else nothing has happened, and nothing finishes.
    """

    __slots__ = ("_event", "_flow", "_inflight", "_last", "_record", "_sent", "_stream", "_told")

    def __init__(
        self,
        inflight: InflightTable,
        flow: Flow,
        stream: Stream | None,
        event: Event | None,
        sent: list[Pending] | None,
    ) -> None:
        self._inflight, self._flow, self._sent = inflight, flow, flow.sent
        self._stream, self._last = stream, stream.last if stream is not None else None
        self._event, self._record = event, event.record if event is not None else None
        self._told = sent

    def begin(self, pending: Pending) -> None:
        """Note it as sent."""
        if self._stream is not None:
            self._stream.last = pending
        if self._event is not None:
            self._event.record = pending
        if self._told is not None:
            self._told.append(pending)
        self._inflight.add(pending)
        self._flow.sent += 1

    def undo(self, pending: Pending, others: int) -> None:
        """It was not sent, however far `begin` came; ``others`` were meanwhile, by this thread."""
        self._flow.sent = self._sent + others
        if self._stream is not None and self._stream.last is pending:
            self._stream.last = self._last
        if self._event is not None and self._event.record is pending:
            self._event.record = self._record
        if self._told is not None:
            self._told.clear()
        self._inflight.withdraw(pending)
