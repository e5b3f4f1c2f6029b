# SPDX-License-Identifier: Apache-2.0
"""How a command takes the short way: sent, noted, perhaps answered, in one call of C; or undone.

All under the connection's lock. Whoever is interrupted leaves every table as it was, or a command
that is on its way and will be heard of.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from flyt.frontend.inflight import Pending
from flyt.frontend.streams import Stream
from flyt.frontend.wire import Wire
from flyt.rpc import messages as m
from flyt.rpc.patience import is_polite, spin_seconds
from flyt.shm.native import Native

if TYPE_CHECKING:
    from flyt.frontend.connection import Connection

HOLD_SECONDS = 0.00005
"""How long an answer is waited for with the connection's lock held: what giving it away and getting
it back costs, with a wake-up of who wanted it. The general way waits on."""

HELD_SIZE = 64 << 10
"""Bytes: what is longer on its way than the lock is held is not waited for with it."""

_CODES = {kind: code for code, kind in m.COMMAND_CODES.items()}
COPY_IN, COPY_OUT, FILL = (_CODES[kind] for kind in (m.CopyIn, m.CopyOut, m.Memset))
_NAMES = {COPY_IN: "CopyIn", COPY_OUT: "CopyOut", FILL: "Memset"}


class Link(ctypes.Structure):
    """``express_t`` of express.c."""

    _fields_ = (
        ("commands", ctypes.c_void_p),
        ("replies", ctypes.c_void_p),
        ("commands_written", ctypes.c_void_p),
        ("replies_read", ctypes.c_void_p),
        ("command_places", ctypes.c_uint32),
        ("reply_places", ctypes.c_uint32),
        ("pid", ctypes.c_uint64),
        ("taken", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
    )


class ExpressCommand(NamedTuple):
    """``second`` is the index of a copy in the window, or the value of a fill."""

    code: int
    address: int
    second: int
    size: int
    stream: Stream


class _Attempt(NamedTuple):
    """A command that may go out, and how all was before."""

    pending: Pending
    stream: Stream
    written: int
    last: Pending | None
    sent: int


Claim = Callable[[Pending], Any]
"""Puts a place into the hands of a command; what is undone counts as answered."""


class ExpressLink:
    """Of one session with rings.

    Parameters
    ----------
    connection : Connection
    native : Native
    wire : Wire
        The connection's.
    """

    def __init__(self, connection: Connection, native: Native, wire: Wire) -> None:
        self._connection = connection
        self._lock, self._inflight = connection.lock, connection.inflight
        self._flow = connection.flow
        self._wire = wire
        commands, replies = wire.rings
        link = self._link = Link()
        link.commands, link.commands_written, link.command_places = commands.place
        link.replies, link.replies_read, link.reply_places = replies.place
        self._commands = commands
        self._at = ctypes.addressof(link)
        self._post, self._call = native.express_post, native.express_call
        self._read, self._wait_for = native.express_read, native.express_wait
        hold = min(HOLD_SECONDS, spin_seconds())
        self._hold, self._polite = int(hold * 1e9), int(is_polite())

    def begin(self, pid: int) -> None:
        """Commands name the process from now on."""
        self._link.pid = pid

    # --- receiving, for the connection ---

    def read(self) -> bool:
        """Take note of the plain answers that are next in the ring; whether there were any."""
        self._note()  # what an interrupt has left
        if not self._wire.is_plain:
            return False
        try:
            return bool(self._read(self._at))
        finally:
            self._note()  # also what a signal's handler has come behind

    def wait(self, pending: Pending) -> bool:
        """Look for the answer to a command for a moment; whether it is there. Takes the lock."""
        with self._lock:
            connection = self._connection
            if pending.done or connection.lost is not None or connection.room.is_led:
                return pending.done
            self._note()
            if self._wire.is_plain and not pending.done:
                try:
                    self._wait_for(self._at, pending.id, self._hold, self._polite)
                finally:
                    self._note()
            return pending.done

    def _note(self) -> None:
        link = self._link
        if not link.count:
            return
        self._flow.heard = time.monotonic()
        self._connection.succeeded(link.taken, link.first, link.count)
        link.count = 0  # last: whoever is interrupted before notes it once more

    # --- sending ---

    def is_ready(self) -> bool:
        """Whether there is nothing to see to first."""
        connection = self._connection
        return (
            connection.lost is None
            and connection.deferred is None
            and not connection.room.is_led
            and self._flow.has_credit()
            and self._wire.is_plain
        )

    def new(self, code: int, size: int, pages: tuple[int, int] = (0, 0)) -> Pending:
        """A command that is to be sent, with the window bytes that it holds."""
        pending = Pending(self._inflight.next_id(), _NAMES[code], size, pages)
        if not len(self._inflight):
            self._flow.heard = pending.issued
        return pending

    def post(self, pending: Pending, command: ExpressCommand, claim: Claim | None = None) -> bool:
        """Send a command that nobody waits for; where it can't be, nothing has happened."""
        pending.posted = True
        tried = self._attempt(pending, command.stream)
        try:
            if claim is not None:
                claim(pending)
            self._begin(tried)
            code, address, second, size, stream = command
            asleep = self._post(self._at, code, pending.id, address, second, size, stream.number)
        except BaseException:
            self._interrupted(tried)
            raise
        if not self._is_sent(tried, asleep):
            return False
        self._flow.posts += 1
        if self._wire.wants_a_look():
            self._connection.drain()
        return True

    def ask(self, pending: Pending, command: ExpressCommand, claim: Claim | None = None) -> bool:
        """Send a command and look for its answer for a moment; whether it is sent."""
        self._note()  # the library begins to count anew
        tried = self._attempt(pending, command.stream)
        try:
            if claim is not None:
                claim(pending)
            self._begin(tried)
            code, address, second, size, stream = command
            asleep = self._call(
                self._at, code, pending.id, address, second, size, stream.number,
                self._hold if size <= HELD_SIZE else 0, self._polite,
            )  # fmt: skip
        except BaseException:
            self._interrupted(tried)
            self._note()
            raise
        if not self._is_sent(tried, asleep):
            return False
        self._flow.calls += 1
        self._note()
        if self._wire.wants_a_look():
            self._connection.drain()
        return True

    def _attempt(self, pending: Pending, stream: Stream) -> _Attempt:
        return _Attempt(pending, stream, self._commands.written, stream.last, self._flow.sent)

    def _begin(self, tried: _Attempt) -> None:
        tried.stream.last = tried.pending
        self._inflight.add(tried.pending)
        self._flow.sent += 1

    def _undo(self, tried: _Attempt) -> None:
        tried.stream.last, self._flow.sent = tried.last, tried.sent
        self._inflight.succeed(tried.pending.id)
        tried.pending.done = True  # also where it was not in the table yet

    def _interrupted(self, tried: _Attempt) -> None:
        """By a handler of a signal that another thread got; see `Connection`."""
        if self._commands.written == tried.written:
            self._undo(tried)
        else:  # perhaps behind the command: it must be heard of
            self._wire.nudge()

    def _is_sent(self, tried: _Attempt, asleep: int) -> bool:
        """After the library's call: whether the command is in the ring, and its reader awake."""
        if asleep < 0:  # the ring is damaged: the general way says so
            self._undo(tried)
            return False
        if asleep and not self._wire.wake(asleep):
            self._connection.ended()
        return True
