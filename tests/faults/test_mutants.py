# SPDX-License-Identifier: Apache-2.0
"""A million messages that are nearly right: each is a message or a protocol error, nothing else;
and ten thousand of them against a live worker, beside a client that verifies its bytes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from flyt.backend import orders
from flyt.errors import ProtocolError
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.greetings import HELLO_CODES, WELCOME_CODES
from tests.faults.mutator import mutants, valid
from tests.faults.zmtp import Zmtp
from tests.pair.raw import Honest, eventually, say, status, worker_of

SEED = 6
SEEDS = 2000
"""Valid messages that the mutants of one vocabulary come from."""

IN_PROCESS = {
    "commands": (m.COMMANDS, m.COMMAND_CODES, 350_000),
    "replies": (m.REPLIES, m.REPLY_CODES, 350_000),
    "hellos": (m.HELLOS, HELLO_CODES, 100_000),
    "welcomes": (m.WELCOMES, WELCOME_CODES, 100_000),
    "from workers": (orders.FROM_WORKER, orders.WORKER_WORDS, 100_000),
}
"""A million together."""

LIVE = 10_000
IN_ONE_SESSION = 40
"""A session ends with the first mutant that is no message; most do so soon."""


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_message_or_a_protocol_error(name: str) -> None:
    vocabulary, codes, count = IN_PROCESS[name]
    source = random.Random(SEED)
    seeds = [valid(vocabulary, list(codes.values()), source) for _ in range(SEEDS)]
    for data in seeds:
        vocabulary.decode(data)
    messages = errors = 0
    for data in mutants(seeds, count, source):
        try:
            message = vocabulary.decode(data)
        except ProtocolError:
            errors += 1
        else:
            assert type(message) in codes.values()
            vocabulary.encode(message)
            messages += 1
    assert messages + errors == count
    assert min(messages, errors) > count // 100, (messages, errors)


def inline_session(endpoint: str) -> tuple[Zmtp, bytes]:
    """A connection to a session of its own, and the session's token."""
    welcome = say(endpoint, m.Hello(m.PROTOCOL_VERSION, (1, 2), os.getpid(), "mutant"))
    assert isinstance(welcome, m.Welcome), welcome
    peer = Zmtp(Endpoint.parse(endpoint).session(welcome.port, welcome.path))
    return peer, welcome.token


def test_live(backend: Callable[..., Any]) -> None:
    served = backend(extra=["--log-level", "ERROR"])
    source = random.Random(SEED)
    seeds = [valid(m.COMMANDS, list(m.COMMAND_CODES.values()), source) for _ in range(SEEDS)]
    honest = Honest(served)
    try:
        worker = worker_of(served, honest.pid)
        data = mutants(seeds, LIVE, source)
        sent = 0
        while sent < LIVE:
            peer, token = inline_session(served.endpoint)
            with peer:
                peer.send(m.COMMANDS.encode(m.Attach(1, token, True, 0, 0, (), 0)))
                peer.message()
                try:
                    for _ in range(min(IN_ONE_SESSION, LIVE - sent)):
                        peer.send(next(data))
                        sent += 1
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the session has ended, as it should
            if sent % 1000 < IN_ONE_SESSION:
                assert honest.carries_on(1)
        assert worker_of(served, honest.pid) == worker, "it is the same worker"
        assert eventually(lambda: len(status(served)["sessions"]) == 1)
        assert "Traceback" not in served.log, served.log
    finally:
        honest.close()
