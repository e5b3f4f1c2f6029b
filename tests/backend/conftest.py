# SPDX-License-Identifier: Apache-2.0
"""A client of the main endpoint that speaks the bare protocol, lies and garbage included."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from flyt.rpc.endpoints import Endpoint
from flyt.rpc.handshake import offer
from flyt.rpc.messages import HELLOS, PROTOCOL_VERSION, WELCOMES, AskStatus, Hello
from flyt.rpc.sockets import Dialer, open_context

ANSWER_LIMIT = 30.0
"""Seconds: a hang, not a measure of speed."""


class RawClient:
    """One connection to a main endpoint."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.dialer = Dialer(context, Endpoint.parse(endpoint))
        self._open = True

    def close(self) -> None:
        """Go away. May be called again."""
        if self._open:
            self._open = False
            self.dialer.close()

    def say(self, *frames: bytes) -> None:
        assert self.dialer.send(list(frames))

    def hear(self, seconds: float = ANSWER_LIMIT) -> Any | None:
        """The next message, or None."""
        deadline = time.monotonic() + seconds
        while (frames := self.dialer.receive()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            select.select(self.dialer.filenos(), [], [], min(left, 0.05))
            self.dialer.check()
        return WELCOMES.decode(frames[0])

    def greet(
        self, features: tuple[int, ...] | None = None, version: int = PROTOCOL_VERSION
    ) -> Any:
        """HELLO and its answer."""
        offered = (
            tuple(sorted(offer("frontend", ring=False).features)) if features is None else features
        )
        self.say(HELLOS.encode(Hello(version, offered, os.getpid(), "raw")))
        answer = self.hear()
        assert answer is not None, "the backend gave no answer"
        return answer

    def status(self) -> Any:
        """AskStatus and its answer."""
        self.say(HELLOS.encode(AskStatus()))
        answer = self.hear()
        assert answer is not None, "the backend gave no answer"
        return answer


@pytest.fixture
def raw() -> Iterator[Callable[[str], RawClient]]:
    """``raw(endpoint)`` connects."""
    context = open_context()
    clients: list[RawClient] = []

    def connect(endpoint: str) -> RawClient:
        clients.append(RawClient(context, endpoint))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
    context.term()


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], Any]:
    """Waits until a condition holds and returns its value; fails after `ANSWER_LIMIT`."""

    def wait(condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + ANSWER_LIMIT
        while not (value := condition()):
            if time.monotonic() > deadline:
                pytest.fail("a condition did not come true in time")
            time.sleep(0.01)  # bounded by ANSWER_LIMIT: other processes make it true
        return value

    return wait
