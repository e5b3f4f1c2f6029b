# SPDX-License-Identifier: Apache-2.0
"""The keeper as a real process on a real region: zeroing, sweeping, and its death."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flyt.backend.ledger import Ledger
from flyt.backend.loop import EventLoop
from flyt.backend.options import Options
from flyt.backend.reclaim import RESTARTS, Reclaimer
from flyt.backend.served import ServedRegion
from flyt.shm.layout import MAGIC, FrameState
from flyt.shm.locks import FrameLocks
from flyt.shm.table import FrameTable

LIMIT = 20.0
"""Seconds: a hang, not a measure of speed."""

SIZE = 4 << 20


class Site:
    """A served region, its keeper, and the region's bytes as a client sees them."""

    def __init__(self, name: str, *, start: bool = True) -> None:
        self.loop = EventLoop()
        self.served = ServedRegion(Options(listen=("ipc:///unused",), region=name, size=SIZE))
        self.ledger = Ledger(self.served.geometry.page_count)
        self.reclaimer = Reclaimer(self.loop, self.served, self.ledger)
        if start:
            self.reclaimer.start()
            self.table = FrameTable(self.served.region.fd, SIZE)

    def poke(self, frame: int, data: bytes) -> None:
        os.pwrite(self.served.region.fd, data, self.served.geometry.offset(frame))

    def peek(self, frame: int) -> bytes:
        size = self.served.geometry.page_size
        return os.pread(self.served.region.fd, size, self.served.geometry.offset(frame))

    def grant(self, session: int, *frames: int) -> None:
        """As a client and the supervisor do together."""
        for frame in frames:
            self.table.mark_owned(frame, session, 1, frame)
            self.poke(frame, b"secret" * 100)
            assert self.ledger.grant(session, [(frame, 1)]) == ()

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            self.loop.turn(0.05)  # FREE in the table wakes nobody up

    def reclaim(self, session: int) -> list[str]:
        done: list[str] = []
        self.reclaimer.submit(self.ledger.release_all(session), lambda: done.append("done"))
        return done

    def close(self) -> None:
        self.reclaimer.leave(0)
        self.served.close()
        if hasattr(self, "table"):
            self.table.close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("FLYT_RUNTIME_DIR", str(tmp_path))
    made = Site(f"flyt-test-keeper-{os.getpid()}")
    yield made
    made.close()


def is_clean(site: Site, frame: int) -> bool:
    zero = bytes(site.served.geometry.page_size)
    return site.table.state(frame) == FrameState.FREE and site.peek(frame) == zero


def test_it_formats_a_new_region(site: Site) -> None:
    block = site.table.superblock()
    assert block.epoch == site.served.epoch
    assert block.geometry == site.served.geometry
    assert site.table.snapshot() == []


def test_it_zeroes_what_an_adopted_region_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLYT_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "region"
    # Flyt's magic, since a file that holds anything else is not adopted.
    path.write_bytes(MAGIC.to_bytes(8, "little") + b"\xa5" * (SIZE - 8))
    site = Site(str(path))
    try:
        assert all(is_clean(site, frame) for frame in range(site.ledger.page_count))
    finally:
        site.close()
    assert path.stat().st_size == SIZE, "what was adopted is left there"


def test_reclaimed_frames_are_zero_and_free(site: Site) -> None:
    site.grant(1, 3, 4, 9)
    site.grant(2, 5)
    done = site.reclaim(1)
    assert site.ledger.grant(3, [(3, 1)]) == (3,), "not before it is done"
    site.until(lambda: done and all(is_clean(site, frame) for frame in (3, 4, 9)))
    assert site.peek(5).startswith(b"secret")
    assert site.ledger.grant(3, [(3, 1)]) == ()


def test_forged_states_are_cleaned_as_well(site: Site) -> None:
    site.grant(1, 0)
    site.table._states[0] = 0xFFFF_FFFF_FFFF_FFFF
    done = site.reclaim(1)
    site.until(lambda: done and is_clean(site, 0))


def held_back(site: Site) -> Any:
    """The locks of a client."""
    return FrameLocks(site.served.lock_file, site.served.epoch)


def test_a_dead_sessions_frames_keep_their_bytes_while_they_are_locked(site: Site) -> None:
    with closing(held_back(site)) as first, closing(held_back(site)) as second:
        site.grant(1, *range(10))
        assert first.lock(6, 2)  # the younger lock lies lower, and the kernel names any
        assert second.lock(2, 3)
        site.reclaimer.submit_unlocked(site.ledger.release_all(1))
        site.until(lambda: all(is_clean(site, frame) for frame in (0, 1, 5, 8, 9)))
        site.until(lambda: not site.reclaimer.busy)

        def keeps(*frames: int) -> bool:
            owned = all(site.table.state(frame) == FrameState.OWNED for frame in frames)
            return owned and all(site.peek(frame).startswith(b"secret") for frame in frames)

        assert keeps(2, 3, 4, 6, 7)
        assert site.ledger.reclaiming == 5
        assert site.ledger.grant(2, [(2, 1)]) == (2,), "they are nobody's"
        second.unlock(3, 1)
        site.until(lambda: is_clean(site, 3))
        assert keeps(2, 4, 6, 7)
        site.table.set_state(6, FrameState.FREE)  # forged by who has it: nothing is gained
        assert site.ledger.grant(2, [(6, 1)]) == (6,)
    site.until(lambda: all(is_clean(site, frame) for frame in range(10)))
    site.until(lambda: site.ledger.reclaiming == 0)


def test_locked_frames_do_not_outlive_a_keeper(site: Site) -> None:
    with closing(held_back(site)) as locks:
        site.grant(1, 0, 1)
        assert locks.lock(1, 1)
        site.reclaimer.submit_unlocked(site.ledger.release_all(1))
        site.until(lambda: is_clean(site, 0))
        first = site.reclaimer.pid
        os.kill(first, signal.SIGKILL)
        site.until(lambda: site.reclaimer.pid not in (0, first))
        assert site.peek(1).startswith(b"secret")
    site.until(lambda: is_clean(site, 1))


def test_what_is_unlocked_just_before_the_end_is_cleaned(site: Site) -> None:
    with closing(held_back(site)) as locks:
        site.grant(1, 0, 1)
        assert locks.lock(0, 1)
        site.reclaimer.submit_unlocked(site.ledger.release_all(1))
        site.until(lambda: is_clean(site, 1) and not site.reclaimer.busy)
    site.reclaimer.leave(LIMIT)  # the region may be kept
    assert is_clean(site, 0)


def test_sweeps_leave_locked_frames_of_the_dead(site: Site) -> None:
    with closing(held_back(site)) as locks:
        site.grant(1, 0)
        assert locks.lock(0, 1)
        site.reclaimer.submit_unlocked(site.ledger.release_all(1))
        for _ in range(3):
            site.reclaimer.sweep()
            site.until(lambda: not site.reclaimer._sweeping and not site.reclaimer.busy)
        assert site.peek(0).startswith(b"secret")


def test_it_spares_what_is_locked_in_an_adopted_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLYT_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "region"
    path.write_bytes(MAGIC.to_bytes(8, "little") + b"\xa5" * (SIZE - 8))
    first = ServedRegion(Options(listen=("ipc:///unused",), region=str(path), size=SIZE))
    with closing(FrameLocks(first.lock_file, first.epoch)) as locks:
        first.close()
        assert locks.lock(3, 2)
        assert locks.lock(9, 1)
        site = Site(str(path))
        try:
            held = {3, 4, 9}
            others = set(range(site.ledger.page_count)) - held
            assert all(is_clean(site, frame) for frame in others)
            for frame in held:
                assert site.peek(frame) == b"\xa5" * site.served.geometry.page_size
                assert site.table.state(frame) == FrameState.OWNED
                assert site.ledger.grant(1, [(frame, 1)]) == (frame,)
            locks.close()
            site.until(lambda: all(is_clean(site, frame) for frame in held))
            assert site.ledger.reclaiming == 0
        finally:
            site.close()


def test_nothing_to_reclaim_is_done_at_once(site: Site) -> None:
    assert site.reclaim(7) == ["done"]


def test_many_scattered_frames(site: Site) -> None:
    frames = list(range(0, site.ledger.page_count, 2))
    site.grant(1, *frames)
    done = site.reclaim(1)
    site.until(lambda: done and all(is_clean(site, frame) for frame in frames))


def test_a_sweep_takes_strays_the_second_time(site: Site) -> None:
    site.grant(1, 1)
    site.table.mark_owned(2, 99, 1, 0)  # taken, never granted: its client died in between
    site.poke(2, b"secret")
    site.table._states[3] = 0x1234  # forged
    site.table.set_state(4, FrameState.QUARANTINED)  # a keeper died over it

    def swept() -> bool:
        return not site.reclaimer._sweeping

    site.reclaimer.sweep()
    site.until(swept)
    assert site.ledger.reclaiming == 0, "seen once: it may be about to be granted"
    site.reclaimer.sweep()
    site.until(lambda: swept() and not site.reclaimer.busy)
    site.until(lambda: all(is_clean(site, frame) for frame in (2, 3, 4)))
    assert site.table.state(1) == FrameState.OWNED
    assert site.ledger.reclaiming == 0


def test_a_frame_that_one_client_after_the_other_takes_is_no_stray(site: Site) -> None:
    for session in (5, 6, 7):  # each between taking it and asking for it, when we look
        site.table.mark_owned(2, session, 1, 0)
        site.poke(2, b"secret")
        site.reclaimer.sweep()
        site.until(lambda: not site.reclaimer._sweeping and not site.reclaimer.busy)
        assert site.peek(2).startswith(b"secret")
    assert site.ledger.grant(7, [(2, 1)]) == ()


def test_a_frame_that_gets_its_owner_between_two_sweeps_stays(site: Site) -> None:
    site.table.mark_owned(2, 5, 1, 0)
    site.reclaimer.sweep()
    site.until(lambda: not site.reclaimer._sweeping)
    assert site.ledger.grant(5, [(2, 1)]) == ()
    site.reclaimer.sweep()
    site.until(lambda: not site.reclaimer._sweeping)
    assert site.table.state(2) == FrameState.OWNED
    assert site.ledger.holder(2) == 5


def test_a_killed_keeper_is_replaced_and_told_again(site: Site) -> None:
    site.grant(1, *range(20))
    first = site.reclaimer.pid
    os.kill(first, signal.SIGSTOP)  # so that the orders are not carried out yet
    done = site.reclaim(1)
    os.kill(first, signal.SIGKILL)
    site.until(lambda: done and all(is_clean(site, frame) for frame in range(20)))
    assert site.reclaimer.pid not in (0, first)
    assert site.served.is_whole()


def test_a_truncated_region_is_given_up_once_and_for_all(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.grant(1, site.ledger.page_count - 1)
    os.ftruncate(site.served.region.fd, SIZE // 2)
    with caplog.at_level(logging.ERROR):
        site.reclaim(1)
        site.until(lambda: not site.reclaimer.pid)
        assert not site.served.is_whole()
        os.ftruncate(site.served.region.fd, SIZE)
        assert not site.served.is_whole(), "what came back is not what was there"
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "truncated" in errors[0]
    assert not site.reclaimer.busy, "nobody waits for what will never be done"


def test_a_keeper_that_keeps_dying_is_given_up(site: Site) -> None:
    for _ in range(RESTARTS + 1):
        pid = site.reclaimer.pid
        os.kill(pid, signal.SIGKILL)
        site.until(lambda pid=pid: site.reclaimer.pid != pid)
    assert site.reclaimer.pid == 0
    assert not site.served.is_whole()
