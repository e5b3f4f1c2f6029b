# SPDX-License-Identifier: Apache-2.0
"""The one file that owns ZeroMQ sockets.

`Listener` (ROUTER) and `Dialer` (DEALER) hide ZeroMQ's habits: nothing reconnects by itself, no
call blocks, a peer's end is seen at once through the socket monitor, and a peer that stops
answering heartbeats counts as ended.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterator, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from flyt.errors import ConfigurationError
from flyt.rpc.endpoints import Endpoint, port_range

LARGEST_MESSAGE = 16 << 20
"""No frame is larger: inline chunks are 1 MiB, page tables smaller. Longer ones end it all."""

HEARTBEATS_PER_LIMIT = 4
"""A silent peer gets this many heartbeats before its time limit is over."""

_NEVER_MS = 1 << 30
"""Twelve days until a lost connection would be dialled again; `Dialer.lost` ends it before."""

_LINGER_MS = 500
"""How long a closing socket may take to hand its last words to the kernel."""

Payload = bytes | bytearray | memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """Where a message came from, as the kernel says; -1 where it can't (TCP)."""

    address: str
    uid: int = -1
    pid: int = -1

    @classmethod
    def parse(cls, text: str) -> Peer:
        # libzmq writes "host:uid:gid:pid" for ipc, from SO_PEERCRED at accept.
        parts = text.rsplit(":", 3)
        if len(parts) == 4 and all(p.isdigit() for p in parts[1:]):
            return cls("local", int(parts[1]), int(parts[3]))
        return cls(text)


@dataclasses.dataclass(frozen=True, slots=True)
class Incoming:
    """One message of one connection. ``source`` is the connection's descriptor."""

    identity: bytes
    source: int
    peer: Peer
    frames: list[bytes]


def open_context(io_threads: int = 1) -> zmq.Context[zmq.Socket[bytes]]:
    """A context without the default limit of 1,023 sockets (a session needs three)."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


def _prepare(socket: zmq.Socket[bytes], heartbeat_ms: int) -> None:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)  # a ROUTER drops at its mark; our credits bound it instead
    socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
    # Not -1: without reconnection libzmq drops what has come and is not read yet when a connection
    # ends, the peer's last word among it. The socket is closed long before this interval is over.
    socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    socket.setsockopt(zmq.IPV6, 1)
    if heartbeat_ms:
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, heartbeat_ms // HEARTBEATS_PER_LIMIT))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, heartbeat_ms)


class _Frames:
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


class _Monitored:
    """A socket and its monitor, both read without blocking."""

    def __init__(self, socket: zmq.Socket[bytes], events: int) -> None:
        self.socket = socket
        self.messages = _Frames(socket)
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(events)
        self._reports = _Frames(self.monitor)

    def events(self) -> Iterator[tuple[int, int]]:
        """(event, value) pairs that came since the last call."""
        while (frames := self._reports.next()) is not None:
            message = parse_monitor_message(frames)
            yield int(message["event"]), int(message["value"])

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()


class Listener:
    """A bound ROUTER.

    Parameters
    ----------
    context
        From `open_context`.
    address : str
        ``ipc:///path``, ``tcp://host:port``, ``tcp://host:*`` or ``tcp://host:A-B`` (first free).
    heartbeat_ms : int
        A peer silent for this long counts as gone; 0 never.
    backlog : int
        Messages that may wait unread per connection; beyond, the peer's sends stall.

    Raises
    ------
    ConfigurationError
        When the address can't be bound: in use, no permission, no such interface.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        heartbeat_ms: int = 0,
        backlog: int = 1024,
    ) -> None:
        socket = context.socket(zmq.ROUTER)
        _prepare(socket, heartbeat_ms)
        socket.setsockopt(zmq.RCVHWM, backlog)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else messages to a gone peer vanish silently
        self._wire = _Monitored(socket, zmq.EVENT_DISCONNECTED)
        try:
            self.endpoint = _bind(socket, address)
        except BaseException:
            self._wire.close()
            raise

    @property
    def pollables(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Sockets whose POLLIN means that `receive` or `gone` has something."""
        return self._wire.socket, self._wire.monitor

    def receive(self) -> Incoming | None:
        """The next message, or None; never waits."""
        socket = self._wire.socket
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        last = frames[-1]
        try:
            source, address = int(last.get(zmq.SRCFD)), str(last.get("Peer-Address"))
        except (zmq.ZMQError, ValueError):
            source, address = -1, ""  # the connection ended before its message was read
        peer = Peer.parse(address)
        return Incoming(frames[0].bytes, source, peer, [frame.bytes for frame in frames[1:]])

    def gone(self) -> list[int]:
        """Descriptors of connections that ended since the last call."""
        return [value for _, value in self._wire.events()]

    def send(self, identity: bytes, frames: Sequence[Payload]) -> bool:
        """Hand a message over; False when that peer is gone. Never waits."""
        try:
            self._wire.socket.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            if exc.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        self._wire.close()
        if self.endpoint.scheme == "ipc":
            _unlink_socket(self.endpoint.path)


def _bind(socket: zmq.Socket[bytes], address: str) -> Endpoint:
    scheme, _, rest = address.partition("://")
    host, _, ports = rest.rpartition(":")
    if scheme == "tcp" and "-" in ports:
        low, high = port_range(ports)
        candidates = [f"tcp://{host}:{port}" for port in range(low, high + 1)]
    else:
        candidates = [address]
    reason: zmq.ZMQError | None = None
    for candidate in candidates:
        try:
            socket.bind(candidate)
        except zmq.ZMQError as exc:
            reason = exc
            continue
        bound = Endpoint.parse(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        if scheme == "tcp":  # the host as asked, not as resolved
            return Endpoint("tcp", host=host.strip("[]"), port=bound.port)
        return bound
    raise ConfigurationError(f"can't listen on {address}: {reason}") from reason


def _inode(descriptor: int) -> int:
    """What a descriptor stands for; 0 when it is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return 0


def _unlink_socket(path: str) -> None:
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        return  # libzmq removed it itself


_ENDS = {
    int(zmq.EVENT_DISCONNECTED): "the backend closed the connection, or it died",
    int(zmq.EVENT_CLOSED): "nobody listens there",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the peer does not speak ZeroMQ's protocol",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the peer does not speak ZeroMQ's protocol",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the backend refused this client's credentials",
}


class Dialer:
    """A DEALER that is connected once and never again.

    Attributes
    ----------
    descriptor : int
        The connection's descriptor once connected, else -1. A forked child closes it.
    lost : str or None
        Why the connection ended, once it did. Kept up to date by `check`.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, *, heartbeat_ms: int = 0
    ) -> None:
        socket = context.socket(zmq.DEALER)
        _prepare(socket, heartbeat_ms)
        socket.setsockopt(zmq.RCVHWM, 0)
        self._wire = _Monitored(socket, int(zmq.EVENT_CONNECTED) | sum(_ENDS))
        self.endpoint = endpoint
        self.descriptor = -1
        self.lost: str | None = None
        self._inode = 0
        try:
            socket.connect(str(endpoint))
        except zmq.ZMQError as exc:
            self._wire.close()
            raise ConfigurationError(f"can't dial {endpoint}: {exc}") from exc

    @property
    def pollables(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Sockets whose POLLIN means that `receive` or `check` has something."""
        return self._wire.socket, self._wire.monitor

    def filenos(self) -> tuple[int, int]:
        """Descriptors to poll for input. Edge-triggered: after a wake-up *and after each send*
        drain with `receive` and `check` until they have nothing."""
        return self._wire.socket.fileno(), self._wire.monitor.fileno()

    def readable(self) -> bool:
        """Whether `receive` has something; cheap."""
        return bool(int(self._wire.socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self) -> list[bytes] | None:
        """The next message's frames, or None; never waits."""
        return self._wire.messages.next()

    def check(self) -> None:
        """Take note of what happened to the connection."""
        for event, value in self._wire.events():
            if event == zmq.EVENT_CONNECTED:
                self.descriptor, self._inode = value, _inode(value)
            elif self.lost is None:
                self.descriptor = -1
                self.lost = f"{self.endpoint}: {self._end(event)}"

    def close_in_child(self) -> None:
        """After a fork, in the child: close the parent's connection, so that it ends with the
        parent. If the number is another file's by now, that is left alone."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0 and _inode(descriptor) == self._inode != 0:
            os.close(descriptor)

    def _end(self, event: int) -> str:
        path = self.endpoint.path
        if event == zmq.EVENT_CLOSED and self.endpoint.scheme == "ipc" and os.path.exists(path):
            owner, mode = os.stat(path).st_uid, stat.S_IMODE(os.stat(path).st_mode)
            if not os.access(path, os.W_OK):
                return f"this user may not use the socket (owner uid {owner}, mode {mode:o})"
        return _ENDS.get(event, "the connection ended")

    def send(self, frames: Sequence[Payload]) -> bool:
        """Hand a message over; False when the connection is gone. Never waits."""
        if self.lost is not None:  # libzmq would queue it for a connection that never comes
            return False
        try:
            self._wire.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self.descriptor = -1
        self._wire.close()
