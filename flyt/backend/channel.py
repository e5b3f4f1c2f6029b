# SPDX-License-Identifier: Apache-2.0
"""`Channel`: whole messages over one end of a socket pair between the daemon's processes.

A message is a 32-bit little-endian length and the bytes of `flyt.rpc.codec`. Nothing here waits
without a bound, apart from `Channel.receive` without a time limit, which ends when the other
process does.
"""

from __future__ import annotations

import array
import collections
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

from flyt.errors import FlytError, ProtocolError, SessionLost
from flyt.rpc.codec import MAX_MESSAGE_BYTES, Vocabulary

SEND_LIMIT = 5.0
"""Seconds a peer may leave its full socket unread (some 200 KiB, so thousands of messages)
before it counts as stuck."""

_LENGTH = struct.Struct("<I")

_READ_BYTES = 64 << 10

_READS_PER_DRAIN = 16
"""An event loop takes at most this many reads from one peer before it looks at the others."""


_ANCILLARY = socket.CMSG_SPACE(4 * array.array("i").itemsize)
"""Room for the descriptors of one read; a message brings one at most."""


class ChannelClosed(FlytError):
    """The process at the other end closed the channel or ended."""


class Channel:
    """One end of a socket pair.

    Any thread may send; one thread receives.

    Parameters
    ----------
    sock : socket.socket
        A connected ``AF_UNIX``/``SOCK_STREAM`` socket; the channel owns it from now on.
    sends, receives : Vocabulary
        What this side says and what it understands.
    send_limit : float
        Seconds that `send` waits for a peer that does not read.
    takes_descriptors : bool
        Whether the other side may send some; else the kernel drops them.

    Attributes
    ----------
    descriptors : deque of int
        Those that came with messages (`takes_descriptors`), in order; whoever takes one out owns
        it.
    closed : bool
        Whether `messages` or `receive` saw the end of the other side.
    """

    def __init__(
        self,
        sock: socket.socket,
        sends: Vocabulary,
        receives: Vocabulary,
        *,
        send_limit: float = SEND_LIMIT,
        takes_descriptors: bool = False,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._sends = sends
        self._receives = receives
        self._send_limit = send_limit
        self._lock = threading.Lock()
        self._torn = False
        self._buffer = bytearray()
        self._takes_descriptors = takes_descriptors
        self.descriptors: collections.deque[int] = collections.deque()
        self.closed = False

    def fileno(self) -> int:
        """The descriptor to poll for input."""
        return self._socket.fileno()

    def send(self, message: Any, descriptor: int = -1) -> None:
        """Hand a message, and a copy of a descriptor with it, to the kernel.

        Raises
        ------
        ChannelClosed
            When the other side is gone.
        SessionLost
            When the other side has not read for `send_limit` seconds. The channel is unusable
            afterwards: a part of the message may be out.
        """
        body = self._sends.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"{self._sends.name} wants to send {type(message).__name__} of {len(body)} bytes; "
                f"the limit is {MAX_MESSAGE_BYTES}: split it"
            )
        with self._lock:
            self._send_bytes(memoryview(_LENGTH.pack(len(body)) + body), descriptor)

    def _send_bytes(self, rest: memoryview, descriptor: int) -> None:
        if self._torn:
            raise SessionLost(f"the channel to {self._receives.name} broke in an earlier message")
        deadline = time.monotonic() + self._send_limit
        rights = [] if descriptor < 0 else [_rights(descriptor)]
        while rest:
            try:
                rest = rest[self._socket.sendmsg([rest], rights, socket.MSG_NOSIGNAL) :]
                rights = []  # it went with the first byte
            except BlockingIOError:
                if not _ready(self._socket, select.POLLOUT, deadline - time.monotonic()):
                    self._torn = True
                    raise SessionLost(
                        f"{self._receives.name} has not read its messages for {self._send_limit} s"
                    ) from None
            except OSError as exc:
                self._torn = True
                raise ChannelClosed(f"{self._receives.name} is gone: {exc.strerror}") from exc

    def receive(self, timeout: float | None = None) -> Any | None:
        """The next message; None when none came within ``timeout`` seconds.

        Raises
        ------
        ChannelClosed
            When the other side is gone and all its messages were received.
        ProtocolError
            When the other side sent something else than a message.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self._next()
            if message is not None:
                return message
            if self.closed:
                raise ChannelClosed(f"{self._receives.name} closed its channel")
            left = None if deadline is None else deadline - time.monotonic()
            if not _ready(self._socket, select.POLLIN, left):
                return None
            self._read()

    def messages(self) -> Iterator[Any]:
        """What has arrived, without waiting; `closed` tells afterwards whether more can come.

        A caller that leaves the loop early must call again without waiting for new input.
        """
        for _ in range(_READS_PER_DRAIN):
            if not self._read():
                break
        while (message := self._next()) is not None:
            yield message

    def _read(self) -> bool:
        """Append what is there to the buffer; False when there was nothing."""
        if self.closed:
            return False
        try:
            data = self._receive_bytes()
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""  # the other process ended with our messages unread
        if not data:
            self.closed = True
            return False
        self._buffer += data
        return True

    def _receive_bytes(self) -> bytes:
        if not self._takes_descriptors:
            return self._socket.recv(_READ_BYTES)
        # What comes of one message with descriptors is never mixed with the next one's.
        # Not socket.recv_fds: some versions of Python drop its flags, so they would be inherited.
        data, ancillary, _, _ = self._socket.recvmsg(
            _READ_BYTES, _ANCILLARY, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(content[: len(content) // found.itemsize * found.itemsize])
                self.descriptors.extend(found)
        return data

    def _next(self) -> Any | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"{self._receives.name} announced a message of {length} bytes; "
                f"the limit is {MAX_MESSAGE_BYTES}"
            )
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return self._receives.decode(body)

    def close(self) -> None:
        """Close this end; the other side sees its end."""
        self.closed = True
        self._socket.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())


def _rights(descriptor: int) -> tuple[int, int, array.array[int]]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])


def _ready(sock: socket.socket, event: int, seconds: float | None) -> bool:
    poller = select.poll()
    poller.register(sock, event)
    return bool(poller.poll(None if seconds is None else max(0.0, seconds) * 1000))
