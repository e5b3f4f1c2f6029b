# SPDX-License-Identifier: Apache-2.0
"""Arrays in device memory, for people who have NumPy arrays.

Nothing is ever treated as flat: what is contiguous, in C's or Fortran's order, is copied as it
lies; all else is packed on the way, and both docstrings say when.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from typing import Any, Literal, SupportsInt

import numpy as np
import numpy.typing as npt
from cuda.bindings.runtime import cudaMemcpyKind

from flyt.frontend import current
from flyt.frontend.api.copies import cudaMemcpy, cudaMemcpyAsync
from flyt.frontend.api.devices import cudaDeviceSynchronize
from flyt.frontend.api.events import cudaEventRecord
from flyt.frontend.api.memory import cudaMalloc
from flyt.frontend.api.streams import cudaStreamWaitEvent
from flyt.frontend.current import thread
from flyt.frontend.dlpack import CPU, CUDA, capsule_of, has_cuda
from flyt.frontend.objects import LEGACY, Event, Owned, Stream, checked
from flyt.frontend.pointers import Allocation
from flyt.frontend.session import Session
from flyt.frontend.statistics import FlytWarning

Array = np.ndarray[Any, np.dtype[Any]]
Order = Literal["C", "F"]

H2D = cudaMemcpyKind.cudaMemcpyHostToDevice
D2H = cudaMemcpyKind.cudaMemcpyDeviceToHost


_ELSEWHERE = (
    "this array lies in the memory of Flyt's backend, and CUDA itself runs in this process too, "
    "which can't reach it: use copy_to_host(), or what works through Flyt (flyt.numba)"
)


def to_device(array: Any, stream: SupportsInt | None = None) -> DeviceArray:
    """Copy an array to new memory of the current device.

    Parameters
    ----------
    array : array_like
        An ndarray, or another object with the buffer protocol (``bytes``, ``memoryview``, mmap,
        ...) or NumPy's array interface. C-contiguous and Fortran-contiguous arrays keep their
        order. Any other array (slices with steps, negative strides, broadcasts) is packed into
        C order first.
    stream : Stream or int or cudaStream_t, optional
        Copy in this stream's order, with cudaMemcpyAsync. By default with cudaMemcpy.

    Returns
    -------
    DeviceArray
        The caller's to close.

    Raises
    ------
    TypeError
        It holds Python objects or a mask, or is no array.
    DeviceError
        With the code of the CUDA call that failed, such as cudaErrorMemoryAllocation.

    Notes
    -----
    On return an array in pageable memory may be changed. One in pinned memory (`pinned_empty`)
    may be changed once the stream has done the copy, unless it was packed.
    """
    source = _readable(array)
    order = _order_of(source)
    if order is None:
        # Not ascontiguousarray: it makes one dimension of none.
        source, order = np.array(source, order="C", copy=True), "C"
    made = DeviceArray(source.shape, source.dtype, order)
    try:
        _copy(made.ptr, source, made.nbytes, H2D, stream)
    except BaseException:
        made.close()
        raise
    if stream is not None:
        made.stream = stream
    return made


class DeviceArray(Owned):
    """An array in device memory, contiguous in C's or Fortran's order.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : data-type
        Any dtype of a fixed size without Python objects.
    order : {"C", "F"}

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    order : {"C", "F"}
        What NumPy says of an array that is both is C.
    nbytes : int
    device : int
        The thread's current device when it was made.
    stream : Stream or int or cudaStream_t or None
        Whose work another user of the memory has to wait for: the stream that filled it. Yours to
        set when another one writes to it.

    Notes
    -----
    A new one is zero. It is a context manager; one that is dropped without `close` is freed by the
    process's next CUDA call. It ends with its session.
    """

    def __init__(
        self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float64, order: Order = "C"
    ) -> None:
        kind = np.dtype(dtype)
        _refuse_objects(kind)
        if order not in ("C", "F"):
            raise ValueError(f"order is 'C' or 'F', not {order!r}")
        extents = (shape,) if isinstance(shape, (int, np.integer)) else shape
        self.shape = tuple(operator.index(extent) for extent in extents)
        if any(extent < 0 for extent in self.shape):
            raise ValueError(f"negative dimensions in the shape {self.shape}")
        self.dtype = kind
        self.order: Order = order
        self.nbytes = math.prod(self.shape) * kind.itemsize
        self.device = thread.device
        self.stream: SupportsInt | None = Stream.default
        address = checked(cudaMalloc(self.nbytes))
        [place] = current.current().places(1, address)
        super().__init__(address, functools.partial(_free, place.allocation))

    @property
    def ptr(self) -> int:
        """Its address on the device; 0 if it has no bytes."""
        return self._use()

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next, in each dimension."""
        inner_first = self.shape if self.order == "F" else self.shape[::-1]
        steps, step = [], self.dtype.itemsize
        for extent in inner_first:
            steps.append(step)
            step *= extent
        return tuple(steps if self.order == "F" else reversed(steps))

    def copy_to_host(self, out: Any = None, stream: SupportsInt | None = None) -> Array:
        """Copy it to host memory.

        Parameters
        ----------
        out : ndarray or object with the buffer protocol, optional
            Gets the elements; of the same shape and dtype, of any strides. Unless it is contiguous
            in this array's order, they pass through a packed array first.
        stream : Stream or int or cudaStream_t, optional
            Copy in this stream's order, with cudaMemcpyAsync. By default with cudaMemcpy.

        Returns
        -------
        ndarray
            ``out``, as an array; by default a new one in this array's order.

        Raises
        ------
        ValueError
            ``out`` is read-only, or of another shape or dtype; no byte has moved then.
        DeviceError
            With the code of the CUDA call that failed.

        Notes
        -----
        Complete on return. With a ``stream`` and a contiguous ``out`` in pinned memory it is
        complete once the stream has done the copy.
        """
        target = self._new() if out is None else self._writable(out)
        packed = target if self._lies_alike(target) else self._new()
        _copy(packed, self.ptr, self.nbytes, D2H, stream)
        if packed is not target:
            target[...] = packed
        return target

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3; names the array's ``stream``. For consumers that work through Flyt: the
        address means nothing to CUDA itself, and where that runs too, a `FlytWarning` says so."""
        if has_cuda():
            warnings.warn(_ELSEWHERE, FlytWarning, stacklevel=2)
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            # Not the dtype's own, which raises where fields overlap.
            "descr": np.empty(0, self.dtype).__array_interface__["descr"],
            "data": (self.ptr, False),
            "strides": None if self.order == "C" else self.strides,
            "stream": self._ordering_stream(),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """kDLCUDA and the device's number in this process's session."""
        return CUDA, self.device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule, for consumers in this process that work through Flyt.

        Parameters
        ----------
        stream : int, optional
            Of the consumer's: it waits for the array's work. -1: nobody waits; default 1, the
            legacy stream.
        dl_device : tuple of int, optional
            ``(1, 0)`` gives a copy in host memory, as ``numpy.from_dlpack(a, device="cpu")`` asks.

        Raises
        ------
        BufferError
            CUDA itself runs in this process, so that its own users might take the address for one
            of theirs; a dtype that DLPack has not; another device.

        Notes
        -----
        The memory stays until the consumer lets go, unless the array is closed.
        """
        if dl_device is not None and tuple(map(int, dl_device)) == (CPU, 0):
            if copy is False:
                raise BufferError("device memory can't be seen by the host without a copy")
            return self.copy_to_host().__dlpack__()
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError(f"no copy of it on device {dl_device}; only ((1, 0)) makes one")
        if has_cuda():
            raise BufferError(_ELSEWHERE)
        if stream != -1:
            self._order_before(LEGACY if stream is None else stream)
        return capsule_of(self, self.ptr, self.device, self.shape, self.strides, self.dtype)

    def _order_before(self, consumer: int) -> None:
        """Later work of the consumer's stream waits for the array's."""
        own = self._ordering_stream()
        if own is not None and own != consumer:
            with Event(timing=False) as mark:
                checked(cudaEventRecord(mark.handle, own))
                checked(cudaStreamWaitEvent(consumer, mark.handle, 0))

    def _ordering_stream(self) -> int | None:
        """The stream to wait for; None once nothing is left to wait for."""
        if isinstance(self.stream, Stream) and self.stream.closed:
            checked(cudaDeviceSynchronize())  # its work may still run, and it has no name any more
            self.stream = None
        return None if self.stream is None else int(self.stream) or LEGACY

    def _new(self) -> Array:
        return np.empty(self.shape, self.dtype, self.order)

    def _lies_alike(self, array: Array) -> bool:
        return bool(array.flags.c_contiguous if self.order == "C" else array.flags.f_contiguous)

    def _writable(self, out: Any) -> Array:
        target = out if isinstance(out, np.ndarray) else _viewed(out)
        _refuse_mask(target)
        wanted, found = (self.shape, self.dtype), (target.shape, target.dtype)
        if wanted != found:
            raise ValueError(
                f"out has shape {found[0]} and dtype {found[1]}, this array {wanted[0]} and "
                f"{wanted[1]}"
            )
        if not target.flags.writeable:
            raise ValueError("out is read-only")
        return target

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"ptr={self._handle:#x}"
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, order={self.order!r}, {state})"


def _copy(dst: Any, src: Any, count: int, kind: Any, stream: SupportsInt | None) -> None:
    if stream is None:
        checked(cudaMemcpy(dst, src, count, kind))
    else:
        checked(cudaMemcpyAsync(dst, src, count, kind, int(stream)))


def _free(block: Allocation | None, session: Session, address: int) -> None:
    if block is not None:  # an array without bytes has none
        session.free(address, block)


def _readable(array: Any) -> Array:
    """What NumPy makes of it without a guess; never of a list or a text."""
    _refuse_mask(array)
    known = hasattr(array, "__array__") or hasattr(array, "__array_interface__")
    source = np.asarray(array) if known else _viewed(array)
    _refuse_objects(source.dtype)
    return source


def _viewed(buffer: Any) -> Array:
    """The buffer as an array; bytes are numbers, not a text."""
    try:
        return np.asarray(memoryview(buffer))
    except TypeError:
        raise TypeError(
            f"{type(buffer).__name__} is no array and has no buffer protocol; numpy.asarray makes "
            "an array of a sequence"
        ) from None


def _order_of(array: Array) -> Order | None:
    if array.flags.c_contiguous:
        return "C"
    return "F" if array.flags.f_contiguous else None


def _refuse_objects(kind: np.dtype[Any]) -> None:
    if kind.hasobject:
        raise TypeError(f"{kind} holds Python objects; a device can't follow their addresses")


def _refuse_mask(array: Any) -> None:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array's mask would be lost; give its data or its filled()")
