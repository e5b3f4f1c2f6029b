# SPDX-License-Identifier: Apache-2.0
"""Who gets which worker, with real worker processes and no clients."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flyt.backend import pool as pool_module
from flyt.backend.loop import EventLoop
from flyt.backend.orders import Closed
from flyt.backend.pool import WorkerPool
from flyt.backend.principals import Principal
from flyt.backend.workers import Launch, SessionRecord, WorkerProcess
from flyt.errors import DeviceError

LIMIT = 30.0
"""Seconds: a hang, not a measure of speed."""

ANN, BOB = Principal("uid", "1"), Principal("uid", "2")


class Site:
    """A pool, and an owner that treats it as the supervisor does."""

    def __init__(self, device: str, **terms: Any) -> None:
        self.loop = EventLoop()
        arguments = ["--device", device, "--heartbeat-ms", "1000", "--log-level", "ERROR"]
        self.pool = WorkerPool(
            self.loop, self, Launch(lambda: arguments, tuple), **{"limit": 4, **terms}
        )

    def worker_ready(self, worker: WorkerProcess) -> None:
        pass

    def worker_said(self, worker: WorkerProcess, message: Any) -> None:
        if isinstance(message, Closed):
            worker.sessions.pop(message.session, None)
            self.pool.settle(worker)

    def worker_ended(self, worker: WorkerProcess, reason: str) -> None:
        self.pool.forget(worker)

    # --- what the tests do ---

    def until(self, condition: Callable[[], bool]) -> None:
        assert self.loop.turn_until(condition, LIMIT), [w.state for w in self.pool]

    def states(self) -> list[str]:
        return sorted(worker.state for worker in self.pool)

    def spares(self) -> list[WorkerProcess]:
        return [w for w in self.pool if w.principal is None and w.state != "leaving"]

    def serve(self, principal: Principal, session: int) -> WorkerProcess:
        """Give a principal a session, as a handshake does."""
        worker = self.pool.assign(principal)
        self.until(lambda: worker.state == "ready")
        address = f"ipc:///tmp/flyt-pool-{os.getpid()}.{session}"
        worker.open(SessionRecord(session, os.getpid(), "test", address, "", 0.0), bytes(16), 0)
        return worker


@pytest.fixture
def site(device_kind: str) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def start(**terms: Any) -> Site:
        sites.append(Site(device_kind, **terms))
        return sites[-1]

    yield start
    for one in sites:
        one.pool.leave(LIMIT, lambda: False)
        assert list(one.pool) == []


def test_shared_one_worker_for_each_principal(site: Callable[..., Site]) -> None:
    one = site(per_session=False, limit=2)
    first = one.pool.start()
    assert one.pool.assign(ANN) is first, "the one that was started ahead"
    second = one.pool.assign(BOB)
    assert second is not first
    assert one.pool.assign(ANN) is first
    assert one.pool.assign(BOB) is second
    with pytest.raises(DeviceError, match="2 users already") as caught:
        one.pool.assign(Principal("uid", "3"))
    assert caught.value.code == 46
    one.loop.turn(0)
    assert len(list(one.pool)) == 2, "no spare"
    one.pool.settle(first)
    assert first.principal == ANN, "it stays its principal's without sessions"
    assert one.pool.assign(ANN) is first
    os.kill(first.pid, signal.SIGKILL)
    one.until(lambda: not first.running)
    assert one.pool.assign(ANN).pid != first.pid, "the successor"


def test_an_idle_worker_ends_but_the_last_one(site: Callable[..., Site]) -> None:
    one = site(per_session=False, limit=3, idle_seconds=0.2)
    first, second = one.serve(ANN, 1), one.serve(BOB, 2)
    second.end_session(2, "the test says so")
    one.until(lambda: not second.running)
    assert one.serve(ANN, 3) is first, "who has sessions is not ended"
    for session in (1, 3):
        first.end_session(session, "the test says so")
    one.until(lambda: not first.sessions)
    one.loop.turn_until(lambda: not first.running, 1.0)
    assert first.running, "the last one stays"
    third = one.serve(BOB, 4)
    one.until(lambda: not first.running)
    assert list(one.pool) == [third]


def test_a_session_in_time_keeps_the_worker(site: Callable[..., Site]) -> None:
    one = site(per_session=False, limit=3, idle_seconds=0.5)
    first = one.serve(ANN, 1)
    one.serve(BOB, 2)
    first.end_session(1, "the test says so")
    one.until(lambda: not first.sessions)
    assert one.serve(ANN, 3) is first
    one.loop.turn_until(lambda: not first.running, 1.0)
    assert first.running


def test_at_the_limit_an_idle_worker_makes_room(site: Callable[..., Site]) -> None:
    one = site(per_session=False, limit=1, idle_seconds=1000.0)
    first = one.serve(ANN, 1)
    with pytest.raises(DeviceError):
        one.pool.assign(BOB)
    first.end_session(1, "the test says so")
    one.until(lambda: not first.sessions)
    assert one.serve(BOB, 2) is not first
    one.until(lambda: not first.running)


def test_a_session_gets_the_spare_and_the_next_one_starts(site: Callable[..., Site]) -> None:
    one = site(per_session=True)
    spare = one.pool.start()
    one.until(lambda: spare.state == "ready")
    assert one.serve(ANN, 1) is spare
    one.until(lambda: one.states() == ["ready", "ready"])
    assert len(one.spares()) == 1
    assert one.serve(ANN, 2) is not spare, "of the same principal, yet not the same worker"


def test_a_worker_exits_after_its_session(site: Callable[..., Site]) -> None:
    one = site(per_session=True)
    worker = one.serve(ANN, 1)
    worker.end_session(1, "the test says so")
    one.until(lambda: worker.state == "leaving")
    one.until(lambda: not worker.running)
    one.until(lambda: one.states() == ["ready"])
    assert len(one.spares()) == 1


def test_one_that_nobody_came_for_is_a_spare_again(site: Callable[..., Site]) -> None:
    one = site(per_session=True)
    spare = one.pool.start()
    one.until(lambda: spare.state == "ready")
    assert one.pool.assign(ANN) is spare
    one.until(lambda: len(one.spares()) == 1)
    (other,) = one.spares()
    one.pool.settle(spare)  # its client went away
    one.until(lambda: not other.running)
    assert one.spares() == [spare], "one is enough, and the ready one is kept"


def test_at_the_limit_there_is_no_spare(site: Callable[..., Site]) -> None:
    one = site(per_session=True, limit=2)
    first = one.serve(ANN, 1)
    one.serve(BOB, 2)
    one.loop.turn(0)
    assert len(list(one.pool)) == 2
    with pytest.raises(DeviceError, match="2 sessions already") as caught:
        one.pool.assign(ANN)
    assert caught.value.code == 46
    first.end_session(1, "the test says so")
    one.until(lambda: first.state == "leaving")
    assert one.pool.assign(ANN) is not first, "who is leaving is not in the way"


def test_a_spare_that_dies_is_not_tried_again_at_once(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "SPARE_RETRY", 0.5)
    one = site(per_session=True)
    spare = one.pool.start()
    spare.kill()
    one.until(lambda: not spare.running)
    one.loop.turn(0)
    assert list(one.pool) == []
    one.until(lambda: one.states() == ["ready"])


def test_a_worker_that_does_not_exit_is_killed(site: Callable[..., Site]) -> None:
    one = site(per_session=True)
    worker = one.serve(ANN, 1)
    os.kill(worker.pid, signal.SIGSTOP)
    worker.expect_end(0.2)
    assert worker.state == "leaving"
    one.until(lambda: not worker.running)


def test_a_worker_that_ended_first_is_no_news_at_the_end(
    site: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    """A system that stops may end all processes at once."""
    here = site(per_session=False)
    worker = here.pool.start()
    here.until(lambda: worker.snapshot is not None)
    os.kill(worker.pid, signal.SIGTERM)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    here.pool.leave(LIMIT, lambda: False)
    assert not caplog.records
