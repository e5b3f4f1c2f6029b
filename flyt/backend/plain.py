# SPDX-License-Identifier: Apache-2.0
"""Plain commands, which a session's thread serves without Python (`flyt/shm/native/plain.c`).

Copies and fills in memory and on a stream that Python has checked before, while nothing else of the
session is in flight: small ones in a row, and on a GPU large ones in a row with marks of the device
behind each; and launches of functions that it has launched before. What Python has checked is noted
in a table that the compiled loop reads; it is changed only by the thread that runs the loop, and
forgotten as a whole as soon as a block, a stream, a module or a segment of the window is gone. All
else stays in the ring, for Python.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from flyt.backend.answers import Answers
from flyt.backend.blocks import Block
from flyt.backend.devices.base import Device, Direct
from flyt.backend.inbox import Inbox
from flyt.backend.modules import Function
from flyt.backend.plain_table import MARKS, OF_A_STREAM, Notes, Table
from flyt.backend.streams import SessionStream
from flyt.backend.wire import Wire
from flyt.errors import DeviceError
from flyt.rpc.patience import device_spin_seconds, is_polite
from flyt.shm.native import Native
from flyt.shm.window import Window

if TYPE_CHECKING:
    from flyt.backend.session import Session

LARGEST = 64 << 10
"""Bytes that the loop itself copies, for a device that has no engine of its own."""

UNBOUNDED = (1 << 64) - 1

log = logging.getLogger(__name__)

MOST_SECONDS = 0.001
"""After so long the thread looks at its socket and its inbox, as it does between two turns; with a
large copy under way that has no mark, after as long as it would ask the device itself."""

IDLE, LOOK, OTHER, KICK, LATE = range(5)
"""What the loop returns."""


class PlainCommands:
    """Of one session, whose thread alone uses it.

    Parameters
    ----------
    session : Session
    wire : Wire
    answers : Answers
    inbox : Inbox
        The session's: what is in it does not wait for a long row of commands.
    """

    def __init__(self, session: Session, wire: Wire, answers: Answers, inbox: Inbox) -> None:
        self._session = session
        self._holdings = session.holdings
        self._wire, self._inbox = wire, inbox
        self._answers = answers
        self._known: tuple[object, ...] = ()
        self._serve: Callable[..., int] | None = None
        self._window: Window | None = None
        table = self._table = Table(pid=session.pid, largest=LARGEST)
        self._blocks, self._segments = Notes(table.block), Notes(table.segment)
        self._streams, self._functions = Notes(table.queue), Notes(table.function)
        self._marked: Device | None = None

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
        table, device, self._marked = self._table, self._marked, None
        marks, table.marks = table.mark[: table.marks], 0
        try:
            for mark in marks:
                if device is not None:
                    device.destroy_event(mark)
        except DeviceError as exc:  # the context is broken, and they with it
            log.info("marks of the compiled loop: %s", exc)

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
            self._streams.add(number, number, stream.device.ordinal, *direct[:OF_A_STREAM])
            self._table.largest = UNBOUNDED if direct.query else LARGEST
            if direct.record and self._marked is None:
                self._make_marks(stream.device, direct)
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

    def _make_marks(self, device: Device, direct: Direct) -> None:
        table, self._marked = self._table, device
        table.marked, table.record, table.reached = device.ordinal, direct.record, direct.reached
        while table.marks < MARKS:
            try:
                table.mark[table.marks] = device.create_event()
            except DeviceError:  # no memory: with fewer, or one at a time
                break
            table.marks += 1

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
        serve = self._ready()
        return self._wire.spin(seconds) if serve is None else self._run(serve, seconds) != IDLE

    def take(self) -> bool:
        """Serve what is plain and has come already; whether nothing else is in the ring. Who was
        just woken has all its Python yet to be fetched into the caches, and the loop is small.

        Raises
        ------
        ProtocolError
        """
        serve = self._ready()
        if serve is None or self._run(serve, 0.0) not in (IDLE, LOOK):
            return False
        self._wire.glance()
        return True

    def _ready(self) -> Callable[..., int] | None:
        """The loop, if it may run now."""
        serve, window = self._serve, self._window
        if serve is None or window is None or not (self._wire.is_quiet and self._holdings.is_quiet):
            return None
        self._forget_what_is_gone(window)
        return serve

    def _run(self, serve: Callable[..., int], seconds: float) -> int:
        replies = self._wire.rings[1]
        table, answers = self._table, self._answers
        table.taken, table.moved, table.count, table.run = answers.taken, 0, 0, 0
        table.woken = replies.woken
        linger, most = int(seconds * 1e9), int(MOST_SECONDS * 1e9)
        longest = max(most, int(device_spin_seconds() * 1e9))
        while True:
            why = serve(ctypes.byref(table), linger, most, longest, is_polite())
            replies.woken = table.woken
            if why == KICK:
                self._wire.kick()
            goes_on = why in (KICK, LOOK) and table.count and table.slow and table.marks
            if not goes_on or self._is_wanted():
                break
        self._holdings.moved += table.moved
        answers.were_given(table.taken, table.count)
        if table.count:
            self._complete(table)
        return why

    def _is_wanted(self) -> bool:
        """Whether a row has to end, since the thread has something else to see to."""
        wire = self._wire
        wire.glance()
        return bool(self._inbox) or wire.gone or not wire.is_quiet

    def _complete(self, table: Table) -> None:
        """The loop began these commands, all but a run at their end that the device has refused;
        they are finished like others."""
        holdings, first = self._holdings, table.first
        stream, refused = holdings.streams.get(table.stream), None
        if table.run:
            whole = table.run_to, table.run_from, table.run_size
            try:
                stream.device.copy(*whole, holdings.streams.use(stream))
            except DeviceError as exc:
                refused = exc
        for command in range(first, first + table.count):
            try:
                if refused is not None and command >= first + table.count - table.run:
                    raise refused
                holdings.streams.use(stream)
                self._session.complete(command, [stream], brief=not table.slow)
                if command - first < table.launches:
                    holdings.modules.was_launched(stream, holdings.unmarked(stream))
            except DeviceError as exc:
                self._session.fail(command, exc)
