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
from collections.abc import Callable
from typing import Any

from flyt.backend.devices.kernels import Kernels
from flyt.backend.devices.properties import Value

Notification = Callable[[int], None]
"""Called once, from a thread of the device, with a cudaError_t value: 0 when all is well."""

Handle = Any
"""An opaque pool, stream or event of one device; what it is only the device knows."""


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
    """

    name: str
    total_memory: int
    kind: str
    attributes: dict[str, int]
    properties: dict[str, Value]
    pci_bus_id: str
    peers: list[int]


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

    # --- memory ---

    @abc.abstractmethod
    def create_pool(self) -> Handle:
        """A stream-ordered memory pool for one session (cudaMemPoolCreate)."""

    @abc.abstractmethod
    def destroy_pool(self, pool: Handle) -> None:
        """Gives the pool's memory back. All its blocks are freed and their streams done."""

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

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the device's threads; waits for running work, for at most a few seconds."""
