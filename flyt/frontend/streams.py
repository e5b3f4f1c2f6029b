# SPDX-License-Identifier: Apache-2.0
"""Streams and events as this process knows them: enough to answer queries without a message.

Every command that was put on a stream is answered when the stream has reached it. So a stream is
idle when its last command is answered, and an event is reached when its record is. Guarded by the
connection's lock.
"""

from __future__ import annotations

import dataclasses
import threading

from flyt.errors import DeviceError
from flyt.frontend.inflight import Pending
from flyt.rpc.messages import FIRST_STREAM, MAX_EVENTS, MAX_STREAMS

MEMORY_ALLOCATION = 2
INVALID_HANDLE = 400

LEGACY, LEGACY_EXPLICIT, PER_THREAD = 0, 1, 2
"""CUDA's special handles: the default stream, cudaStreamLegacy, cudaStreamPerThread."""

NON_BLOCKING = 1
DISABLE_TIMING = 2
INTERPROCESS = 4

_STEP = 16
"""Handles look like addresses and differ in more than the last bits."""


@dataclasses.dataclass(slots=True, eq=False)
class Stream:
    """One stream; ``number`` is its handle, and its name in messages."""

    number: int
    device: int
    flags: int = 0
    priority: int = 0
    last: Pending | None = None

    @property
    def idle(self) -> bool:
        """Whether everything that was put on it is done."""
        return self.last is None or self.last.done


@dataclasses.dataclass(slots=True, eq=False)
class Event:
    """One event; ``record`` is this process's last record of it. Another process may record one
    that is ``shared``; ``exported`` is its handle if it is ours."""

    number: int
    device: int
    flags: int
    record: Pending | None = None
    shared: bool = False
    exported: bytes = b""

    @property
    def reached(self) -> bool:
        """Whether the work before the last record is done; true if there is none."""
        return self.record is None or self.record.done

    @property
    def timed(self) -> bool:
        return not self.flags & DISABLE_TIMING


class StreamTable:
    """All streams and events of a session."""

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}
        self._dying: list[Stream] = []
        """Destroyed, and perhaps busy yet."""
        self._events: dict[int, Event] = {}
        self._legacy: dict[int, Stream] = {}
        self._per_thread: dict[tuple[int, int], Stream] = {}
        self._next = FIRST_STREAM * _STEP

    def mint(self) -> int:
        """A number for a new stream or event."""
        self._next += _STEP
        return self._next

    def create(self, device: int, flags: int, priority: int) -> Stream:
        """A new stream, or DeviceError cudaErrorMemoryAllocation: creating is a post, and whoever
        asks for too many is to hear of it now."""
        if len(self._streams) >= MAX_STREAMS:
            raise DeviceError(MEMORY_ALLOCATION, f"the session has {MAX_STREAMS} streams already")
        stream = Stream(self.mint(), device, flags, priority)
        self._streams[stream.number] = stream
        return stream

    def special(self, handle: int, device: int) -> Stream | None:
        """The stream that a special handle means on a device: None for an ordinary handle, and for
        a thread's own default stream that has not been made yet."""
        if handle <= LEGACY_EXPLICIT:
            legacy = self._legacy.get(device)
            return legacy or self._legacy.setdefault(device, Stream(device, device))
        return self._per_thread.get((threading.get_ident(), device))

    def set_per_thread(self, stream: Stream) -> None:
        """Make ``stream`` this thread's own default stream on its device."""
        self._per_thread[threading.get_ident(), stream.device] = stream

    def known(self, handle: int, device: int) -> Stream | None:
        """What a handle means to this thread, if there is such a stream already; None below 0."""
        if handle > PER_THREAD:
            return self._streams.get(handle)
        if handle == LEGACY and (legacy := self._legacy.get(device)):
            return legacy  # the commonest
        return None if handle < 0 else self.special(handle, device)

    def number_of(self, handle: int, device: int) -> int | None:
        """What commands call the stream, if there is such a stream already."""
        if handle in self._streams:
            return handle
        stream = self.known(handle, device)
        return None if stream is None else stream.number

    def numbered(self, number: int) -> Stream | None:
        """The stream that messages call so, also one that was destroyed and is busy yet."""
        if number < FIRST_STREAM:
            return self.special(LEGACY, number)
        stream = self._streams.get(number)
        return stream or next((s for s in self._dying if s.number == number), None)

    def get(self, handle: int) -> Stream:
        """An ordinary stream, or DeviceError cudaErrorInvalidResourceHandle."""
        stream = self._streams.get(handle)
        if stream is None:
            raise DeviceError(INVALID_HANDLE, f"{handle:#x} is no stream of this process")
        return stream

    def remove(self, handle: int) -> Stream:
        """Take an ordinary stream out. Its work goes on, and still counts for others."""
        if handle in (LEGACY, LEGACY_EXPLICIT, PER_THREAD):
            raise DeviceError(INVALID_HANDLE, "a default stream can't be destroyed")
        stream = self.get(handle)
        del self._streams[handle]
        if not stream.idle:
            self._dying.append(stream)
        return stream

    def before(self, stream: Stream) -> list[Stream]:
        """The streams whose work the stream waits for: with the legacy stream, all blocking ones
        (recorded: a query of it sees their work, a query of them does not see its work)."""
        if stream.number >= FIRST_STREAM:
            return [stream]
        everyone = (*self._streams.values(), *self._dying)
        blocking = (s for s in everyone if not s.flags & NON_BLOCKING)
        return [stream, *(s for s in blocking if s.device == stream.device)]

    def of(self, device: int) -> list[Stream]:
        """Every stream of a device; forgets destroyed ones that are idle by now."""
        self._dying = [stream for stream in self._dying if not stream.idle]
        return self.standing(device)

    @property
    def has_dying(self) -> bool:
        """Whether there are destroyed streams that may be busy."""
        return bool(self._dying)

    def standing(self, device: int) -> list[Stream]:
        """`of`, without a change: for those who may be interrupted."""
        everyone = [*self._legacy.values(), *self._streams.values(), *self._dying]
        return [stream for stream in everyone if stream.device == device]

    def create_event(self, device: int, flags: int) -> Event:
        """A new event, or DeviceError cudaErrorMemoryAllocation."""
        if len(self._events) >= MAX_EVENTS:
            raise DeviceError(MEMORY_ALLOCATION, f"the session has {MAX_EVENTS} events already")
        event = Event(self.mint(), device, flags)
        self.add_event(event)
        return event

    def add_event(self, event: Event) -> None:
        self._events[event.number] = event

    def event(self, handle: int) -> Event:
        """An event, or DeviceError cudaErrorInvalidResourceHandle."""
        event = self._events.get(handle)
        if event is None:
            raise DeviceError(INVALID_HANDLE, f"{handle:#x} is no event of this process")
        return event

    def remove_event(self, handle: int) -> Event:
        event = self.event(handle)
        del self._events[handle]
        return event
