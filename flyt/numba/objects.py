# SPDX-License-Identifier: Apache-2.0
"""What numba-cuda takes of cuda.core's objects, on `flyt.driver`: Device, Stream, Event, Buffer.

cuda.core is compiled against the driver, so replaced functions do not reach it; names, arguments
and meanings are its own, and no more of them is here than numba-cuda and its tests use.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from typing import Any, NamedTuple

from flyt import driver
from flyt.frontend.current import thread

# cuda.core's own, so that who catches them catches these; the text begins with the result's name.
try:
    _utils = importlib.import_module("cuda.core._utils.cuda_utils")
except ModuleNotFoundError:  # before cuda.core 0.5
    _utils = importlib.import_module("cuda.core.experimental._utils.cuda_utils")
CUDAError: type[Exception] = _utils.CUDAError
NVRTCError: type[Exception] = _utils.NVRTCError


def took(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call; its error raised."""
    if answer[0]:
        raise CUDAError(f"{answer[0].name}: {thread.last_failure}")
    if len(answer) == 1:
        return None
    return answer[1] if len(answer) == 2 else answer[1:]


class ComputeCapability(NamedTuple):
    major: int
    minor: int


class _Context(NamedTuple):
    handle: Any

    @property
    def _handle(self) -> Any:
        """Its name before cuda.core 0.6."""
        return self.handle


class Device:
    """A device of the backend's; without a number, the current one, or the first."""

    def __init__(self, device_id: int | None = None) -> None:
        took(driver.cuInit(0))
        if device_id is None:
            context = took(driver.cuCtxGetCurrent())
            device_id = int(took(driver.cuCtxGetDevice())) if int(context) else 0
        took(driver.cuDeviceGet(device_id))
        self.device_id = int(device_id)

    @functools.cached_property
    def compute_capability(self) -> ComputeCapability:
        return ComputeCapability(*took(driver.cuDeviceComputeCapability(self.device_id)))

    @property
    def arch(self) -> str:
        major, minor = self.compute_capability
        return f"{major}{minor}"

    @property
    def name(self) -> str:
        return str(took(driver.cuDeviceGetName(256, self.device_id)).split(b"\0")[0].decode())

    @property
    def uuid(self) -> str:
        digits = bytes(took(driver.cuDeviceGetUuid(self.device_id)).bytes).hex()
        cuts = (0, 8, 12, 16, 20, 32)
        return "-".join(digits[a:b] for a, b in itertools.pairwise(cuts))

    @property
    def pci_bus_id(self) -> str:
        raw = took(driver.cuDeviceGetPCIBusId(32, self.device_id))
        return str(raw.split(b"\0")[0].decode())

    @property
    def context(self) -> _Context:
        return _Context(took(driver.cuDevicePrimaryCtxRetain(self.device_id)))

    @property
    def memory_resource(self) -> None:
        """What buffers without a byte are given."""
        return

    @property
    def default_stream(self) -> Stream:
        return Stream.from_handle(0)

    def set_current(self, ctx: Any = None) -> None:
        """Make the primary context current."""
        handle = took(driver.cuDevicePrimaryCtxRetain(self.device_id)) if ctx is None else ctx
        took(driver.cuCtxSetCurrent(getattr(handle, "handle", handle)))

    def create_stream(self, obj: Any = None, options: Any = None) -> Stream:
        """A stream of this device's; non-blocking unless the options say otherwise."""
        if obj is not None:
            return Stream.from_handle(obj.__cuda_stream__()[1])
        blocking = options is not None and not getattr(options, "nonblocking", True)
        priority = getattr(options, "priority", None) or 0
        handle = took(driver.cuStreamCreateWithPriority(0 if blocking else 1, priority))
        return Stream(handle, owned=True)

    def create_event(self, options: Any = None) -> Event:
        """An event; without timing unless the options ask for it."""
        timed = bool(
            getattr(options, "timing_enabled", False) or getattr(options, "enable_timing", False)
        )
        return Event(took(driver.cuEventCreate(0 if timed else 2)))

    def allocate(self, size: int, *, stream: Any = None) -> Buffer:  # noqa: ARG002 - cuda.core's
        """Device memory; given back with the object."""
        return Buffer(int(took(driver.cuMemAlloc(size))), size)

    def sync(self) -> None:
        """Wait for all work of this process on the device."""
        took(driver.cuCtxSynchronize())

    def __int__(self) -> int:
        return self.device_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.device_id == self.device_id

    def __hash__(self) -> int:
        return hash(self.device_id)

    def __repr__(self) -> str:
        return f"<Device {self.device_id} ({self.name})>"


class Buffer:
    """Device memory that goes with the object."""

    def __init__(self, address: int, size: int) -> None:
        self.handle = address
        self.size = size
        self._owned = bool(address)

    @classmethod
    def from_handle(
        cls,
        ptr: Any,
        size: int,
        mr: Any = None,  # noqa: ARG003 - cuda.core's
        owner: Any = None,
        *,
        stream: Any = None,  # noqa: ARG003 - cuda.core's
    ) -> Buffer:
        """Memory that is somebody else's."""
        made = cls(int(ptr), size)
        made._owned = False
        made._owner = owner  # type: ignore[attr-defined]
        return made

    def close(self, stream: Any = None) -> None:  # noqa: ARG002 - cuda.core's
        """Give it back."""
        owned, self._owned = self._owned, False
        if owned:
            took(driver.cuMemFree(self.handle))

    def __del__(self) -> None:
        owned, self._owned = getattr(self, "_owned", False), False
        if owned:  # a finalizer sends nothing: the next call gives it back
            _leave(self.handle)


def _leave(address: int) -> None:
    from flyt.frontend import current
    from flyt.frontend.session import Session

    session = current.existing()
    if session is not None:
        session.garbage.append((Session.free, address))


class Stream:
    """A stream by its handle; one that `Device.create_stream` made is destroyed by `close`."""

    def __init__(self, handle: Any, *, owned: bool = False) -> None:
        self._handle = driver.CUstream(int(handle))
        self._owned = owned

    @staticmethod
    def from_handle(handle: Any) -> Stream:
        """A stream that is somebody else's."""
        return Stream(handle)

    @property
    def handle(self) -> Any:
        return self._handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self._handle)

    def sync(self) -> None:
        """Wait for the work on it."""
        took(driver.cuStreamSynchronize(self._handle))

    def record(self, event: Event | None = None, options: Any = None) -> Event:
        """Record an event, by default a new one."""
        mark = event if event is not None else Device().create_event(options)
        took(driver.cuEventRecord(mark.handle, self._handle))
        return mark

    def wait(self, event_or_stream: Any) -> None:
        """Let later work wait for an event, or for another stream's work so far."""
        mark = event_or_stream
        if not isinstance(mark, Event):
            mark = Stream(mark.__cuda_stream__()[1]).record()
        took(driver.cuStreamWaitEvent(self._handle, mark.handle, 0))

    def close(self) -> None:
        """Destroy it, if it is ours."""
        owned, self._owned = self._owned, False
        if owned:
            took(driver.cuStreamDestroy(self._handle))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and int(other._handle) == int(self._handle)

    def __hash__(self) -> int:
        return hash(int(self._handle))

    def __repr__(self) -> str:
        return f"<Stream {int(self._handle):#x}>"


class Event:
    """An event by its handle."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    @property
    def is_done(self) -> bool:
        """Whether the work before it is done."""
        answer = driver.cuEventQuery(self.handle)
        if answer[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        took(answer)
        return True

    def sync(self) -> None:
        """Wait for the work before it."""
        took(driver.cuEventSynchronize(self.handle))

    def __sub__(self, start: Event) -> float:
        return float(took(driver.cuEventElapsedTime(start.handle, self.handle)))

    def close(self) -> None:
        """Destroy it."""
        took(driver.cuEventDestroy(self.handle))
