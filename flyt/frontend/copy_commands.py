# SPDX-License-Identifier: Apache-2.0
"""The messages of copies: each function gives what makes one, once its number is known."""

from __future__ import annotations

from collections.abc import Callable

from flyt.frontend.inflight import Make
from flyt.frontend.rows import Row, Rows
from flyt.frontend.streams import Stream
from flyt.rpc import messages as m


def copy_in(
    address: int, index: int, size: int, pid: int, stream: Stream
) -> Callable[[int], m.CopyIn]:
    """From the window to the device."""
    return lambda number: m.CopyIn(number, address, index, size, pid, stream.number)


def copy_out(
    address: int, index: int, size: int, pid: int, stream: Stream
) -> Callable[[int], m.CopyOut]:
    """From the device to the window."""
    return lambda number: m.CopyOut(number, address, index, size, pid, stream.number)


def copy_rows(
    way: m.Way, to: Row, origin: Row, width: int, height: int, pid: int, stream: Stream
) -> Callable[[int], m.CopyRows]:
    """Rows between the window and the device, or on the device."""
    return lambda number: m.CopyRows(number, way, *to, *origin, width, height, pid, stream.number)


def copied_in(part: Rows, index: int, pid: int, stream: Stream) -> Make:
    """From a packed part in the window to its place on the device."""
    if part.height == 1:
        return copy_in(part.device, index, part.width, pid, stream)
    to, origin = Row(part.device, part.device_pitch), Row(index, part.width)
    return copy_rows(m.Way.IN, to, origin, part.width, part.height, pid, stream)


def copied_out(part: Rows, index: int, pid: int, stream: Stream) -> Make:
    """The way back."""
    if part.height == 1:
        return copy_out(part.device, index, part.width, pid, stream)
    to, origin = Row(index, part.width), Row(part.device, part.device_pitch)
    return copy_rows(m.Way.OUT, to, origin, part.width, part.height, pid, stream)


def pushed(part: Rows, stream: Stream) -> Make:
    """From a payload to the part's place on the device."""
    if part.height == 1:
        return lambda number: m.Push(number, part.device, part.width, stream.number)
    return lambda number: m.PushRows(
        number, part.device, part.device_pitch, part.width, part.height, stream.number
    )


def pulled(part: Rows, stream: Stream) -> Make:
    """From the device, as a payload."""
    if part.height == 1:
        return lambda number: m.Pull(number, part.device, part.width, stream.number)
    return lambda number: m.PullRows(
        number, part.device, part.device_pitch, part.width, part.height, stream.number
    )
