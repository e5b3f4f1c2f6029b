# SPDX-License-Identifier: Apache-2.0
"""The in-flight table: every command that was sent and not yet answered."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from flyt.errors import DeviceError, ProtocolError
from flyt.rpc.messages import Status


class Command(Protocol):
    """Any message of `flyt.rpc.messages` that a session answers."""

    @property
    def id(self) -> int: ...


Make = Callable[[int], Command]
"""Gets a command's id and makes the message."""


class Pending:
    """One command on its way.

    Attributes
    ----------
    id, name, size : int, str, int
        The command and the bytes it moves.
    pages : tuple of int
        First index and length of the window bytes it holds; (0, 0) for none.
    ended : bool
        Whether the session was lost before an answer came.
    done : bool
        Whether its answer is there; ``status``, ``values``, ``payload`` and ``text`` are it.
    wire : bytes
        The encoded command.
    finish : callable or None
        Run under the connection's lock, when the answer comes or the session is lost. Once; but
        twice does no harm, for who is interrupted in it is told once more.
    """

    __slots__ = (
        "done", "ended", "event", "finish", "id", "issued", "name", "pages", "payload", "posted",
        "size", "status", "text", "values", "wire",
    )  # fmt: skip

    def __init__(self, number: int, name: str, size: int, pages: tuple[int, int]) -> None:
        self.id = number
        self.name = name
        self.size = size
        self.pages = pages
        self.issued = time.monotonic()
        self.posted = False
        self.wire = b""
        self.done = False
        self.ended = False
        self.status = 0
        self.values: tuple[int, ...] = ()
        self.payload: bytes | None = None
        self.text = ""
        self.event: threading.Event | None = None
        self.finish: Callable[[Pending], None] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class InflightCommand:
    """One line of `flyt.inflight`: command, bytes it moves, seconds since it was sent, and the
    first index and length of the window bytes that it holds."""

    id: int
    name: str
    size: int
    age: float
    pages: tuple[int, int]


class InflightTable:
    """Commands by id. Guarded by the connection's lock.

    Attributes
    ----------
    commands : dict
        In the order in which they were sent.
    """

    def __init__(self) -> None:
        self.commands: dict[int, Pending] = {}
        self.last_id = 0

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def get(self, number: int) -> Pending | None:
        """A command that is in flight."""
        return self.commands.get(number)

    def add(self, pending: Pending) -> None:
        self.commands[pending.id] = pending

    def answer(self, number: int, **answer: Any) -> Pending | None:
        """Take an answered command out; None for an id that is not in flight."""
        pending = self.commands.get(number)
        if pending is not None:
            self._settle(pending, **answer)
            self.commands.pop(number, None)  # last: an interrupted answer is told once more
        return pending

    def succeed(self, number: int) -> None:
        """Take a command out that has nothing to say but success, or that was never sent."""
        pending = self.commands.get(number)
        if pending is not None:
            self._end(pending)
            self.commands.pop(number, None)  # last: an interrupted row is told once more

    def withdraw(self, pending: Pending) -> None:
        """Of a command that was not sent after all: nobody waits for it, and nothing finishes."""
        pending.done = True
        self.commands.pop(pending.id, None)

    def fail_all(self, status: int, text: str) -> list[Pending]:
        """Every command ends with this status: the session is lost."""
        ended = self.all()
        self.commands.clear()
        for pending in ended:
            pending.ended = True
            self._settle(pending, status=status, text=text)
        return ended

    @staticmethod
    def _settle(
        pending: Pending,
        *,
        status: int,
        text: str,
        values: tuple[int, ...] = (),
        payload: bytes | None = None,
    ) -> None:
        pending.status, pending.text = status, text
        pending.values, pending.payload = values, payload
        InflightTable._end(pending)

    @staticmethod
    def _end(pending: Pending) -> None:
        pending.done = True
        if (finish := pending.finish) is not None:
            finish(pending)
            pending.finish = None
        if pending.event is not None:
            pending.event.set()

    def waiting(self) -> Pending | None:
        """Some command whose caller sleeps in an event, if there is one."""
        return next((p for p in self.commands.values() if p.event is not None), None)

    def __len__(self) -> int:
        return len(self.commands)

    def all(self) -> list[Pending]:
        """What is in flight now, oldest first."""
        return list(self.commands.values())

    def snapshot(self) -> list[InflightCommand]:
        """`all`, as a caller may see it."""
        now = time.monotonic()
        return [InflightCommand(p.id, p.name, p.size, now - p.issued, p.pages) for p in self.all()]

    def describe(self) -> str:
        """One clause for error messages."""
        lines = [f"{c.name} #{c.id} ({c.size} bytes, {c.age:.1f} s)" for c in self.snapshot()]
        if not lines:
            return "nothing was in flight"
        shown = ", ".join(lines[:4]) + (f" and {len(lines) - 4} more" if len(lines) > 4 else "")
        return f"in flight: {shown}"


def checked(pending: Pending) -> Pending:
    """The answered command, or its error raised.

    Raises
    ------
    DeviceError, ProtocolError
    """
    if 0 < pending.status < min(Status):
        raise DeviceError(pending.status, pending.text or pending.name)
    if pending.status == Status.PROTOCOL:
        raise ProtocolError(f"the backend refused {pending.name}: {pending.text}")
    return pending
