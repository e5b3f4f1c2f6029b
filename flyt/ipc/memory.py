# SPDX-License-Identifier: Apache-2.0
"""`VirtualMemoryResource`: allocates memory that other processes can map, and maps theirs.

Physical memory, an address range, mappings and access rights, in this order, as CUDA's virtual
memory management has them; whatever fails half-way gives back what was done before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any, Literal

from flyt.errors import SharingError
from flyt.ipc.buffer import KEY_BYTES, MAX_CHUNKS, MAX_SIZE, Buffer, IPCBufferDescriptor
from flyt.ipc.driver import Driver, get_driver


@dataclasses.dataclass(frozen=True, slots=True)
class VirtualMemoryResourceOptions:
    """How a `VirtualMemoryResource` allocates.

    Attributes
    ----------
    granularity : {"recommended", "minimum"}
        Which of the driver's two granularities sizes are rounded up to.
    chunk_size : int, optional
        Bytes of one piece of physical memory, rounded up likewise; all in one piece by default.
    peers : tuple of int
        Devices besides its own that may use what it allocates.
    """

    granularity: Literal["recommended", "minimum"] = "recommended"
    chunk_size: int | None = None
    peers: tuple[int, ...] = ()


class VirtualMemoryResource:
    """Allocates on one device, by CUDA's virtual memory management.

    Parameters
    ----------
    device : int
        Ordinal in this process.
    options : VirtualMemoryResourceOptions, optional
    driver : Driver, optional
        Default: this process's (`flyt.ipc.get_driver`).
    """

    def __init__(
        self,
        device: int = 0,
        options: VirtualMemoryResourceOptions | None = None,
        *,
        driver: Driver | None = None,
    ) -> None:
        self.driver = driver or get_driver()
        self.device_id = device
        self.options = options or VirtualMemoryResourceOptions()
        self.minimum_granularity = self.driver.granularity(device, recommended=False)
        self.recommended_granularity = self.driver.granularity(device, recommended=True)

    def allocate(self, size: int) -> Buffer:
        """A buffer of at least ``size`` bytes, of any content; 0 gives an empty one."""
        if not 0 <= size <= MAX_SIZE:
            raise SharingError(f"{size} bytes: a buffer has 0 to {MAX_SIZE}")
        key = secrets.token_bytes(KEY_BYTES)
        if size == 0:
            return Buffer(
                self, 0, None, contextlib.ExitStack(), key=key, size=0, mapped_size=0,
                device=self.device_id,
            )  # fmt: skip
        chunks = self._chunks_of(size)

        def make(number: int) -> Any:
            return self.driver.create(self.device_id, chunks[number])

        return self._map(key, size, chunks, make, self.device_id, None, read_only=False)

    def _chunks_of(self, size: int) -> tuple[int, ...]:
        least = self.options.granularity == "minimum"
        grain = self.minimum_granularity if least else self.recommended_granularity
        total = -(-size // grain) * grain
        chunk = total
        if self.options.chunk_size is not None:
            if self.options.chunk_size <= 0:
                raise SharingError("chunk_size is a positive number of bytes")
            chunk = min(total, -(-self.options.chunk_size // grain) * grain)
        count = -(-total // chunk)
        if count > MAX_CHUNKS:
            raise SharingError(
                f"{size} bytes in chunks of {chunk} are {count} chunks: at most {MAX_CHUNKS} can "
                "be shared, so take larger ones"
            )
        return (chunk,) * (count - 1) + (total - chunk * (count - 1),)

    def _import(self, descriptor: IPCBufferDescriptor, read_only: bool) -> Buffer:
        resident = self.driver.device_of(descriptor.uuid)
        if resident is None:
            raise SharingError(
                f"the memory lies on GPU {descriptor.uuid.hex()}, which this process does not see: "
                "make it visible (CUDA_VISIBLE_DEVICES)"
            )

        def make(number: int) -> Any:
            handle = self.driver.import_fd(descriptor.fds[number])
            with contextlib.ExitStack() as undo:
                undo.callback(self.driver.release, handle)
                if self.driver.resident_device(handle) != resident:
                    raise SharingError("the memory does not lie on the GPU that the sender names")
                undo.pop_all()
            return handle

        return self._map(
            descriptor.key, descriptor.size, descriptor.chunks, make, resident, descriptor.fds,
            read_only=read_only,
        )  # fmt: skip

    def _map(
        self,
        key: bytes,
        size: int,
        chunks: tuple[int, ...],
        make: Callable[[int], Any],
        resident: int,
        fds: tuple[int, ...] | None,
        *,
        read_only: bool,
    ) -> Buffer:
        """One range over all chunks; a failure half-way gives back what was done."""
        driver, total = self.driver, sum(chunks)
        devices = tuple(dict.fromkeys((self.device_id, resident, *self.options.peers)))
        for device in devices:
            if not driver.can_access(device, resident):
                raise SharingError(
                    f"device {device} has no peer access to {resident}, which holds the memory"
                )
        with contextlib.ExitStack() as undo:
            address = driver.reserve(
                total, max(self.recommended_granularity, self.minimum_granularity)
            )
            undo.callback(driver.unreserve, address, total)
            at, handles = address, []
            for number, chunk in enumerate(chunks):
                handles.append(make(number))
                undo.callback(driver.release, handles[-1])
                driver.map(at, chunk, handles[-1])
                undo.callback(driver.unmap, at, chunk)
                at += chunk
            driver.set_access(address, total, devices, read_only=read_only)
            shared = _Descriptors(driver, handles, fds)
            undo.callback(shared.close)

            uuid = driver.uuid(resident)

            @functools.cache
            def descriptor() -> IPCBufferDescriptor:
                return IPCBufferDescriptor(key, uuid, size, chunks, shared.get())

            for device in devices:  # nothing is unmapped under a running kernel
                undo.callback(driver.synchronize, device)
            return Buffer(
                self, address, descriptor, undo.pop_all(), key=key, size=size, mapped_size=total,
                device=resident, read_only=read_only, imported=fds is not None,
            )  # fmt: skip

    def __repr__(self) -> str:
        return f"<VirtualMemoryResource device {self.device_id}, {self.driver.kind}>"


class _Descriptors:
    """A buffer's file descriptors: exported at the first use, or kept from the import."""

    def __init__(
        self, driver: Driver, handles: list[Any], received: tuple[int, ...] | None
    ) -> None:
        self._driver = driver
        self._handles = handles
        self._lock = threading.Lock()
        self._fds: list[int] = []
        if received is not None:  # the very objects that came: drivers need not export imports
            with contextlib.ExitStack() as undo:
                for fd in received:
                    self._fds.append(os.dup(fd))
                    undo.callback(os.close, self._fds[-1])
                undo.pop_all()

    def get(self) -> tuple[int, ...]:
        with self._lock:
            while len(self._fds) < len(self._handles):
                self._fds.append(self._driver.export_fd(self._handles[len(self._fds)]))
            return tuple(self._fds)

    def close(self) -> None:
        with self._lock:
            while self._fds:
                os.close(self._fds.pop())
