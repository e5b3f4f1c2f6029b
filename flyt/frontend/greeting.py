# SPDX-License-Identifier: Apache-2.0
"""The handshake from the client's side: HELLO to the daemon, WELCOME back."""

from __future__ import annotations

import os
import select
import sys

import zmq

from flyt.errors import CommandTimeout, HandshakeError, ProtocolError, SessionLost
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.handshake import offer
from flyt.rpc.patience import Deadline
from flyt.rpc.sockets import Dialer
from flyt.shm import ivshmem, ring

HEARTBEAT_MS = 5000
"""On the daemon's main endpoint; the handshake is over long before it matters."""


def greet(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, deadline: Deadline
) -> m.Welcome:
    """Introduce this process to the daemon.

    Raises
    ------
    SessionLost
        Nobody listens at the endpoint, or it closed the connection.
    HandshakeError
        The daemon refused; the message is its reason.
    CommandTimeout
        No answer within the deadline.
    """
    mine = offer("frontend", ring=ring.usable() is not None, doorbell=bool(ivshmem.bars()))
    hello = m.Hello(mine.version, tuple(sorted(mine.features)), os.getpid(), _program())
    answer = ask(context, endpoint, hello, deadline)
    if isinstance(answer, m.Refused):
        raise HandshakeError(answer.text)
    if not isinstance(answer, m.Welcome):
        raise ProtocolError(f"the backend answered HELLO with {type(answer).__name__}")
    return answer


def ask(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: Endpoint,
    message: m.Hello | m.AskStatus,
    deadline: Deadline,
) -> m.Welcome | m.Refused | m.StatusReport:
    """One question and one answer on the daemon's main endpoint."""
    dialer = Dialer(context, endpoint, heartbeat_ms=HEARTBEAT_MS)
    try:
        poll = select.poll()
        for descriptor in dialer.filenos():
            poll.register(descriptor, select.POLLIN)
        dialer.send([m.HELLOS.encode(message)])
        while True:
            dialer.check()
            if (frames := dialer.receive()) is not None:
                reply: m.Welcome | m.Refused | m.StatusReport = m.WELCOMES.decode(frames[0])
                return reply
            if dialer.lost is not None:
                raise SessionLost(f"{dialer.lost}; is flyt-backend running?")
            if not deadline.left():
                raise CommandTimeout(f"{endpoint}: no answer to {type(message).__name__} in time")
            poll.poll(min(deadline.left(), 1.0) * 1000)
    finally:
        dialer.close()


def _program() -> str:
    name = os.path.basename(sys.argv[0] or sys.executable)[:200] if sys.argv else ""
    return name.encode(errors="replace").decode()  # a file's name need not be UTF-8
