# SPDX-License-Identifier: Apache-2.0
"""One frame: a length, a MessagePack map, and the file descriptors that travel with it.

The sockets are SOCK_SEQPACKET, so the kernel keeps a frame and its descriptors whole: frames of
several threads never mix, and none arrives in part. The descriptors of a refused frame are closed.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import Any

import msgpack

from flyt.errors import ProtocolError

MAX_FRAME = 64 << 10
"""Bytes. The largest message describes 253 chunks and 64 dimensions: a few KiB."""

MAX_FDS = 253
"""The kernel's own limit for one message (SCM_MAX_FD)."""

# As plain numbers: "and" with an IntFlag is Python code, and takes longer than the system call.
_CTRUNC, _TRUNC = int(socket.MSG_CTRUNC), int(socket.MSG_TRUNC)
_RECEIVE, _SEND = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_NOSIGNAL)

_LENGTH = struct.Struct("<I")
_ANCILLARY = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)


def pack(content: dict[str, Any]) -> bytes:
    """A map as MessagePack."""
    packed: bytes = msgpack.packb(content)
    return packed


def unpack(body: bytes) -> dict[str, Any]:
    """The map that a peer packed."""
    try:
        content = msgpack.unpackb(body, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as exc:
        raise ProtocolError(f"the peer's frame is no MessagePack: {exc}") from exc
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ProtocolError("the peer's frame is no map with names as keys")
    return content


def encode(message: dict[str, Any]) -> bytes:
    """The bytes of a frame."""
    body = pack(message)
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a message of {len(body)} bytes exceeds the {MAX_FRAME} of a frame")
    return _LENGTH.pack(len(body)) + body


def send(sock: socket.socket, frame: bytes, fds: tuple[int, ...] = ()) -> None:
    """Send one whole frame, or raise (BlockingIOError when the peer's queue is full)."""
    if fds:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        sock.sendmsg([frame], [rights], _SEND)
    else:
        sock.send(frame, _SEND)


def receive(sock: socket.socket) -> tuple[bytes, tuple[int, ...]] | None:
    """Receive one frame, for `decode`, and descriptors that are the caller's to close.

    Returns
    -------
    tuple or None
        None at the end of the connection.

    Raises
    ------
    ProtocolError
        When a part of it was lost.
    BlockingIOError
        When nothing is there (on a non-blocking socket).
    """
    data, ancillary, flags, _ = sock.recvmsg(_LENGTH.size + MAX_FRAME + 1, _ANCILLARY, _RECEIVE)
    fds = _descriptors(ancillary) if ancillary else ()
    if not data and not fds:
        return None
    if flags & (_CTRUNC | _TRUNC):
        close_all(fds)
        if flags & _CTRUNC:
            raise ProtocolError(
                "descriptors were lost: this process has no room for more of them (ulimit -n)"
            )
        raise _wrong_length()
    return data, fds


def close_all(fds: tuple[int, ...]) -> None:
    """Close descriptors that were received."""
    for fd in fds:
        os.close(fd)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) // fds.itemsize * fds.itemsize])
    return tuple(fds)


def _wrong_length() -> ProtocolError:
    return ProtocolError(f"the peer sent a frame that is not 4 to {MAX_FRAME} bytes long")


def decode(data: bytes) -> dict[str, Any]:
    """The map in a peer's frame; ProtocolError if there is none."""
    if not _LENGTH.size <= len(data) <= _LENGTH.size + MAX_FRAME:
        raise _wrong_length()
    (length,) = _LENGTH.unpack_from(data)
    body = data[_LENGTH.size :]
    if length != len(body):
        raise ProtocolError(f"the peer's frame says {length} bytes and has {len(body)}")
    return unpack(body)
