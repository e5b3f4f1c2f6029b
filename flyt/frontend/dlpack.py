# SPDX-License-Identifier: Apache-2.0
"""DLPack capsules of device memory, and who may have one.

The address in a capsule means something to Flyt alone: the memory is on the backend's GPU. DLPack
does not tell who asks, so a process in which CUDA itself runs is refused.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import numpy as np

CPU, CUDA = 1, 2
"""DLDeviceType."""

_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
"""DLDataTypeCode of NumPy's kinds."""

_SUSPECTS = ("cupy", "torch", "pycuda", "jax", "tensorflow")
"""Packages that bring CUDA into a process; without one nobody looks further."""


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (
        ("tensor", _Tensor),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


_NAME = b"dltensor"

# Prototypes of our own: those of `ctypes.pythonapi` are everybody's.
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

_alive: dict[int, tuple[Any, ...]] = {}
"""By the address of its struct, what a capsule needs until its consumer lets go of it."""


def _delete(address: int) -> None:
    _alive.pop(address, None)


def _end_capsule(capsule: int) -> None:
    """A capsule whose name was changed has been consumed: its consumer calls the deleter."""
    if _is_valid(capsule, _NAME):
        _delete(_pointer(capsule, _NAME))


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_deleter, _destructor = _Callback(_delete), _Callback(_end_capsule)


def capsule_of(
    owner: object, address: int, device: int, shape: tuple[int, ...], strides: tuple[int, ...],
    dtype: np.dtype[Any],
) -> Any:  # fmt: skip
    """A capsule named ``dltensor``; ``owner`` lives as long as it is used.

    Raises
    ------
    BufferError
        DLPack has no such dtype, or strides that are no whole elements.
    """
    code = _CODES.get(dtype.kind)
    if code is None or not dtype.isnative or any(step % dtype.itemsize for step in strides):
        raise BufferError(f"DLPack has no elements of dtype {dtype}")
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    steps = (ctypes.c_int64 * len(shape))(*(step // dtype.itemsize for step in strides))
    managed = Managed()
    managed.tensor.data = address
    managed.tensor.device = _Device(CUDA, device)
    managed.tensor.ndim = len(shape)
    managed.tensor.dtype = _DataType(code, 8 * dtype.itemsize, 1)
    managed.tensor.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    managed.tensor.strides = ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _deleter
    place = ctypes.addressof(managed)
    _alive[place] = (managed, sizes, steps, owner)
    return _new(place, _NAME, ctypes.cast(_destructor, ctypes.c_void_p))


def has_cuda() -> bool:
    """Whether CUDA itself runs in this process, beside Flyt."""
    if not any(name in sys.modules for name in _SUSPECTS):
        return False
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia"):
                return True
        except OSError:  # closed meanwhile
            continue
    return False
