# SPDX-License-Identifier: Apache-2.0
"""A ZeroMQ socket together with its monitor, both read without blocking."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import zmq

_REPORT = struct.Struct("=Hi")
"""Event and value, as zmq_socket_monitor(3) lays out a report's first frame. pyzmq's reader of it
imports asyncio, which is a tenth of the start of a client, and of a worker."""


class Frames:
    """Reads whole messages without blocking, and loses none to a Ctrl-C between two frames."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._parts: list[bytes] = []

    def next(self) -> list[bytes] | None:
        parts, socket = self._parts, self._socket
        while not parts or socket.getsockopt(zmq.RCVMORE):
            if not int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
                return None
            # `map` hands the frame over in the same step that takes it off the socket.
            parts.extend(map(socket.recv, (zmq.NOBLOCK,)))
        self._parts = []
        return parts


class Monitored:
    """A socket and its monitor. Owns both."""

    def __init__(self, socket: zmq.Socket[bytes], events: int) -> None:
        self.socket = socket
        self.messages = Frames(socket)
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(events)
        self._reports = Frames(self.monitor)

    def events(self) -> Iterator[tuple[int, int]]:
        """(event, value) pairs that came since the last call."""
        while (frames := self._reports.next()) is not None:
            yield _REPORT.unpack(frames[0])

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()
