# SPDX-License-Identifier: Apache-2.0
"""Making, waiting for and asking streams and events of a session.

Creating, destroying, recording and waiting are posts; queries and synchronisation need no message
at all, since the answers to what was put on a stream tell how far it is.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable

from flyt.errors import DeviceError, ProtocolError
from flyt.frontend import prints
from flyt.frontend.connection import Connection
from flyt.frontend.inflight import Command, Pending
from flyt.frontend.streams import PER_THREAD, Event, Stream, StreamTable
from flyt.rpc import messages as m

INVALID_HANDLE = 400
NOT_READY = 600

SHORTEST_PAUSE, LONGEST_PAUSE = 0.0002, 0.005
"""Seconds between two questions whether a shared event is reached."""


class NotReady(DeviceError):
    """cudaErrorNotReady: an answer, not an error; it is no thread's last error (recorded)."""

    def __init__(self, code: int = NOT_READY, detail: str = "the work is not done yet") -> None:
        super().__init__(code, detail)


class Scheduler:
    """Streams and events of one session.

    Attributes
    ----------
    prints : bool
        Whether its kernels may print, and the backend keeps that for us.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.prints = False
        self.table = StreamTable()

    # --- streams ---

    def stream(self, handle: int, device: int) -> Stream:
        """The stream that a handle means to this thread, whose current device is ``device``."""
        found = self.table.known(handle, device)  # one look-up, so it needs no lock
        if found is None:
            if handle > PER_THREAD or handle < 0:
                return self.table.get(handle)
            found = self.create(device, 0, 0)
            with self._connection.lock:
                self.table.set_per_thread(found)
        return found

    def create(self, device: int, flags: int, priority: int) -> Stream:
        """A new stream; ``priority`` is 0 or less, in CUDA's sense."""
        with self._connection.lock:
            stream = self.table.create(device, flags, priority)
        self._post(
            lambda number: m.StreamCreate(number, stream.number, device, flags, -priority), None
        )
        return stream

    def destroy(self, handle: int) -> None:
        """The handle is gone at once, the work goes on, as CUDA says of cudaStreamDestroy."""
        with self._connection.lock:
            stream = self.table.remove(handle)
        self._post(lambda number: m.StreamDestroy(number, stream.number), stream)

    def query(self, stream: Stream) -> None:
        """NotReady while the stream, or one whose work it waits for, is busy."""
        self._connection.refresh()
        with self._connection.lock:
            busy = any(not s.idle for s in self.table.before(stream))
        if busy:
            raise NotReady
        self._connection.raise_deferred()

    def synchronize(self, stream: Stream) -> None:
        """Wait until the stream, and those whose work it waits for, are idle."""
        with self._connection.lock:
            streams = self.table.before(stream)
        self._wait((s.last for s in streams), stream.device)

    def synchronize_device(self, device: int) -> None:
        """Wait for everything that this process put on a device."""
        with self._connection.lock:
            streams = self.table.of(device)
        self._wait((s.last for s in streams), device)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Work put on the stream from now on waits for the event's last record."""
        if event.shared or not event.reached:
            self._post(lambda number: m.StreamWait(number, stream.number, event.number), stream)

    # --- events ---

    def create_event(self, device: int, flags: int) -> Event:
        with self._connection.lock:
            event = self.table.create_event(device, flags)
        self._post(lambda number: m.EventCreate(number, event.number, device, flags), None)
        return event

    def destroy_event(self, handle: int) -> None:
        with self._connection.lock:
            event = self.table.remove_event(handle)
        self._post(lambda number: m.EventDestroy(number, event.number), None)

    def event(self, handle: int) -> Event:
        """An event by handle, or DeviceError cudaErrorInvalidResourceHandle."""
        with self._connection.lock.reading:
            return self.table.event(handle)

    def record(self, event: Event, stream: Stream) -> None:
        if event.device != stream.device:
            raise DeviceError(INVALID_HANDLE, "the event belongs to another device than the stream")
        self._connection.submit(
            lambda number: m.EventRecord(number, event.number, stream.number),
            posted=True,
            stream=stream,
            event=event,
        )
        if event.shared:  # who hears of it from this process now must find it recorded
            self._connection.call(m.Ping)

    def query_event(self, event: Event) -> None:
        """NotReady until the event's last record is reached."""
        self._connection.refresh()
        if not (self._asked(event) if event.shared else event.reached):
            raise NotReady
        self._connection.raise_deferred()

    def synchronize_event(self, event: Event) -> None:
        pause = SHORTEST_PAUSE
        while event.shared and not self._asked(event):
            time.sleep(pause)  # no answer tells of another process's record
            pause = min(2 * pause, LONGEST_PAUSE)
        self._wait([event.record], event.device)

    def _asked(self, event: Event) -> bool:
        """Whether an event is reached that another process may have recorded."""
        answer = self._connection.call(lambda number: m.EventQuery(number, event.number))
        if len(answer.values) != 1:
            raise ProtocolError("the backend's answer to EVENT_QUERY is not one number")
        return bool(answer.values[0])

    def elapsed(self, start: Event, end: Event) -> float:
        """Milliseconds between the last records of two events."""
        for event in (start, end):
            if event.record is None or not event.timed:
                raise DeviceError(INVALID_HANDLE, "an event has no record, or no timing")
        self._connection.refresh()
        if not (start.reached and end.reached):
            raise NotReady
        answer = self._connection.call(lambda number: m.Elapsed(number, start.number, end.number))
        if len(answer.values) != 1 or answer.values[0] >> 32:
            raise ProtocolError("the backend's answer to ELAPSED is not one 32-bit float")
        return float(struct.unpack("<f", answer.values[0].to_bytes(4, "little"))[0])

    # --- both ---

    def _post(self, make: Callable[[int], Command], stream: Stream | None) -> None:
        self._connection.submit(make, posted=True, stream=stream)

    def _wait(self, pending: Iterable[Pending | None], device: int) -> None:
        for one in pending:
            if one is not None and (one.ended or not one.done):
                self._connection.wait(one)
        self._connection.refresh()
        self._connection.raise_deferred()
        if self.prints:
            prints.show(self._connection, device)
