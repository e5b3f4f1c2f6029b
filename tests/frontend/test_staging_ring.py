# SPDX-License-Identifier: Apache-2.0
"""The ring of small copies: places of commands in flight never overlap, and all come back."""

from __future__ import annotations

import collections
import random

import pytest

from flyt.frontend.inflight import Pending
from flyt.frontend.staging import Slot
from flyt.frontend.staging_ring import StagingRing

BASE, INDEX, LENGTH = 1 << 44, 1 << 21, 64 << 10
LARGEST = LENGTH // 16


def pending(number: int) -> Pending:
    return Pending(number, "CopyIn", 0, (0, 0))


@pytest.fixture
def ring() -> StagingRing:
    return StagingRing(BASE, INDEX, LENGTH)


@pytest.mark.parametrize("seed", range(4))
def test_places_in_flight_never_overlap(ring: StagingRing, seed: int) -> None:
    rng = random.Random(seed)
    flying: collections.deque[tuple[Pending, range]] = collections.deque()
    refused = 0
    for number in range(20_000):
        size = rng.choice([1, 63, 64, 65, 1000, LARGEST - 1, LARGEST, rng.randint(1, LARGEST)])
        slot = ring.place(size)
        if slot is None:
            refused += 1
            assert ring.oldest is flying[0][0]
            assert sum(len(place) for _, place in flying) + size > LENGTH - LARGEST - 64 * len(
                flying
            )
        else:
            place = range(slot.at - INDEX, slot.at - INDEX + size)
            assert slot.address - BASE == place.start
            assert 0 <= place.start <= place.stop <= LENGTH
            for _, other in flying:
                assert place.stop <= other.start or other.stop <= place.start
            flying.append((pending(number), place))
            ring.hold(flying[-1][0], size)
        while flying and rng.random() < 0.45:
            flying.popleft()[0].done = True
    assert refused > 100


def test_an_answer_out_of_turn_frees_nothing_yet(ring: StagingRing) -> None:
    commands = [pending(number) for number in range(16)]
    for command in commands:
        assert ring.place(LARGEST) is not None
        ring.hold(command, LARGEST)
    for command in commands[1:]:
        command.done = True
    assert ring.place(1) is None
    assert ring.oldest is commands[0]
    commands[0].done = True
    assert ring.place(LARGEST) == Slot(BASE, INDEX)
    assert ring.oldest is None


def test_a_place_that_nobody_holds_is_given_out_again(ring: StagingRing) -> None:
    """Its command was refused before it was sent."""
    assert ring.place(100) == ring.place(100) == Slot(BASE, INDEX)
