# SPDX-License-Identifier: Apache-2.0
"""The short way of plain copies and fills: one call of C does and notes it all.

What `flyt.frontend.api`, `transfer`, `ways` and `connection` do in a hundred calls for any copy is
done here in one for the plainest: between the device and pinned memory, or a few KiB of pageable
memory, in a session with rings and with nothing else to see to. Each function tells whether it was
that; if not, nothing has happened, and the general way finds out the rest. The same checks lead to
the same messages in the same order.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from flyt.frontend.express_link import Area, ExpressLink
from flyt.frontend.inflight import Pending, checked
from flyt.frontend.plain_kernel import PlainKernel, Three
from flyt.frontend.streams import LEGACY_EXPLICIT, Stream
from flyt.shm import memory
from flyt.shm.native import Native, native

if TYPE_CHECKING:
    from flyt.frontend.session import Session

ELSEWHERE, LOOK, SENT = -1, -2, -3
"""What the library answers beside 0, and the sleep of a worker that has to be woken; below `SENT`,
as far as the number of the command that has to be waited for."""

MOST_STREAMS = 8
"""That are asked for one after the other: with more the general way is no longer."""

_OF_MEMORY = -1
"""No stream's number: the legacy stream of the memory's device."""


def express_of(session: Session, area: Area | None) -> Express | None:
    """The short way of a new session; None where it has no rings."""
    link, library = session.connection.link, native()
    if link is None or library is None or area is None:
        return None
    return Express(session, link, area, library)


class Express:
    """Of one session with rings.

    Parameters
    ----------
    session : Session
    link : ExpressLink
        Its connection's.
    area : Area
        What small copies of pageable memory pass through.
    library : Native
    """

    def __init__(self, session: Session, link: ExpressLink, area: Area, library: Native) -> None:
        connection = self._connection = session.connection
        self._link, self._area = link, area
        self._lock, self._raw = connection.lock, connection.lock.reading
        self._users = session.users
        self._streams = session.scheduler.table
        self._number_of = session.scheduler.table.number_of
        calls = library.entries(link.at)
        self._in, self._out = calls["express_in"], calls["express_out"]
        self._fill, self._part = calls["express_fill"], calls["express_part"]
        self._launch, self._sync = calls["express_launch"], calls["express_sync"]
        self._state = link.link
        self._calls = itertools.count(1)
        with connection.lock:
            link.begin(session.pid, area, self._streams, session.counts)
            session.pointers.mirror(link)

    @property
    def reader(self) -> int:
        """The command whose answer, or whose caller, still needs the cell; 0 for none."""
        return int(self._state.reader)

    def to_device(self, address: int, host: int, size: int, handle: int, device: int) -> bool:
        """cudaMemcpyAsync from host memory; see `Transfers.copy`.

        Parameters
        ----------
        address, host, size : int
            Where to, where from, and how many bytes. Of another kind, or not to be: False.
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
        number = device if 0 <= handle <= LEGACY_EXPLICIT else self._number_of(handle, device)
        if number is None:
            return False
        link, pending, is_long = self._link, None, False
        with self._raw:
            try:
                said = self._in(address, host, size, number, device < 0, link.hold_ns, link.polite)
                if said and said != ELSEWHERE:
                    is_long = self._is_long(said, size)
                    if not is_long or self._state.asleep:
                        pending = self._see_to(said)
            except BaseException:
                link.nudge()
                raise
        if is_long:
            self._end_long(SENT - said)
        elif pending is not None:
            self._end(pending)
        return said != ELSEWHERE

    def to_host(self, host: int, address: int, size: int, handle: int, device: int) -> bool:
        """cudaMemcpyAsync to host memory; to pageable memory it is complete on return. See
        `to_device`."""
        number = device if 0 <= handle <= LEGACY_EXPLICIT else self._number_of(handle, device)
        if number is None:
            return False
        link, state, call = self._link, self._state, next(self._calls)
        pending, is_long, has_cell = None, False, False
        try:
            with self._raw:
                try:
                    said = self._out(
                        host, address, size, number, device < 0, link.hold_ns, link.polite, call
                    )
                    if said and said != ELSEWHERE:
                        is_long = self._is_long(said, size)
                        if not is_long or state.asleep:
                            pending = self._see_to(said)
                        has_cell = bool(state.reader) and state.owner == call
                except BaseException:
                    link.nudge()
                    raise
            if is_long:
                self._end_long(SENT - said)
            elif has_cell:
                self._await(pending, host, size)
            elif pending is not None:
                self._end(pending)
        except BaseException:
            self._leave(call)
            raise
        return said != ELSEWHERE

    def fill(self, address: int, value: int, size: int, handle: int, device: int) -> bool:
        """cudaMemsetAsync of device memory, with the low byte of a C int; see `Transfers.fill`, and
        `to_device`."""
        number = device if 0 <= handle <= LEGACY_EXPLICIT else self._number_of(handle, device)
        if number is None:
            return False
        with self._raw:
            try:
                said = self._fill(address, value, size, number)
                if said and said != ELSEWHERE:
                    self._see_to(said)
            except BaseException:
                self._link.nudge()
                raise
        return said != ELSEWHERE

    def send_part(self, address: int, index: int, size: int, stream: int, sent: int) -> bool:
        """Post a part of a longer copy from its staging slot; its places were checked.

        Parameters
        ----------
        address, index, size : int
            Where to, the slot's index in the window, and how many bytes.
        stream : int
            The stream's number.
        sent : int
            Address of a word that gets the command's number: for `ExpressLink.is_answered`.
        """
        with self._raw:
            try:
                said = self._part(address, index, size, stream, sent)
                if said and said != ELSEWHERE:
                    self._see_to(said)
            except BaseException:
                self._link.nudge()
                raise
        return said != ELSEWHERE

    def launch(
        self,
        kernel: PlainKernel,
        grid: Three,
        block: Three,
        shared: int,
        stream: int,
        params: bytes,
    ) -> bool:
        """cuLaunchKernel; see `Kernels.launch`. ``stream`` is a number of commands."""
        with self._raw:
            try:
                said = self._launch(kernel.at, grid, block, shared, stream, params)
                if said and said != ELSEWHERE:
                    self._see_to(said)
            except BaseException:
                self._link.nudge()
                raise
        return said != ELSEWHERE

    def synchronize(self, handle: int, device: int) -> bool:
        """cudaStreamSynchronize; see `Scheduler.synchronize`. True: what the stream waits for is
        done, and there is no error to tell."""
        stream = self._streams.known(handle, device)
        if stream is None:
            return False
        with self._raw:
            return self._are_done(self._streams.before(stream))

    def synchronize_device(self, device: int) -> bool:
        """cudaDeviceSynchronize; see `synchronize`."""
        with self._raw:
            streams = self._streams  # dying ones: the general way forgets those that are idle
            return not streams.has_dying and self._are_done(streams.standing(device))

    def _are_done(self, streams: list[Stream]) -> bool:
        """Under the lock. Nothing is sent, and all that was read is noted: an interrupt tears
        nothing."""
        if not 0 < len(streams) <= MOST_STREAMS:
            return False
        link = self._link
        for stream in streams:
            last = stream.last
            number = 0 if last is None or last.done else last.id
            if self._sync(stream.number, number, link.hold_ns, link.polite):
                return False
        return True

    # --- inside, under the lock ---

    def _see_to(self, said: int) -> Pending | None:
        """After a command went out: what is left to do, and the command, if it has to be waited
        for and no answer to it was read."""
        link, connection = self._link, self._connection
        if said == LOOK and link.is_quiet():
            return None
        with self._lock:
            asleep = self._state.asleep if said < SENT else max(said, 0)
            if asleep:
                link.wake(asleep)
            if said == LOOK:
                connection.drain()
            pending = connection.inflight.get(SENT - said) if said < SENT else None
            if pending is not None:
                pending.posted = False
            elif said < SENT and connection.lost is not None:
                raise connection.lost
            return pending

    def _is_long(self, said: int, size: int) -> bool:
        """Whether a copy is on its way that takes a while: then it is noted as awaited."""
        is_long = said < SENT and size > self._area.cell
        if is_long:
            self._link.awaited[SENT - said] = None
        return is_long

    # --- inside, without it ---

    def _end_long(self, number: int) -> None:
        """Wait for a copy between the device and pinned memory: by the library as long as a thread
        looks for answers, and with no table brought up to date where it was a success."""
        awaited = self._link.awaited
        try:
            with self._users:
                if self._link.hears(number):
                    return
            with self._lock:  # the command is in the table by now, if it was no success
                pending = awaited[number] or self._connection.inflight.get(number)
                if pending is not None:  # a handler may have noted it before it was `awaited`
                    pending.posted = False
            if pending is not None:
                self._end(pending)
            else:
                self._connection.raise_deferred()
        finally:
            awaited.pop(number, None)

    def _end(self, pending: Pending) -> None:
        if not pending.done or pending.ended:
            self._connection.wait(pending)
        checked(pending)
        self._connection.raise_deferred()

    def _await(self, pending: Pending | None, host: int, size: int) -> None:
        """The answer to a copy by way of the cell takes longer, or is an error."""
        if pending is not None:
            self._connection.wait(pending)
        with self._lock:
            if self._connection.lost is not None:  # the window may be gone by now
                raise self._connection.lost
            if pending is None or not pending.status:
                memory.copy(host, self._area.address + self._area.ring, size)
            self._state.reader = 0
        if pending is not None:
            checked(pending)

    def _leave(self, call: int) -> None:
        """After an interrupt, or the session's end: the cell, if this call has it, is free when
        the answer is there."""
        with self._lock:
            if not self._state.reader or self._state.owner != call:
                return
            pending = self._connection.inflight.get(self._state.reader)
            if pending is None or pending.done:
                self._state.reader = 0
            else:
                pending.finish = self._free

    def _free(self, pending: Pending) -> None:
        if self._state.reader == pending.id:  # told twice, the cell may be another call's
            self._state.reader = 0
