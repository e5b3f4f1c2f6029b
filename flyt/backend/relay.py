# SPDX-License-Identifier: Apache-2.0
"""`Relay`: sessions through the main endpoint, for networks where one port is open (--single-port).

The client dials the main endpoint a second time. Its ATTACH names the session by its token; from
then on the supervisor hands whole messages over, unread, between that connection and the session's
private socket. Each message passes one more process, so this is slower than a port per session.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os

import zmq

from flyt.backend.loop import EventLoop, Timer
from flyt.errors import ConfigurationError, ProtocolError
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.sockets import Dialer, Incoming, Listener
from flyt.shm.runtime_dir import runtime_dir

log = logging.getLogger(__name__)

EXPECTED_SECONDS = 15.0
"""From WELCOME to ATTACH. The session itself gives up sooner."""

MESSAGES_A_TURN = 64
"""One session's share before the event loop looks at the others."""

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
        self._expected: dict[bytes, tuple[str, Timer]] = {}
        self._lines: dict[Key, _Line] = {}

    def expect(self, token: bytes, address: str) -> None:
        """A client was welcomed to the session at ``address``, and will show ``token``."""

        def too_late() -> None:
            self._expected.pop(token, None)

        self._expected[token] = address, self._loop.call_later(EXPECTED_SECONDS, too_late)

    def takes(self, listener: Listener, incoming: Incoming) -> bool:
        """Whether this message is a relayed session's; then it is on its way."""
        key = id(listener), incoming.identity
        line = self._lines.get(key) or self._joined(listener, incoming)
        if line is None:
            return False
        if not line.dialer.send(incoming.frames):
            self._drop(key, "its session has ended")
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
        for _, limit in self._expected.values():
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
        address, limit = self._expected.pop(command.token)
        limit.cancel()
        try:
            dialer = Dialer(self._context, Endpoint.parse(address))
        except ConfigurationError as exc:
            log.error("can't relay a session: %s", exc)
            return None
        line = _Line(listener, incoming.identity, incoming.source, dialer)
        key = id(listener), incoming.identity
        self._lines[key] = line
        for source in dialer.pollables:
            self._loop.watch(source, functools.partial(self._answer, key))
        return line

    def _answer(self, key: Key) -> None:
        """Hand over what the session said."""
        line = self._lines.get(key)
        if line is None:
            return
        line.dialer.check()
        for _ in range(MESSAGES_A_TURN):
            frames = line.dialer.receive()
            if frames is None:
                if line.dialer.lost is not None:
                    self._drop(key, "its session has ended")
                return
            if not line.listener.send(line.identity, frames):
                self._drop(key, "")
                return

    def _drop(self, key: Key, reason: str) -> None:
        """End a line. With a reason the client is told: a ROUTER can't close its connection."""
        line = self._lines.pop(key)
        for source in line.dialer.pollables:
            self._loop.unwatch(source)
        line.dialer.close()
        if reason:
            word = m.REPLIES.encode(m.Sticky(DEVICES_UNAVAILABLE, reason))
            line.listener.send(line.identity, [word])
