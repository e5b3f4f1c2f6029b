# SPDX-License-Identifier: Apache-2.0
"""DLPack and ``__cuda_array_interface__`` of a DeviceArray: for whom, and for how long."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import types
import weakref
from typing import Any

import numpy as np
import pytest

import flyt
from flyt.frontend import dlpack
from flyt.frontend.api.callbacks import launch

LIMIT = 30.0

_get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)


def tensor_of(capsule: Any) -> Any:
    return dlpack.Managed.from_address(_get(capsule, b"dltensor"))


@pytest.mark.parametrize(
    ("dtype", "code", "bits"),
    [(np.int8, 0, 8), (np.uint16, 1, 16), (np.float16, 2, 16), (np.float64, 2, 64),
     (np.complex128, 5, 128), (np.bool_, 6, 8)],
)  # fmt: skip
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_a_capsule_says(
    session: flyt.Session, dtype: Any, code: int, bits: int, order: Any
) -> None:
    made = flyt.DeviceArray((3, 4, 5), dtype, order)
    tensor = tensor_of(capsule := made.__dlpack__()).tensor
    assert made.__dlpack_device__() == (2, 0)  # kDLCUDA of dlpack.h
    assert (tensor.device.type, tensor.device.id, tensor.byte_offset) == (2, 0, 0)
    assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (code, bits, 1)
    assert tensor.data == made.ptr
    assert tensor.shape[: tensor.ndim] == [3, 4, 5]
    steps = [20, 5, 1] if order == "C" else [1, 3, 12]
    assert tensor.strides[: tensor.ndim] == steps, "in elements"
    del capsule


def test_the_array_lives_as_long_as_its_capsule(session: flyt.Session) -> None:
    made = flyt.DeviceArray(5)
    there = weakref.ref(made)
    capsule = made.__dlpack__()
    del made
    gc.collect()
    assert there() is not None
    del capsule  # never consumed
    gc.collect()
    assert there() is None


def test_a_consumer_lets_go_by_the_deleter(session: flyt.Session) -> None:
    made = flyt.DeviceArray(5)
    there, capsule = weakref.ref(made), made.__dlpack__()
    managed = tensor_of(capsule)
    _rename(capsule, used := b"used_dltensor")
    del made, capsule
    gc.collect()
    assert there() is not None, "the consumer has it"
    managed.deleter(ctypes.addressof(managed))
    gc.collect()
    assert there() is None
    assert used


def test_numpy_gets_a_copy_of_the_host(session: flyt.Session) -> None:
    data = np.arange(12.0).reshape(3, 4)
    made = flyt.to_device(data)
    capsule = made.__dlpack__(dl_device=(1, 0))

    class Host:
        def __dlpack__(self, **_: Any) -> Any:
            return capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    assert np.array_equal(np.from_dlpack(Host()), data)
    with pytest.raises(BufferError, match="without a copy"):
        made.__dlpack__(dl_device=(1, 0), copy=False)
    with pytest.raises(BufferError):
        made.__dlpack__(dl_device=(2, 7))


def test_what_dlpack_has_no_word_for(session: flyt.Session) -> None:
    for dtype in ("S4", "datetime64[s]", ">f8", [("x", "i4")]):
        with pytest.raises(BufferError, match="dtype"):
            flyt.DeviceArray(5, np.dtype(dtype)).__dlpack__()


def test_the_consumers_stream_waits(session: flyt.Session) -> None:
    first, second = flyt.Stream(non_blocking=True), flyt.Stream(non_blocking=True)
    made, go = flyt.DeviceArray(5), threading.Event()
    made.stream = first
    launch(int(first), lambda _: go.wait(LIMIT) and None)
    capsule = made.__dlpack__(stream=-1)
    assert second.is_done, "nobody waits"
    other = made.__dlpack__(stream=int(second))
    assert not second.is_done
    go.set()
    second.sync()
    assert first.is_done
    del capsule, other


def test_who_has_cuda_is_told(session: flyt.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    made = flyt.DeviceArray(5)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert not dlpack.has_cuda(), "a package alone is no CUDA"
    made.__dlpack__()
    driver = "/dev/nvidiactl"  # what a process has open in which CUDA runs
    monkeypatch.setattr(dlpack.os, "readlink", lambda _: driver)
    with pytest.raises(BufferError, match="copy_to_host"):
        made.__dlpack__()
    with pytest.warns(flyt.FlytWarning, match="copy_to_host"):
        assert made.__cuda_array_interface__["data"] == (made.ptr, False)
    monkeypatch.delitem(sys.modules, "torch")
    assert not dlpack.has_cuda()
