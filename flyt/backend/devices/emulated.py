# SPDX-License-Identifier: Apache-2.0
"""`EmulatedDevice`: the embedded device for machines without a GPU, with CUDA's semantics.

Pointers, sizes and handles are checked at the call; bytes move later, in the order of the stream
and on its thread. A copy made slow by options moves its bytes at the end of its time, so that
whoever reuses a source or reads a destination too early is found out.
"""

from __future__ import annotations

import logging
import time

from flyt.backend.devices import codes, emulated_attributes, emulated_memory
from flyt.backend.devices.base import DeviceSnapshot, Handle, Mark, Notification
from flyt.backend.devices.emulated_base import nothing
from flyt.backend.devices.emulated_pools import EmulatedPools
from flyt.backend.devices.emulated_stream import Event, Record, Stream
from flyt.backend.devices.emulated_work import EmulatedWork
from flyt.errors import ConfigurationError, DeviceError

NAME = "Flyt emulated device"

RUNTIME_VERSION = 13000
DRIVER_VERSION = 13000

CLOSE_PATIENCE = 3.0
"""Seconds that close() gives to work on streams before it drops what has not begun."""

CLOSE_LIMIT = 5.0
"""Seconds after which close() returns, whatever still runs."""

_DISABLE_TIMING = 2
_EVENT_FLAGS = frozenset({0, 1, 2, 3})  # BlockingSync and DisableTiming
_STREAM_FLAGS = frozenset({0, 1})  # default and NonBlocking

_log = logging.getLogger(__name__)


class EmulatedDevice(EmulatedPools, EmulatedWork):
    """One emulated GPU.

    Parameters
    ----------
    context : Context
        Shared by the devices of a process: a copy may go from one to another, and a sticky error
        ends them all.
    ordinal : int

    Notes
    -----
    `unregister` waits for all work of all devices of the context, as CUDA does (measured); that
    work alone bounds the wait.
    """

    def snapshot(self) -> DeviceSnapshot:
        count = self._context.options.devices
        return emulated_attributes.snapshot(NAME, self.ordinal, self._memory.size, count)

    def limit_sms(self, count: int) -> None:
        raise ConfigurationError(f"--sm-limit {count}: the emulated device has no SMs to limit")

    def register(self, address: int, size: int) -> None:
        self._enter("register")
        with self._context.lock:
            self._context.register(address, size)

    def unregister(self, address: int) -> None:
        self._enter("unregister")
        with self._context.lock:
            work = self._others_work("unregister")
            self._context.unregister(address)
        self._context.wait(work)

    # --- streams and events ---

    def create_stream(self, flags: int = 1, priority: int = 0) -> Stream:  # noqa: ARG002
        """A stream; its priority means nothing, as there are no kernels to prefer."""
        self._enter("create_stream")
        if flags not in _STREAM_FLAGS:
            raise DeviceError(codes.INVALID_VALUE, f"create a stream with flags {flags}")
        stream = Stream(self._context, self, self._ended)
        with self._context.lock:
            self._streams.add(stream)
        return stream

    def destroy_stream(self, stream: Handle) -> None:
        self._enter("destroy_stream")
        with self._context.lock:
            self._stream(stream).finish()

    def create_event(self, flags: int = 2) -> Event:
        self._enter("create_event")
        if flags not in _EVENT_FLAGS:
            raise DeviceError(codes.INVALID_VALUE, f"create an event with flags {flags}")
        return Event(self, timed=not flags & _DISABLE_TIMING)

    def destroy_event(self, event: Handle) -> None:
        self._enter("destroy_event")
        self._event(event).destroyed = True

    def record(self, event: Handle, stream: Handle) -> None:
        failure = self._enter("record")
        with self._context.lock:
            target = self._own_event(event)
            queue = self._stream(stream)
            record = Record()
            if self._is_brief(queue, 0, failure):
                record.reach()
            else:
                queue.start()
                if failure:
                    queue.put_work(nothing, failure)
                queue.put(record.reach)
            target.record = record

    def query(self, event: Handle) -> bool:
        self._enter("query")
        record = self._event(event).record
        return record is None or record.done

    def wait_event(self, stream: Handle, event: Handle) -> None:
        failure = self._enter("wait_event")
        with self._context.lock:
            record = self._event(event).record
            queue = self._stream(stream)
            if (record is None or record.done) and self._is_brief(queue, 0, failure):
                return
            queue.start()
            if failure:
                queue.put_work(nothing, failure)
            if record is not None:
                queue.put_wait(record)

    def elapsed(self, start: Handle, end: Handle) -> float:
        self._enter("elapsed")
        records = []
        for event in (self._own_event(start), self._own_event(end)):
            if event.record is None or not event.timed:
                raise DeviceError(
                    codes.INVALID_RESOURCE_HANDLE, "elapsed: an event has no record or no timing"
                )
            records.append(event.record)
        if not all(record.done for record in records):
            raise DeviceError(codes.NOT_READY, "elapsed: an event is not reached yet")
        return (records[1].reached - records[0].reached) * 1000.0

    def notify(self, stream: Handle, call: Notification) -> None:
        self._enter("notify")
        with self._context.lock:
            self._stream(stream).start().put_notification(call)

    def mark(self, stream: Handle) -> Mark:
        mark = Mark()
        with self._context.lock:
            if self._stream(stream).has_nothing_to_tell and not self._context.broken:
                mark.reach(codes.SUCCESS)
                return mark
        self.notify(stream, mark.reach)
        return mark

    # --- checkpoint ---

    def suspend(self) -> None:
        self._enter("suspend")
        with self._context.lock:
            self._context.suspend()

    def resume(self) -> None:
        self._enter("resume")
        with self._context.lock:
            self._context.resume()

    def close(self) -> None:
        context = self._context
        started = time.monotonic()
        with context.lock:
            if self._closed:
                return
            self._others_work("close")
            self._closed = True
            streams = list(self._streams)
            for stream in streams:
                if not stream.destroyed:
                    stream.finish()
        for stream in streams:
            stream.hurry()
        if not _join(streams, started + CLOSE_PATIENCE):
            for stream in streams:
                stream.hurry(abandon=True)
        ended = _join(streams, started + CLOSE_LIMIT)
        with context.lock:
            context.memories.remove(self._memory)
            work = context.outstanding()  # of other devices, which may use this one's memory
        left = max(0.0, started + CLOSE_LIMIT - time.monotonic())
        if context.wait(work, left) and ended:
            emulated_memory.unmap(self._memory.base, self._memory.size)
        else:  # a copy still runs: to unmap its memory would be a segmentation fault
            _log.warning("emulated device %d: a copy outlives close()", self.ordinal)


def _join(streams: list[Stream], deadline: float) -> bool:
    """Waits for each of them, not just up to the first that is late."""
    ended = [stream.join(deadline) for stream in streams]
    return all(ended)
