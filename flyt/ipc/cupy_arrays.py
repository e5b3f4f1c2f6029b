# SPDX-License-Identifier: Apache-2.0
"""CuPy's arrays, and those of other libraries with ``__cuda_array_interface__`` through CuPy."""

from __future__ import annotations

from typing import Any

import cupy

from flyt.errors import SharingError
from flyt.ipc.arrays import Adapter, Described, Owner, span
from flyt.ipc.dtypes import NUMPY_NAMES
from flyt.ipc.messages import Layout


class CupyAdapter(Adapter):
    """Arrays in a GPU's memory with NumPy's element types."""

    library = "cupy"

    def takes(self, array: object) -> bool:
        return isinstance(array, cupy.ndarray)

    def view(self, array: object) -> Any:
        """Another library's array, not copied."""
        return cupy.asarray(array)

    def describe(self, array: Any) -> Described:
        name = array.dtype.name
        if name not in NUMPY_NAMES:
            raise SharingError(f"elements of type {array.dtype!r} can't cross from CuPy")
        before, after = span(array.shape, array.strides, array.itemsize)
        layout = Layout(self.library, name, array.shape, array.strides, 0, before + after, before)
        return Described(array.data.ptr - before, layout, array.device.id, array)

    def build(self, layout: Layout, owner: Owner | None, *, read_only: bool) -> Any:
        if layout.dtype not in NUMPY_NAMES:
            raise SharingError(f"CuPy has no {layout.dtype}: receive it with like='torch'")
        if owner is None:
            return cupy.empty(layout.shape, layout.dtype)
        start = owner.__cuda_array_interface__["data"][0]
        memory = cupy.cuda.UnownedMemory(start, layout.extent, owner, owner.buffer.device_id)
        pointer = cupy.cuda.MemoryPointer(memory, layout.offset)
        return cupy.ndarray(layout.shape, layout.dtype, pointer, layout.strides)

    def stream(self, device: int) -> int:
        with cupy.cuda.Device(device):
            return int(cupy.cuda.get_current_stream().ptr)

    def device(self) -> int | None:
        return int(cupy.cuda.runtime.getDevice())
