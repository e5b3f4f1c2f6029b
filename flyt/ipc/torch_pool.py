# SPDX-License-Identifier: Apache-2.0
"""Two ways to let PyTorch itself allocate memory that can be shared, PyTorch left as it is.

`torch_pool` makes one of its memory pools draw on CUDA's virtual memory management. A program that
must not be touched is started with ``flyt ipc run``, which puts our cudaMalloc before the runtime's
(`adopt_preloaded`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any

from flyt.errors import ConfigurationError
from flyt.ipc import native_build
from flyt.ipc.foreign import adopt

PRELOADED_VARIABLE = "FLYT_IPC_PRELOAD"
"""Environment variable: path of the library that ``flyt ipc run`` has preloaded."""

_pools: dict[int, Any] = {}
_keep: list[Any] = []
_lock = threading.Lock()


@contextlib.contextmanager
def torch_pool(device: int | None = None) -> Iterator[Any]:
    """Within this block, PyTorch's new CUDA tensors lie in memory that can be shared.

    Parameters
    ----------
    device : int, optional
        By default PyTorch's current one.

    Yields
    ------
    torch.cuda.MemPool
        One for each device, kept for the life of the process.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigurationError("torch_pool needs a GPU: PyTorch sees none")
    index = torch.cuda.current_device() if device is None else device
    with _lock:
        if index not in _pools:
            path = str(native_build.library_path("pool"))
            allocator = torch.cuda.memory.CUDAPluggableAllocator(
                path, "flyt_pool_alloc", "flyt_pool_free"
            )
            adopt("pool", ctypes.CDLL(path))  # the very library that PyTorch has opened
            _keep.append(allocator)
            with torch.cuda.device(index):
                _pools[index] = torch.cuda.MemPool(allocator.allocator())
    with torch.cuda.use_mem_pool(_pools[index], device=index):
        yield _pools[index]


def adopt_preloaded() -> bool:
    """Under ``flyt ipc run``: let this process share what cudaMalloc gave it."""
    path = os.environ.get(PRELOADED_VARIABLE)
    if not path or path not in os.environ.get("LD_PRELOAD", "").split(":"):
        return False
    adopt("preload", ctypes.CDLL(path))
    return True
