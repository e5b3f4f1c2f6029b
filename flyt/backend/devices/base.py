# SPDX-License-Identifier: Apache-2.0
"""`Device`: the one interface to a GPU. The same test suite runs on every implementation.

Addresses are plain integers, sizes bytes. Every method may be called from any thread and raises
`flyt.errors.DeviceError` with CUDA's code when the device refuses; none waits for work of a stream
unless it says so.
"""

from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from flyt.backend.devices.kernels import Kernels
from flyt.backend.devices.properties import Value

Notification = Callable[[int], None]
"""Called once, from a thread of the device, with a cudaError_t value: 0 when all is well."""


class Direct(NamedTuple):
    """How compiled code puts small work on a stream: the stream as a pointer, and addresses of
    functions with the arguments and results of cuMemcpyAsync, cuMemsetD8Async, cuStreamQuery,
    cuLaunchKernel, cuEventRecord and cuEventQuery. ``query``, ``record`` and ``reached`` are 0
    where work is done when the call is back, else the device's events are addresses too;
    ``launch`` is 0 where the device runs no kernels."""

    stream: int
    move: int
    fill: int
    query: int
    launch: int
    record: int
    reached: int


Handle = Any
"""An opaque pool, stream or event of one device; what it is only the device knows."""


class Row(NamedTuple):
    """The first of several rows, and how many bytes lie from the start of one to the next."""

    address: int
    pitch: int

    def span(self, width: int, height: int) -> int:
        """Bytes from the first of ``height`` > 0 rows to the end of the last."""
        return self.pitch * (height - 1) + width


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """What never changes about a device; travels to the frontends in WELCOME.

    Attributes
    ----------
    name : str
    total_memory : int
        Bytes.
    kind : str
        ``"cupy"`` or ``"emulated"``.
    attributes : dict of str to int
        ``cudaDeviceAttr`` names without the prefix ``cudaDevAttr``, and their values.
    properties : dict of str to int, bytes or list of int
        Fields of ``cudaDeviceProp``; those that the device can't tell are left out.
    pci_bus_id : str
        ``domain:bus:device.function``, as cudaDeviceGetPCIBusId has it.
    peers : list of int
        Ordinals of the devices whose memory this one can reach (cudaDeviceCanAccessPeer).
    stream_priorities : list of int
        The least and the greatest (cudaDeviceGetStreamPriorityRange).
    """

    name: str
    total_memory: int
    kind: str
    attributes: dict[str, int]
    properties: dict[str, Value]
    pci_bus_id: str
    peers: list[int]
    stream_priorities: list[int]


class Mark:
    """A mark made of a notification, for devices that have nothing cheaper."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._call: Notification | None = None
        self._lock = threading.Lock()

    def reach(self, code: int) -> None:
        with self._lock:
            self.code = code
            call = self._call
        if call is not None:
            call(code)

    def tell(self, call: Notification) -> None:
        with self._lock:
            self._call = call
            code = self.code
        if code is not None:
            call(code)


class Device(abc.ABC):
    """One GPU as a worker drives it."""

    ordinal: int
    kernels = Kernels()
    """What it does with code."""

    @abc.abstractmethod
    def snapshot(self) -> DeviceSnapshot: ...

    @abc.abstractmethod
    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the whole device (cudaMemGetInfo)."""

    @abc.abstractmethod
    def limit_sms(self, count: int) -> None:
        """Kernels on streams that are made from now on run on at most ``count`` SMs (a green
        context). ConfigurationError where device or driver can't."""

    # --- memory ---

    @abc.abstractmethod
    def create_pool(self) -> Handle:
        """A stream-ordered memory pool for one session (cudaMemPoolCreate)."""

    @abc.abstractmethod
    def destroy_pool(self, pool: Handle) -> None:
        """Takes no more allocations; the pool's memory goes back with the last of its blocks."""

    @abc.abstractmethod
    def trim_pool(self, pool: Handle, keep: int) -> None:
        """Gives unused memory back, but for ``keep`` bytes that the pool may hold on to; `settle`
        first."""

    @abc.abstractmethod
    def settle(self, streams: Iterable[Handle]) -> None:
        """The host has seen the end of all work on those of the streams that are idle: what was
        freed on them may leave its pool. That `reached` said so may be not enough for a device."""

    @abc.abstractmethod
    def pool_attribute(self, pool: Handle, attribute: int) -> int:
        """cudaMemPoolGetAttribute of one of the first eight attributes."""

    @abc.abstractmethod
    def set_pool_attribute(self, pool: Handle, attribute: int, value: int) -> None:
        """cudaMemPoolSetAttribute of one of the first eight attributes."""

    @abc.abstractmethod
    def allocate(self, size: int, pool: Handle, stream: Handle) -> int:
        """Address of ``size`` > 0 bytes, aligned to 512, **with whatever bytes were there**
        (cudaMallocFromPoolAsync). DeviceError 2 when memory is short."""

    @abc.abstractmethod
    def free(self, address: int, stream: Handle) -> None:
        """Frees once the work before it on ``stream`` is done (cudaFreeAsync)."""

    @abc.abstractmethod
    def register(self, address: int, size: int) -> None:
        """Pins host memory of this process for DMA, portable and mapped (cudaHostRegister)."""

    @abc.abstractmethod
    def unregister(self, address: int) -> None:
        """cudaHostUnregister. May wait for **all** work of the context, as CUDA does."""

    # --- streams and events ---

    @abc.abstractmethod
    def create_stream(self, flags: int = 1, priority: int = 0) -> Handle:
        """A stream; flags 1 is cudaStreamNonBlocking: sessions build legacy order themselves."""

    @abc.abstractmethod
    def destroy_stream(self, stream: Handle) -> None:
        """The stream goes once its work is done; returns at once."""

    @abc.abstractmethod
    def create_event(self, flags: int = 2) -> Handle:
        """cudaEventCreateWithFlags; 2 is cudaEventDisableTiming."""

    @abc.abstractmethod
    def destroy_event(self, event: Handle) -> None: ...

    @abc.abstractmethod
    def record(self, event: Handle, stream: Handle) -> None: ...

    @abc.abstractmethod
    def query(self, event: Handle) -> bool:
        """True when all work captured by the last record is done (or nothing was recorded)."""

    @abc.abstractmethod
    def wait_event(self, stream: Handle, event: Handle) -> None:
        """Work put on ``stream`` from now on waits for ``event`` (cudaStreamWaitEvent)."""

    @abc.abstractmethod
    def elapsed(self, start: Handle, end: Handle) -> float:
        """Milliseconds between two recorded events with timing (cudaEventElapsedTime)."""

    @abc.abstractmethod
    def notify(self, stream: Handle, call: Notification) -> None:
        """Calls ``call(code)`` once everything put on ``stream`` so far is done or has failed.

        The code is that of the first failure since the notification before, the sticky one of a
        broken context, or 709 if close() dropped the work. ``call`` must neither block nor use
        the device: the notifications of the stream after it wait for it.
        """

    def direct(self, stream: Handle) -> Direct | None:  # noqa: ARG002 - others have it
        """For small copies and fills that were checked, in memory and on a stream that stay as they
        are meanwhile. None where every operation has to pass through the methods of this class."""
        return None

    # --- marks: a point in a stream that can be asked for, or waited for ---

    def mark(self, stream: Handle) -> Handle:
        """The point behind everything put on ``stream`` so far; for one `reached` that answers, or
        one `watch`."""
        mark = Mark()
        self.notify(stream, mark.reach)
        return mark

    def reached(self, mark: Handle) -> int | None:
        """The cudaError_t of the work before a mark, or None while it is not done. Cheap: sessions
        ask for a while before they `watch`."""
        code: int | None = mark.code
        return code

    def watch(self, mark: Handle, call: Notification) -> None:
        """Calls ``call(code)``, perhaps at once, when the mark is reached."""
        mark.tell(call)

    # --- work, put on a stream; returns at once ---

    @abc.abstractmethod
    def copy(self, destination: int, source: int, size: int, stream: Handle) -> None:
        """cudaMemcpyAsync(…, cudaMemcpyDefault). Each side lies in one block of a device or in
        one registration of host memory; otherwise DeviceError 1."""

    @abc.abstractmethod
    def fill(self, address: int, value: int, size: int, stream: Handle) -> None:
        """cudaMemsetAsync."""

    # --- checkpoint: of all devices of the process at once, so called on one of them ---

    @abc.abstractmethod
    def suspend(self) -> None:
        """Moves the state of this process on its devices to host memory and gives up the devices
        (cuCheckpointProcessLock, …Checkpoint). Nothing is in flight, and nothing is asked of any
        device until `resume`. Waits, bounded; a process that it can't suspend is as before."""

    @abc.abstractmethod
    def resume(self) -> None:
        """Brings everything back: the same bytes at the same addresses, streams, events and
        registrations (cuCheckpointProcessRestore, …Unlock). DeviceError when the devices have no
        room: then the process is suspended still. Waits, bounded."""

    @abc.abstractmethod
    def copy_rows(
        self, destination: Row, source: Row, width: int, height: int, stream: Handle
    ) -> None:
        """cudaMemcpy2DAsync(…, cudaMemcpyDefault) of ``height`` rows; each side as in `copy`."""

    @abc.abstractmethod
    def fill_rows(self, rows: Row, value: int, width: int, height: int, stream: Handle) -> None:
        """cudaMemset2DAsync of device memory."""

    # --- gates: points where a stream waits for the host ---

    @abc.abstractmethod
    def gate(self, stream: Handle) -> Handle:
        """Work put on ``stream`` from now on waits until the gate that this returns is opened."""

    @abc.abstractmethod
    def open_gate(self, gate: Handle) -> None:
        """Let the work behind a gate go on; once for each gate."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the device's threads; waits for running work, for at most a few seconds."""
