# SPDX-License-Identifier: Apache-2.0
"""UNIX sockets for sharing: abstract names or socket pairs, and who the peer is.

if TYPE_CHECKING:
    from typing_extensions import Self

An abstract name has no file, so nothing is left in a file system and nothing has permissions:
both sides ask the kernel for the other's user instead (SO_PEERCRED), and refuse strangers.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from types import TracebackType
from typing import TYPE_CHECKING

from flyt.errors import ConfigurationError, HandshakeError, PeerLost, PeerTimeout

if TYPE_CHECKING:
    from typing_extensions import Self

KIND = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
BACKLOG = 128
"""Connections that may wait for accept; the kernel's usual limit is as high."""

MAX_NAME = 107
"""Bytes of an abstract name (sun_path less its leading zero byte)."""

CONNECT_LIMIT = 10.0
"""Seconds for a connection on one machine; only a listener that never accepts takes so long."""

_CREDENTIALS = struct.Struct("3i")


def new_name() -> str:
    """An abstract name that nobody can guess or hold already."""
    return f"flyt-ipc-{secrets.token_hex(16)}"


def _address(name: str) -> bytes:
    octets = name.encode()
    if not octets or len(octets) > MAX_NAME or b"\0" in octets:
        raise ConfigurationError(f"{name!r} is no socket name: 1 to {MAX_NAME} bytes, none zero")
    return b"\0" + octets


def check_peer(sock: socket.socket, allowed_uids: frozenset[int]) -> int:
    """The peer's process id; raises HandshakeError unless its user is one of ``allowed_uids``."""
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
        raise HandshakeError("arrays cross UNIX sockets of kind SOCK_SEQPACKET: see flyt.ipc.pair")
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid not in allowed_uids:
        raise HandshakeError(
            f"process {pid} of user {uid} is at the other end; memory is shared only with "
            f"{', '.join(map(str, sorted(allowed_uids)))}: name it in allowed_uids if that is meant"
        )
    return int(pid)


def own_uids() -> frozenset[int]:
    """Only the user that runs this process."""
    return frozenset({os.geteuid()})


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets: one for a child process, by its descriptor."""
    return socket.socketpair(socket.AF_UNIX, KIND)


def connect(name: str, timeout: float = CONNECT_LIMIT) -> socket.socket:
    """A socket to a listener's abstract name."""
    sock = socket.socket(socket.AF_UNIX, KIND)
    deadline = time.monotonic() + timeout
    try:
        sock.settimeout(timeout)
        while True:
            try:
                sock.connect(_address(name))
            except BlockingIOError:  # its backlog is full; AF_UNIX can't be polled for that
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                time.sleep(0.005)
            else:
                return sock
    except ConnectionRefusedError as exc:
        sock.close()
        raise PeerLost(f"nobody listens at {name!r}: its process is gone or has closed it") from exc
    except TimeoutError as exc:
        sock.close()
        raise PeerTimeout(f"{name!r} accepts no connection within {timeout} s") from exc
    except BaseException:
        sock.close()
        raise


class ListeningSocket:
    """An abstract name that processes of allowed users can connect to."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or new_name()
        self._sock = socket.socket(socket.AF_UNIX, KIND)
        try:
            self._sock.bind(_address(self.name))
            self._sock.listen(BACKLOG)
            self._sock.setblocking(False)
        except OSError as exc:
            self._sock.close()
            raise ConfigurationError(f"can't listen at {self.name!r}: {exc.strerror}") from exc
        except BaseException:
            self._sock.close()
            raise

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self, timeout: float) -> socket.socket:
        """The next connection, whoever it is from: `check_peer` it."""
        try:
            waiter = select.poll()
            waiter.register(self._sock, select.POLLIN)
            if waiter.poll(timeout * 1000):
                return self._sock.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):  # it was gone again
            pass
        raise PeerTimeout(f"nobody connected to {self.name!r} within {timeout} s")

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
