# SPDX-License-Identifier: Apache-2.0
"""The line of a client's commands: order, what passes it, and its bound."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from flyt.backend.line import MOST, Line
from flyt.errors import ProtocolError
from flyt.rpc import messages as m

Frames = list[bytes]


class Wire:
    """As far as a line uses one."""

    def __init__(self) -> None:
        self.came: collections.deque[Frames] = collections.deque()
        self.is_full = False

    def receive(self) -> Frames | None:
        return self.came.popleft() if self.came else None


def frames(command: Any) -> Frames:
    return [m.COMMANDS.encode(command)]


def fill(number: int) -> Frames:
    return frames(m.Memset(number, 4096, 1, 1, 0))


PING, RETURN = frames(m.Ping(1000)), frames(m.HostReturn(1001, 1))


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def line(wire: Wire) -> Line:
    return Line(wire)  # type: ignore[arg-type]  # not a whole one


def test_in_order_when_nothing_is_held(line: Line, wire: Wire) -> None:
    wire.came += [fill(1), PING, fill(2)]
    assert [line.next() for _ in range(4)] == [fill(1), PING, fill(2), None]


def test_only_what_is_ordered_with_nothing_passes_a_held_command(line: Line, wire: Wire) -> None:
    line.held = fill(1)
    wire.came += [fill(2), PING, fill(3), RETURN, fill(4)]
    assert [line.next() for _ in range(3)] == [PING, RETURN, None]
    assert line
    line.held = None
    wire.came.append(fill(5))
    assert [line.next() for _ in range(5)] == [*map(fill, (2, 3, 4, 5)), None]
    assert not line


def test_a_line_has_an_end(line: Line, wire: Wire) -> None:
    line.held = fill(1)
    wire.came += [fill(number) for number in range(2 * MOST)]
    wire.came.append(PING)
    assert line.next() is None
    assert line.is_full
    assert len(wire.came) == MOST + 1, "no more is received"


def test_who_does_not_read_is_not_heard(line: Line, wire: Wire) -> None:
    wire.came += [fill(1), PING]
    assert line.next() == fill(1)
    wire.is_full = True
    assert line.next() is None
    line.held = fill(1)
    assert line.next() is None
    assert wire.came


def test_what_is_no_command_ends_the_session_also_in_line(line: Line, wire: Wire) -> None:
    line.held = fill(1)
    wire.came += [[b"\xc1"], []]
    for _ in range(2):
        with pytest.raises(ProtocolError):
            line.next()


def test_all_are_dropped_together(line: Line, wire: Wire) -> None:
    line.held = fill(1)
    wire.came += [fill(2), fill(3)]
    assert line.next() is None
    assert line.drop() == [(fill(1), True), (fill(2), False), (fill(3), False)]
    assert (line.held, bool(line), line.drop()) == (None, False, [])
