# SPDX-License-Identifier: Apache-2.0
"""cudaMemcpy and cudaMemset."""

from __future__ import annotations

from typing import Any

from cuda.bindings.runtime import cudaMemcpyKind

from flyt.errors import DeviceError
from flyt.frontend import current
from flyt.frontend.api.convention import INVALID_VALUE, Answer, cuda
from flyt.frontend.hostmem import check_destination, check_source, pointer, size_t
from flyt.frontend.pointers import Space

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
    may be changed; to the host, when the last byte is in place. cudaErrorInvalidValue when a range
    leaves its allocation: then no byte has moved.
    """
    size = size_t(count)
    to, origin = pointer(dst), pointer(src)
    session = current.current()
    session.connection.raise_deferred()
    if not size:
        return ()
    sides = _SIDES.get(int(kind))
    if sides is None:
        raise DeviceError(INVALID_MEMCPY_DIRECTION, f"{kind!r} is no cudaMemcpyKind")
    if not to.address or not origin.address:
        raise DeviceError(INVALID_VALUE, "source or destination is NULL")
    check_source(origin, size)
    check_destination(to, size)
    destination, source = session.place(to.address, size), session.place(origin.address, size)
    for needs_device, place, name in zip(
        sides, (destination, source), ("destination", "source"), strict=True
    ):
        if needs_device and place.space not in _ACCESSIBLE:
            raise DeviceError(
                INVALID_VALUE, f"the {name} {place.address:#x} is pageable memory, not the device's"
            )
    session.transfers.copy(destination, source, size)
    return ()


@cuda(0)
def cudaMemset(devPtr: Any, value: int, count: int) -> Answer:
    """Fill ``count`` bytes of device or pinned memory with the low byte of ``value``."""
    size = size_t(count)
    address = pointer(devPtr).address
    session = current.current()
    session.connection.raise_deferred()
    if not size:
        return ()
    place = session.place(address, size)
    if place.space not in _ACCESSIBLE:
        raise DeviceError(INVALID_VALUE, f"{address:#x} is not memory that the device can fill")
    session.transfers.fill(place, value & 0xFF, size)
    return ()
