# SPDX-License-Identifier: Apache-2.0
"""cudaMemcpy and cudaMemset, and their asynchronous forms."""

from __future__ import annotations

from typing import Any

from cuda.bindings.runtime import cudaMemcpyKind

from flyt.errors import DeviceError
from flyt.frontend import current
from flyt.frontend.api.convention import INVALID_VALUE, Answer, cuda
from flyt.frontend.api.devices import c_int
from flyt.frontend.api.handles import number_of, plain_number, stream_of
from flyt.frontend.current import thread
from flyt.frontend.hostmem import (
    HostArgument,
    check_destination,
    check_source,
    plain,
    pointer,
    size_t,
)
from flyt.frontend.pointers import Place, Space
from flyt.frontend.session import Session
from flyt.frontend.streams import LEGACY, LEGACY_EXPLICIT, PER_THREAD, Stream

INVALID_MEMCPY_DIRECTION = 21

ACCESSIBLE = frozenset({Space.DEVICE, Space.PINNED})

_SIDES: dict[int, tuple[bool, bool]] = {
    cudaMemcpyKind.cudaMemcpyHostToHost: (False, False),
    cudaMemcpyKind.cudaMemcpyHostToDevice: (True, False),
    cudaMemcpyKind.cudaMemcpyDeviceToHost: (False, True),
    cudaMemcpyKind.cudaMemcpyDeviceToDevice: (True, True),
    cudaMemcpyKind.cudaMemcpyDefault: (False, False),
}
"""Whether destination and source have to be device-accessible. With unified addressing a kind
asks for no more (all 45 pairs of places and kinds read off an H200: tests/data)."""


def c_kind(kind: Any) -> int:
    """A kind, or any number that C's enum holds; OverflowError as ``cuda.bindings`` raises."""
    number = int(kind)
    if not -(1 << 31) <= number < 1 << 32:
        raise OverflowError("value too large to convert to enum cudaMemcpyKind")
    return number


def check_kind(kind: Any) -> tuple[bool, bool]:
    """Whether the two sides have to be device-accessible."""
    sides = _SIDES.get(int(kind))
    if sides is None:
        raise DeviceError(INVALID_MEMCPY_DIRECTION, f"{kind!r} is no cudaMemcpyKind")
    return sides


def checked_places(
    session: Session,
    to: HostArgument,
    to_offset: int,
    to_size: int,
    origin: HostArgument,
    origin_offset: int,
    origin_size: int,
    kind: Any,
) -> tuple[Place, Place]:
    """Every check that CUDA makes at the call, and where the bytes go and come from; no byte has
    moved when one fails."""
    sides = check_kind(kind)
    if not to.address or not origin.address:
        raise DeviceError(INVALID_VALUE, "source or destination is NULL")
    check_source(origin, origin_offset + origin_size)
    check_destination(to, to_offset + to_size)
    destination, source = session.two_places(
        to.address + to_offset, to_size, origin.address + origin_offset, origin_size
    )
    if sides[0] and destination.space not in ACCESSIBLE:
        raise _pageable("destination", destination)
    if sides[1] and source.space not in ACCESSIBLE:
        raise _pageable("source", source)
    return destination, source


def _pageable(name: str, place: Place) -> DeviceError:
    return DeviceError(
        INVALID_VALUE, f"the {name} {place.address:#x} is pageable memory, not the device's"
    )


_TO_DEVICE, _TO_HOST = 1, 2
"""Of cudaMemcpyKind, in which `int` compares without a function of Python."""


def _is_express(dst: Any, src: Any, count: Any, kind: Any, stream: Any, device: int) -> bool:
    """Whether it was a plain copy, and is done: by the short way (`flyt.frontend.express`)."""
    express = current.express()
    if express is None or type(count) is not int or not isinstance(kind, int):
        return False
    handle = stream if type(stream) is int else plain_number(stream)
    if kind == _TO_HOST:
        host = plain(dst, count)
        return host > 0 and express.to_host(host, src, count, handle, device)
    if kind == _TO_DEVICE:
        host = plain(src, count)
        return host > 0 and express.to_device(dst, host, count, handle, device)
    return False


def _copy(dst: Any, src: Any, count: int, kind: Any, stream: Any, *, wait: bool) -> Answer:
    if _is_express(dst, src, count, kind, stream, -1 if wait else thread.device):
        return ()
    size, kind = size_t(count), c_kind(kind)
    to, origin = pointer(dst), pointer(src)
    session = current.current()
    session.connection.raise_deferred()
    asked = None if wait else stream_of(session, stream)
    if not size:
        return ()
    destination, source = checked_places(session, to, 0, size, origin, 0, size, kind)
    queue = queue_of(session, destination, source, asked)
    session.transfers.copy(destination, source, size, queue)
    return finish(session, destination, source, queue, wait=wait)


def queue_of(session: Session, destination: Place, source: Place, asked: Stream | None) -> Stream:
    """The stream of a copy: the one that was asked for, else the legacy stream of the device whose
    memory is copied, whatever device is current: later work on that device then waits for it."""
    if asked is not None:
        return asked
    for place in (destination, source):
        if place.space == Space.DEVICE and place.allocation is not None:
            return session.scheduler.stream(LEGACY, place.allocation.device)
    return stream_of(session, LEGACY)


def finish(
    session: Session, destination: Place, source: Place, queue: Stream, *, wait: bool
) -> Answer:
    """A synchronous copy from or to pinned memory is done at return; and what kernels have printed
    is shown by each."""
    if wait and (session.scheduler.prints or Space.PINNED in (destination.space, source.space)):
        session.scheduler.synchronize(queue)
    return ()


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
    express = current.express()
    if express is not None:
        handle = stream if type(stream) is int else plain_number(stream)
        if express.fill(devPtr, value, count, handle, thread.device):
            return ()
    byte, size = c_int(value) & 0xFF, size_t(count)
    address = pointer(devPtr).address
    session = current.current()
    session.connection.raise_deferred()
    queue = stream_of(session, stream)
    if not size:
        return ()
    [place] = session.places(size, address)
    if place.space not in ACCESSIBLE:
        raise DeviceError(INVALID_VALUE, f"{address:#x} is not memory that the device can fill")
    session.transfers.fill(place, byte, size, queue)
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


@cuda(0)
def cudaMemcpyPeer(dst: Any, dstDevice: int, src: Any, srcDevice: int, count: int) -> Answer:
    """Copy between two devices: in the order of both devices' legacy streams and of the current
    one's, asynchronous to the host."""
    return _peer(dst, dstDevice, src, srcDevice, count, LEGACY)


@cuda(0)
def cudaMemcpyPeerAsync(
    dst: Any, dstDevice: int, src: Any, srcDevice: int, count: int, stream: Any
) -> Answer:
    """`cudaMemcpyPeer` in the order of a stream."""
    return _peer(dst, dstDevice, src, srcDevice, count, stream)


def _peer(dst: Any, to: int, src: Any, origin: int, count: int, stream: Any) -> Answer:
    session = current.current()
    for device in (to, origin):
        session.check_device(c_int(device))
    return _copy(dst, src, count, cudaMemcpyKind.cudaMemcpyDeviceToDevice, stream, wait=False)


@cuda(0)
def cudaMemcpyBatchAsync(
    dsts: Any,
    srcs: Any,
    sizes: Any,
    count: int,
    attrs: Any,
    attrsIdxs: Any,
    numAttrs: int,
    stream: Any,
) -> Answer:
    """Copies in the order of a stream; among themselves in any order.

    Parameters
    ----------
    dsts, srcs, sizes : sequence
        ``count`` addresses or buffers each, and their bytes.
    attrs : sequence of cudaMemcpyAttributes
        ``numAttrs`` of them; their hints change nothing.
    attrsIdxs : sequence of int
        The first copy of each, from 0 on.
    stream : cudaStream_t or int
        No default stream.

    Notes
    -----
    All copies are checked before the first byte moves.
    """
    session = current.current()
    session.connection.raise_deferred()
    number, firsts = size_t(count), list(attrsIdxs or ())
    if number_of(stream) in (LEGACY, LEGACY_EXPLICIT, PER_THREAD):
        raise DeviceError(INVALID_VALUE, "a batch of copies needs a stream of its own")
    queue = stream_of(session, stream)
    if not number or {len(dsts), len(srcs), len(sizes)} != {number}:
        raise DeviceError(INVALID_VALUE, f"there are not {number} places and sizes")
    orders = [int(one.srcAccessOrder) for one in attrs or ()]
    if (
        len(orders) != numAttrs
        or len(firsts) != numAttrs
        or not all(o in (1, 2, 3) for o in orders)
    ):
        raise DeviceError(INVALID_VALUE, "each copy needs attributes with a srcAccessOrder")
    if not firsts or firsts[0] or sorted(set(firsts)) != firsts or firsts[-1] >= number:
        raise DeviceError(INVALID_VALUE, "attrsIdxs rise from 0 to below the number of copies")
    checked = []
    for dst, src, given in zip(dsts, srcs, sizes, strict=True):
        to, origin, size = pointer(dst), pointer(src), size_t(given)
        kind = cudaMemcpyKind.cudaMemcpyDefault
        places = checked_places(session, to, 0, size, origin, 0, size, kind)
        checked.append((*places, size, to.owner, origin.owner))
    for destination, source, size, *_ in checked:
        if size:
            session.transfers.copy(destination, source, size, queue)
    if 2 in orders:  # cudaMemcpySrcAccessOrderDuringApiCall: nobody may look at a source later
        session.scheduler.synchronize(queue)
    return ()
