# SPDX-License-Identifier: Apache-2.0
"""`CupyDevice`: a real GPU, driven through CuPy's binding of the CUDA runtime.

CuPy serves as the binding alone: none of its memory pools, streams or arrays are used. All
threads of the process share the primary context of each GPU.
"""

from __future__ import annotations

import collections
import importlib
import logging
import os
import threading
import time
from typing import Any

from flyt.backend.devices import checkpoint, codes
from flyt.backend.devices.base import Device, DeviceSnapshot, Handle, Notification
from flyt.backend.devices.cupy_calls import cuda
from flyt.backend.devices.cupy_linear import CupyLinear
from flyt.backend.devices.cupy_snapshot import take_snapshot
from flyt.backend.devices.cupy_waiter import Waiter
from flyt.backend.devices.sm_cap import SmCap
from flyt.errors import ConfigurationError, DeviceError

CLOSE_LIMIT = 5.0
"""Seconds that close() waits for the waiters; a kernel may run on for hours."""

STOCK_LIMIT = 64
"""Idle events kept for notifications: more are outstanding only in a burst."""

# Values of CUDA's header driver_types.h.
_HOST_REGISTER_PORTABLE_MAPPED = 1 | 2
_EVENT_NO_TIMING = 2
"""Without cudaEventBlockingSync: an interrupt costs a copy of 256 MiB a fifth of its time."""

_log = logging.getLogger(__name__)


class CupyDevice(CupyLinear):
    """One GPU.

    Parameters
    ----------
    runtime : module
        ``cupy.cuda.runtime``.
    ordinal : int

    Notes
    -----
    CUDA checks a copy against the memory that a pool has mapped, which is more than the block:
    exact bounds are for the session to check.
    """

    def __init__(self, runtime: Any, ordinal: int) -> None:
        super().__init__(runtime, ordinal)
        self._lock = threading.Lock()
        self._waiters: dict[int, Waiter] = {}  # by stream, until that is destroyed
        self._leaving: set[Waiter] = set()  # of destroyed streams with work left
        self._stock: collections.deque[int] = collections.deque()  # idle events for marks
        self._cap: SmCap | None = None
        self._snapshot = self._take_snapshot()

    def snapshot(self) -> DeviceSnapshot:
        return self._snapshot

    @cuda
    def memory(self) -> tuple[int, int]:
        free, total = self.runtime.memGetInfo()
        return int(free), int(total)

    @cuda
    def limit_sms(self, count: int) -> None:
        self._cap = SmCap(self.ordinal, count)

    # --- memory ---

    @cuda
    def register(self, address: int, size: int) -> None:
        self.runtime.hostRegister(address, size, _HOST_REGISTER_PORTABLE_MAPPED)

    @cuda
    def unregister(self, address: int) -> None:
        self.runtime.hostUnregister(address)

    # --- streams and events ---

    @cuda
    def create_stream(self, flags: int = 1, priority: int = 0) -> int:
        if self._cap is None:
            stream = int(self.runtime.streamCreateWithPriority(flags, priority))
        else:
            stream = self._cap.create_stream(priority)
        with self._lock:
            self._waiters[stream] = Waiter(self._wait, self._ended)
        return stream

    @cuda
    def destroy_stream(self, stream: Handle) -> None:
        with self._lock:
            waiter = self._waiters.pop(stream, None)
            if waiter is None:
                raise DeviceError(codes.INVALID_RESOURCE_HANDLE, "destroy_stream: no such stream")
            self._leaving.add(waiter)
        waiter.finish()
        self.runtime.streamDestroy(stream)

    @cuda
    def create_event(self, flags: int = 2) -> int:
        return int(self.runtime.eventCreateWithFlags(flags))

    @cuda
    def destroy_event(self, event: Handle) -> None:
        self.runtime.eventDestroy(event)

    @cuda
    def record(self, event: Handle, stream: Handle) -> None:
        self.runtime.eventRecord(event, stream)

    @cuda
    def query(self, event: Handle) -> bool:
        code = int(self.runtime.eventQuery(event))  # a code, not an exception
        if code not in (codes.SUCCESS, codes.NOT_READY):
            raise DeviceError(code, "query")
        return code == codes.SUCCESS

    @cuda
    def wait_event(self, stream: Handle, event: Handle) -> None:
        self.runtime.streamWaitEvent(stream, event)

    @cuda
    def elapsed(self, start: Handle, end: Handle) -> float:
        return float(self.runtime.eventElapsedTime(start, end))

    def notify(self, stream: Handle, call: Notification) -> None:
        self.watch(self.mark(stream), call)

    @cuda
    def mark(self, stream: Handle) -> tuple[int, int]:
        with self._lock:
            if stream not in self._waiters:
                raise DeviceError(codes.INVALID_RESOURCE_HANDLE, "mark: no such stream")
            event = self._stock.popleft() if self._stock else 0
        event = event or int(self.runtime.eventCreateWithFlags(_EVENT_NO_TIMING))
        self.runtime.eventRecord(event, stream)
        return event, stream

    def reached(self, mark: Handle) -> int | None:
        event, _ = mark
        try:
            if not self.query(event):
                return None
            self._put_back(event)
        except DeviceError as exc:
            return exc.code  # the event is not used again: its context may be broken
        return codes.SUCCESS

    def watch(self, mark: Handle, call: Notification) -> None:
        event, stream = mark
        with self._lock:
            waiter = self._waiters.get(stream)
        if waiter is None:
            raise DeviceError(codes.INVALID_RESOURCE_HANDLE, "watch: the stream is destroyed")
        waiter.put(event, call)

    # --- checkpoint ---

    def suspend(self) -> None:
        checkpoint.suspend(os.getpid())

    def resume(self) -> None:
        checkpoint.resume(os.getpid())

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_LIMIT
        with self._lock:
            streams, waiters = list(self._waiters), [*self._waiters.values(), *self._leaving]
            self._leaving.update(self._waiters.values())
            self._waiters.clear()
        for waiter in waiters:
            waiter.finish()
        late = [waiter for waiter in waiters if not waiter.join(deadline)]
        if late:
            _log.warning("device %d: work on %d streams outlives it", self.ordinal, len(late))
        with self._lock:
            events, self._stock = list(self._stock), collections.deque()
        try:
            self._discard(streams, events)
        except DeviceError as exc:  # a broken context has lost them already
            _log.debug("device %d: %s", self.ordinal, exc)

    # --- inside ---

    @cuda
    def _take_snapshot(self) -> DeviceSnapshot:
        return take_snapshot(self.runtime, self.ordinal)

    @cuda
    def _discard(self, streams: list[int], events: list[int]) -> None:
        for stream in streams:
            self.runtime.streamDestroy(stream)
        for event in events:
            self.runtime.eventDestroy(event)

    def _wait(self, event: int) -> int:
        """On a waiter's thread: waits, the GIL released, for as long as the work takes."""
        try:
            self._synchronize(event)
        except DeviceError as exc:
            return exc.code  # the event is not used again: its context may be broken
        return codes.SUCCESS

    @cuda
    def _synchronize(self, event: int) -> None:
        self.runtime.eventSynchronize(event)
        self._put_back(event)

    @cuda
    def _put_back(self, event: int) -> None:
        with self._lock:
            if len(self._stock) < STOCK_LIMIT:
                self._stock.append(event)
                return
        self.runtime.eventDestroy(event)

    def _ended(self, waiter: Waiter) -> None:
        with self._lock:
            self._leaving.discard(waiter)


def open_cupy() -> list[Device]:
    """All GPUs that CUDA_VISIBLE_DEVICES shows; ConfigurationError if there is none."""
    runtime = _runtime()
    try:
        devices: list[Device] = [CupyDevice(runtime, n) for n in range(runtime.getDeviceCount())]
    except (DeviceError, runtime.CUDARuntimeError) as exc:
        raise ConfigurationError(
            f"no usable GPU ({exc}); check the driver with nvidia-smi, or use --device emulated"
        ) from exc
    if not devices:
        raise ConfigurationError("the driver shows no GPU; to try without, use --device emulated")
    return devices


def runtime_version() -> int:
    """Of the runtime that CuPy carries."""
    return int(_runtime().runtimeGetVersion())


def driver_version() -> int:
    """The newest CUDA that the installed driver can serve."""
    return int(_runtime().driverGetVersion())


def _runtime() -> Any:
    """Imported only when asked for: CuPy takes a second, and most machines lack it."""
    try:
        return importlib.import_module("cupy").cuda.runtime
    except ImportError as exc:
        reason = str(exc).strip().partition("\n")[0]
        raise ConfigurationError(
            f"CuPy can't be imported ({reason}): pip install '.[gpu]' in Flyt's checkout, or use "
            "--device emulated"
        ) from exc
