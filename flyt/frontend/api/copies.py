# SPDX-License-Identifier: Apache-2.0
"""cudaMemcpy and cudaMemset, and their asynchronous forms."""

from __future__ import annotations

from typing import Any

from cuda.bindings.runtime import cudaMemcpyKind

from flyt.errors import DeviceError
from flyt.frontend import current
from flyt.frontend.api.convention import INVALID_VALUE, Answer, cuda
from flyt.frontend.api.handles import stream_of
from flyt.frontend.hostmem import HostArgument, check_destination, check_source, pointer, size_t
from flyt.frontend.pointers import Place, Space
from flyt.frontend.session import Session
from flyt.frontend.streams import LEGACY, Stream

INVALID_MEMCPY_DIRECTION = 21

_ACCESSIBLE = frozenset({Space.DEVICE, Space.PINNED})

_SIDES: dict[int, tuple[bool, bool]] = {
    cudaMemcpyKind.cudaMemcpyHostToHost: (False, False),
    cudaMemcpyKind.cudaMemcpyHostToDevice: (True, False),
    cudaMemcpyKind.cudaMemcpyDeviceToHost: (False, True),
    cudaMemcpyKind.cudaMemcpyDeviceToDevice: (True, True),
    cudaMemcpyKind.cudaMemcpyDefault: (False, False),
}
"""Whether destination and source have to be device-accessible. With unified addressing a kind
asks for no more (all 45 pairs of places and kinds read off an H200: tests/data)."""


def _places(
    session: Session, to: HostArgument, origin: HostArgument, size: int, kind: Any
) -> tuple[Place, Place]:
    """Every check that CUDA makes at the call, and where the bytes go and come from; no byte has
    moved when one fails."""
    sides = _SIDES.get(int(kind))
    if sides is None:
        raise DeviceError(INVALID_MEMCPY_DIRECTION, f"{kind!r} is no cudaMemcpyKind")
    if not to.address or not origin.address:
        raise DeviceError(INVALID_VALUE, "source or destination is NULL")
    check_source(origin, size)
    check_destination(to, size)
    destination, source = session.places(size, to.address, origin.address)
    if sides[0] and destination.space not in _ACCESSIBLE:
        raise _pageable("destination", destination)
    if sides[1] and source.space not in _ACCESSIBLE:
        raise _pageable("source", source)
    return destination, source


def _pageable(name: str, place: Place) -> DeviceError:
    return DeviceError(
        INVALID_VALUE, f"the {name} {place.address:#x} is pageable memory, not the device's"
    )


def _copy(dst: Any, src: Any, count: int, kind: Any, stream: Any, *, wait: bool) -> Answer:
    size = size_t(count)
    to, origin = pointer(dst), pointer(src)
    session = current.current()
    session.connection.raise_deferred()
    queue = None if wait else stream_of(session, stream)
    if not size:
        return ()
    destination, source = _places(session, to, origin, size, kind)
    if queue is None:
        queue = _legacy_of(session, destination, source)
    session.transfers.copy(destination, source, size, queue)
    if wait and Space.PINNED in (destination.space, source.space):
        session.scheduler.synchronize(queue)
    return ()


def _legacy_of(session: Session, destination: Place, source: Place) -> Stream:
    """The legacy stream of the device whose memory is copied, whatever device is current: later
    work on that device then waits for the copy."""
    for place in (destination, source):
        if place.space == Space.DEVICE and place.allocation is not None:
            return session.scheduler.stream(LEGACY, place.allocation.device)
    return stream_of(session, LEGACY)


@cuda(0)
def cudaMemcpy(dst: Any, src: Any, count: int, kind: Any) -> Answer:
    """Copy ``count`` bytes.

    Parameters
    ----------
    dst, src : int or object with the buffer protocol
        Device or host addresses; ``bytes`` and read-only arrays as sources only.
    count : int
        Bytes; 0 is success before anything is looked at.
    kind : cudaMemcpyKind

    Notes
    -----
    On the legacy default stream. From pageable memory to the device it returns when the source
    may be changed; to the host, and from pinned memory, when the last byte is in place.
    cudaErrorInvalidValue when a range leaves its allocation: then no byte has moved.
    """
    return _copy(dst, src, count, kind, LEGACY, wait=True)


@cuda(0)
def cudaMemcpyAsync(dst: Any, src: Any, count: int, kind: Any, stream: Any) -> Answer:
    """Copy ``count`` bytes in the order of a stream.

    Parameters
    ----------
    dst, src, count, kind
        As for `cudaMemcpy`. Pinned memory must stay as it is until the stream has got there.
    stream : cudaStream_t or int

    Notes
    -----
    Pinned and device memory: returns at once. Pageable memory as a source: its bytes are taken
    before the return. Pageable memory as a destination, and host to host: complete on return
    (CUDA: "API synchronization behavior").
    """
    return _copy(dst, src, count, kind, stream, wait=False)


def _set(devPtr: Any, value: int, count: int, stream: Any) -> Answer:
    size = size_t(count)
    address = pointer(devPtr).address
    session = current.current()
    session.connection.raise_deferred()
    queue = stream_of(session, stream)
    if not size:
        return ()
    [place] = session.places(size, address)
    if place.space not in _ACCESSIBLE:
        raise DeviceError(INVALID_VALUE, f"{address:#x} is not memory that the device can fill")
    session.transfers.fill(place, value & 0xFF, size, queue)
    return ()


@cuda(0)
def cudaMemset(devPtr: Any, value: int, count: int) -> Answer:
    """Fill ``count`` bytes of device or pinned memory with the low byte of ``value``.

    Asynchronous to the host for device memory, on the legacy default stream.
    """
    return _set(devPtr, value, count, LEGACY)


@cuda(0)
def cudaMemsetAsync(devPtr: Any, value: int, count: int, stream: Any) -> Answer:
    """`cudaMemset` in the order of a stream."""
    return _set(devPtr, value, count, stream)
