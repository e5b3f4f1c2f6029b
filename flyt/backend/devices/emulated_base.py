# SPDX-License-Identifier: Apache-2.0
"""What all calls of an emulated device pass through: its tables, and the checks of handles."""

from __future__ import annotations

from flyt.backend.devices import codes, emulated_memory
from flyt.backend.devices.base import Device, Handle
from flyt.backend.devices.emulated_context import Context
from flyt.backend.devices.emulated_memory import Memory, Pool
from flyt.backend.devices.emulated_stream import Event, Stream
from flyt.errors import DeviceError

BRIEF_BYTES = 4 << 20
"""What a memmove does in a few microseconds, less than waking a stream's thread takes."""


class EmulatedBase(Device):
    """One device of a context; its calls are in the classes above this one."""

    def __init__(self, context: Context, ordinal: int) -> None:
        self.ordinal = ordinal
        self._context = context
        size = context.options.memory
        self._memory = Memory(emulated_memory.map_arena(size, ordinal), size)
        self._streams: set[Stream] = set()
        self._closed = False
        with context.lock:
            context.memories.append(self._memory)
            context.streams.append(self._streams)

    def memory(self) -> tuple[int, int]:
        self._enter("memory")
        return self._memory.free, self._memory.size

    def _is_brief(self, queue: Stream, size: int, failure: int) -> bool:
        """Whether work is so short, with nothing before it, that it is done at the call: a real
        device is done with it before the call is back too."""
        options = self._context.options
        slowed = options.latency > 0 or size / options.bandwidth > 0
        return size <= BRIEF_BYTES and not (failure or slowed) and queue.is_idle

    def _enter(self, operation: str) -> int:
        if self._closed:
            raise DeviceError(codes.CONTEXT_IS_DESTROYED, f"{operation}: the device is closed")
        return self._context.enter(operation)

    def _others_work(self, operation: str) -> list[tuple[Stream, int]]:
        work = self._context.outstanding()
        if any(stream.is_current for stream, _ in work):
            raise DeviceError(
                codes.NOT_PERMITTED, f"{operation}: called by a notification, it waits for itself"
            )
        return work

    def _pool(self, handle: Handle) -> Pool:
        if not isinstance(handle, Pool) or handle.owner is not self or handle.destroyed:
            raise DeviceError(codes.INVALID_VALUE, "no memory pool of this device")
        return handle

    def _stream(self, handle: Handle) -> Stream:
        if not isinstance(handle, Stream) or handle.owner is not self or handle.destroyed:
            raise DeviceError(codes.INVALID_RESOURCE_HANDLE, "no stream of this device")
        return handle

    def _event(self, handle: Handle) -> Event:
        if not isinstance(handle, Event) or handle.destroyed:
            raise DeviceError(codes.INVALID_RESOURCE_HANDLE, "no event")
        return handle

    def _own_event(self, handle: Handle) -> Event:
        if self._event(handle).owner is not self:
            raise DeviceError(codes.INVALID_RESOURCE_HANDLE, "an event of another device")
        return self._event(handle)

    def _ended(self, stream: Stream) -> None:
        with self._context.lock:
            self._streams.discard(stream)


def nothing() -> None:
    """The work of a call that is made to fail: it is never done."""
