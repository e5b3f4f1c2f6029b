# SPDX-License-Identifier: Apache-2.0
"""A ZeroMQ socket together with its monitor, both read without blocking."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import zmq

from flyt.rpc.frames import Inbox, Outbox

_REPORT = struct.Struct("=Hi")
"""Event and value, as zmq_socket_monitor(3) lays out a report's first frame. pyzmq's reader of it
imports asyncio, which is a tenth of the start of a client, and of a worker."""


class Monitored:
    """A socket and its monitor. Owns both."""

    def __init__(self, socket: zmq.Socket[bytes], events: int) -> None:
        self.socket = socket
        self.inbox, self.outbox = Inbox(socket), Outbox(socket)
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(events)
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
