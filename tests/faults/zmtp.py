# SPDX-License-Identifier: Apache-2.0
"""A peer that speaks ZeroMQ's wire protocol (ZMTP 3, RFC 23) itself, to break its rules.

libzmq reads for its user in the background and sends whole messages only; this one reads when told
to, and may send a message that never ends.
"""

from __future__ import annotations

import socket
import struct
from types import TracebackType

from flyt.rpc.endpoints import Endpoint

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
MORE, LONG, COMMAND = 1, 2, 4
LIMIT = 20.0
"""Seconds: a hang, not a measure of speed."""


def frame(data: bytes, flags: int = 0) -> bytes:
    """One frame as it lies on the wire."""
    if len(data) < 256:
        return bytes([flags, len(data)]) + data
    return struct.pack(">BQ", flags | LONG, len(data)) + data


class Zmtp:
    """One connection, greeted. A context manager."""

    def __init__(self, endpoint: Endpoint) -> None:
        family = socket.AF_UNIX if endpoint.scheme == "ipc" else socket.AF_INET
        self.socket = socket.socket(family)
        self.socket.settimeout(LIMIT)
        self._buffer = bytearray()
        try:
            where = endpoint.path if endpoint.scheme == "ipc" else (endpoint.host, endpoint.port)
            self.socket.connect(where)
            self.socket.sendall(GREETING + frame(READY, COMMAND))
            self._exactly(len(GREETING))
            flags, _ = self.frame()
            assert flags & COMMAND, "libzmq answers a greeting with its READY"
        except BaseException:
            self.socket.close()
            raise

    def send(self, *frames: bytes) -> None:
        """One message."""
        parts = [frame(data, MORE) for data in frames[:-1]]
        self.socket.sendall(b"".join([*parts, frame(frames[-1])]))

    def frame(self) -> tuple[int, bytes]:
        """The next frame: its flags and its bytes."""
        flags, size = self._exactly(2)
        if flags & LONG:
            size = int.from_bytes(bytes([size]) + self._exactly(7), "big")
        return flags, self._exactly(size)

    def message(self) -> list[bytes]:
        """The next message; ZeroMQ's own commands (heartbeats) are passed over."""
        frames = []
        while True:
            flags, data = self.frame()
            if flags & COMMAND:
                continue
            frames.append(data)
            if not flags & MORE:
                return frames

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            chunk = self.socket.recv(1 << 20)
            if not chunk:
                raise ConnectionResetError("the peer closed the connection")
            self._buffer += chunk
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def __enter__(self) -> Zmtp:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.socket.close()
