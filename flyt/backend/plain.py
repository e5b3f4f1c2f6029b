# SPDX-License-Identifier: Apache-2.0
"""Plain commands, which a session's thread serves without Python (`flyt/shm/native/plain.c`).

Copies and fills in memory and on a stream that Python has checked before, while nothing else of the
session is in flight: small ones in a row, and on a GPU a large one by itself; and launches of
functions that it has launched before. What Python has checked is noted in a table that the compiled
loop reads; it is changed only by the thread that runs the loop, and forgotten as a whole as soon as
a block, a stream, a module or a segment of the window is gone. All else stays in the ring, for
Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from flyt.backend.answers import Answers
from flyt.backend.blocks import Block
from flyt.backend.devices.base import Direct
from flyt.backend.modules import Function
from flyt.backend.streams import SessionStream
from flyt.backend.wire import Wire
from flyt.errors import DeviceError
from flyt.rpc.patience import device_spin_seconds, is_polite
from flyt.shm.native import Native
from flyt.shm.window import Window

if TYPE_CHECKING:
    from flyt.backend.session import Session

BLOCKS, SEGMENTS, STREAMS, FUNCTIONS = 64, 16, 16, 64
"""How many of each are noted; a program seldom uses more in turns, and each is looked for in
nanoseconds. One more takes the place of the oldest."""

LARGEST = 64 << 10
"""Bytes that the loop itself copies, for a device that has no engine of its own."""

UNBOUNDED = (1 << 64) - 1

MOST_SECONDS = 0.001
"""After so long the thread looks at its socket and its inbox, as it does between two turns; with a
large copy under way after as long as it would ask the device itself."""

IDLE, LOOK, OTHER, KICK = range(4)
"""What the loop returns."""


class _Range(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
    )


class _Stream(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
        ("handle", ctypes.c_void_p),
        ("move", ctypes.c_void_p),
        ("fill", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("launch", ctypes.c_void_p),
    )


class _Function(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
        ("handle", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("bytes", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
    )


class Table(ctypes.Structure):
    """``plain_t`` of plain.c."""

    _fields_ = (
        ("commands", ctypes.c_void_p),
        ("replies", ctypes.c_void_p),
        ("commands_read", ctypes.c_void_p),
        ("replies_written", ctypes.c_void_p),
        ("command_places", ctypes.c_uint32),
        ("reply_places", ctypes.c_uint32),
        ("base", ctypes.c_uint64),
        ("pid", ctypes.c_uint64),
        ("largest", ctypes.c_uint64),
        ("blocks", ctypes.c_uint32),
        ("segments", ctypes.c_uint32),
        ("streams", ctypes.c_uint32),
        ("functions", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("launches", ctypes.c_uint32),
        ("first", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("taken", ctypes.c_uint64),
        ("moved", ctypes.c_uint64),
        ("woken", ctypes.c_uint64),
        ("slow", ctypes.c_uint64),
        ("block", _Range * BLOCKS),
        ("segment", _Range * SEGMENTS),
        ("queue", _Stream * STREAMS),
        ("function", _Function * FUNCTIONS),
    )


class _Notes:
    """Rows of one kind in the table; one too many takes the place of the oldest."""

    def __init__(self, rows: ctypes.Array[Any]) -> None:
        self._rows = rows
        self._keys: dict[Hashable, None] = {}
        self._next = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: Hashable, *values: int) -> None:
        if len(self._keys) == len(self._rows):
            del self._keys[next(iter(self._keys))]
        self._keys[key] = None
        row = self._rows[self._next]
        for (name, _), value in zip(row._fields_, values, strict=True):
            setattr(row, name, value)
        self._next = (self._next + 1) % len(self._rows)

    def clear(self) -> None:
        self._keys.clear()
        self._next = 0


class PlainCommands:
    """Of one session, whose thread alone uses it.

    Parameters
    ----------
    session : Session
    wire : Wire
    answers : Answers
    """

    def __init__(self, session: Session, wire: Wire, answers: Answers) -> None:
        self._session = session
        self._holdings = session.holdings
        self._wire = wire
        self._answers = answers
        self._known: tuple[object, ...] = ()
        self._serve: Callable[..., int] | None = None
        self._window: Window | None = None
        table = self._table = Table(pid=session.pid, largest=LARGEST)
        self._blocks, self._segments = _Notes(table.block), _Notes(table.segment)
        self._streams, self._functions = _Notes(table.queue), _Notes(table.function)

    def begin(self, native: Native, window: Window) -> None:
        """The client may use its rings from now on."""
        commands, replies = self._wire.rings
        table, table.base = self._table, window.base
        table.commands, table.commands_read, table.command_places = commands.place
        table.replies, table.replies_written, table.reply_places = replies.place
        self._serve, self._window = native.plain_serve, window

    def end(self) -> None:
        """The rings, or the window, are going."""
        self._serve = self._window = None

    def note(
        self, number: int, stream: SessionStream, block: Block, index: int | None = None
    ) -> None:
        """A command was found right, and done: the like of it may be served by the loop.

        Parameters
        ----------
        number : int
            What commands call the stream.
        stream : SessionStream
        block : Block
            Where the device memory lies.
        index : int, optional
            Of the window memory, if there is any.
        """
        window = self._window
        if window is None or not self._has(number, stream, window):
            return
        if block.address not in self._blocks:
            start, end = block.address, block.address + block.size
            self._blocks.add(start, start, end, block.device.ordinal)
        segment = None if index is None else window.segment_of(index)
        if segment is not None and segment not in self._segments:
            self._segments.add(segment, *segment, 0)
        self._count()

    def note_launch(
        self, number: int, stream: SessionStream, name: int, function: Function
    ) -> None:
        """A launch was found right, and done: the like of it may be served by the loop; see `note`.
        ``name`` is what commands call the function."""
        if self._window is None or not self._has(number, stream, self._window):
            return
        if name not in self._functions:
            device, params = function.module.device.ordinal, function.params
            self._functions.add(
                name, name, device, int(function.handle), params.size, params.start, params.address
            )
        self._count()

    def _has(self, number: int, stream: SessionStream, window: Window) -> bool:
        """Whether the stream is noted, by now at the latest."""
        self._forget_what_is_gone(window)
        if number not in self._streams:
            direct = self._direct(stream)
            if direct is None:
                self.end()  # no device will: all are of a kind
                return False
            self._streams.add(number, number, stream.device.ordinal, *direct)
            self._table.largest = UNBOUNDED if direct.query else LARGEST
        return True

    def _forget_what_is_gone(self, window: Window) -> None:
        holdings = self._holdings
        known = (
            holdings.blocks.version,
            holdings.streams.version,
            holdings.modules.version,
            window.version,
        )
        if known != self._known:
            self._known = known
            for notes in (self._blocks, self._segments, self._streams, self._functions):
                notes.clear()
            self._count()

    @staticmethod
    def _direct(stream: SessionStream) -> Direct | None:
        try:
            return stream.device.direct(stream.handle)
        except DeviceError:  # the context is broken, and whoever asks for work hears of it
            return None

    def _count(self) -> None:
        table = self._table
        table.blocks, table.segments = len(self._blocks), len(self._segments)
        table.streams, table.functions = len(self._streams), len(self._functions)

    def serve(self, seconds: float) -> bool:
        """Serve what is plain, or only wait for a command where something else is in flight.

        Parameters
        ----------
        seconds : float
            How long to wait for a command.

        Returns
        -------
        bool
            Whether there is, or may be, something for Python to do. False: no command came.

        Raises
        ------
        ProtocolError
        """
        serve, window = self._serve, self._window
        if serve is None or window is None or not (self._wire.is_quiet and self._holdings.is_quiet):
            return self._wire.spin(seconds)
        self._forget_what_is_gone(window)
        replies = self._wire.rings[1]
        table, answers = self._table, self._answers
        table.taken, table.moved, table.count = answers.taken, 0, 0
        table.woken = replies.woken
        linger, most = int(seconds * 1e9), int(MOST_SECONDS * 1e9)
        longest = max(most, int(device_spin_seconds() * 1e9))
        why = serve(ctypes.byref(table), linger, most, longest, is_polite())
        replies.woken = table.woken
        self._holdings.moved += table.moved
        answers.were_given(table.taken, table.count)
        if why == KICK:
            self._wire.kick()
        if table.count:
            self._complete(table)
        return bool(why != IDLE)

    def _complete(self, table: Table) -> None:
        """The loop began these commands; they are finished like others."""
        holdings, first = self._holdings, table.first
        stream = holdings.streams.get(table.stream)
        for command in range(first, first + table.count):
            try:
                holdings.streams.use(stream)
                self._session.complete(command, [stream], brief=not table.slow)
                if command - first < table.launches:
                    holdings.modules.was_launched(stream, holdings.unmarked(stream))
            except DeviceError as exc:
                self._session.fail(command, exc)
