# SPDX-License-Identifier: Apache-2.0
"""The streams of one session, with CUDA's legacy order among them and none with other sessions.

All are non-blocking streams of the device: a real legacy stream would order the sessions of a
worker against each other. What the legacy default stream means is built from events: its work
waits for what was put on the session's blocking streams before, and their later work waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable

from flyt.backend.devices.base import Device, Handle
from flyt.errors import DeviceError, ProtocolError
from flyt.rpc.messages import FIRST_STREAM, MAX_EVENTS, MAX_STREAMS

INVALID_VALUE = 1
INVALID_DEVICE = 101
INVALID_HANDLE = 400

NON_BLOCKING = 1
"""cudaStreamNonBlocking: no order with the legacy stream."""


@dataclasses.dataclass(slots=True, eq=False)
class SessionStream:
    """One stream of a session.

    Attributes
    ----------
    fresh : bool
        Whether work was put on it that the legacy stream has not waited for.
    seen : int
        The generation of the legacy stream's work that it waited for last.
    generation : int
        Of the legacy stream: counts what was put on it.
    marked, told : int
        Numbers of the last mark of its work, and of the last one whose end was told.
    after : dict
        What it has waited for since its last mark: streams, and their marks up to which.
    """

    device: Device
    handle: Handle
    legacy: bool = False
    blocking: bool = True
    fresh: bool = False
    seen: int = 0
    generation: int = 0
    marked: int = 0
    told: int = 0
    after: dict[SessionStream, int] = dataclasses.field(default_factory=dict)

    def follow(self, other: SessionStream, mark: int) -> None:
        """Note that it waits for another one's work up to a mark: whoever hears that this one's is
        done, must have heard the same of that."""
        if other is not self and mark > other.told:
            self.after[other] = max(mark, self.after.get(other, 0))


class StreamTable:
    """Streams and events of one session, by the numbers that the frontend minted.

    Parameters
    ----------
    devices : list of Device
    mark : callable
        Called with a stream that is about to wait for another's work, and with that: brief work on
        either gets a mark of its own.
    """

    def __init__(self, devices: list[Device], mark: Callable[[SessionStream], None]) -> None:
        self._devices = devices
        self._mark = mark
        self.version = 0
        """Another one whenever a stream is gone."""
        self._legacy: dict[int, SessionStream] = {}
        self._own: dict[int, SessionStream] = {}
        self._streams: dict[int, SessionStream] = {}
        self._dying: list[SessionStream] = []
        self._events: dict[int, tuple[Device, Handle]] = {}
        self._records: dict[int, tuple[SessionStream, int]] = {}
        self._stock: dict[int, list[Handle]] = {}
        self._partings: dict[int, Callable[[], bool]] = {}

    # --- streams ---

    def device(self, ordinal: int) -> Device:
        """The device a command names, or DeviceError cudaErrorInvalidDevice."""
        if ordinal >= len(self._devices):
            raise DeviceError(INVALID_DEVICE, f"there is no device {ordinal}")
        return self._devices[ordinal]

    def get(self, number: int) -> SessionStream:
        """A stream by number, or DeviceError cudaErrorInvalidResourceHandle."""
        if number < FIRST_STREAM:
            return self.legacy(self.device(number))
        stream = self._streams.get(number)
        if stream is None:
            raise DeviceError(INVALID_HANDLE, f"stream {number:#x} does not exist")
        return stream

    def legacy(self, device: Device) -> SessionStream:
        """The session's own legacy default stream on a device."""
        if device.ordinal not in self._legacy:
            handle = device.create_stream()
            self._legacy[device.ordinal] = SessionStream(device, handle, legacy=True)
        return self._legacy[device.ordinal]

    def own(self, device: Device) -> SessionStream:
        """A stream for what the program did not ask for (clearing memory); ordered with nothing."""
        if device.ordinal not in self._own:
            handle = device.create_stream()
            self._own[device.ordinal] = SessionStream(device, handle, blocking=False)
        return self._own[device.ordinal]

    def create(self, number: int, device: Device, flags: int, priority: int) -> None:
        if number < FIRST_STREAM or number in self._streams:
            raise ProtocolError(f"stream number {number:#x} can't be given out now")
        if len(self._streams) >= MAX_STREAMS:
            raise DeviceError(2, f"the session has {MAX_STREAMS} streams already")
        handle = device.create_stream(NON_BLOCKING, priority)
        blocking = not flags & NON_BLOCKING
        # Work on it waits for what is on the legacy stream now, as any blocking stream's does.
        self._streams[number] = SessionStream(device, handle, blocking=blocking)

    def remove(self, number: int) -> SessionStream:
        """Take a stream's number back. Its work still counts until `part`."""
        stream = self._streams.pop(number, None)
        if stream is None:
            raise DeviceError(INVALID_HANDLE, f"stream {number:#x} does not exist")
        self._dying.append(stream)
        self.version += 1
        return stream

    def part(self, stream: SessionStream) -> None:
        """Destroy a stream that was removed and whose work is done."""
        if stream in self._dying:
            stream.device.destroy_stream(stream.handle)
            self._dying.remove(stream)  # else the session's end tries again

    def of(self, device: Device) -> list[SessionStream]:
        """All streams of a device."""
        return [s for s in self.all() if s.device is device]

    def all(self) -> list[SessionStream]:
        """All streams of all devices."""
        return [
            *self._legacy.values(),
            *self._own.values(),
            *self._streams.values(),
            *self._dying,
        ]

    # --- order ---

    def use(self, stream: SessionStream) -> Handle:
        """The handle to put work on, with the legacy order established for that work."""
        if stream.legacy:
            self.join(stream, (s for s in self.of(stream.device) if s.blocking and s.fresh))
            stream.generation += 1
        elif stream.blocking:
            legacy = self._legacy.get(stream.device.ordinal)
            if legacy is not None and stream.seen < legacy.generation:
                self._follow(stream, legacy)
                stream.seen = legacy.generation
            stream.fresh = True
        return stream.handle

    def join(self, stream: SessionStream, others: Iterable[SessionStream]) -> None:
        """Work put on ``stream`` from now on waits for what is on the others."""
        for other in list(others):
            if other is not stream:
                self._follow(stream, other)
                if other.device is stream.device:
                    other.fresh = False

    def across(self, stream: SessionStream, devices: Iterable[Device]) -> list[SessionStream]:
        """For work of a legacy stream that touches other devices: it waits for their legacy
        streams, and `behind` makes those wait for it (CUDA: a peer copy is serialized with the
        pending and future work of both devices)."""
        if not stream.legacy:
            return []
        others = [self.legacy(d) for d in devices if d is not stream.device]
        for other in others:
            self.use(other)
        self.join(stream, others)
        return others

    def behind(self, others: Iterable[SessionStream], stream: SessionStream) -> None:
        """Later work of the others waits for what is on ``stream`` now."""
        for other in others:
            self._follow(other, stream)

    def _follow(self, stream: SessionStream, other: SessionStream) -> None:
        device = other.device
        stock = self._stock.setdefault(device.ordinal, [])
        event = stock.pop() if stock else device.create_event()
        self._mark(other)
        device.record(event, other.handle)
        self._mark(stream)
        stream.device.wait_event(stream.handle, event)
        stream.follow(other, other.marked)
        stock.append(event)  # the wait has captured this record: it may be recorded again

    # --- events ---

    def create_event(self, number: int, device: Device, flags: int) -> None:
        self._check_event(number)
        self._events[number] = (device, device.create_event(flags))

    def _check_event(self, number: int) -> None:
        if number in self._events:
            raise ProtocolError(f"event number {number:#x} is taken")
        if len(self._events) >= MAX_EVENTS:
            raise DeviceError(2, f"the session has {MAX_EVENTS} events already")

    def is_shared(self, number: int) -> bool:
        """Whether the event was shared, or is another session's."""
        return number in self._partings

    def share_event(self, number: int, part: Callable[[], bool]) -> None:
        """Other sessions have this event too; ``part`` tells whether this is the last."""
        self._partings[number] = part

    def adopt_event(
        self, number: int, device: Device, handle: Handle, part: Callable[[], bool]
    ) -> None:
        """Give a number to another session's event."""
        self._check_event(number)
        self._events[number] = (device, handle)
        self._partings[number] = part

    def event(self, number: int) -> tuple[Device, Handle]:
        """An event by number, or DeviceError cudaErrorInvalidResourceHandle."""
        if number not in self._events:
            raise DeviceError(INVALID_HANDLE, f"event {number:#x} does not exist")
        return self._events[number]

    def recorded(self, number: int, stream: SessionStream) -> None:
        """Note that the stream's last mark is that of a record of this event."""
        self._records[number] = stream, stream.marked

    def wait_event(self, stream: SessionStream, number: int) -> None:
        """Work put on the stream from now on waits for the last record of the event."""
        event = self.event(number)[1]
        self._mark(stream)
        stream.device.wait_event(self.use(stream), event)
        if number in self._records:
            stream.follow(*self._records[number])

    def destroy_event(self, number: int) -> None:
        device, handle = self.event(number)
        del self._events[number]
        self._records.pop(number, None)
        part = self._partings.pop(number, None)
        if part is None or part():
            device.destroy_event(handle)

    # --- the end ---

    def destroy(self) -> None:
        """Give everything back, whatever fails meanwhile; all work is done."""
        with contextlib.ExitStack() as steps:
            for stream in self.all():
                steps.callback(stream.device.destroy_stream, stream.handle)
            for device in self._devices:
                for handle in self._stock.pop(device.ordinal, []):
                    steps.callback(device.destroy_event, handle)
            for number in self._events:
                steps.callback(self.destroy_event, number)
            for table in (self._records, self._legacy, self._own, self._streams):
                table.clear()
            self._dying.clear()
