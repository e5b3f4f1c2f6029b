# SPDX-License-Identifier: Apache-2.0
"""Who hears what of a stream's marks: in their order, and everybody."""

from __future__ import annotations

import collections
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flyt.backend import completions
from flyt.backend.holdings import Holdings
from flyt.backend.images import ImageStore
from flyt.backend.reaper import Activity
from flyt.backend.streams import SessionStream
from flyt.errors import DeviceError


class Gpu:
    """A device whose marks are reached when the test says so."""

    ordinal = 0

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def mark(self, handle: Any) -> Any:
        self.marks.append(SimpleNamespace(code=None, call=None))
        return self.marks[-1]

    def reached(self, mark: Any) -> int | None:
        code: int | None = mark.code
        return code

    def watch(self, mark: Any, call: Callable[[int], None]) -> None:
        mark.call = call

    def reach(self, number: int, code: int = 0) -> None:
        mark = self.marks[number]
        mark.code = code
        if mark.call is not None:
            mark.call(code)


class Rig:
    def __init__(self) -> None:
        self.gpu = Gpu()
        self.inbox: collections.deque[Callable[[], None]] = collections.deque()
        services: Any = SimpleNamespace(
            devices=[self.gpu], activity=Activity(), images=ImageStore()
        )
        self.holdings = Holdings(services, self.inbox.append, 0)
        self.stream = SessionStream(self.gpu, object())  # type: ignore[arg-type]
        self.heard: list[Any] = []

    def put(self, name: str, *, brief: bool = False) -> None:
        def done(code: int) -> None:
            self.heard.append((name, code))

        self.holdings.when_done([self.stream], done, brief=brief)

    def turn(self) -> bool:
        while self.inbox:
            self.inbox.popleft()()
        return self.holdings.look()


@pytest.fixture(params=[0.0, 60.0], ids=["left to the device", "asked for"])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(completions, "device_spin_seconds", lambda: request.param)
    return Rig()


def test_marks_are_told_in_the_order_of_the_stream(rig: Rig) -> None:
    rig.put("first")
    rig.turn()
    rig.put("second")
    rig.gpu.reach(1)  # seen first, for whatever reason
    rig.turn()
    assert rig.heard == []
    rig.gpu.reach(0, 700)
    rig.turn()
    assert rig.heard == [("first", 700), ("second", 0)]
    assert rig.holdings.waiting == 0


def test_brief_work_shares_a_mark(rig: Rig) -> None:
    for name in "abc":
        rig.put(name, brief=True)
    assert rig.gpu.marks == []
    rig.holdings.mark()
    assert len(rig.gpu.marks) == 1
    rig.put("d", brief=True)
    rig.holdings.mark_before(rig.stream)
    rig.put("long")
    assert len(rig.gpu.marks) == 3
    for number in range(3):
        rig.gpu.reach(number)
    rig.turn()
    rig.turn()
    assert [name for name, _ in rig.heard] == ["a", "b", "c", "d", "long"]


def test_one_that_raises_keeps_nothing_from_the_others(rig: Rig) -> None:
    def broken(_: int) -> None:
        raise DeviceError(700, "its own affair")

    rig.holdings.when_done([rig.stream], broken, brief=True)
    rig.put("other", brief=True)
    rig.holdings.mark()
    rig.turn()
    rig.gpu.reach(0)
    with pytest.raises(DeviceError):
        rig.turn()
    assert rig.heard == [("other", 0)]
    assert rig.holdings.waiting == 0


def test_it_is_worth_looking_again_while_the_thread_asks(rig: Rig) -> None:
    rig.put("work")
    asks = rig.holdings._marks[rig.stream][0].until > 0
    busy = rig.turn()
    assert asks
    assert busy is (rig.gpu.marks[0].call is None)
    rig.gpu.reach(0)
    assert rig.turn() is False
    assert rig.heard == [("work", 0)]


@pytest.mark.parametrize("late", [False, True], ids=["both at once", "one turn later"])
def test_what_a_stream_waited_for_is_told_before_it(rig: Rig, late: bool) -> None:
    """The device has ordered the two; who told of the first one may be slow to say so."""
    other = SessionStream(rig.gpu, object())  # type: ignore[arg-type]
    rig.holdings.when_done([other], lambda code: rig.heard.append(("other", code)))
    rig.stream.follow(other, other.marked)
    rig.put("behind it")
    rig.holdings.when_done([other], lambda code: rig.heard.append(("later work", code)))
    rig.turn()
    rig.gpu.reach(1)
    if late:
        rig.turn()
        assert rig.heard == []
    rig.gpu.reach(0)
    rig.turn()
    assert rig.heard == [("other", 0), ("behind it", 0)], "the later work is no matter of its"
    rig.gpu.reach(2)
    rig.turn()
    assert rig.heard[2:] == [("later work", 0)]
    assert rig.holdings.waiting == 0


def test_a_stream_that_is_told_of_already_is_not_waited_for(rig: Rig) -> None:
    other = SessionStream(rig.gpu, object())  # type: ignore[arg-type]
    rig.holdings.when_done([other], lambda code: rig.heard.append(("other", code)))
    rig.gpu.reach(0)
    rig.turn()
    rig.stream.follow(other, other.marked)
    assert not rig.stream.after
