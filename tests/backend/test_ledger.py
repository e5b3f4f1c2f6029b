# SPDX-License-Identifier: Apache-2.0
"""The ledger: whatever is asked in whatever order, a frame has one holder at most."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flyt.backend.ledger import NAMED_LIMIT, UNNAMEABLE, Ledger
from flyt.errors import RegionError

PAGES = 12


def test_granted_frames_are_held_and_only_once() -> None:
    ledger = Ledger(PAGES)
    assert ledger.grant(1, [(0, 4), (8, 2)]) == ()
    assert ledger.frames_of(1) == {0, 1, 2, 3, 8, 9}
    assert ledger.holder(8) == 1
    assert ledger.holder(4) is None
    assert ledger.grant(2, [(3, 3)]) == (3,)
    assert ledger.holder(4) is None, "a refused request leaves nothing behind"
    assert ledger.grant(1, [(2, 1)]) == (2,), "not even its own twice: one place in one page table"


def test_returned_frames_are_refused_until_they_are_reclaimed() -> None:
    ledger = Ledger(PAGES)
    ledger.grant(1, [(0, 4)])
    assert ledger.release(1, [(1, 2)]) == ((1, 2),)
    assert ledger.holder(1) is None
    assert not ledger.is_stray(1)
    assert ledger.grant(2, [(0, 3)]) == (0, 1, 2)
    ledger.reclaimed([(1, 2)])
    assert ledger.grant(2, [(1, 2)]) == ()


def test_a_session_returns_only_what_it_holds() -> None:
    ledger = Ledger(PAGES)
    ledger.grant(1, [(0, 2)])
    ledger.grant(2, [(2, 2)])
    assert ledger.release(1, [(0, PAGES)]) == ((0, 2),)
    assert ledger.frames_of(2) == {2, 3}


def test_only_strays_are_quarantined() -> None:
    ledger = Ledger(PAGES)
    ledger.grant(1, [(0, 2)])
    ledger.release(1, [(1, 1)])
    assert ledger.quarantine(range(4)) == ((2, 2),)
    assert ledger.quarantine(range(4)) == ()
    assert (ledger.granted, ledger.reclaiming) == (1, 3)


def test_frames_that_were_not_being_reclaimed_can_not_be_done() -> None:
    ledger = Ledger(PAGES)
    ledger.grant(1, [(0, 1)])
    with pytest.raises(RegionError):
        ledger.reclaimed([(0, 1)])
    assert ledger.holder(0) == 1


@pytest.mark.parametrize(
    ("runs", "named"),
    [
        ([(0, 2), (1, 1)], (0, 1, 1)),
        ([(PAGES - 1, 2)], (PAGES - 1,)),
        ([(PAGES, 1)], UNNAMEABLE),
        ([((1 << 64) - 1, (1 << 64) - 1)], UNNAMEABLE),
        ([(0, 0)], UNNAMEABLE),
    ],
)
def test_impossible_runs_are_an_error_and_change_nothing(
    runs: list[tuple[int, int]], named: tuple[int, ...]
) -> None:
    ledger = Ledger(PAGES)
    for attempt in (ledger.grant, ledger.release):
        with pytest.raises(RegionError):
            attempt(1, runs)
    assert ledger.nameable(runs) == named
    assert (ledger.granted, ledger.reclaiming) == (0, 0)


def test_a_refusal_names_a_bounded_number_of_frames() -> None:
    ledger = Ledger(1 << 20)
    ledger.grant(1, [(0, 1 << 20)])
    assert ledger.grant(2, [(0, 1 << 20)]) == tuple(range(NAMED_LIMIT))
    assert len(ledger.nameable([(0, 1 << 20)] * 3)) == NAMED_LIMIT


Number = st.one_of(st.integers(0, PAGES + 1), st.integers(0, (1 << 64) - 1))
Runs = st.lists(st.tuples(Number, Number), max_size=4)
Session = st.integers(1, 3)


class LedgerMachine(RuleBasedStateMachine):
    """Compares with a model: a list that says of each frame whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(PAGES)
        self.model: list[int | str | None] = [None] * PAGES

    def frames(self, runs: list[tuple[int, int]]) -> list[int] | None:
        """The frames of well-formed runs, by counting; None for others."""
        listed: list[int] = []
        for first, count in runs:
            if count == 0 or first + count > PAGES:
                return None
            listed += range(first, first + count)
        return listed if len(set(listed)) == len(listed) else None

    @rule(session=Session, runs=Runs)
    def grant(self, session: int, runs: list[tuple[int, int]]) -> None:
        frames = self.frames(runs)
        if frames is None:
            with pytest.raises(RegionError):
                self.ledger.grant(session, runs)
            return
        taken = [f for f in frames if self.model[f] is not None]
        assert list(self.ledger.grant(session, runs)) == taken
        if not taken:
            for frame in frames:
                self.model[frame] = session

    @rule(session=Session, runs=Runs)
    def release(self, session: int, runs: list[tuple[int, int]]) -> None:
        frames = self.frames(runs)
        if frames is None:
            with pytest.raises(RegionError):
                self.ledger.release(session, runs)
            return
        released = self.ledger.release(session, runs)
        self.give_back(session, frames, released)

    @rule(session=Session)
    def release_all(self, session: int) -> None:
        self.give_back(session, list(range(PAGES)), self.ledger.release_all(session))

    def give_back(
        self, session: int, frames: list[int], released: tuple[tuple[int, int], ...]
    ) -> None:
        held = [f for f in frames if self.model[f] == session]
        assert [f for first, count in released for f in range(first, first + count)] == held
        for frame in held:
            self.model[frame] = "reclaiming"

    @rule(frames=st.lists(st.integers(0, PAGES - 1), max_size=5))
    def quarantine(self, frames: list[int]) -> None:
        self.ledger.quarantine(frames)
        for frame in frames:
            if self.model[frame] is None:
                self.model[frame] = "reclaiming"

    @rule(frame=st.integers(0, PAGES - 1))
    def reclaimed(self, frame: int) -> None:
        if self.model[frame] == "reclaiming":
            self.ledger.reclaimed([(frame, 1)])
            self.model[frame] = None
        else:
            with pytest.raises(RegionError):
                self.ledger.reclaimed([(frame, 1)])

    @invariant()
    def agrees(self) -> None:
        owners = [f if isinstance(f, int) else None for f in self.model]
        assert [self.ledger.holder(f) for f in range(PAGES)] == owners
        assert self.ledger.granted == sum(owner is not None for owner in owners)
        assert self.ledger.reclaiming == self.model.count("reclaiming")
        for session in (1, 2, 3):
            held = {f for f, owner in enumerate(owners) if owner == session}
            assert self.ledger.frames_of(session) == held


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@given(runs=st.lists(st.tuples(Number, Number), max_size=50))
def test_no_hostile_request_costs_more_than_its_region(runs: list[tuple[int, int]]) -> None:
    ledger = Ledger(PAGES)
    try:
        ledger.grant(1, runs)
    except RegionError:
        assert ledger.granted == 0
    named = ledger.nameable(runs)
    assert named == UNNAMEABLE or all(frame < PAGES for frame in named)
    assert len(named) <= NAMED_LIMIT
