# SPDX-License-Identifier: Apache-2.0
"""Copies and fills in two and three dimensions, and pitched memory: linear memory only."""

from __future__ import annotations

from typing import Any, NamedTuple

from cuda.bindings.runtime import cudaMemcpyKind, cudaPitchedPtr

from flyt.errors import DeviceError
from flyt.frontend import current
from flyt.frontend.api.convention import INVALID_VALUE, Answer, cuda
from flyt.frontend.api.copies import (
    ACCESSIBLE,
    c_kind,
    check_kind,
    checked_places,
    finish,
    queue_of,
)
from flyt.frontend.api.devices import c_int
from flyt.frontend.api.handles import stream_of
from flyt.frontend.current import thread
from flyt.frontend.hostmem import ADDRESS_BITS, HostArgument, pointer, size_t
from flyt.frontend.pointers import Place
from flyt.frontend.streams import LEGACY, MEMORY_ALLOCATION

INVALID_PITCH = 12
NOT_SUPPORTED = 801

PITCH_LIMIT = 1 << 31
"""cudaDevAttrMaxPitch is one less (recorded on every device so far)."""

ALIGNMENT = 512
"""What rows of pitched memory start at where the device does not tell: cudaDevAttrTextureAlignment
of every device so far."""


class Box(NamedTuple):
    """``depth`` slices of ``height`` rows of ``width`` bytes."""

    width: int
    height: int
    depth: int = 1

    @property
    def is_empty(self) -> bool:
        return not (self.width and self.height and self.depth)


class Side(NamedTuple):
    """Where one side of a copy lies: its first byte, and how far rows and slices are apart."""

    memory: HostArgument
    offset: int
    pitch: int
    slice_pitch: int

    def span(self, box: Box) -> int:
        """Bytes from the first to the last."""
        return self.slice_pitch * (box.depth - 1) + self.pitch * (box.height - 1) + box.width

    def check(self, box: Box) -> None:
        """Raise for rows that overlap or are too far apart; what is one row has no pitch."""
        if box.height * box.depth > 1 and not box.width <= self.pitch < PITCH_LIMIT:
            raise DeviceError(
                INVALID_PITCH, f"rows of {box.width} bytes don't lie {self.pitch} bytes apart"
            )
        if box.depth > 1 and self.slice_pitch < self.pitch * box.height:
            raise DeviceError(INVALID_VALUE, f"slices of {box.height} rows overlap (ysize)")


def _folded(box: Box, *sides: Side) -> Box:
    """Slices without a gap are but more rows."""
    if all(side.slice_pitch == side.pitch * box.height for side in sides):
        return Box(box.width, box.height * box.depth)
    return box


def _copy(to: Side, origin: Side, box: Box, kind: Any, stream: Any, *, wait: bool) -> Answer:
    kind = c_kind(kind)
    session = current.current()
    session.connection.raise_deferred()
    asked = None if wait else stream_of(session, stream)
    if box.is_empty:
        return ()
    check_kind(kind)
    to.check(box)
    origin.check(box)
    destination, source = checked_places(
        session, to.memory, to.offset, to.span(box), origin.memory, origin.offset,
        origin.span(box), kind,
    )  # fmt: skip
    queue = queue_of(session, destination, source, asked)
    box = _folded(box, to, origin)
    for number in range(box.depth):
        session.transfers.copy_rows(
            _further(destination, number * to.slice_pitch), to.pitch,
            _further(source, number * origin.slice_pitch), origin.pitch,
            box.width, box.height, queue,
        )  # fmt: skip
    return finish(session, destination, source, queue, wait=wait)


def _further(place: Place, offset: int) -> Place:
    return Place(place.address + offset, place.space, place.allocation) if offset else place


def _plane(memory: Any, pitch: int) -> Side:
    return Side(pointer(memory), 0, size_t(pitch), 0)


@cuda(0)
def cudaMemcpy2D(
    dst: Any, dpitch: int, src: Any, spitch: int, width: int, height: int, kind: Any
) -> Answer:
    """Copy ``height`` rows of ``width`` bytes.

    Parameters
    ----------
    dst, src : int or object with the buffer protocol
    dpitch, spitch : int
        Bytes from the start of one row to that of the next.
    width, height : int
    kind : cudaMemcpyKind

    Notes
    -----
    As `cudaMemcpy` otherwise. cudaErrorInvalidPitchValue when a pitch is less than ``width``.
    """
    box = Box(size_t(width), size_t(height))
    return _copy(_plane(dst, dpitch), _plane(src, spitch), box, kind, LEGACY, wait=True)


@cuda(0)
def cudaMemcpy2DAsync(
    dst: Any, dpitch: int, src: Any, spitch: int, width: int, height: int, kind: Any, stream: Any
) -> Answer:
    """`cudaMemcpy2D` in the order of a stream; returns as `cudaMemcpyAsync` does."""
    box = Box(size_t(width), size_t(height))
    return _copy(_plane(dst, dpitch), _plane(src, spitch), box, kind, stream, wait=False)


@cuda(0)
def cudaMemcpy3D(p: Any) -> Answer:
    """Copy a box between linear pitched memory, as a ``cudaMemcpy3DParms`` says.

    Notes
    -----
    cudaErrorNotSupported for CUDA arrays. ``srcPos`` and ``dstPos`` count bytes, rows and slices.
    """
    return _copy(*_parameters(p), p.kind, LEGACY, wait=True)


@cuda(0)
def cudaMemcpy3DAsync(p: Any, stream: Any) -> Answer:
    """`cudaMemcpy3D` in the order of a stream."""
    return _copy(*_parameters(p), p.kind, stream, wait=False)


@cuda(0)
def cudaMemcpy3DPeer(p: Any) -> Answer:
    """`cudaMemcpy3D` between devices, as a ``cudaMemcpy3DPeerParms`` says; asynchronous."""
    session = current.current()
    for device in (p.dstDevice, p.srcDevice):
        session.check_device(device)
    return _copy(*_parameters(p), cudaMemcpyKind.cudaMemcpyDefault, LEGACY, wait=False)


@cuda(0)
def cudaMemcpy3DPeerAsync(p: Any, stream: Any) -> Answer:
    """`cudaMemcpy3DPeer` in the order of a stream."""
    session = current.current()
    for device in (p.dstDevice, p.srcDevice):
        session.check_device(device)
    return _copy(*_parameters(p), cudaMemcpyKind.cudaMemcpyDefault, stream, wait=False)


def _parameters(p: Any) -> tuple[Side, Side, Box]:
    if int(p.srcArray) or int(p.dstArray):
        raise DeviceError(NOT_SUPPORTED, "Flyt has no CUDA arrays; copy between pitched memory")
    box = Box(p.extent.width, p.extent.height, p.extent.depth)
    return _side(p.dstPtr, p.dstPos), _side(p.srcPtr, p.srcPos), box


def _side(memory: Any, at: Any) -> Side:
    slice_pitch = memory.pitch * memory.ysize
    offset = at.x + memory.pitch * at.y + slice_pitch * at.z
    return Side(pointer(memory.ptr), offset, memory.pitch, slice_pitch)


def _fill(to: Side, value: int, box: Box, stream: Any) -> Answer:
    byte = c_int(value) & 0xFF
    session = current.current()
    session.connection.raise_deferred()
    queue = stream_of(session, stream)
    if box.is_empty:
        return ()
    to.check(box)
    address = to.memory.address
    [place] = session.places(to.span(box), address)
    if place.space not in ACCESSIBLE:
        raise DeviceError(INVALID_VALUE, f"{address:#x} is not memory that the device can fill")
    box = _folded(box, to)
    for number in range(box.depth):
        session.transfers.fill_rows(
            _further(place, number * to.slice_pitch), to.pitch, byte,
            box.width, box.height, queue,
        )  # fmt: skip
    return ()


@cuda(0)
def cudaMemset2D(devPtr: Any, pitch: int, value: int, width: int, height: int) -> Answer:
    """Fill ``height`` rows of ``width`` bytes with the low byte of ``value``, as `cudaMemset`."""
    return _fill(_plane(devPtr, pitch), value, Box(size_t(width), size_t(height)), LEGACY)


@cuda(0)
def cudaMemset2DAsync(
    devPtr: Any, pitch: int, value: int, width: int, height: int, stream: Any
) -> Answer:
    """`cudaMemset2D` in the order of a stream."""
    return _fill(_plane(devPtr, pitch), value, Box(size_t(width), size_t(height)), stream)


@cuda(0)
def cudaMemset3D(pitchedDevPtr: Any, value: int, extent: Any) -> Answer:
    """Fill a box of pitched memory (``cudaPitchedPtr``, ``cudaExtent``), as `cudaMemset`."""
    return _fill(_whole(pitchedDevPtr), value, _box(extent), LEGACY)


@cuda(0)
def cudaMemset3DAsync(pitchedDevPtr: Any, value: int, extent: Any, stream: Any) -> Answer:
    """`cudaMemset3D` in the order of a stream."""
    return _fill(_whole(pitchedDevPtr), value, _box(extent), stream)


def _whole(memory: Any) -> Side:
    return Side(pointer(memory.ptr), 0, memory.pitch, memory.pitch * memory.ysize)


def _box(extent: Any) -> Box:
    return Box(extent.width, extent.height, extent.depth)


def _allocate(box: Box) -> tuple[int, int]:
    """Address and pitch of new memory; nothing lies at address 0."""
    session = current.current()
    session.connection.raise_deferred()
    attributes = session.devices[thread.device]["attributes"]
    alignment = int(attributes.get("TextureAlignment") or ALIGNMENT)
    pitch = -(-box.width // alignment) * alignment
    size = pitch * box.height * box.depth
    if size >> ADDRESS_BITS:
        raise DeviceError(MEMORY_ALLOCATION, f"{size} bytes are more than there are addresses")
    return (session.allocate(size, thread.device), pitch) if size else (0, 0)


@cuda(2)
def cudaMallocPitch(width: int, height: int) -> Answer:
    """Allocate ``height`` rows of at least ``width`` bytes; address and pitch."""
    return _allocate(Box(size_t(width), size_t(height)))


@cuda(1)
def cudaMalloc3D(extent: Any) -> Answer:
    """Allocate a box of rows that are aligned; a ``cudaPitchedPtr``."""
    box = _box(extent)
    address, pitch = _allocate(box)
    made = cudaPitchedPtr()
    made.ptr, made.pitch, made.xsize, made.ysize = address, pitch, box.width, box.height
    return (made,)
