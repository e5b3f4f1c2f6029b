# SPDX-License-Identifier: Apache-2.0
"""`Driver`: the few calls of CUDA's virtual memory management that sharing needs, as an interface.

Physical memory (a *handle*), address ranges, mappings and access rights are four things here, as in
the driver API. Two implementations: `flyt.ipc.cuda_driver.CudaDriver`, and the twin without a GPU,
`flyt.ipc.twin.TwinDriver`, whose physical memory is a memfd.
"""

from __future__ import annotations

import abc
import os
import threading
from typing import Any

from flyt.errors import ConfigurationError

DRIVER_VARIABLE = "FLYT_IPC_DRIVER"
"""Environment variable: ``cuda`` (default) or ``emulated``."""

UUID_BYTES = 16
"""Length of a GPU's UUID, by which processes name it: ordinals differ between them."""


class Driver(abc.ABC):
    """Physical memory, address ranges, mappings and access of one process.

    Every method raises `flyt.errors.DeviceError` with CUDA's code when the driver refuses. Devices
    are the process's own ordinals; handles are opaque, and whoever got one releases it once.
    """

    kind: str
    """``"cuda"`` or ``"emulated"``: memory crosses only between processes with the same."""

    host_accessible: bool
    """Whether the CPU can use the addresses."""

    @abc.abstractmethod
    def device_count(self) -> int: ...

    @abc.abstractmethod
    def uuid(self, device: int) -> bytes:
        """Its 16 bytes."""

    @abc.abstractmethod
    def granularity(self, device: int, *, recommended: bool) -> int:
        """What sizes and addresses must be multiples of (minimum), or should be (recommended)."""

    @abc.abstractmethod
    def can_access(self, device: int, resident: int) -> bool:
        """Whether ``device`` can use memory that lies on ``resident``."""

    @abc.abstractmethod
    def create(self, device: int, size: int) -> Any:
        """Physical memory on a device, exportable as a file descriptor."""

    @abc.abstractmethod
    def release(self, handle: Any) -> None:
        """Give up a handle; the memory lives on while it is mapped, exported or imported."""

    @abc.abstractmethod
    def export_fd(self, handle: Any) -> int:
        """A new file descriptor for the memory, closed on exec; the caller closes it."""

    @abc.abstractmethod
    def import_fd(self, fd: int) -> Any:
        """A handle for another process's memory. The descriptor stays the caller's."""

    @abc.abstractmethod
    def resident_device(self, handle: Any) -> int:
        """The device that holds the memory, as an ordinal of this process."""

    @abc.abstractmethod
    def reserve(self, size: int, alignment: int) -> int:
        """An address range without memory behind it."""

    @abc.abstractmethod
    def unreserve(self, address: int, size: int) -> None:
        """Give a range back; nothing may be mapped there."""

    @abc.abstractmethod
    def map(self, address: int, size: int, handle: Any) -> None:
        """Map all of a handle's ``size`` bytes into a reserved range; nobody has access yet."""

    @abc.abstractmethod
    def unmap(self, address: int, size: int) -> None:
        """Undo exactly one `map`."""

    @abc.abstractmethod
    def set_access(
        self, address: int, size: int, devices: tuple[int, ...], *, read_only: bool
    ) -> None:
        """Let these devices, and no others, use a fully mapped range."""

    @abc.abstractmethod
    def synchronize(self, device: int, stream: int | None = None) -> None:
        """Wait for a stream's work; without one, for all work of this process on the device."""

    @abc.abstractmethod
    def export_event(self, device: int, stream: int) -> tuple[Any, bytes]:
        """Record an interprocess event on a stream.

        Returns
        -------
        event : object
            Must be kept until the peer has waited; `return_event` takes it.
        handle : bytes
            For the peer's `wait_event`.
        """

    @abc.abstractmethod
    def return_event(self, event: Any) -> None:
        """It may be recorded again, for another peer; finalizers call this."""

    @abc.abstractmethod
    def wait_event(self, device: int, stream: int, handle: bytes) -> None:
        """Order a stream after another process's event."""

    def device_of(self, uuid: bytes) -> int | None:
        """The ordinal that a GPU has here; None if this process doesn't see it."""
        return next((d for d in range(self.device_count()) if self.uuid(d) == uuid), None)


class _Chosen:
    driver: Driver | None = None
    lock = threading.Lock()


def set_driver(driver: Driver) -> None:
    """Choose the driver of this process, once, before any memory is allocated or received."""
    with _Chosen.lock:
        if _Chosen.driver is not None and _Chosen.driver is not driver:
            raise ConfigurationError(
                f"this process already shares memory through the {_Chosen.driver.kind} driver: "
                "choose before the first allocation"
            )
        _Chosen.driver = driver


def get_driver() -> Driver:
    """The driver of this process: what `set_driver` chose, else what FLYT_IPC_DRIVER names.

    Nothing is emulated in silence: without a GPU and without a choice this is an error.
    """
    if _Chosen.driver is not None:
        return _Chosen.driver
    with _Chosen.lock:
        if _Chosen.driver is None:
            _Chosen.driver = _by_name(os.environ.get(DRIVER_VARIABLE, "cuda"))
        return _Chosen.driver


def _by_name(name: str) -> Driver:
    if name == "cuda":
        from flyt.ipc.cuda_driver import CudaDriver

        return CudaDriver()
    if name == "emulated":
        from flyt.ipc.twin import TwinDriver

        return TwinDriver()
    raise ConfigurationError(f"{DRIVER_VARIABLE}={name!r}: say cuda or emulated")
