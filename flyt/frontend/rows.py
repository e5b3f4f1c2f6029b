# SPDX-License-Identifier: Apache-2.0
"""Rows of bytes, evenly apart on either side: what every copy is made of.

A plain copy is one row. What is cut into parts for its way keeps this form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from flyt.shm import memory


class Row(NamedTuple):
    """The first of several rows, and how many bytes lie from the start of one to the next."""

    address: int
    pitch: int


class Rows(NamedTuple):
    """``height`` rows of ``width`` bytes in host memory, and where they lie on the device."""

    host: int
    host_pitch: int
    device: int
    device_pitch: int
    width: int
    height: int

    @property
    def size(self) -> int:
        """Bytes in all the rows."""
        return self.width * self.height

    def parts(self, limit: int, first: int = 0) -> Iterator[Rows]:
        """Cut into parts of at most ``limit`` bytes: whole rows, or pieces of a longer row.

        Of one long row the first piece has ``first`` bytes at most, if that is given, and each of
        the next ones twice as many as the one before it.
        """
        host, host_pitch, device, device_pitch, width, height = self
        if width > limit or height == 1:
            piece = min(first, limit) if first and height == 1 else limit
            for row in range(height):
                at = 0
                while at < width:
                    length = min(piece, width - at)
                    to, origin = device + row * device_pitch + at, host + row * host_pitch + at
                    yield Rows(origin, length, to, length, length, 1)
                    at, piece = at + length, min(2 * piece, limit)
            return
        together = limit // width
        for row in range(0, height, together):
            count = min(together, height - row)
            to, origin = device + row * device_pitch, host + row * host_pitch
            yield Rows(origin, host_pitch, to, device_pitch, width, count)


def move(to: Row, origin: Row, width: int, height: int) -> None:
    """Copy rows within host memory; they may not overlap."""
    if to.pitch == origin.pitch == width:
        memory.copy(to.address, origin.address, width * height)
        return
    # NumPy, as a loop here would take a microsecond for each row.
    _array(to, width, height)[...] = _array(origin, width, height)


def fill(rows: Row, value: int, width: int, height: int) -> None:
    """Set all bytes of rows in host memory."""
    _array(rows, width, height)[...] = value


def _array(rows: Row, width: int, height: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    span = rows.pitch * (height - 1) + width
    pitch = rows.pitch if height > 1 else width
    return np.ndarray(
        (height, width), np.uint8, memory.view(rows.address, span), strides=(pitch, 1)
    )
