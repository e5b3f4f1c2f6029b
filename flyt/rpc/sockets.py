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
from collections.abc import Sequence

import zmq

from flyt.errors import ConfigurationError
from flyt.rpc import curve
from flyt.rpc.connections import Connections, Peer, inode_of
from flyt.rpc.endpoints import Endpoint, port_range, unlink_socket
from flyt.rpc.keys import ClientKeys, KeyPair
from flyt.rpc.monitored import Monitored, made

LARGEST_MESSAGE = 16 << 20
"""No frame is larger: inline chunks are 1 MiB, page tables smaller. Longer ones end it all."""

HEARTBEATS_PER_LIMIT = 4
"""A silent peer gets this many heartbeats before its time limit is over."""

_NEVER_MS = 1 << 30
"""Twelve days until a lost connection would be dialled again; `Dialer.lost` ends it before."""

_LINGER_MS = 500
"""How long a closing socket may take to hand its last words to the kernel."""

UNACCEPTED = 1024
"""Connections that may wait for libzmq to accept them: a UNIX socket turns the next one away at
once, and on a busy machine libzmq's 100 are soon there. The kernel caps it (net.core.somaxconn)."""

MOST_FRAMES = 4
"""Frames of one message that are kept; no message of ours has more than two."""

Payload = bytes | bytearray | memoryview


class Full(Exception):
    """The peer has left so many messages unread that it gets no more."""


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


def _prepare(socket: zmq.Socket[bytes], heartbeat_ms: int, largest: int = LARGEST_MESSAGE) -> None:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, largest)
    # Not -1: without reconnection libzmq drops what has come and is not read yet when a connection
    # ends, the peer's last word among it. The socket is closed long before this interval is over.
    socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    socket.setsockopt(zmq.IPV6, 1)
    if heartbeat_ms:
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, heartbeat_ms // HEARTBEATS_PER_LIMIT))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, heartbeat_ms)


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
    unread : int
        Messages that may wait for one peer to read; beyond, `send` raises `Full`. 0: no limit.
    largest : int
        Bytes of a frame; a connection with a larger one ends.
    key : KeyPair, optional
        On TCP only clients come in that trust this key and that the context's `curve.Gate` admits.

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
        unread: int = 0,
        largest: int = LARGEST_MESSAGE,
        key: KeyPair | None = None,
    ) -> None:
        self._guarded = key is not None and address.startswith("tcp:")
        self.connections = Connections()
        with made(f"can't listen on {address}") as undo:
            events = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            self._wire = Monitored(context, zmq.ROUTER, events)
            undo.callback(self._wire.close)
            socket = self._wire.socket
            _prepare(socket, heartbeat_ms, largest)
            socket.setsockopt(zmq.BACKLOG, UNACCEPTED)
            socket.setsockopt(zmq.RCVHWM, backlog)
            socket.setsockopt(zmq.SNDHWM, unread)
            # Else what a gone peer, or one beyond its mark, was to get vanishes silently.
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if key is not None and self._guarded:
                curve.guard(socket, key)
            self.endpoint = _bind(socket, address)

    @property
    def pollables(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Sockets whose POLLIN means that `receive` or `gone` has something."""
        return self._wire.socket, self._wire.monitor

    def receive(self) -> Incoming | None:
        """The next message, or None; never waits."""
        socket = self._wire.socket
        try:
            last = socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        frames = [last]
        while last.more:  # the rest has come too: libzmq hands whole messages over
            last = socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) <= MOST_FRAMES:
                frames.append(last)
        try:
            source, address = int(last.get(zmq.SRCFD)), str(last.get("Peer-Address"))
            key = str(last.get(curve.KNOWN)) if self._guarded else ""
        except (zmq.ZMQError, ValueError):
            source, address, key = -1, "", ""  # the connection ended before its message was read
        peer = Peer.parse(address, key)
        return Incoming(frames[0].bytes, source, peer, [frame.bytes for frame in frames[1:]])

    def gone(self) -> list[int]:
        """Descriptors of connections that ended since the last call."""
        ended = []
        for event, value in self._wire.events():
            if event == zmq.EVENT_ACCEPTED:
                self.connections.began(value)
            else:
                self.connections.ended(value)
                ended.append(value)
        return ended

    def send(self, identity: bytes, frames: Sequence[Payload]) -> bool:
        """Hand a message over; False when that peer is gone. Never waits.

        Raises
        ------
        Full
            The peer reads too slowly; nothing was sent.
        """
        try:
            self._wire.socket.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.Again as exc:
            raise Full from exc
        except zmq.ZMQError as exc:
            if exc.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def close(self) -> None:
        self._wire.close()
        if self.endpoint.scheme == "ipc":
            unlink_socket(self.endpoint.path)


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


_ENDS = {
    int(zmq.EVENT_DISCONNECTED): "the backend closed the connection, or it died",
    int(zmq.EVENT_CLOSED): "nobody listens there",
    int(zmq.EVENT_CONNECT_RETRIED): "no connection could be made: are any descriptors left?",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the peer does not speak ZeroMQ's protocol",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the peer does not speak ZeroMQ's protocol",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the backend refused this client's key",
}


class Dialer:
    """A DEALER that is connected once and never again.

    Parameters
    ----------
    context
        From `open_context`.
    endpoint : Endpoint
    heartbeat_ms : int
        A peer silent for this long counts as gone; 0 never.
    backlog, unsent : int
        Messages that may wait to be received here, and to be sent; 0: no limit.
    keys : ClientKeys, optional
        For TCP: who this client is, and which server it trusts.

    Attributes
    ----------
    descriptor : int
        The connection's descriptor once connected, else -1. A forked child closes it.
    lost : str or None
        Why the connection ended, once it did. Kept up to date by `check`.
    forbidden : bool
        Whether the socket is there, and not for this user.
    refused : bool
        Whether it ended because the two sides' keys, or their want of them, do not fit.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        *,
        heartbeat_ms: int = 0,
        backlog: int = 0,
        unsent: int = 0,
        keys: ClientKeys | None = None,
    ) -> None:
        self._has_keys = keys is not None and endpoint.scheme == "tcp"
        self.endpoint = endpoint
        self.descriptor = -1
        self.lost: str | None = None
        self.refused = self.forbidden = False
        self._inode = 0
        with made(f"can't dial {endpoint}") as undo:
            self._wire = Monitored(context, zmq.DEALER, int(zmq.EVENT_CONNECTED) | sum(_ENDS))
            undo.callback(self._wire.close)
            socket = self._wire.socket
            _prepare(socket, heartbeat_ms)
            socket.setsockopt(zmq.RCVHWM, backlog)
            socket.setsockopt(zmq.SNDHWM, unsent)
            if keys is not None and self._has_keys:
                curve.identify(socket, keys)
            socket.connect(str(endpoint))

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

    def is_quiet(self) -> bool:
        """Whether neither `receive` nor `check` has anything; changes nothing."""
        return not self.readable() and not int(self._wire.monitor.get(zmq.EVENTS)) & zmq.POLLIN

    def receive(self) -> list[bytes] | None:
        """The next message's frames, or None; never waits."""
        return self._wire.inbox.next()

    def check(self) -> None:
        """Take note of what happened to the connection."""
        for event, value in self._wire.events():
            if event == zmq.EVENT_CONNECTED:
                self.descriptor, self._inode = value, inode_of(value)
            elif self.lost is None:
                self.descriptor = -1
                why = None
                if self.endpoint.scheme == "tcp":
                    why = curve.refusal(event, value, keys=self._has_keys)
                self.refused = why is not None
                self.lost = f"{self.endpoint}: {why or self._end(event)}"

    def close_in_child(self) -> None:
        """After a fork, in the child: close the parent's connection, so that it ends with the
        parent. If the number is another file's by now, that is left alone."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0 and inode_of(descriptor) == self._inode != 0:
            os.close(descriptor)

    def _end(self, event: int) -> str:
        path = self.endpoint.path
        if event == zmq.EVENT_CLOSED and self.endpoint.scheme == "ipc" and os.path.exists(path):
            owner, mode = os.stat(path).st_uid, stat.S_IMODE(os.stat(path).st_mode)
            if not os.access(path, os.W_OK):
                self.forbidden = True
                return (
                    f"this user may not use the socket (owner uid {owner}, mode {mode:o}): "
                    "start flyt-backend under a umask that lets this user in"
                )
        return _ENDS.get(event, "the connection ended")

    def send(self, frames: Sequence[Payload]) -> bool:
        """Hand a message over; False when the connection is gone or its limit reached. Never
        waits."""
        if self.lost is not None:  # libzmq would queue it for a connection that never comes
            return False
        return self._wire.outbox.send(frames)

    @property
    def sent(self) -> int:
        """Messages handed over so far: whether an interrupted `send` has happened."""
        return self._wire.outbox.sent

    def close(self) -> None:
        self.descriptor = -1
        self._wire.close()
