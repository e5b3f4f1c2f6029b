# SPDX-License-Identifier: Apache-2.0
"""The lock that holds signals back: nothing inside is torn, and no signal stays blocked."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from flyt.frontend.shield import ShieldedLock


class Interrupted(Exception):
    pass


class Alarm:
    """SIGVTALRM all the time; it raises once each time it was armed."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            raise Interrupted


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    alarm = Alarm()
    before = signal.signal(signal.SIGVTALRM, alarm)
    yield alarm
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


def _blocked() -> set[Any]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_no_signal_stays_blocked(alarm: Alarm) -> None:
    lock, before, hits = ShieldedLock(), _blocked(), 0
    until = time.monotonic() + 2
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0003, 0.0003)
    while time.monotonic() < until:
        try:
            alarm.armed = True
            while time.monotonic() < until:
                with lock:
                    pass
        except Interrupted:
            hits += 1
            assert _blocked() == before
    alarm.armed = False
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    with lock:
        assert _blocked() > before
    assert _blocked() == before
    assert hits > 50


def test_what_the_program_blocks_stays_blocked() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        with ShieldedLock():
            pass
        assert signal.SIGUSR1 in _blocked()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_signal_inside_comes_at_the_end(alarm: Alarm) -> None:
    lock, inside = ShieldedLock(), 0
    alarm.armed = True

    def section() -> None:
        nonlocal inside
        with lock, lock:
            signal.raise_signal(signal.SIGVTALRM)
            inside += 1

    with pytest.raises(Interrupted):
        section()
    assert inside == 1
