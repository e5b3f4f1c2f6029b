# SPDX-License-Identifier: Apache-2.0
"""What numba-cuda takes of cuda.core's objects, on `flyt.driver`: Device, Stream, Event, launch.

cuda.core is compiled against the driver, so replaced functions do not reach it; names, arguments
and meanings are its own, and no more of them is here than numba-cuda and its tests use.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flyt import driver
from flyt.errors import DeviceError
from flyt.frontend.current import thread

Extent = int | Sequence[int] | None


class CUDAError(Exception):
    """A driver call failed; the text begins with its name, as cuda.core's does."""


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
        return "-".join(digits[a:b] for a, b in zip(cuts, cuts[1:], strict=False))

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


class LaunchConfig:
    """Grid, block and what else a launch has; ``cooperative_launch`` is the name of
    ``is_cooperative`` before cuda.core 1.0."""

    def __init__(
        self,
        grid: Extent = None,
        cluster: Extent = None,
        block: Extent = None,
        shmem_size: int | None = None,
        is_cooperative: bool = False,
        programmatic_stream_serialization: bool = False,
        cooperative_launch: bool = False,
    ) -> None:
        if grid is None or block is None:
            raise ValueError("a launch wants a grid and a block")
        if programmatic_stream_serialization:
            raise NotImplementedError("Flyt passes no programmatic stream serialization")
        self.grid, self.block = _three(grid), _three(block)
        self.cluster = None if cluster is None else _three(cluster)
        self.shmem_size = shmem_size or 0
        self.is_cooperative = bool(is_cooperative or cooperative_launch)


def _three(extent: Extent) -> tuple[int, int, int]:
    given = (extent,) if isinstance(extent, int) else tuple(extent or ())
    if not 1 <= len(given) <= 3:
        raise ValueError(f"{extent!r} is no extent of one to three dimensions")
    x, y, z = (*(int(n) for n in given), 1, 1)[:3]
    return x, y, z


def launch(stream: Any, config: LaunchConfig, kernel: Any, *kernel_args: Any) -> None:
    """Launch a kernel with cuda.core's idea of arguments: an int is a pointer's size."""
    from flyt.driver.contexts import in_context
    from flyt.driver.launches import COOPERATIVE
    from flyt.driver.modules import function_of
    from flyt.frontend import params
    from flyt.frontend.api.handles import stream_of

    handle = stream.__cuda_stream__()[1] if hasattr(stream, "__cuda_stream__") else stream
    attributes: tuple[tuple[int, int, int, int], ...] = ()
    if config.is_cooperative:
        attributes += (COOPERATIVE,)
    if config.cluster is not None:
        attributes += ((_CLUSTER, *config.cluster),)
    try:
        session = in_context()
        session.connection.raise_deferred()
        function = function_of(kernel.handle, thread.device)
        data = params.pack([_argument(one) for one in kernel_args], function.facts)
        session.kernels.launch(
            function,
            config.grid,
            config.block,
            config.shmem_size,
            stream_of(session, handle),
            data,
            attributes,
        )
    except DeviceError as exc:
        from flyt.driver.convention import result_of

        raise CUDAError(f"{result_of(exc.code).name}: {exc.detail}") from exc


_CLUSTER = int(driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)


def _argument(value: Any) -> bytes:
    if isinstance(value, (bool, np.bool_)):
        return bytes([bool(value)])
    if isinstance(value, int):
        return (value % (1 << 64)).to_bytes(8, "little")
    if isinstance(value, float):
        return bytes(ctypes.c_double(value))
    if isinstance(value, complex):
        return np.complex128(value).tobytes()
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, Buffer):
        return int(value.handle).to_bytes(8, "little")
    if isinstance(value, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)):  # noqa: SLF001
        return bytes(value)
    if hasattr(value, "getPtr"):
        return ctypes.string_at(value.getPtr(), 8)
    raise TypeError(f"the argument is of unsupported type: {type(value)}")
