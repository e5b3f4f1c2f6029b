# SPDX-License-Identifier: Apache-2.0
"""The handshake's first words, to a daemon that answers this way or that."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from flyt.errors import CommandTimeout, FlytError, HandshakeError, ProtocolError, SessionLost
from flyt.frontend import greeting
from flyt.rpc import messages as m
from flyt.rpc.patience import Deadline
from flyt.shm import ring

LIMIT = 20.0
WELCOME = m.Welcome(
    7, bytes(16), 1, "s", 0, "", 0, 0, "", 256, 1 << 20, 30_000, (), {"devices": []}
)


def greet(context: Any, endpoint: Any, deadline: Deadline) -> m.Welcome:
    with greeting.greeted(context, endpoint, deadline) as welcome:
        return welcome


@pytest.fixture
def greeted(context: Any, server: Any, background: Any) -> Callable[..., tuple[m.Hello, Any]]:
    """Greet, answer HELLO with these frames (None: not at all), return HELLO and the outcome."""

    def run(frames: list[bytes] | None, seconds: float = LIMIT) -> tuple[m.Hello, Any]:
        endpoint = server.listener.endpoint
        background.start(greet, context, endpoint, Deadline.after(seconds))
        deadline = time.monotonic() + LIMIT
        while (incoming := server.listener.receive()) is None and time.monotonic() < deadline:
            time.sleep(0.002)  # bounded by LIMIT: HELLO is on its way
        assert incoming is not None
        if frames is not None:
            server.listener.send(incoming.identity, frames)
        (outcome,) = background.finish()
        hello = m.HELLOS.decode(incoming.frames[0])
        assert isinstance(hello, m.Hello)
        return hello, outcome

    return run


def test_welcome(greeted: Any) -> None:
    hello, outcome = greeted([m.WELCOMES.encode(WELCOME)])
    assert outcome == WELCOME
    assert (hello.version, hello.pid) == (m.PROTOCOL_VERSION, os.getpid())
    assert hello.features == ((1, 2, 3, 4, 16) if ring.usable() else (1, 2, 4, 16))


@pytest.mark.parametrize(
    ("frames", "error", "text"),
    [
        ([m.WELCOMES.encode(m.Refused(801, "upgrade the frontend"))], HandshakeError, "upgrade"),
        ([m.WELCOMES.encode(m.StatusReport({}))], ProtocolError, "HELLO with StatusReport"),
        ([b"\xc1"], ProtocolError, "no MessagePack"),
        ([b""], ProtocolError, "no MessagePack"),
        ([m.REPLIES.encode(m.Credit(1))], ProtocolError, "backend sent"),
    ],
)
def test_other_answers(
    greeted: Any, frames: list[bytes], error: type[FlytError], text: str
) -> None:
    _, outcome = greeted(frames)
    assert type(outcome) is error
    assert text in str(outcome)


def test_no_answer(greeted: Any, server: Any) -> None:
    _, outcome = greeted(None, seconds=0.3)
    assert isinstance(outcome, CommandTimeout)
    assert f"{server.listener.endpoint}: no answer to Hello" in str(outcome)


def test_nobody_there(context: Any, server: Any) -> None:
    endpoint = server.listener.endpoint
    server.close()
    with pytest.raises(SessionLost, match=r"nobody listens there; is flyt-backend running\?"):
        greet(context, endpoint, Deadline.after(LIMIT))


@pytest.mark.parametrize("name", ["/x/caf\udce9.py", "/x/\N{SNOWMAN}" + "y" * 5000, "", "-c"])
def test_any_name_of_a_program(greeted: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name])  # as Python decodes names that are not UTF-8
    hello, outcome = greeted([m.WELCOMES.encode(WELCOME)])
    assert outcome == WELCOME
    assert len(hello.program) <= 200
    assert hello.program != "" or name == ""
