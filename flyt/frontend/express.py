# SPDX-License-Identifier: Apache-2.0
"""The short way of plain copies and fills: checked, encoded, sent and noted under one lock.

What `flyt.frontend.api`, `transfer`, `ways` and `connection` do in a hundred calls for any copy is
done here in a few for the plainest: between the device and pinned memory, or a few KiB of pageable
memory, in a session with rings and with nothing else to see to. Each function tells whether it was
that; if not, nothing has happened, and the general way finds out the rest. The same checks lead to
the same messages in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyt.frontend.express_link import COPY_IN, COPY_OUT, FILL, ExpressCommand, ExpressLink
from flyt.frontend.inflight import Pending, checked
from flyt.frontend.pointers import Space
from flyt.frontend.staging_ring import StagingRing
from flyt.frontend.streams import Stream
from flyt.shm import memory

if TYPE_CHECKING:
    from flyt.frontend.session import Session


class Express:
    """Of one session with rings.

    Parameters
    ----------
    session : Session
    link : ExpressLink
        Its connection's.
    ring : StagingRing
        What small copies of pageable memory pass through.
    """

    def __init__(self, session: Session, link: ExpressLink, ring: StagingRing) -> None:
        link.begin(session.pid)
        self._connection, self._link, self._ring = session.connection, link, ring
        self._lock = session.connection.lock
        self._pointers, self._streams = session.pointers, session.scheduler.table
        self._counts = session.counts
        self._reader: Pending | None = None
        """The command whose answer, or whose caller, still needs the ring's cell."""

    def to_device(self, address: int, host: int, size: int, handle: int, device: int) -> bool:
        """cudaMemcpyAsync from host memory; see `Transfers.copy`.

        Parameters
        ----------
        address, host, size : int
            Where to, where from, and how many bytes.
        handle : int
            A stream's.
        device : int
            The calling thread's; -1 for a synchronous copy, which is on the legacy stream of the
            memory's device.

        Raises
        ------
        DeviceError, Lost, CommandTimeout
            As the general way: of a synchronous copy from pinned memory.
        """
        with self._lock:
            stream = self._checked(address, size, handle, device)
            if stream is None:
                return False
            if self._pointers.is_free(host, size):
                return self._stage(address, host, size, stream)
            pending = self._pinned(COPY_IN, address, host, size, stream, device)
        if pending is None:
            return False
        self._end(pending)
        return True

    def to_host(self, host: int, address: int, size: int, handle: int, device: int) -> bool:
        """cudaMemcpyAsync to host memory; to pageable memory it is complete on return. See
        `to_device`."""
        held: list[Pending] = []
        try:
            with self._lock:
                stream = self._checked(address, size, handle, device)
                if stream is None:
                    return False
                if self._pointers.is_free(host, size):
                    pending = self._to_cell(host, address, size, stream, held)
                else:
                    pending = self._pinned(COPY_OUT, address, host, size, stream, device)
                if pending is None:
                    return False
            if pending is self._reader:
                self._await(pending, host, size)
            else:
                self._end(pending)
        except BaseException:
            for left in held:
                self._leave(left)
            raise
        return True

    def fill(self, address: int, value: int, size: int, handle: int, device: int) -> bool:
        """cudaMemsetAsync of device memory; see `Transfers.fill`."""
        with self._lock:
            stream = self._checked(address, size, handle, device)
            if stream is None:
                return False
            command = ExpressCommand(FILL, address, value, size, stream)
            return self._link.post(self._link.new(FILL, size), command)

    # --- inside, under the lock ---

    def _checked(self, address: int, size: int, handle: int, device: int) -> Stream | None:
        """The stream of work on bytes of one block of the device; None for anything else."""
        if not self._link.is_ready():
            return None
        block = self._pointers.find(address)
        if block is None or block.space != Space.DEVICE:
            return None
        if address + size > block.address + block.size:
            return None
        return self._streams.known(handle, block.device if device < 0 else device)

    def _stage(self, address: int, host: int, size: int, stream: Stream) -> bool:
        """Post a copy from pageable memory, whose bytes are taken now."""
        slot = self._ring.place(size) if size <= self._ring.largest else None
        if slot is None:
            return False
        memory.copy(slot.address, host, size)
        pending = self._link.new(COPY_IN, size, (slot.at, size))
        command = ExpressCommand(COPY_IN, address, slot.at, size, stream)
        if not self._link.post(pending, command, lambda sent: self._ring.hold(sent, size)):
            return False
        self._counts.add("staged_h2d_bytes", size)
        return True

    def _pinned(
        self, code: int, address: int, host: int, size: int, stream: Stream, device: int
    ) -> Pending | None:
        """Send a copy from or to memory in the window; None for other host memory."""
        block = self._pointers.find(host)
        if block is None or block.index < 0 or host + size > block.address + block.size:
            return None
        index = block.index + host - block.address
        pending = self._link.new(code, size, (index, size))
        send = self._link.ask if device < 0 else self._link.post
        if not send(pending, ExpressCommand(code, address, index, size, stream)):
            return None
        self._counts.add("pinned_h2d_bytes" if code == COPY_IN else "pinned_d2h_bytes", size)
        return pending

    def _to_cell(
        self, host: int, address: int, size: int, stream: Stream, held: list[Pending]
    ) -> Pending | None:
        """Ask for bytes of the device by way of the cell; if they come at once they are copied.
        ``held`` gets the command that may have the cell, for whoever is interrupted."""
        cell = self._ring.cell
        if size > self._ring.cell_size or self._reader is not None:
            return None
        pending = self._link.new(COPY_OUT, size, (cell.at, size))
        command = ExpressCommand(COPY_OUT, address, cell.at, size, stream)

        def claim(sent: Pending) -> None:
            held.append(sent)
            self._reader = sent

        if not self._link.ask(pending, command, claim):
            self._reader = None
            return None
        self._counts.add("staged_d2h_bytes", size)
        if pending.done and not pending.status:
            memory.copy(host, cell.address, size)
            self._reader = None
        return pending

    def _free(self, _: Pending) -> None:
        self._reader = None

    # --- inside, without it ---

    def _end(self, pending: Pending) -> None:
        """The end of a copy that needs no more than its answer, if that."""
        if pending.posted:
            return
        if not pending.done or pending.ended:
            self._connection.wait(pending)
        checked(pending)

    def _await(self, pending: Pending, host: int, size: int) -> None:
        """The answer to a copy by way of the cell takes longer, or is an error."""
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
