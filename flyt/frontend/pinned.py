# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays in pinned memory."""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from flyt.frontend import current, leftovers, pinning
from flyt.frontend.current import thread
from flyt.frontend.pointers import Allocation
from flyt.frontend.session import Session


class _Holder:
    """Owns one pinned allocation for the arrays over it."""

    def __init__(self, address: int, size: int) -> None:
        self.buffer = (ctypes.c_char * size).from_address(address)
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
        }


def pinned_empty(
    shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float64
) -> np.ndarray[Any, np.dtype[Any]]:
    """A new array in pinned memory: copies to and from it are DMA, with no staging.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : data-type
        Any fixed-size dtype without Python objects.

    Returns
    -------
    ndarray
        C-contiguous and zeroed. Its memory goes back once neither it nor a view of it lives,
        at the process's next CUDA call.

    Raises
    ------
    DeviceError
        cudaErrorMemoryAllocation when the region is full, cudaErrorNoDevice without a backend.
    SessionLost
        The session was closed, or has ended.
    """
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"{kind} holds Python objects; they can't live in shared memory")
    dimensions = tuple(shape) if isinstance(shape, tuple | list) else (operator.index(shape),)
    size = math.prod(dimensions) * kind.itemsize
    session = current.current()
    if size <= 0:
        return np.empty(dimensions, kind)
    block = pinning.allocate(session, size, 0, thread.device, lasting=True)
    try:
        holder = _Holder(block.address, size)
        weakref.finalize(holder, _drop, weakref.ref(session), block).atexit = False
    except BaseException:  # an interrupt: nobody gets it
        _drop(weakref.ref(session), block)
        raise
    flat: np.ndarray[Any, np.dtype[Any]] = np.asarray(holder)
    return flat.view(kind).reshape(dimensions)


def _drop(session: weakref.ref[Session], block: Allocation) -> None:
    """Finalizers never send: the session's next call frees it, if nobody has by hand."""
    alive = session()
    if alive is not None and alive.arrays.pop(block, None) is not None:
        release = functools.partial(Session.free_pinned, block=block)
        alive.garbage.append((release, block.address))
    leftovers.drop(block)
