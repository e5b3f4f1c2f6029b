# SPDX-License-Identifier: Apache-2.0
"""Runs of frames: written down, read back, and checked when a peer sent them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from flyt.errors import RegionError
from flyt.shm import runs


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([], ()),
        ([5], ((5, 1),)),
        ([0, 1, 2], ((0, 3),)),
        ([7, 8, 3, 4, 5, 9], ((7, 2), (3, 3), (9, 1))),
        ([2, 1, 0], ((2, 1), (1, 1), (0, 1))),
        ([4, 4], ((4, 1), (4, 1))),
    ],
)
def test_from_frames(frames: list[int], expected: tuple[runs.Run, ...]) -> None:
    assert runs.from_frames(frames) == expected
    assert list(runs.frames_of(expected)) == frames
    assert runs.length(expected) == len(frames)


@given(st.lists(st.integers(0, 50)))
def test_any_list_of_frames_survives(frames: list[int]) -> None:
    packed = runs.from_frames(frames)
    assert list(runs.frames_of(packed)) == frames
    # No two runs could be one.
    assert all(a[0] + a[1] != b[0] for a, b in pairwise(packed))


@given(st.lists(st.tuples(st.integers(-2, 12), st.integers(-1, 6)), max_size=5))
def test_check_agrees_with_plain_sets(table: list[runs.Run]) -> None:
    frames = [frame for first, count in table for frame in range(first, first + count)]
    sound = (
        all(count > 0 for _, count in table)
        and all(0 <= frame < 10 for frame in frames)
        and len(set(frames)) == len(frames)
    )
    try:
        runs.check(table, 10)
    except RegionError:
        assert not sound
    else:
        assert sound


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ([(3, 0)], "empty run at frame 3"),
        ([(0, 101)], "101 frames from frame 0"),
        ([(100, 1)], "frames 0 to 99"),
        ([(0, 2**64 - 1)], "frames 0 to 99"),
        ([(2**64 - 1, 2)], "frames 0 to 99"),
        ([(99, 2**64 - 99)], "frames 0 to 99"),
        ([(-1, 1)], "frames 0 to 99"),
        ([(10, 10), (50, 1), (15, 2)], "frame 15 twice"),
        ([(8, 1), (8, 1)], "frame 8 twice"),
    ],
)
def test_check_says_what_is_wrong(table: list[runs.Run], word: str) -> None:
    with pytest.raises(RegionError, match=word):
        runs.check(table, 100)


def test_a_hostile_table_costs_nothing_per_frame() -> None:
    huge = 1 << 62
    with pytest.raises(RegionError, match="twice"):
        runs.check([(0, huge), (1, huge - 1)], huge)
    runs.check([(0, huge - 1), (huge - 1, 1)], huge)
