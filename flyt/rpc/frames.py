# SPDX-License-Identifier: Apache-2.0
"""Whole messages to and from a socket, by libzmq's own functions: no interrupt tears or loses one.

pyzmq runs signal handlers (`PyErr_CheckSignals`) between libzmq's call and telling of it, so a
message whose sending raises KeyboardInterrupt may be on its way or not, and a frame that was just
received is gone. ctypes runs none: a call and the noting of what it said are one step here.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import sys
from collections.abc import Sequence

import zmq
import zmq.backend

_MESSAGE_BYTES = 64
"""Of a ``zmq_msg_t``, by libzmq's ABI."""


def _library() -> ctypes.CDLL:
    """The very library that pyzmq's own module is linked with: its sockets are no other's."""
    module = sys.modules[zmq.backend.Socket.__module__]
    try:
        found = ctypes.CDLL(module.__file__, use_errno=True)
        found.zmq_msg_recv  # noqa: B018 - AttributeError where it is hidden
    except (OSError, AttributeError) as exc:
        raise ImportError(f"Flyt needs a pyzmq that shows libzmq's functions: {exc}") from exc
    return found


_libzmq = _library()
_SOCKET, _MESSAGE = ctypes.c_void_p, ctypes.c_void_p
_send = _libzmq.zmq_send
_send.argtypes = (_SOCKET, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_receive = _libzmq.zmq_msg_recv
_receive.argtypes = (_MESSAGE, _SOCKET, ctypes.c_int)
_data = _libzmq.zmq_msg_data
_data.argtypes, _data.restype = (_MESSAGE,), ctypes.c_void_p
_more, _open, _close = _libzmq.zmq_msg_more, _libzmq.zmq_msg_init, _libzmq.zmq_msg_close
_more.argtypes = _open.argtypes = _close.argtypes = (_MESSAGE,)

_FRAME, _LAST = int(zmq.SNDMORE | zmq.NOBLOCK), int(zmq.NOBLOCK)
_is_no_error = (0).__le__


def _check() -> None:
    """After a call that failed: EAGAIN is the caller's affair."""
    number = ctypes.get_errno()
    if number != errno.EAGAIN:
        raise zmq.ZMQError(number)


class Outbox:
    """Sends whole messages without blocking."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._handle: int | None = socket.underlying
        self._last: tuple[int, list[int], int] = 0, [], 1

    @property
    def sent(self) -> int:
        """Messages so far: whether an interrupted `send` has happened."""
        before, told, frames = self._last
        return before + (len(told) == frames)

    def send(self, frames: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Hand a message over; False when there is nobody who takes it. (What libzmq has of one
        that it refuses half-way, as its connection ends, it drops.)"""
        handle, told = self._handle, list[int]()
        last = len(frames) - 1
        calls = [
            (handle, data, len(data), _FRAME if n < last else _LAST)
            for n, data in enumerate(map(bytes, frames))
        ]
        self._last = self.sent, told, len(calls)
        told.extend(itertools.takewhile(_is_no_error, itertools.starmap(_send, calls)))
        if len(told) == len(calls):
            return True
        _check()
        return False

    def close(self) -> None:
        """The socket is closed."""
        self._handle = None


class Inbox:
    """Reads whole messages without blocking."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._handle: int | None = socket.underlying
        self._message = (ctypes.c_uint64 * (_MESSAGE_BYTES // 8))()
        self._at = ctypes.addressof(self._message)
        _open(self._at)
        self._state: tuple[list[bytes], list[int]] = [], []
        """Frames of the next message, and the length of the one in `_message`."""

    def next(self) -> list[bytes] | None:
        """The next message's frames, or None."""
        while True:
            state = self._state
            parts, length = state
            if not length:
                calls = map(_receive, (self._at,), (self._handle,), (_LAST,))
                length.extend(filter(_is_no_error, calls))
            if not length:
                _check()
                return None
            more, data = _more(self._at), _data(self._at)
            if self._state is not state:  # a handler has read on, and the bytes are gone
                continue
            parts = [*parts, ctypes.string_at(data, length[0])]
            if self._state is not state:
                continue
            if not more:
                self._state = [], []
                return parts
            self._state = parts, []

    def close(self) -> None:
        """The socket is closed."""
        self._handle = None
        _close(self._at)
