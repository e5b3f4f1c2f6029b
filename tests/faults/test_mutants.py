# SPDX-License-Identifier: Apache-2.0
"""A million messages that are nearly right: each is a message or a protocol error, nothing else;
and more of them against a live worker, beside a client that verifies its bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from flyt.backend import orders
from flyt.errors import ProtocolError
from flyt.rpc import messages as m
from flyt.rpc.greetings import HELLO_CODES, WELCOME_CODES
from tests.faults.mutator import SEEDS, mutants, send_mutants, valid
from tests.pair.raw import Honest, eventually, status, worker_of

SEED = 6

IN_PROCESS = {
    "commands": (m.COMMANDS, m.COMMAND_CODES, 350_000),
    "replies": (m.REPLIES, m.REPLY_CODES, 350_000),
    "hellos": (m.HELLOS, HELLO_CODES, 100_000),
    "welcomes": (m.WELCOMES, WELCOME_CODES, 100_000),
    "from workers": (orders.FROM_WORKER, orders.WORKER_WORDS, 100_000),
}
"""A million together."""

LIVE = 1_500
"""``scripts/soak`` sends ten thousand."""


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


def test_live(backend: Callable[..., Any]) -> None:
    served = backend(extra=["--log-level", "ERROR"])
    honest = Honest(served)
    try:
        worker = worker_of(served, honest.pid)
        ended = send_mutants(served, LIVE, random.Random(SEED), lambda: honest.carries_on(1))
        assert LIVE // 10 < ended < LIVE
        assert worker_of(served, honest.pid) == worker, "it is the same worker"
        assert eventually(lambda: len(status(served)["sessions"]) == 1)
        assert "Traceback" not in served.log, served.log
    finally:
        honest.close()
