# SPDX-License-Identifier: Apache-2.0
"""Runs of page frames: how a page table is written down.

A run ``(first, count)`` stands for the frames ``first … first + count - 1``. A page table is a
sequence of runs whose frames back the virtual pages in that order, so the order of the runs
matters and a window needs one mmap per run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from flyt.errors import RegionError

Run = tuple[int, int]
"""First frame and number of frames."""


def from_frames(frames: Iterable[int]) -> tuple[Run, ...]:
    """Runs for a list of frames: the order is kept, consecutive ascending frames merge."""
    runs: list[Run] = []
    first = count = 0
    for frame in frames:
        if count and frame == first + count:
            count += 1
            continue
        if count:
            runs.append((first, count))
        first, count = frame, 1
    if count:
        runs.append((first, count))
    return tuple(runs)


def frames_of(runs: Iterable[Run]) -> Iterator[int]:
    """Every frame of the runs, in order; for runs that are our own or that `check` has accepted."""
    for first, count in runs:
        yield from range(first, first + count)


def length(runs: Iterable[Run]) -> int:
    """How many frames the runs hold."""
    return sum(count for _, count in runs)


def check(runs: Sequence[Run], page_count: int) -> None:
    """Accept only non-empty, disjoint runs inside a region of ``page_count`` frames.

    Costs a sort of the runs and nothing per frame, whatever the peer sent.

    Raises
    ------
    RegionError
        Naming the run that is empty or out of range, or the frame that is listed twice.
    """
    for first, count in runs:
        if count <= 0:
            raise RegionError(f"the page table lists an empty run at frame {first}")
        if first < 0 or first >= page_count or count > page_count - first:
            raise RegionError(
                f"the page table lists {count} frames from frame {first}, "
                f"but the region has the frames 0 to {page_count - 1}"
            )
    for (first, count), (following, _) in pairwise(sorted(runs)):
        if following < first + count:
            raise RegionError(f"the page table lists frame {following} twice")


def split_first(runs: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The first page of a page table, and the rest of it."""
    (first, count), *others = runs
    rest = ((first + 1, count - 1),) if count > 1 else ()
    return ((first, 1),), (*rest, *others)
