# SPDX-License-Identifier: Apache-2.0
"""What the emulated devices of a process share: pinned host memory, faults, and their end."""

from __future__ import annotations

import bisect
import collections
import contextlib
import threading
from typing import TYPE_CHECKING

from flyt.backend.devices import codes
from flyt.backend.devices.emulated_memory import Memory
from flyt.backend.devices.emulated_options import EmulatedOptions
from flyt.errors import DeviceError

if TYPE_CHECKING:  # a stream needs its context, and the context only the name
    from flyt.backend.devices.emulated_stream import Stream

_WHILE_SUSPENDED = frozenset({"memory", "resume"})
"""Operations that a suspended process answers."""


class Context:
    """The one context of a process.

    Attributes
    ----------
    lock : threading.RLock
        Guards every table of the context and of its devices, and is held from the check of a
        copy until the copy is on its stream, so that nothing it needs can go in between.
    progress : threading.Condition
        Notified whenever a stream has finished a task; guards `broken` and the streams' counts.
    broken : int
        The sticky error that ended the context; 0 while it lives.
    suspended : bool
        Whether the devices' memory is elsewhere.
    """

    def __init__(self, options: EmulatedOptions) -> None:
        self.options = options
        self.lock = threading.RLock()
        self.progress = threading.Condition()
        self.broken = 0
        self.suspended = False
        self.memories: list[Memory] = []
        self.streams: list[set[Stream]] = []  # one set a device
        self._calls: collections.Counter[str] = collections.Counter()
        self._registered: dict[int, int] = {}
        self._starts: list[int] = []  # sorted addresses of the registrations

    def enter(self, operation: str) -> int:
        """Every call passes here: raises a sticky error or an injected one.

        Returns
        -------
        int
            The code with which the work of this call is to fail later, on its stream; mostly 0.
        """
        if self.broken:
            raise DeviceError(self.broken, f"{operation}: an earlier fault broke the context")
        if self.suspended and operation not in _WHILE_SUSPENDED:
            # CUDA would block the caller; here whoever forgets that is found out.
            raise DeviceError(codes.NOT_PERMITTED, f"{operation}: the process is suspended")
        if not self.options.faults:
            return codes.SUCCESS
        with self.lock:
            self._calls[operation] += 1
            call = self._calls[operation]
        for fault in self.options.faults:
            if (fault.operation, fault.nth) == (operation, call):
                if fault.asynchronous:
                    return fault.code
                self.failed(fault.code)
                raise DeviceError(fault.code, f"injected fault: call {call} of {operation}")
        return codes.SUCCESS

    def failed(self, code: int) -> None:
        """Breaks the context if ``code`` is sticky; the first such code stays."""
        if code in codes.STICKY:
            with self.progress:
                self.broken = self.broken or code
                self.progress.notify_all()

    def check(self, address: int, size: int, what: str) -> None:
        """DeviceError unless these bytes lie in one block or one registration."""
        for memory in self.memories:
            if address in memory:
                inside = memory.covers(address, size)
                break
        else:
            inside = self._pinned(address, size)
        if size < 0 or not inside:
            raise DeviceError(
                codes.INVALID_VALUE,
                f"{what}: {size} bytes at {address:#x} lie neither in one block of device memory"
                " nor in one registration of host memory",
            )

    def register(self, address: int, size: int) -> None:
        on_device = any(memory.overlaps(address, size) for memory in self.memories)
        if size <= 0 or address <= 0 or on_device:
            raise DeviceError(codes.INVALID_VALUE, f"register {size} bytes at {address:#x}")
        index = bisect.bisect_left(self._starts, address)
        before = self._starts[index - 1] if index else 0
        after = self._starts[index] if index < len(self._starts) else address + size
        if before + self._registered.get(before, 0) > address or after < address + size:
            raise DeviceError(
                codes.HOST_MEMORY_ALREADY_REGISTERED,
                f"register {size} bytes at {address:#x}, of which some are registered",
            )
        self._starts.insert(index, address)
        self._registered[address] = size

    def unregister(self, address: int) -> None:
        if address not in self._registered:
            inside = self._pinned(address, 1)
            code = codes.INVALID_VALUE if inside else codes.HOST_MEMORY_NOT_REGISTERED
            raise DeviceError(code, f"unregister {address:#x}, where no registration starts")
        del self._registered[address]
        del self._starts[bisect.bisect_left(self._starts, address)]

    def outstanding(self) -> list[tuple[Stream, int]]:
        """All streams, and how many tasks each must have finished until today's work is done."""
        return [(stream, stream.issued) for streams in self.streams for stream in streams]

    def wait(self, outstanding: list[tuple[Stream, int]], timeout: float | None = None) -> bool:
        """Waits for that work; without a ``timeout`` only the work itself bounds the wait."""
        with self.progress:
            return self.progress.wait_for(
                lambda: all(stream.finished >= goal for stream, goal in outstanding), timeout
            )

    def suspend(self) -> None:
        """All devices give their memory up. With the lock held."""
        if any(stream.finished < goal for stream, goal in self.outstanding()):
            raise DeviceError(codes.NOT_READY, "suspend: work is in flight")
        if self.suspended:
            raise DeviceError(codes.NOT_PERMITTED, "suspend: the process is suspended already")
        with contextlib.ExitStack() as undo:
            for memory in self.memories:
                undo.callback(memory.resume)
                memory.suspend()
            undo.pop_all()
        self.suspended = True

    def resume(self) -> None:
        """Undoes `suspend`. With the lock held."""
        if not self.suspended:
            raise DeviceError(codes.NOT_PERMITTED, "resume: the process is not suspended")
        for memory in self.memories:
            memory.resume()
        self.suspended = False

    def _pinned(self, address: int, size: int) -> bool:
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return False
        start = self._starts[index]
        return address + size <= start + self._registered[start]
