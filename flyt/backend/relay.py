# SPDX-License-Identifier: Apache-2.0
"""`Relay`: sessions through the main endpoint, for networks where one port is open (--single-port).

The client dials the main endpoint a second time. Its ATTACH names the session by its token; from
then on the supervisor hands whole messages over, unread, between that connection and the session's
private socket. Each message passes one more process, so this is slower than a port per session.

From its ATTACH on the connection is no visitor any more (`flyt.backend.visitors`): it may idle and
send as a session does. What is kept for it is bounded by the credits of a session, and by answers
being left with the session while the client does not read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os

import zmq

from flyt.backend.loop import EventLoop, Timer
from flyt.backend.wire import UNREAD
from flyt.errors import ConfigurationError, ProtocolError
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.sockets import Dialer, Full, Incoming, Listener
from flyt.shm.runtime_dir import runtime_dir

log = logging.getLogger(__name__)

EXPECTED_SECONDS = 15.0
"""From WELCOME to ATTACH. The session itself gives up sooner."""

MESSAGES_A_TURN = 64
"""One session's share before the event loop looks at the others."""

MOST_MESSAGES = m.CREDITS + 8
"""Of a client on their way to its session, where its credits bound them; a ping costs none."""

MESSAGE_BYTES = 2 * m.INLINE_CHUNK
"""No message of an honest client is larger: an inline chunk, or a page table of under 1 MiB."""

AGAIN_SECONDS = 0.005
"""Until a client that had not read its answers is tried again: libzmq does not tell that it has."""

DEVICES_UNAVAILABLE = 46

Key = tuple[int, bytes]
"""A client's connection: which listener, and its identity there."""


@dataclasses.dataclass(slots=True)
class _Line:
    """A client's connection, joined to its session's."""

    listener: Listener
    identity: bytes
    source: int
    dialer: Dialer
    owed: list[bytes] | None = None
    """An answer that found no room."""
    again: Timer | None = None


class Relay:
    """All relayed sessions.

    Parameters
    ----------
    loop : EventLoop
    context : zmq.Context
        The supervisor's.

    Attributes
    ----------
    endpoint : Endpoint
        Beside this path, in a folder of the daemon's user, lie the private sockets of the sessions.
    """

    def __init__(self, loop: EventLoop, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._loop = loop
        self._context = context
        path = os.path.join(runtime_dir(), f"relay.{os.getpid()}")
        self.endpoint = Endpoint.parse(f"ipc://{path}")
        self._expected: dict[bytes, tuple[str, str, Timer]] = {}
        self._lines: dict[Key, _Line] = {}

    @property
    def most_bytes(self) -> int:
        """What this process may hold for the relayed sessions."""
        return len(self._lines) * (MOST_MESSAGES + UNREAD) * MESSAGE_BYTES

    def expect(self, token: bytes, address: str, peer: str) -> None:
        """A client that proved to be ``peer`` was welcomed to the session at ``address``, and will
        show ``token``."""

        def too_late() -> None:
            self._expected.pop(token, None)

        self._expected[token] = address, peer, self._loop.call_later(EXPECTED_SECONDS, too_late)

    def takes(self, listener: Listener, incoming: Incoming) -> bool:
        """Whether this message is a relayed session's; then it is on its way."""
        key = id(listener), incoming.identity
        line = self._lines.get(key) or self._joined(listener, incoming)
        if line is None:
            return False
        if sum(map(len, incoming.frames)) > MESSAGE_BYTES:
            self._drop(key, f"the client sent a message of more than {MESSAGE_BYTES} bytes")
        elif not line.dialer.send(incoming.frames):
            line.dialer.check()
            self._drop(
                key,
                "the client sent more commands than it has credits for"
                if line.dialer.lost is None
                else "its session has ended",
            )
        return True

    def gone(self, listener: Listener, source: int) -> None:
        """A client's connection has ended: so does its session's."""
        for key, line in list(self._lines.items()):
            if (line.listener, line.source) == (listener, source):
                self._drop(key, "")

    def close(self) -> None:
        """End all, before the listeners are closed."""
        for key in list(self._lines):
            self._drop(key, "this backend is shutting down")
        for *_, limit in self._expected.values():
            limit.cancel()
        self._expected.clear()

    def _joined(self, listener: Listener, incoming: Incoming) -> _Line | None:
        """The line that a connection's first message opens, if it is the ATTACH of a session."""
        if not self._expected or not incoming.frames:
            return None
        try:
            command = m.COMMANDS.decode(incoming.frames[0])
        except ProtocolError:
            return None  # a HELLO, or garbage: the handshake tells them apart
        if not isinstance(command, m.Attach) or command.token not in self._expected:
            return None
        address, peer, limit = self._expected[command.token]
        if incoming.peer.proven != peer:
            log.warning("%r may not attach to another's session", incoming.peer.proven)
            return None
        del self._expected[command.token]
        limit.cancel()
        try:
            dialer = Dialer(
                self._context, Endpoint.parse(address), backlog=UNREAD, unsent=MOST_MESSAGES
            )
        except ConfigurationError as exc:
            log.error("can't relay a session: %s", exc)
            return None
        line = _Line(listener, incoming.identity, incoming.source, dialer)
        key = id(listener), incoming.identity
        self._lines[key] = line
        listener.connections.ended(incoming.source)
        self._watch(key, line)
        return line

    def _watch(self, key: Key, line: _Line) -> None:
        for source in line.dialer.pollables:
            self._loop.watch(source, functools.partial(self._answer, key))

    def _unwatch(self, line: _Line) -> None:
        for source in line.dialer.pollables:
            self._loop.unwatch(source)

    def _answer(self, key: Key) -> None:
        """Hand over what the session said."""
        line = self._lines.get(key)
        if line is None:
            return
        line.dialer.check()
        for _ in range(MESSAGES_A_TURN):
            frames = line.owed or line.dialer.receive()
            if frames is None:
                if line.dialer.lost is not None:
                    self._drop(key, "its session has ended")
                return
            try:
                sent = line.listener.send(line.identity, frames)
            except Full:
                self._try_again(key, line, frames)
                return
            line.owed = None
            if not sent:
                self._drop(key, "")
                return

    def _try_again(self, key: Key, line: _Line, frames: list[bytes]) -> None:
        """The client does not read: what comes after this answer stays with the session."""
        line.owed = frames
        self._unwatch(line)

        def again() -> None:
            line.again = None
            self._watch(key, line)
            self._answer(key)

        line.again = self._loop.call_later(AGAIN_SECONDS, again)

    def _drop(self, key: Key, reason: str) -> None:
        """End a line. With a reason the client is told: a ROUTER can't close its connection."""
        line = self._lines.pop(key)
        if line.again is not None:
            line.again.cancel()
        self._unwatch(line)
        line.dialer.close()
        if reason:
            word = m.REPLIES.encode(m.Sticky(DEVICES_UNAVAILABLE, reason))
            with contextlib.suppress(Full):  # its own fault: it has not read what came before
                line.listener.send(line.identity, [word])
