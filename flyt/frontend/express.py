# SPDX-License-Identifier: Apache-2.0
"""The short way of small copies and fills: checked, encoded, sent and noted under one lock.

What `flyt.frontend.api`, `transfer`, `ways` and `connection` do in a hundred calls for any copy is
done here in a few for the plainest: between pageable memory and the device, at most a few KiB, in a
session with rings and with nothing else to see to. Each function tells whether it was that; if not,
nothing has happened, and the general way finds out the rest. The same checks lead to the same
messages in the same order.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, NamedTuple

from flyt.frontend.inflight import Pending, checked
from flyt.frontend.pointers import PointerMap, Space
from flyt.frontend.staging_ring import StagingRing
from flyt.frontend.statistics import Statistics
from flyt.frontend.streams import Stream, StreamTable
from flyt.frontend.wire import Wire
from flyt.rpc import messages as m
from flyt.rpc.patience import is_polite, spin_seconds
from flyt.shm import memory
from flyt.shm.native import Native

if TYPE_CHECKING:
    from flyt.frontend.connection import Connection

HOLD_SECONDS = 0.00005
"""How long an answer is waited for with the connection's lock held: what giving it away and getting
it back costs, with a wake-up of who wanted it. The general way waits on."""

_CODES = {kind: code for code, kind in m.COMMAND_CODES.items()}
COPY_IN, COPY_OUT, FILL = (_CODES[kind] for kind in (m.CopyIn, m.CopyOut, m.Memset))


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


class _Attempt(NamedTuple):
    """A command that may go out, and how all was before: `Express._undo` puts it back."""

    pending: Pending
    stream: Stream
    written: int
    last: Pending | None
    sent: int


class Express:
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
        self._patience = int(hold * 1e9), int(is_polite())
        self._reader: Pending | None = None
        """The command whose answer, or whose caller, still needs the ring's cell."""

    def begin(
        self,
        pointers: PointerMap,
        streams: StreamTable,
        ring: StagingRing,
        counts: Statistics,
        pid: int,
    ) -> None:
        """From now on the functions below do what they are for.

        Parameters
        ----------
        pointers, streams
            The session's tables.
        ring : StagingRing
            What small copies pass through.
        counts : Statistics
        pid : int
            The process, as commands name it.
        """
        self._link.pid = pid
        self._pointers, self._streams = pointers, streams
        self._ring, self._counts = ring, counts

    # --- receiving, for the connection and under its lock ---

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
                    self._wait_for(self._at, pending.id, *self._patience)
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

    # --- what it is for ---

    def to_device(self, address: int, host: int, size: int, handle: int, device: int) -> bool:
        """cudaMemcpyAsync from pageable memory; see `Transfers.copy`.

        Parameters
        ----------
        address, host, size : int
            Where to, where from, and how many bytes.
        handle : int
            A stream's.
        device : int
            The calling thread's; -1 for a synchronous copy, which is on the legacy stream of the
            memory's device.
        """
        with self._lock:
            stream = self._checked(address, host, size, handle, device)
            if stream is None or size > self._ring.largest:
                return False
            slot = self._ring.place(size)
            if slot is None:
                return False
            memory.copy(slot.address, host, size)
            pending = self._send(COPY_IN, "CopyIn", address, slot.at, size, stream)
            if pending is None:
                return False
        self._counts.add("staged_h2d_bytes", size)
        return True

    def fill(self, address: int, value: int, size: int, handle: int, device: int) -> bool:
        """cudaMemsetAsync of device memory; see `Transfers.fill`."""
        with self._lock:
            if not self._is_ready():
                return False
            block = self._pointers.find(address)
            stream = self._streams.known(handle, device)
            if block is None or block.space != Space.DEVICE or stream is None:
                return False
            if address + size > block.address + block.size:
                return False
            return self._send(FILL, "Memset", address, value, size, stream) is not None

    def to_host(self, host: int, address: int, size: int, handle: int, device: int) -> bool:
        """cudaMemcpyAsync to pageable memory, which is complete on return; see `to_device`."""
        pending: Pending | None = None
        try:
            with self._lock:
                stream = self._checked(address, host, size, handle, device)
                if stream is None or size > self._ring.cell_size or self._reader is not None:
                    return False
                pending = self._new("CopyOut", size, self._ring.cell.at)
                if not self._ask(pending, address, size, stream):
                    pending = None
                    return False
                if pending.done and not pending.status:
                    memory.copy(host, self._ring.cell.address, size)
                    self._reader = pending = None
            if pending is not None:
                self._await(pending, host, size)
        except BaseException:
            if pending is not None:
                self._leave(pending)
            raise
        self._counts.add("staged_d2h_bytes", size)
        return True

    # --- inside ---

    def _is_ready(self) -> bool:
        """Whether there is nothing to see to first. Under the lock, as all below."""
        connection = self._connection
        return (
            connection.lost is None
            and connection.deferred is None
            and not connection.room.is_led
            and self._flow.has_credit()
            and self._wire.is_plain
        )

    def _checked(
        self, address: int, host: int, size: int, handle: int, device: int
    ) -> Stream | None:
        """The stream of a copy between pageable memory and one block of the device; None for
        anything else."""
        if not self._is_ready():
            return None
        block = self._pointers.find(address)
        if block is None or block.space != Space.DEVICE:
            return None
        if address + size > block.address + block.size or not self._pointers.is_free(host, size):
            return None
        return self._streams.known(handle, block.device if device < 0 else device)

    def _new(self, name: str, size: int, at: int = -1) -> Pending:
        pages = (0, 0) if at < 0 else (at, size)
        pending = Pending(self._inflight.next_id(), name, size, pages)
        if not len(self._inflight):
            self._flow.heard = pending.issued
        return pending

    def _send(
        self, code: int, name: str, address: int, second: int, size: int, stream: Stream
    ) -> Pending | None:
        """Post a command; None where it could not be, and then nothing has happened."""
        pending = self._new(name, size, second if code == COPY_IN else -1)
        pending.posted = True
        tried = self._attempt(pending, stream)
        try:
            if code == COPY_IN:  # before it goes out: its place is free when it is done, or undone
                self._ring.hold(pending, size)
            self._begin(pending, stream)
            asleep = self._post(self._at, code, pending.id, address, second, size, stream.number)
        except BaseException:
            self._interrupted(tried)
            raise
        if not self._is_sent(tried, asleep):
            return None
        self._flow.posts += 1
        if self._wire.wants_a_look():
            self._connection.drain()
        return pending

    def _ask(self, pending: Pending, address: int, size: int, stream: Stream) -> bool:
        """Send a CopyOut to the cell and look for its answer; whether it is sent."""
        self._note()  # the library begins to count anew
        tried = self._attempt(pending, stream)
        try:
            self._reader = pending
            self._begin(pending, stream)
            asleep = self._call(
                self._at, COPY_OUT, pending.id, address, self._ring.cell.at, size, stream.number,
                *self._patience,
            )  # fmt: skip
        except BaseException:
            self._interrupted(tried)
            self._note()
            raise
        if not self._is_sent(tried, asleep):
            self._reader = None
            return False
        self._flow.calls += 1
        self._note()
        if self._wire.wants_a_look():
            self._connection.drain()
        return True

    def _attempt(self, pending: Pending, stream: Stream) -> _Attempt:
        return _Attempt(pending, stream, self._commands.written, stream.last, self._flow.sent)

    def _begin(self, pending: Pending, stream: Stream) -> None:
        stream.last = pending
        self._inflight.add(pending)
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

    def _await(self, pending: Pending, host: int, size: int) -> None:
        """Without the lock: the answer takes longer, or is an error."""
        self._connection.wait(pending)
        with self._lock:
            if self._connection.lost is not None:  # the window may be gone by now
                raise self._connection.lost
            if not pending.status:
                memory.copy(host, self._ring.cell.address, size)
            self._reader = None
        checked(pending)

    def _leave(self, pending: Pending) -> None:
        """After an interrupt, or the session's end: the cell is free when the answer is there."""
        with self._lock:
            if self._reader is not pending:
                return
            if pending.done:
                self._reader = None
            else:
                pending.finish = self._free

    def _free(self, _: Pending) -> None:
        self._reader = None
