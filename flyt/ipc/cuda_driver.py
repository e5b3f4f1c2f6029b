# SPDX-License-Identifier: Apache-2.0
"""`CudaDriver`: the driver API of CUDA, through cuda-bindings.

Thin on purpose: each method is the call of the same name. Device contexts are the primary ones,
which the CUDA runtime, PyTorch and CuPy use too.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from cuda.bindings import driver as cu

from flyt.errors import ConfigurationError, DeviceError, SharingError
from flyt.ipc.driver import UUID_BYTES, Driver

POSIX = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
EVENT_HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE."""

EVENTS_KEPT = 64
"""Of a device, for the next hand-offs: making one and its handle takes longer than recording it."""

NEEDED = (
    cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
)
"""What a device must be able to do."""


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the driver: its value, or values; DeviceError if it refuses."""
    code, *values = function(*arguments)
    if int(code):
        raise DeviceError(int(code), f"{function.__name__}: {getattr(code, 'name', code)}")
    return values[0] if len(values) == 1 else tuple(values)


def _location(device: int) -> Any:
    location = cu.CUmemLocation()
    location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return location


def _properties(device: int) -> Any:
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = POSIX
    properties.location = _location(device)
    return properties


@dataclasses.dataclass(frozen=True, slots=True)
class _Event:
    """An interprocess event and what its importers open."""

    device: int
    event: Any
    handle: bytes


class CudaDriver(Driver):
    """The GPUs that this process sees."""

    kind = "cuda"
    host_accessible = False

    def __init__(self) -> None:
        try:
            _call(cu.cuInit, 0)
        except (RuntimeError, DeviceError) as exc:
            raise ConfigurationError(
                f"no CUDA driver to share memory with ({exc}): FLYT_IPC_DRIVER=emulated shares "
                "host memory instead"
            ) from exc
        self._lock = threading.Lock()
        self._contexts: dict[int, Any] = {}
        self._uuids: dict[int, bytes] = {}
        # Without a lock: finalizers return events, at any point.
        self._events: defaultdict[int, list[_Event]] = defaultdict(list)

    def _context(self, device: int) -> Any:
        """The device's primary context, retained for the life of the process."""
        known = self._contexts.get(device)
        if known is not None:
            return known
        with self._lock:
            if device not in self._contexts:
                handle = _call(cu.cuDeviceGet, device)
                for attribute in NEEDED:
                    if not _call(cu.cuDeviceGetAttribute, attribute, handle):
                        raise SharingError(f"device {device} can't share memory: {attribute.name}")
                self._contexts[device] = _call(cu.cuDevicePrimaryCtxRetain, handle)
            return self._contexts[device]

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        context = self._context(device)
        if _call(cu.cuCtxGetCurrent) == context:  # as it mostly is
            yield
            return
        _call(cu.cuCtxPushCurrent, context)
        try:
            yield
        finally:
            _call(cu.cuCtxPopCurrent)

    def device_count(self) -> int:
        return int(_call(cu.cuDeviceGetCount))

    def uuid(self, device: int) -> bytes:
        if device not in self._uuids:
            uuid = _call(cu.cuDeviceGetUuid, _call(cu.cuDeviceGet, device))
            self._uuids[device] = bytes(uuid.bytes)[:UUID_BYTES]
        return self._uuids[device]

    def granularity(self, device: int, *, recommended: bool) -> int:
        self._context(device)
        flags = cu.CUmemAllocationGranularity_flags
        option = (
            flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
            if recommended
            else flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        )
        return int(_call(cu.cuMemGetAllocationGranularity, _properties(device), option))

    def can_access(self, device: int, resident: int) -> bool:
        if device == resident:
            return True
        here, there = _call(cu.cuDeviceGet, device), _call(cu.cuDeviceGet, resident)
        return bool(_call(cu.cuDeviceCanAccessPeer, here, there))

    def create(self, device: int, size: int) -> Any:
        self._context(device)
        return _call(cu.cuMemCreate, size, _properties(device), 0)

    def release(self, handle: Any) -> None:
        _call(cu.cuMemRelease, handle)

    def export_fd(self, handle: Any) -> int:
        fd = int(_call(cu.cuMemExportToShareableHandle, handle, POSIX, 0))
        os.set_inheritable(fd, False)
        return fd

    def import_fd(self, fd: int) -> Any:
        return _call(cu.cuMemImportFromShareableHandle, fd, POSIX)

    def resident_device(self, handle: Any) -> int:
        return int(_call(cu.cuMemGetAllocationPropertiesFromHandle, handle).location.id)

    def reserve(self, size: int, alignment: int) -> int:
        return int(_call(cu.cuMemAddressReserve, size, alignment, cu.CUdeviceptr(0), 0))

    def unreserve(self, address: int, size: int) -> None:
        _call(cu.cuMemAddressFree, cu.CUdeviceptr(address), size)

    def map(self, address: int, size: int, handle: Any) -> None:
        _call(cu.cuMemMap, cu.CUdeviceptr(address), size, 0, handle, 0)

    def unmap(self, address: int, size: int) -> None:
        _call(cu.cuMemUnmap, cu.CUdeviceptr(address), size)

    def set_access(
        self, address: int, size: int, devices: tuple[int, ...], *, read_only: bool
    ) -> None:
        flags = cu.CUmemAccess_flags
        right = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READ
            if read_only
            else flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        )
        rights = []
        for device in devices:
            self._context(device)
            access = cu.CUmemAccessDesc()
            access.location = _location(device)
            access.flags = right
            rights.append(access)
        _call(cu.cuMemSetAccess, cu.CUdeviceptr(address), size, rights, len(rights))

    def synchronize(self, device: int, stream: int | None = None) -> None:
        with self._on(device):
            if stream is None:
                _call(cu.cuCtxSynchronize)
            else:
                _call(cu.cuStreamSynchronize, cu.CUstream(stream))

    def export_event(self, device: int, stream: int) -> tuple[_Event, bytes]:
        with self._on(device):
            try:
                made = self._events[device].pop()
            except IndexError:
                made = self._new_event(device)
            try:
                _call(cu.cuEventRecord, made.event, cu.CUstream(stream))
            except DeviceError:
                _call(cu.cuEventDestroy, made.event)
                raise
        return made, made.handle

    def _new_event(self, device: int) -> _Event:
        flags = cu.CUevent_flags
        kind = flags.CU_EVENT_DISABLE_TIMING.value | flags.CU_EVENT_INTERPROCESS.value
        event = _call(cu.cuEventCreate, kind)
        try:
            handle = _call(cu.cuIpcGetEventHandle, event)
        except DeviceError:
            _call(cu.cuEventDestroy, event)
            raise
        return _Event(device, event, ctypes.string_at(handle.getPtr(), EVENT_HANDLE_BYTES))

    def return_event(self, event: _Event) -> None:
        if len(self._events[event.device]) < EVENTS_KEPT:
            self._events[event.device].append(event)
        else:
            _call(cu.cuEventDestroy, event.event)

    def wait_event(self, device: int, stream: int, handle: bytes) -> None:
        received = cu.CUipcEventHandle()
        ctypes.memmove(received.getPtr(), handle, EVENT_HANDLE_BYTES)
        with self._on(device):
            event = _call(cu.cuIpcOpenEventHandle, received)
            try:
                _call(cu.cuStreamWaitEvent, cu.CUstream(stream), event, 0)
            finally:
                _call(cu.cuEventDestroy, event)
