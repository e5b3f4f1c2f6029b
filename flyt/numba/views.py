# SPDX-License-Identifier: Apache-2.0
"""`View`: what numba-cuda takes of cuda.core's StridedMemoryView, which asks the driver."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flyt.numba.objects import Buffer


class _Layout(NamedTuple):
    strides_in_bytes: tuple[int, ...] | None
    is_contiguous_c: bool
    is_contiguous_f: bool

    @property
    def is_contiguous_any(self) -> bool:
        return self.is_contiguous_c or self.is_contiguous_f


class View:
    """Where an array lies, and how; ``owner`` keeps it alive."""

    def __init__(
        self, ptr: int, shape: tuple[int, ...], strides: Any, dtype: Any, owner: Any
    ) -> None:
        self.ptr = ptr
        self.shape = tuple(int(n) for n in shape)
        self.dtype = np.dtype(dtype)
        self.strides = strides
        self.owner = owner
        form = np.lib.stride_tricks.as_strided(np.empty(1, self.dtype), self.shape, strides)
        self.size = int(form.size)
        self._layout = _Layout(
            None if strides is None else tuple(strides),
            bool(form.flags.c_contiguous),
            bool(form.flags.f_contiguous),
        )

    @classmethod
    def from_buffer(
        cls, buffer: Buffer, shape: Any, strides: Any = None, dtype: Any = None, **_: Any
    ) -> View:
        """Device memory as an array."""
        return cls(buffer.handle, shape, strides, dtype, buffer)

    @classmethod
    def from_cuda_array_interface(cls, obj: Any, stream_ptr: Any = None) -> View:  # noqa: ARG003
        """A device array of whoever speaks the interface."""
        told = obj.__cuda_array_interface__
        return cls(told["data"][0], told["shape"], told.get("strides"), told["typestr"], obj)

    @classmethod
    def from_array_interface(cls, obj: Any) -> View:
        """An array in host memory."""
        array = np.asanyarray(obj)
        return cls(array.ctypes.data, array.shape, array.strides, array.dtype, array)

    @classmethod
    def from_any_interface(cls, obj: Any, stream_ptr: Any = None) -> View:
        """A device array or one in host memory."""
        if hasattr(obj, "__cuda_array_interface__"):
            return cls.from_cuda_array_interface(obj, stream_ptr)
        return cls.from_array_interface(obj)

    @classmethod
    def from_dlpack(cls, obj: Any, stream_ptr: Any = None) -> View:
        """A device array that speaks DLPack, through its array interface."""
        if hasattr(obj, "__cuda_array_interface__"):
            return cls.from_cuda_array_interface(obj, stream_ptr)
        raise NotImplementedError("flyt.numba takes DLPack of arrays with an array interface only")
