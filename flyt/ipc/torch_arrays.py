# SPDX-License-Identifier: Apache-2.0
"""PyTorch's tensors: described by their storage, built by ``set_`` on a storage over shared memory.

A tensor's device is the one that *holds* the memory, also where another device of this process
mapped it: PyTorch then launches where it should, and its own checks agree.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from flyt.errors import SharingError
from flyt.ipc.arrays import Adapter, Described, Owner
from flyt.ipc.driver import get_driver
from flyt.ipc.dtypes import ITEMSIZES
from flyt.ipc.messages import Layout

DTYPES = {name: getattr(torch, name) for name in ITEMSIZES if hasattr(torch, name)}
FEW_STORAGES = 64
"""Below that many, those that are no more are not looked for."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TorchAdapter(Adapter):
    """Strided tensors on the CPU (emulated driver) or a GPU."""

    library = "torch"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._storages: dict[tuple[bytes, int, int, int], StorageWeakRef] = {}
        self._sweep_at = FEW_STORAGES

    def takes(self, array: object) -> bool:
        return isinstance(array, torch.Tensor)

    def describe(self, array: torch.Tensor) -> Described:
        reason = _why_not(array)
        if reason:
            raise SharingError(f"this tensor can't be shared: {reason}")
        storage, itemsize = array.untyped_storage(), array.element_size()
        layout = Layout(
            self.library,
            NAMES[array.dtype],
            tuple(array.shape),
            tuple([step * itemsize for step in array.stride()]),
            0,
            storage.nbytes(),
            array.storage_offset() * itemsize,
            requires_grad=array.requires_grad,
            parameter=type(array) is torch.nn.Parameter,
        )
        device = array.device.index if array.is_cuda else None
        return Described(storage.data_ptr(), layout, device, storage)

    def build(self, layout: Layout, owner: Owner | None, *, read_only: bool) -> Any:
        if layout.dtype not in DTYPES:
            raise SharingError(f"this PyTorch has no {layout.dtype}")
        dtype, size = DTYPES[layout.dtype], ITEMSIZES[layout.dtype]
        if owner is None:
            where = "cuda" if _on_gpu() else "cpu"
            tensor = torch.empty(layout.shape, dtype=dtype, device=where)
        else:
            strides = tuple([step // size for step in layout.strides])
            whole = [step * size for step in strides] == list(layout.strides)
            if not whole or layout.offset % size or min(strides, default=0) < 0:
                raise SharingError(
                    "PyTorch has neither negative strides nor strides and offsets that are no "
                    "multiple of the element: receive it as a NumPy array, like='numpy'"
                )
            storage = self._storage(layout, owner)
            tensor = torch.empty(0, dtype=dtype, device=storage.device)
            tensor.set_(storage, layout.offset // size, layout.shape, strides)
        if layout.parameter:
            return torch.nn.Parameter(tensor, requires_grad=layout.requires_grad)
        return tensor.requires_grad_() if layout.requires_grad else tensor

    def _storage(self, layout: Layout, owner: Owner) -> torch.UntypedStorage:
        """The storage over these bytes: one for all tensors that shared one at the sender."""
        buffer = owner.buffer
        key = (buffer.key, buffer.handle, layout.storage, layout.extent)
        with self._lock:
            known = self._storages.get(key)
            if known is not None:
                old = torch.UntypedStorage._new_with_weak_ptr(known.cdata)  # noqa: SLF001
                if old is not None:
                    return old
            if len(self._storages) >= self._sweep_at:
                for dead in [k for k, ref in self._storages.items() if ref.expired()]:
                    del self._storages[dead]
                self._sweep_at = max(FEW_STORAGES, 2 * len(self._storages))
            new = self._view(owner).untyped_storage()
            self._storages[key] = StorageWeakRef(new)
            return new

    def _view(self, owner: Owner) -> torch.Tensor:
        """All bytes of the owner as a tensor that keeps it, on the device that holds them."""
        if owner.buffer.memory_resource.driver.host_accessible:
            import numpy as np

            return torch.from_numpy(np.asarray(owner))
        device = _device(owner.buffer.device_id)
        if torch.cuda.current_device() == device.index:
            view = torch.as_tensor(owner, device=device)
        else:
            with torch.cuda.device(device):
                view = torch.as_tensor(owner, device=device)
        # A copy, or another device, would be the wrong memory: never in silence.
        if view.data_ptr() != owner.__cuda_array_interface__["data"][0] or view.device != device:
            raise SharingError(f"PyTorch put memory of {device} on {view.device}, or copied it")
        return view

    def stream(self, device: int) -> int:
        if not _on_gpu():
            return 0
        torch.cuda.init()
        # What torch.cuda.current_stream(device).cuda_stream is, without an object around it.
        return int(torch._C._cuda_getCurrentRawStream(device))  # noqa: SLF001

    def device(self) -> int | None:
        return torch.cuda.current_device() if _on_gpu() else None


@functools.cache
def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


def _on_gpu() -> bool:
    """Whether to ask PyTorch's CUDA, which starts up for it: not for emulated memory."""
    return get_driver().kind == "cuda"


def _why_not(tensor: torch.Tensor) -> str:
    """Why this tensor can't cross; empty if it can."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"{type(tensor).__name__} is a subclass of Tensor, which can't be rebuilt"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return "it is sparse, quantized or nested: only strided tensors have one storage"
    if tensor.requires_grad and not tensor.is_leaf:
        return "it is not a leaf of its graph, and graphs don't cross processes: detach() it"
    if tensor.is_conj() or tensor.is_neg():
        return "its conjugation or negation is pending: call resolve_conj() or resolve_neg()"
    if tensor.dtype not in NAMES:
        return f"elements of type {tensor.dtype} have no name on the wire"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"it is on {tensor.device}"
    return ""
