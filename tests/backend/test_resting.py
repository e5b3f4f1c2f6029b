# SPDX-License-Identifier: Apache-2.0
"""How a session's thread sleeps when its doorbell rings, for something or for nothing."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator

import pytest

from flyt.backend.resting import IN_VAIN_MS, Resting
from flyt.backend.wire import Wire
from flyt.rpc.sockets import Listener, open_context
from flyt.shm import layout, memory, ring

pytestmark = pytest.mark.skipif(
    ring.native() is None, reason="no C compiler was there when Flyt was installed"
)

PAGE = -(-layout.RINGS_END // memory.OS_PAGE) * memory.OS_PAGE


class Sleeper:
    """A thread's waits, on a wire with rings and a proven doorbell."""

    def __init__(self, folder: str) -> None:
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._inbox = os.eventfd(0, os.EFD_NONBLOCK)
        self.took = False
        self._context = open_context()
        self._listener = Listener(self._context, f"ipc://{folder}/s")
        self._page = memory.anonymous(PAGE)
        native = ring.native()
        assert native is not None
        self.wire = Wire(self._listener, lambda _: False, self.bell)
        self.ring()
        assert self.wire.use_rings(native, self._page) is True
        self.commands, _ = ring.frontend_rings(native, self._page)
        self.rest = Resting(self._listener, self.wire, self._inbox)

    def ring(self) -> None:
        os.eventfd_write(self.bell, 1)

    def sleep(self, patience_ms: int) -> None:
        self.rest.for_command(self.took, busy=False, waiting=False, patience_ms=patience_ms)
        self.took = False

    def close(self) -> None:
        self.wire.drop_rings()
        self._listener.close()
        self._context.term()
        memory.release(self._page, PAGE)
        os.close(self.bell)
        os.close(self._inbox)


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    with tempfile.TemporaryDirectory(prefix="flyt-") as folder:
        made = Sleeper(folder)
        yield made
        made.close()


def test_a_ring_ends_the_sleep(sleeper: Sleeper) -> None:
    sleeper.ring()
    begun = time.monotonic()
    sleeper.sleep(60_000)
    assert time.monotonic() - begun < 30.0


def test_a_ring_that_came_while_nobody_listened_is_not_lost(sleeper: Sleeper) -> None:
    sleeper.ring()
    sleeper.sleep(60_000)  # it brought nothing
    sleeper.ring()
    begun = time.monotonic()
    sleeper.sleep(60_000)
    assert time.monotonic() - begun < 30.0


def test_without_a_ring_the_sleep_is_as_long_as_it_may_be(sleeper: Sleeper) -> None:
    begun = time.monotonic()
    sleeper.sleep(100)
    assert time.monotonic() - begun >= 0.1


def test_rings_without_end_wake_it_once_a_millisecond(sleeper: Sleeper) -> None:
    begun, wakes = time.monotonic(), 0
    while time.monotonic() - begun < 0.5:
        sleeper.ring()
        sleeper.sleep(60_000)
        wakes += 1
    milliseconds = (time.monotonic() - begun) * 1000
    assert 1 < wakes <= milliseconds / IN_VAIN_MS + 1


@pytest.mark.parametrize("way", ["doorbell", "socket"])
def test_who_was_woken_looks_for_the_command_that_is_on_its_way(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    looks = []
    monkeypatch.setattr(sleeper.rest, "_look", looks.append)
    sleeper.sleep(0)
    sleeper.sleep(0)
    assert len(looks) == 1, "once, at the start"
    if way == "doorbell":
        sleeper.ring()
        sleeper.sleep(60_000)
    else:
        sleeper.wire.was_kicked = True
    sleeper.sleep(0)
    assert len(looks) == 2
    sleeper.sleep(0)
    assert len(looks) == 2, "and then it sleeps on"


def test_rings_without_end_are_looked_after_once(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look is half a millisecond of a processor."""
    looks = []
    monkeypatch.setattr(sleeper.rest, "_look", looks.append)
    for _ in range(10):
        sleeper.ring()
        sleeper.sleep(60_000)
    assert len(looks) == 2, "at the start, and behind the first"
    sleeper.took = True
    sleeper.sleep(0)
    sleeper.ring()
    sleeper.sleep(60_000)
    sleeper.sleep(0)
    assert len(looks) == 4, "a command is believed again"


def test_rings_that_bring_commands_are_heard_at_once(sleeper: Sleeper) -> None:
    """So the deafness is for who rings for nothing."""
    begun = time.monotonic()
    for _ in range(200):
        sleeper.ring()
        sleeper.sleep(60_000)
        sleeper.commands.write(b"x")
        assert sleeper.wire.receive() == [b"x"]
        sleeper.took = True
        sleeper.sleep(0)
        assert sleeper.rest._in_vain is False
    assert time.monotonic() - begun < 30.0
