# SPDX-License-Identifier: Apache-2.0
"""Frames from the ledger to a session and back, with a real daemon, worker and keeper."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flyt.rpc.endpoints import Endpoint
from flyt.rpc.messages import COMMANDS, REPLIES, Attach, Result, Status, Welcome
from flyt.rpc.sockets import Dialer, open_context
from flyt.shm.layout import FRONTEND_PROOF, FrameState
from flyt.shm.region import Region
from flyt.shm.table import FrameTable

LIMIT = 30.0
"""Seconds: a hang, not a measure of speed."""

RESERVE = 1 << 30

Runs = tuple[tuple[int, int], ...]


class Bench:
    """A backend, its region as a client sees it, and raw sessions."""

    def __init__(self, one: Any, connect: Callable[[str], Any]) -> None:
        self.one = one
        self.main = connect(one.endpoint)
        self.region = Region.open(one.region)
        self.table = FrameTable(self.region.fd, self.region.size)
        self.context = open_context()
        self.dialers: list[Dialer] = []

    def attach(self, runs: Runs, *, mark: bool = True) -> tuple[Welcome, Dialer, Result]:
        """HELLO and ATTACH with these frames; the client's locks are not what is tested here."""
        welcome = self.main.greet()
        assert isinstance(welcome, Welcome)
        frames = [frame for first, count in runs for frame in range(first, first + min(count, 64))]
        for vpn, frame in enumerate(frames):
            if mark and frame < self.table.geometry.page_count:
                self.table.mark_owned(frame, welcome.session, os.getpid(), vpn)
                self.poke(frame, b"secret" * 100)
        proof = 0x1122_3344_5566_7788
        if frames and frames[0] < self.table.geometry.page_count and mark:
            self.poke(frames[0], proof.to_bytes(8, "little"), FRONTEND_PROOF)
        endpoint = Endpoint.parse(self.one.endpoint).session(welcome.port, welcome.path)
        dialer = Dialer(self.context, endpoint)
        self.dialers.append(dialer)
        base = 0x1100_0000_0000 + len(self.dialers) * RESERVE
        command = Attach(1, welcome.token, False, base, RESERVE, runs, proof)
        assert dialer.send([COMMANDS.encode(command)])
        deadline = time.monotonic() + LIMIT
        while (answer := dialer.receive()) is None:
            assert time.monotonic() < deadline, "ATTACH got no answer"
            select.select(dialer.filenos(), [], [], 0.05)
            dialer.check()
        result = REPLIES.decode(answer[0])
        assert isinstance(result, Result)
        return welcome, dialer, result

    def detach(self, dialer: Dialer) -> None:
        self.dialers.remove(dialer)
        dialer.close()

    def poke(self, frame: int, data: bytes, offset: int = 64) -> None:
        os.pwrite(self.region.fd, data, self.table.geometry.offset(frame) + offset)

    def is_clean(self, *frames: int) -> bool:
        geometry = self.table.geometry
        zero = bytes(geometry.page_size)
        return all(
            self.table.state(f) == FrameState.FREE
            and os.pread(self.region.fd, len(zero), geometry.offset(f)) == zero
            for f in frames
        )

    def frames(self) -> dict[str, int]:
        """The daemon's own count."""
        counted: dict[str, int] = self.main.status().report["frames"]
        return counted

    def close(self) -> None:
        for dialer in self.dialers:
            dialer.close()
        self.context.term()
        self.table.close()
        self.region.close()


@pytest.fixture
def bench(backend: Callable[..., Any], raw: Callable[[str], Any]) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*extra: str) -> Bench:
        made.append(Bench(backend(size="8M", extra=extra), raw))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_frames_are_granted_and_come_back_clean(
    bench: Callable[..., Bench], eventually: Callable[[Callable[[], Any]], Any]
) -> None:
    site = bench()
    welcome, dialer, result = site.attach(((3, 4), (20, 3)))
    assert result.status == 0, result.text
    (session,) = [s for s in site.main.status().report["sessions"] if s["frames"]]
    assert (session["session"], session["frames"]) == (welcome.session, 7)
    assert site.frames()["granted"] == 7
    site.detach(dialer)
    eventually(lambda: site.is_clean(3, 4, 5, 6, 20, 21, 22))
    eventually(lambda: not site.frames()["granted"] and not site.frames()["reclaiming"])


def test_a_liar_gets_nobodys_frames(bench: Callable[..., Bench]) -> None:
    site = bench()
    pages = site.table.geometry.page_count
    _, _, result = site.attach(((0, 4),))
    assert result.status == 0, result.text
    lies: list[tuple[Runs, tuple[int, ...]]] = [
        (((2, 4),), (2, 3)),
        (((pages - 1, 5),), (pages - 1,)),
        (((8, 4), (9, 1)), (8, 9, 10, 11, 9)),
        (((pages, 3),), ((1 << 64) - 1,)),
        ((((1 << 64) - 3, 2), (1, 1)), (1,)),
    ]
    for runs, named in lies:
        _, dialer, result = site.attach(runs, mark=False)
        assert result.status == Status.FRAMES_REFUSED, result
        assert set(result.values) <= set(named)
        site.detach(dialer)
    assert site.frames()["granted"] == 4
    assert site.table.state(2) == FrameState.OWNED


def test_the_frames_of_a_killed_worker_come_back_clean(
    bench: Callable[..., Bench], eventually: Callable[[Callable[[], Any]], Any]
) -> None:
    site = bench()
    assert site.attach(((5, 9),))[2].status == 0
    (worker,) = site.main.status().report["workers"]
    os.kill(worker["pid"], signal.SIGKILL)
    eventually(lambda: site.is_clean(*range(5, 14)))
    eventually(lambda: site.frames()["granted"] == site.frames()["reclaiming"] == 0)
    assert site.attach(((5, 9),))[2].status == 0, "and serve the next one"


def test_a_killed_keeper_changes_nothing(
    bench: Callable[..., Bench], eventually: Callable[[Callable[[], Any]], Any]
) -> None:
    site = bench()
    _, dialer, result = site.attach(((5, 9),))
    assert result.status == 0
    keeper = site.main.status().report["keeper"]
    os.kill(keeper, signal.SIGSTOP)
    site.detach(dialer)
    eventually(lambda: site.frames()["reclaiming"] == 9)
    _, dialer, result = site.attach(((5, 3),), mark=False)
    assert result.status == Status.FRAMES_REFUSED, "not while they are being zeroed"
    site.detach(dialer)
    os.kill(keeper, signal.SIGKILL)
    eventually(lambda: site.is_clean(*range(5, 14)))
    assert site.main.status().report["keeper"] != keeper


def test_frames_that_nobody_was_granted_are_swept(
    bench: Callable[..., Bench], eventually: Callable[[Callable[[], Any]], Any]
) -> None:
    site = bench("--sweep-seconds", "0.1")
    assert site.attach(((0, 3),))[2].status == 0
    site.table.mark_owned(40, 99, 1, 0)
    site.poke(40, b"secret")
    eventually(lambda: site.is_clean(40))
    assert site.table.state(0) == FrameState.OWNED
    assert site.frames()["granted"] == 3
