# SPDX-License-Identifier: Apache-2.0
"""A quota, and memory that dies in the order of a stream."""

from __future__ import annotations

import random

import pytest

from flyt.backend.quota import Dying, Quota
from flyt.errors import DeviceError


def refused(quota: Quota, size: int, stream: object = None) -> None:
    before = quota.used
    with pytest.raises(DeviceError) as caught:
        quota.reserve(size, stream)
    assert caught.value.code == 2
    assert "the limit of the test" in str(caught.value)
    assert quota.used == before


def test_a_limit() -> None:
    quota = Quota(100, "the limit of the test")
    quota.reserve(60)
    refused(quota, 41)
    quota.reserve(40)
    refused(quota, 1)
    quota.restore(100)
    assert quota.used == 0
    Quota(0, "none").reserve(1 << 60)


def test_what_dies_counts_but_for_its_own_stream() -> None:
    quota = Quota(100, "the limit of the test")
    quota.reserve(80)
    dying = quota.let_die(80, "a")
    refused(quota, 21, "b")
    refused(quota, 101, "a")
    quota.reserve(90, "a")
    assert quota.used == 90
    refused(quota, 11, "a")
    quota.bury(dying)
    assert quota.used == 90, "its bytes are the new block's"
    quota.restore(90)
    assert quota.used == 0


def test_what_was_not_used_after_all() -> None:
    quota = Quota(100, "the limit of the test")
    quota.reserve(80)
    dying = quota.let_die(80, "a")
    borrowed = quota.reserve(90, "a")
    quota.restore(90, borrowed)
    assert quota.used == 80
    quota.bury(dying)
    assert quota.used == 0


@pytest.mark.parametrize("seed", range(20))
def test_it_never_lets_more_live_than_it_may(seed: int) -> None:
    """Against a model: a stream's memory is that of its living blocks, or of what died before them
    and still takes up the place, whichever is more."""
    source, quota = random.Random(seed), Quota(1000, "the limit of the test")
    living: list[tuple[int, str]] = []
    dying: list[Dying] = []
    for _ in range(500):
        choice = source.random()
        if choice < 0.5:
            size, stream = source.randrange(1, 300), source.choice("abc")
            try:
                quota.reserve(size, stream)
            except DeviceError:
                continue
            living.append((size, stream))
        elif choice < 0.75 and living:
            dying.append(quota.let_die(*living.pop(source.randrange(len(living)))))
        elif dying:
            quota.bury(dying.pop(source.randrange(len(dying))))
        assert sum(size for size, _ in living) <= quota.used <= 1000
        assert quota.used == sum(size for size, _ in living) + sum(one.left for one in dying)
    for one in dying:
        quota.bury(one)
    assert quota.used == sum(size for size, _ in living)
