# SPDX-License-Identifier: Apache-2.0
"""The handshake from the client's side: HELLO to the daemon, WELCOME back."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator

import zmq

from flyt.errors import CommandTimeout, HandshakeError, ProtocolError, SessionLost
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.greetings import Answer, Question
from flyt.rpc.handshake import offer
from flyt.rpc.keys import ClientKeys
from flyt.rpc.patience import Deadline
from flyt.rpc.sockets import Dialer
from flyt.shm import ivshmem, ring

HEARTBEAT_MS = 15_000
"""On the daemon's main endpoint. No less than a handshake may take: on a busy machine libzmq's
thread may not get to answer for seconds, and the handshake has a limit of its own."""


@contextlib.contextmanager
def greeted(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: Endpoint,
    deadline: Deadline,
    keys: ClientKeys | None = None,
) -> Iterator[m.Welcome]:
    """Introduce this process to the daemon, and stay connected for the block: until this process
    has attached, that is how the daemon sees whether it is alive.

    Raises
    ------
    SessionLost
        Nobody listens at the endpoint, or it closed the connection.
    HandshakeError
        The daemon refused; the message is its reason. Or the keys do not fit.
    CommandTimeout
        No answer within the deadline.
    """
    mine = offer("frontend", ring=ring.usable() is not None, doorbell=bool(ivshmem.bars()))
    hello = m.Hello(mine.version, tuple(sorted(mine.features)), os.getpid(), _program())
    with contextlib.closing(_dialer(context, endpoint, keys)) as dialer:
        answer = _answer(dialer, hello, deadline)
        if isinstance(answer, m.Refused):
            raise HandshakeError(answer.text)
        if not isinstance(answer, m.Welcome):
            raise ProtocolError(f"the backend answered HELLO with {type(answer).__name__}")
        yield answer


def ask(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: Endpoint,
    message: Question,
    deadline: Deadline,
    keys: ClientKeys | None = None,
) -> Answer:
    """One question and one answer on the daemon's main endpoint."""
    with contextlib.closing(_dialer(context, endpoint, keys)) as dialer:
        return _answer(dialer, message, deadline)


def _dialer(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, keys: ClientKeys | None
) -> Dialer:
    return Dialer(context, endpoint, heartbeat_ms=HEARTBEAT_MS, keys=keys)


def _answer(dialer: Dialer, message: Question, deadline: Deadline) -> Answer:
    poll = select.poll()
    for descriptor in dialer.filenos():
        poll.register(descriptor, select.POLLIN)
    dialer.send([m.HELLOS.encode(message)])
    while True:
        dialer.check()
        if (frames := dialer.receive()) is not None:
            reply: Answer = m.WELCOMES.decode(frames[0])
            return reply
        if dialer.lost is not None and dialer.refused:
            raise HandshakeError(dialer.lost)
        if dialer.lost is not None:
            question = "" if dialer.forbidden else "; is flyt-backend running?"
            raise SessionLost(f"{dialer.lost}{question}")
        if not deadline.left():
            what = type(message).__name__
            raise CommandTimeout(f"{dialer.endpoint}: no answer to {what} in time")
        poll.poll(min(deadline.left(), 1.0) * 1000)


def _program() -> str:
    name = os.path.basename(sys.argv[0] or sys.executable)[:200] if sys.argv else ""
    return name.encode(errors="replace").decode()  # a file's name need not be UTF-8
