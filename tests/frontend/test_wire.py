# SPDX-License-Identifier: Apache-2.0
"""Replies by ring and connection; a signal's handler may read in the middle of a read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from flyt.frontend import wire as module
from flyt.frontend.wire import Wire
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.shm.ring import ELSEWHERE

LAST_WORDS = [b"last words"]


class Ends:
    """A ring's reading end and a connection, of what is put there; ``within`` is done once, in the
    middle of the next read that has something."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        self.messages: list[list[bytes]] = []
        self.position = [0, 0]
        self.has_more = False
        self.within: Callable[[], object] | None = None

    def _happens(self) -> None:
        within, self.within = self.within, None
        if within is not None:
            within()

    def peek(self) -> tuple[bytes | None, int]:
        at = self.position[0]
        if not self.entries:
            return None, at
        entry = self.entries[0]
        self._happens()
        return entry, at

    def drop(self, entry: bytes, at: int) -> None:
        if at == self.position[0]:
            self.entries.pop(0)
            self.position[0] += 1
            self.position[1] += entry == ELSEWHERE

    def check(self) -> None: ...

    def receive(self) -> list[bytes] | None:
        return self.messages.pop(0) if self.messages else None


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def wire(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> Wire:
    monkeypatch.setattr(module, "Dialer", lambda *_, **__: ends)
    made = Wire(cast("Any", None), Endpoint.parse("ipc:///nowhere"), 0)
    made._replies = cast("Any", ends)
    return made


def everything(wire: Wire) -> list[list[bytes]]:
    got = []
    while (reply := wire.receive()) is not None:
        got.append(reply.frames)
        wire.dropped(reply)
    return got


def test_order_of_ring_and_connection(wire: Wire, ends: Ends) -> None:
    ends.entries = [b"1", ELSEWHERE, b"3"]
    ends.messages = [[m.KICK], [b"2"], [m.KICK], LAST_WORDS]
    assert everything(wire) == [[b"1"], [b"2"], [b"3"], LAST_WORDS]
    assert wire.is_plain


@pytest.mark.parametrize("rings", [True, False])
@pytest.mark.parametrize("entry", [b"1", ELSEWHERE], ids=["by the ring", "by the connection"])
def test_a_reply_comes_until_it_is_dropped(
    wire: Wire, ends: Ends, entry: bytes, rings: bool
) -> None:
    """Who is interrupted before that loses nothing; and only that one is dropped."""
    ends.entries, ends.messages = [entry, b"2"], [[b"1"]] * (entry == ELSEWHERE)
    if not rings:
        wire._replies = None
        ends.messages = [[b"1"], [b"2"]]
    first, again = wire.receive(), wire.receive()
    assert first is not None
    assert again is not None
    assert first.frames == again.frames == [b"1"]
    wire.dropped(again)
    wire.dropped(first)
    assert everything(wire) == [[b"2"]]
    assert wire.is_plain is rings


def test_what_is_announced_is_waited_for(wire: Wire, ends: Ends) -> None:
    ends.entries = [ELSEWHERE, b"2"]
    assert wire.receive() is None
    assert wire.receive() is None
    assert not wire.is_plain
    ends.messages = [[b"1"]]
    assert everything(wire) == [[b"1"], [b"2"]]
    assert wire.is_plain


@pytest.mark.parametrize("late", [False, True], ids=["there already", "comes later"])
def test_a_handler_reads_behind_what_was_announced(wire: Wire, ends: Ends, late: bool) -> None:
    """Just when the announcement was read, and nobody knows of it but the reader."""
    ends.entries = [ELSEWHERE, b"2", ELSEWHERE, b"4"]
    messages = [[b"1"], [b"3"]]
    got: list[list[bytes]] = []
    if not late:
        ends.messages = messages
    ends.within = lambda: got.extend(everything(wire))
    got.extend(everything(wire))
    if late:
        ends.messages = messages
        got.extend(everything(wire))
    assert sorted(got) == [[b"1"], [b"2"], [b"3"], [b"4"]]
    assert wire.is_plain
    ends.entries = [b"5"]
    assert everything(wire) == [[b"5"]]


def test_a_handler_reads_while_the_connection_is_looked_at(
    wire: Wire, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that was received, and is in no hand yet, is not forgotten."""
    ends.entries, ends.messages = [ELSEWHERE, ELSEWHERE, b"3"], [[b"1"], [b"2"]]
    got: list[list[bytes]] = []
    receive, inside = ends.receive, []

    def interrupted() -> list[bytes] | None:
        frames = receive()
        if not inside:
            inside.append(1)
            got.extend(everything(wire))
        return frames

    monkeypatch.setattr(ends, "receive", interrupted)
    got.extend(everything(wire))
    assert sorted(got) == [[b"1"], [b"2"], [b"3"]]
    assert wire.is_plain
