# SPDX-License-Identifier: Apache-2.0
"""Arrays of the libraries: how one is described, and how one is built over shared memory.

One `Adapter` a library. NumPy's is here: it sees what the CPU can use, which is the emulated
driver's memory.
"""

from __future__ import annotations

import abc
import functools
import math
import sys
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from flyt.errors import SharingError
from flyt.ipc.buffer import Buffer
from flyt.ipc.dtypes import ITEMSIZES, NUMPY_NAMES
from flyt.ipc.messages import Layout


class Described(NamedTuple):
    """An array as addresses and byte counts, before it is known which block it lies in."""

    start: int
    """Address of its storage."""
    layout: Layout
    """With ``storage`` still 0."""
    device: int | None
    """Where its library says that it lies; None for host memory."""
    keep: Any
    """Keeps its storage alive."""


class Owner:
    """What an array over shared memory keeps alive: the buffer, and by it the mapping.

    Its death is the release of the share. It offers the storage's bytes to the libraries.
    """

    __slots__ = ("__weakref__", "_interface", "buffer")

    def __init__(self, buffer: Buffer, start: int, extent: int) -> None:
        self.buffer = buffer
        # Said to be writable even where it is not: PyTorch knows no read-only memory, and NumPy's
        # flag is set on the array itself. The mapping holds the truth.
        self._interface = {
            "shape": (extent,),
            "typestr": "|u1",
            "data": (buffer.handle + start, False),
            "version": 3,
        }

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if not self.buffer.memory_resource.driver.host_accessible:
            raise AttributeError("this is a GPU's memory")
        return self._interface

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.buffer.memory_resource.driver.host_accessible:
            raise AttributeError("this is the host's memory")
        return self._interface


class Adapter(abc.ABC):
    """One library's arrays."""

    library: ClassVar[str]

    @abc.abstractmethod
    def takes(self, array: object) -> bool:
        """Whether this is one of the library's."""

    @abc.abstractmethod
    def describe(self, array: Any) -> Described:
        """Raises SharingError with the reason when it can't cross."""

    @abc.abstractmethod
    def build(self, layout: Layout, owner: Owner | None, *, read_only: bool) -> Any:
        """An array over the owner's bytes; without an owner an empty one."""

    @abc.abstractmethod
    def stream(self, device: int) -> int:
        """The library's current stream."""

    def device(self) -> int | None:
        """The library's current device, if it has a choice."""
        return None


def span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Bytes before the first element and from there to the end of the last; (0, 0) if empty."""
    if 0 in shape:
        return 0, 0
    before, after = 0, itemsize
    for n, step in zip(shape, strides, strict=True):
        if step < 0:
            before -= (n - 1) * step
        else:
            after += (n - 1) * step
    return before, after


def packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Of a C-contiguous array, in bytes."""
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def packed_layout(library: str, dtype: str, shape: tuple[int, ...]) -> Layout:
    """A new C-contiguous array at the start of its block."""
    if dtype not in ITEMSIZES:
        raise SharingError(f"{dtype!r} is no element type: {', '.join(ITEMSIZES)}")
    extent = math.prod(shape) * ITEMSIZES[dtype]
    return Layout(library, dtype, shape, packed_strides(shape, ITEMSIZES[dtype]), 0, extent, 0)


@functools.lru_cache(64)
def _numpy_name(dtype: np.dtype[Any]) -> str | None:
    """An element type's name on the wire, if it has one: NumPy takes long to tell."""
    return dtype.name if dtype.name in NUMPY_NAMES and dtype.isnative else None


class NumpyAdapter(Adapter):
    """NumPy arrays, and what NumPy views without a copy (DLPack, ``__array_interface__``)."""

    library = "numpy"

    def takes(self, array: object) -> bool:
        return isinstance(array, np.ndarray)

    def describe(self, array: np.ndarray[Any, Any]) -> Described:
        if type(array) is not np.ndarray:
            raise SharingError(f"{type(array).__name__} is a subclass of ndarray: send its .view()")
        name = _numpy_name(array.dtype)
        if name is None:
            raise SharingError(
                f"elements of type {array.dtype!r} can't cross: only plain native numbers and bool"
            )
        before, after = span(array.shape, array.strides, array.itemsize)
        layout = Layout(
            self.library,
            name,
            array.shape,
            array.strides,
            0,
            before + after,
            before,
            read_only=not array.flags.writeable,
        )
        return Described(array.__array_interface__["data"][0] - before, layout, None, array)

    def build(self, layout: Layout, owner: Owner | None, *, read_only: bool) -> Any:
        if layout.dtype not in NUMPY_NAMES:
            raise SharingError(
                f"NumPy has no {layout.dtype}: receive it as a PyTorch tensor, like='torch'"
            )
        if owner is None:
            return np.empty(layout.shape, layout.dtype)
        storage = np.asarray(owner)
        array: np.ndarray[Any, Any] = np.ndarray(
            layout.shape, layout.dtype, storage, layout.offset, layout.strides
        )
        array.flags.writeable = not (read_only or layout.read_only)
        return array

    def stream(self, device: int) -> int:
        return 0


def _load(library: str) -> Adapter:
    if library == "torch":
        from flyt.ipc.torch_arrays import TorchAdapter

        return TorchAdapter()
    if library == "cupy":
        from flyt.ipc.cupy_arrays import CupyAdapter

        return CupyAdapter()
    raise SharingError(f"{library!r} is no array library: numpy, torch or cupy")


_adapters: dict[str, Adapter] = {"numpy": NumpyAdapter()}

on_load: list[Callable[[], None]] = []
"""Called when another library's arrays come into play in this process."""


def adapter(library: str) -> Adapter:
    """A library's adapter; SharingError when the library is not installed."""
    if library not in _adapters:
        try:
            _adapters[library] = _load(library)
        except ImportError as exc:
            raise SharingError(
                f"{library} is not installed here: name another library with like="
            ) from exc
        for call in on_load:
            call()
    return _adapters[library]


def adapter_for(array: object) -> tuple[Adapter, Any]:
    """The adapter of an array's library, and the array as that library's own."""
    for library in ("numpy", "torch", "cupy"):  # none is imported for the asking
        if library in sys.modules and (own := adapter(library)).takes(array):
            return own, array
    if hasattr(array, "__cuda_array_interface__"):
        return adapter("cupy"), adapter("cupy").view(array)  # type: ignore[attr-defined]
    if hasattr(array, "__array_interface__"):
        return adapter("numpy"), np.asarray(array)
    if hasattr(array, "__dlpack__"):
        return adapter("numpy"), np.from_dlpack(array)
    raise SharingError(
        f"{type(array).__name__} is no array: PyTorch, CuPy, NumPy, or an object with DLPack"
    )
