# SPDX-License-Identifier: Apache-2.0
"""Rows cut into parts, and moved."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from flyt.frontend.rows import Row, Rows, fill, move


def bytes_of(rows: Rows) -> list[tuple[int, int]]:
    """Every byte, as (host address, device address)."""
    return [
        (rows.host + row * rows.host_pitch + at, rows.device + row * rows.device_pitch + at)
        for row in range(rows.height)
        for at in range(rows.width)
    ]


@given(
    width=st.integers(1, 40), height=st.integers(1, 12), host=st.integers(0, 9),
    device=st.integers(0, 9), limit=st.integers(1, 90),
    first=st.integers(0, 90),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_parts_are_the_whole(
    width: int, height: int, host: int, device: int, limit: int, first: int
) -> None:
    whole = Rows(1000, width + host, 5000, width + device, width, height)
    parts = list(whole.parts(limit, first))
    assert all(0 < part.size <= limit for part in parts)
    assert [byte for part in parts for byte in bytes_of(part)] == bytes_of(whole)
    assert sum(part.size for part in parts) == whole.size == width * height
    if width <= limit and (height > 1 or not 0 < first < width):
        assert len(parts) == -(-height // (limit // width)), "as few as can be"


@given(
    width=st.integers(1, 40), height=st.integers(1, 12), left=st.integers(0, 9),
    right=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_moved_and_filled(width: int, height: int, left: int, right: int) -> None:
    source = np.random.default_rng(width).integers(1, 256, (height, width + left), dtype=np.uint8)
    target = np.zeros((height, width + right), np.uint8)
    to = Row(target.ctypes.data, width + right)
    move(to, Row(source.ctypes.data, width + left), width, height)
    assert np.array_equal(target[:, :width], source[:, :width])
    assert (target[:, width:] == 0).all()
    fill(to, 7, width, height)
    assert (target[:, :width] == 7).all()
    assert (target[:, width:] == 0).all()


def test_the_first_parts_are_smaller() -> None:
    def sizes(width: int, limit: int, first: int) -> list[int]:
        return [part.size for part in Rows(0, width, 0, width, width, 1).parts(limit, first)]

    assert sizes(40, 8, 1) == [1, 2, 4, 8, 8, 8, 8, 1]
    assert sizes(40, 8, 3) == [3, 6, 8, 8, 8, 7]
    assert sizes(9, 8, 100) == [8, 1]
    assert sizes(9, 8, 0) == [8, 1]
