# SPDX-License-Identifier: Apache-2.0
"""What the short way's C and the tables of the general way know of each other.

`flyt/shm/native/express.c` sends commands, and reads the answers to them, without telling anybody;
it notes them. Whoever takes the connection's lock for anything else first has the tables brought up
to date with these notes (`ExpressLink.absorb`), and gives what the library goes by back when it
leaves (`ExpressLink.lend`). So the tables are right wherever Python looks at them, and a program
that only copies never fills them. Between the two the short way is shut: a finalizer, or a
signal's handler, may make a call in the middle of another one's.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, NamedTuple

from flyt.frontend.inflight import Pending
from flyt.frontend.pointers import Allocation
from flyt.frontend.wire import Wire
from flyt.rpc import messages as m
from flyt.rpc.patience import is_polite, spin_seconds
from flyt.shm.native import Native

if TYPE_CHECKING:
    from flyt.frontend.connection import Connection
    from flyt.frontend.statistics import Statistics
    from flyt.frontend.streams import StreamTable

HOLD_SECONDS = 0.00005
"""How long an answer is waited for with the connection's lock held: what giving it away and getting
it back costs, with a wake-up of who wanted it. The general way waits on."""

TURN_SECONDS = 0.0005
"""After so long without an answer a thread that looks for one asks whether another has read it."""

LOOKS = 8
"""So often a thread that needs a slot looks so long: together about what a slot's DMA takes."""

NOTES, ROWS = 256, 16
NOWHERE = (1 << 64) - 1

_CODES = {kind: code for code, kind in m.COMMAND_CODES.items()}
COPY_IN, COPY_OUT, FILL, LAUNCH = (
    _CODES[kind] for kind in (m.CopyIn, m.CopyOut, m.Memset, m.Launch)
)
_NAMES = {COPY_IN: "CopyIn", COPY_OUT: "CopyOut", FILL: "Memset", LAUNCH: "Launch"}
_COUNTED = (
    ("staged_h2d_bytes", "staged_in"),
    ("staged_d2h_bytes", "staged_out"),
    ("pinned_h2d_bytes", "pinned_in"),
    ("pinned_d2h_bytes", "pinned_out"),
)


def _words(*names: str) -> list[tuple[str, type[ctypes.c_uint64]]]:
    return [(name, ctypes.c_uint64) for name in names]


class _Row(ctypes.Structure):
    _fields_ = _words("first", "count")


class _Held(ctypes.Structure):
    _fields_ = _words("id", "end", "answered")


class _Note(ctypes.Structure):
    _fields_ = _words("id", "code", "size", "index", "stream", "issued", "answered")


class Link(ctypes.Structure):
    """``express_t`` of express.h."""

    _fields_ = (
        *_words("commands", "replies", "commands_written", "replies_read"),
        *_words("command_places", "reply_places", "pid", "shut"),
        *_words("last_id", "sent", "taken", "credits", "woken"),
        *_words("news", "base", "first", "count", "rows", "heard", "posts", "calls"),
        *_words("staged_in", "staged_out", "pinned_in", "pinned_out"),
        *_words("asleep", "since", "looked", "patience", "yields"),
        *_words("ring", "ring_index", "ring_size", "head", "tail", "holds", "freed"),
        *_words("cell", "cell_index", "cell_size", "reader", "owner"),
        *_words("blocks", "block_count", "block_room"),
        ("row", _Row * ROWS),
        ("held", _Held * NOTES),
        ("note", _Note * NOTES),
    )


CELL_BYTES = 16 << 10
"""Small copies to the host are waited for, one at a time."""

CELL_SHARE = 4
"""In a small area the cell has this part of it."""


class Area(NamedTuple):
    """The short way's part of the staging area: a ring of bytes, and behind it a cell.

    Attributes
    ----------
    address, at : int
        Of the ring, and its index in the window.
    ring, cell : int
        Bytes of each.
    """

    address: int
    at: int
    ring: int
    cell: int

    @classmethod
    def over(cls, address: int, at: int, size: int) -> Area:
        """So many bytes, divided."""
        cell = min(CELL_BYTES, size // CELL_SHARE)
        return cls(address, at, size - cell, cell)


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
        self._inflight, self._flow = connection.inflight, connection.flow
        self._commands = connection.inflight.commands
        self._wire, self._native = wire, native
        commands, replies = wire.rings
        link = self.link = Link(shut=1, credits=connection.flow.credits)
        link.commands, link.commands_written, link.command_places = commands.place
        link.replies, link.replies_read, link.reply_places = replies.place
        self.at = ctypes.addressof(link)
        self._add, self._remove = native.express_add, native.express_remove
        self._read, self._wait_for = native.express_read, native.express_wait
        self._state = native.express_state
        self._heard, self._answered = native.express_heard, native.express_answered
        self.hold_ns = int(min(HOLD_SECONDS, spin_seconds()) * 1e9)
        self.polite = int(is_polite())
        link.patience, link.yields = self.hold_ns, self.polite
        self._streams: StreamTable | None = None
        self._counts: Statistics | None = None
        self._ended = False
        self.awaited: dict[int, Pending | None] = {}  # what callers wait for without the lock
        connection.lock.surround(self.absorb, self.lend)

    def begin(self, pid: int, area: Area, streams: StreamTable, counts: Statistics) -> None:
        """Small copies may be made from now on."""
        link = self.link
        link.pid = pid
        link.ring, link.ring_index, link.ring_size = area.address, area.at, area.ring
        link.cell, link.cell_index = area.address + area.ring, area.at + area.ring
        link.cell_size = area.cell
        self._streams, self._counts = streams, counts

    def end(self) -> None:
        """The window is going, and the rings with it."""
        self._ended = True
        self._native.express_end(self.at)

    # --- memory, for the pointer map ---

    def add(self, block: Allocation) -> None:
        """Note a block of device memory, or of pinned or registered memory."""
        index = block.index if block.index >= 0 else NOWHERE
        device = max(block.device, 0)
        if not self._add(self.at, block.address, block.size, block.space, device, index):
            self.end()  # no memory for a few words: the general way knows the block

    def remove(self, address: int) -> None:
        """Forget the block that begins there."""
        self._remove(self.at, address)

    # --- the tables, for the lock ---

    def absorb(self) -> None:
        """Bring the tables up to date. Whoever is interrupted in here does it once more; if it was
        by a call that has done it meanwhile, the rest changes nothing."""
        link = self.link
        link.shut = 1
        if not link.news:
            return
        flow, inflight, connection = self._flow, self._inflight, self._connection
        is_idle = not len(inflight)
        # Not max(): between its arguments and the store a handler could come, and send.
        if link.last_id > inflight.last_id:  # noqa: PLR1730
            inflight.last_id = link.last_id
        if link.sent > flow.sent:  # noqa: PLR1730
            flow.sent = link.sent
        if link.taken > flow.taken:  # noqa: PLR1730
            flow.taken = link.taken
        flow.heard = max(flow.heard, link.heard / 1e9)
        for number in range(link.first, link.first + link.count):
            note = link.note[number % NOTES]
            if is_idle:
                flow.heard = max(flow.heard, note.issued / 1e9)  # an idle session's silence
                is_idle = False
            if not note.answered:
                self._note(note)
        for row in link.row[: link.rows]:
            connection.succeeded(row.first, row.count)
        if self._counts is not None:
            for name, field in _COUNTED:
                if size := getattr(link, field):
                    self._counts.add(name, size)
        flow.posts += link.posts
        flow.calls += link.calls
        self._heard(self.at)

    def _note(self, note: _Note) -> None:
        pending = self._inflight.get(note.id)
        if pending is None:
            pages = (note.index, note.size) if note.code in (COPY_IN, COPY_OUT) else (0, 0)
            pending = Pending(note.id, _NAMES[note.code], note.size, pages)
            pending.issued, pending.posted = note.issued / 1e9, True  # until its caller waits
            if not self.link.news:
                return  # it was told meanwhile, and perhaps answered
            if pending.id in self.awaited:  # whoever reads an error of it, it is the caller's
                pending.posted, self.awaited[pending.id] = False, pending
            self._commands[pending.id] = pending
        stream = self._streams.numbered(note.stream) if self._streams is not None else None
        if stream is not None and (stream.last is None or stream.last.id < pending.id):
            stream.last = pending

    def _tell(self) -> None:
        """How far the tables are."""
        link = self.link
        link.last_id, link.sent, link.taken = (
            self._inflight.last_id, self._flow.sent, self._flow.taken,
        )  # fmt: skip

    def lend(self) -> None:
        """Let the library go on from where the tables are, if nothing has to be seen to first."""
        connection = self._connection
        self._tell()
        self.link.shut = (
            self._ended
            or connection.lost is not None
            or connection.deferred is not None
            or connection.room.is_led
            or not self._wire.is_plain
        )

    # --- answers, for the connection, under its lock ---

    def read(self) -> bool:
        """Take note of the plain answers that are next in the ring; whether there were any."""
        if self._ended or not self._wire.is_plain:
            return False
        self._tell()
        try:
            return bool(self._read(self.at))
        finally:
            self.absorb()  # also what a signal's handler has come behind

    def wait(self, pending: Pending) -> bool:
        """Look for the answer to a command for a moment; whether it is there. Takes the lock."""
        with self._connection.lock:
            connection = self._connection
            if pending.done or connection.lost is not None or connection.room.is_led:
                return pending.done
            if self._wire.is_plain and not self._ended:
                self._tell()
                try:
                    self._wait_for(self.at, pending.id, self.hold_ns, self.polite)
                finally:
                    self.absorb()
            return pending.done

    def is_answered(self, number: int) -> bool:
        """Whether the answer to a command that the library has sent was read."""
        with self._connection.lock.reading:
            state = self._state(self.at, number)
            return bool(state) if state >= 0 else self._inflight.get(number) is None

    def await_answer(self, number: int) -> None:
        """Return once a command that the library has sent is answered.

        Raises
        ------
        Lost, CommandTimeout
        """
        connection = self._connection
        for _ in range(LOOKS):
            with connection.lock.reading:
                if not self.link.shut:
                    self._wait_for(self.at, number, self.hold_ns, self.polite)
                if self.is_answered(number):
                    return
        with connection.lock:
            pending = self._inflight.get(number)
        if pending is not None:
            connection.wait(pending)

    def hears(self, number: int) -> bool:
        """Look for the answer to a command that the library has sent, without the lock, as long as
        `flyt.rpc.patience.spin_seconds`; whether it was read. False as well where something else
        has come, or another thread sees to what comes. The caller is among the session's users."""
        until = time.monotonic() + spin_seconds()
        while time.monotonic() < until:
            came = self._wire.spin(TURN_SECONDS)
            with self._connection.lock.reading:
                if came is None or self.link.shut:
                    return False
                told = self._read(self.at)
                state = self._state(self.at, number)
                is_gone = state < 0 and self._inflight.get(number) is None
            if state == 1:
                return True
            if is_gone or (came and not told):
                return False
        return False

    def answered(self, first: int, count: int) -> None:
        """Python has read the answer to these commands: their places in the ring are free."""
        self._answered(self.at, first, count)

    def rouse(self) -> None:
        """Something comes soon: wake the reader of commands now, if it sleeps."""
        with self._connection.lock:
            if self._connection.lost is None and (asleep := self._wire.rings[0].sleeper()):
                self.wake(asleep)

    # --- after the library has sent a command ---

    def is_quiet(self) -> bool:
        """Under the lock: whether the connection has nothing to tell. Most looks find that, and
        the tables need not be brought up to date for it."""
        return self._wire.is_quiet()

    def wake(self, asleep: int) -> None:
        """Under the lock: the reader slept when the command was published."""
        if not self._wire.wake(asleep):
            self._connection.ended()
        self.link.woken = asleep

    def nudge(self) -> None:
        """After an interrupt: perhaps nobody has woken the reader for what it did not see."""
        with self._connection.lock:
            if self._connection.lost is None:
                self._wire.nudge()
