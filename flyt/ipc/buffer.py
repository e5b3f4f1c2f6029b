# SPDX-License-Identifier: Apache-2.0
"""`Buffer`: a range of device addresses that other processes can map, and its description for them.

The vocabulary is cuda.core's. A buffer's memory lies in one or several physical chunks, mapped side
by side into one address range; each chunk crosses to another process as a file descriptor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from flyt.errors import SharingError
from flyt.ipc.blocks import blocks
from flyt.ipc.driver import UUID_BYTES

if TYPE_CHECKING:
    from typing_extensions import Self

    from flyt.ipc.memory import VirtualMemoryResource

KEY_BYTES = 16
"""Length of a block's random name; whoever knows it was handed the block."""

MAX_CHUNKS = 253
"""The kernel passes at most this many descriptors in one message (SCM_MAX_FD)."""

MAX_SIZE = 1 << 47
"""Bytes of a buffer: half of what 48-bit addresses span; no GPU has as much."""


@dataclasses.dataclass(frozen=True, slots=True)
class IPCBufferDescriptor:
    """What another process needs to map a buffer.

    It goes through a `flyt.ipc.Connection`, or by your own socket: the descriptors with SCM_RIGHTS,
    the rest as you like. It does not pickle, since descriptors mean nothing elsewhere.

    Attributes
    ----------
    key : bytes
        Random name of the block, the same in every process.
    uuid : bytes
        Of the GPU that holds the memory.
    size : int
        Bytes that were asked for.
    chunks : tuple of int
        Bytes of each piece of physical memory.
    fds : tuple of int
        One descriptor for each; they belong to the buffer and are closed with it.
    """

    key: bytes
    uuid: bytes
    size: int
    chunks: tuple[int, ...]
    fds: tuple[int, ...]

    def __post_init__(self) -> None:
        sound = (
            len(self.key) == KEY_BYTES
            and len(self.uuid) == UUID_BYTES
            and 0 < len(self.chunks) <= MAX_CHUNKS
            and len(self.fds) == len(self.chunks)
            and all(chunk > 0 for chunk in self.chunks)
            and 0 < self.size <= sum(self.chunks) <= MAX_SIZE
        )
        if not sound:
            raise SharingError("this is no description of a buffer: sizes and chunks don't fit")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "descriptors don't survive pickling: send the array with flyt.ipc.send, or call "
            "flyt.ipc.install_reducers() for multiprocessing queues"
        )


class Buffer:
    """A range of device addresses with physical memory behind it.

    Made by `VirtualMemoryResource.allocate` and `Buffer.from_ipc_descriptor`. ``close()`` waits
    for the device's work, then unmaps: using arrays over a closed buffer is a use after free, as in
    CUDA. The physical memory itself lives until every process has let go of it.

    NumPy (emulated driver) and CuPy or PyTorch (CUDA) take a buffer as an array of bytes, with no
    copy: ``numpy.asarray(buffer)``, ``torch.as_tensor(buffer)``; such arrays keep the buffer.
    """

    def __init__(
        self,
        resource: VirtualMemoryResource,
        handle: int,
        descriptor: Callable[[], IPCBufferDescriptor] | None,
        undo: contextlib.ExitStack,
        *,
        key: bytes,
        size: int,
        mapped_size: int,
        device: int,
        read_only: bool = False,
        imported: bool = False,
        foreign: bool = False,
    ) -> None:
        self._resource = resource
        self._handle = handle
        self._descriptor = descriptor
        self._key = key
        self._size = size
        self._mapped_size = mapped_size
        self._device = device
        self._read_only = read_only
        self._imported = imported
        if foreign:  # its allocator is asked for it each time: see flyt.ipc.foreign
            blocks.name(self)
            undo.callback(blocks.ended, key)
        elif handle:
            blocks.add(self, own=not imported)
            undo.callback(blocks.remove, handle, key)
        self._end = weakref.finalize(self, undo.close)
        self._end.atexit = False  # the kernel and the driver take it back then

    @property
    def handle(self) -> int:
        """Its address in this process; 0 for an empty buffer."""
        return self._handle

    @property
    def size(self) -> int:
        """Bytes that were asked for."""
        return self._size

    @property
    def mapped_size(self) -> int:
        """Bytes of physical memory behind it: the size, rounded up to the granularity."""
        return self._mapped_size

    @property
    def key(self) -> bytes:
        """Name of the block, the same in every process."""
        return self._key

    @property
    def device_id(self) -> int:
        """The device on which the memory lies, which need not be the one that mapped it."""
        return self._device

    @property
    def memory_resource(self) -> VirtualMemoryResource:
        return self._resource

    @property
    def is_read_only(self) -> bool:
        return self._read_only

    @property
    def is_imported(self) -> bool:
        """Whether another process allocated it."""
        return self._imported

    @property
    def is_closed(self) -> bool:
        return not self._end.alive

    @property
    def ipc_descriptor(self) -> IPCBufferDescriptor:
        """For another process; made at the first use. Imported memory can be passed on."""
        if self.is_closed or self._descriptor is None:
            raise SharingError("an empty or closed buffer has nothing to share")
        return self._descriptor()

    @classmethod
    def from_ipc_descriptor(
        cls,
        resource: VirtualMemoryResource,
        descriptor: IPCBufferDescriptor,
        *,
        read_only: bool = False,
    ) -> Buffer:
        """Map another process's memory.

        Parameters
        ----------
        resource : VirtualMemoryResource
            Its device maps the memory and gets access; so does the device that holds it.
        descriptor : IPCBufferDescriptor
            Its descriptors stay the caller's.
        read_only : bool
            Map it without the right to write.
        """
        return resource._import(descriptor, read_only)  # noqa: SLF001 - one concept, two classes

    def close(self, *, stream: int | None = None) -> None:
        """Wait for ``stream`` (or all work of the device), then give all back. Idempotent."""
        if self._end.alive and self._handle and stream is not None:
            self._resource.driver.synchronize(self._device, stream)
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{self._handle:#x}"
        return f"<Buffer {state}, {self._size} bytes on device {self._device}>"

    def _interface(self, host: bool) -> dict[str, Any]:
        name = "__array_interface__" if host else "__cuda_array_interface__"
        if self._resource.driver.host_accessible is not host:
            raise AttributeError(f"memory of the {self._resource.driver.kind} driver has no {name}")
        if self.is_closed:
            raise SharingError("this buffer is closed")
        return {
            "shape": (self._size,),
            "typestr": "|u1",
            "data": (self._handle, self._read_only),
            "version": 3,
        }

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._interface(host=True)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._interface(host=False)
