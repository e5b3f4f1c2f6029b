# SPDX-License-Identifier: Apache-2.0
"""A ZeroMQ socket together with its monitor, both read without blocking."""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterator

import zmq

from flyt.errors import ConfigurationError
from flyt.rpc.frames import Inbox, Outbox

_numbers = itertools.count()

_REPORT = struct.Struct("=Hi")
"""Event and value, as zmq_socket_monitor(3) lays out a report's first frame. pyzmq's reader of it
imports asyncio, which is a tenth of the start of a client, and of a worker."""


@contextlib.contextmanager
def made(failure: str) -> Iterator[contextlib.ExitStack]:
    """Make something of ZeroMQ's or nothing: what the block puts on the stack is undone where it
    fails. A socket that stays open holds up the end of its context for ever.

    Raises
    ------
    ConfigurationError
        In place of a ZMQError: ``failure``, and ZeroMQ's reason.
    """
    try:
        with contextlib.ExitStack() as undo:
            yield undo
            undo.pop_all()
    except zmq.ZMQError as exc:
        raise ConfigurationError(f"{failure}: {exc}") from exc


class Monitored:
    """A new socket and its monitor. Owns both.

    Raises
    ------
    zmq.ZMQError
        Either can't be had, for want of descriptors mostly; nothing is left then. (With fewer than
        about eight libzmq ends the process.)
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, events: int) -> None:
        with contextlib.ExitStack() as undo:
            self.socket = context.socket(kind)
            undo.callback(self.socket.close, 0)
            # Never the same again: libzmq lets go of a closed socket's address in its own time.
            address = f"inproc://monitor.{next(_numbers)}"
            self.socket.monitor(address, events)
            self.monitor = context.socket(zmq.PAIR)
            undo.callback(self.monitor.close, 0)
            self.monitor.connect(address)
            undo.pop_all()
        self.inbox, self.outbox = Inbox(self.socket), Outbox(self.socket)
        self._reports = Inbox(self.monitor)

    def events(self) -> Iterator[tuple[int, int]]:
        """(event, value) pairs that came since the last call."""
        while (frames := self._reports.next()) is not None:
            yield _REPORT.unpack(frames[0])

    def close(self) -> None:
        for end in (self.inbox, self.outbox, self._reports):
            end.close()
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()
