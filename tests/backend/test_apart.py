# SPDX-License-Identifier: Apache-2.0
"""Work apart from a session's thread: its result comes back there, whatever happens to it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from flyt.backend.apart import Apart
from flyt.errors import DeviceError

LIMIT = 20.0


class Session:
    def __init__(self) -> None:
        self.waiting = 0
        self.inbox: queue.Queue[Callable[[], None]] = queue.Queue()
        self.apart = Apart(self, self.inbox.put)
        self.told: list[object] = []

    def turn(self) -> object:
        self.inbox.get(timeout=LIMIT)()
        return self.told[-1]


def test_the_result_comes_back_on_the_session_s_thread() -> None:
    session, go = Session(), threading.Event()
    threads: list[str] = []

    def work() -> str:
        go.wait(LIMIT)
        threads.append(threading.current_thread().name)
        return "done"

    session.apart.do(work, session.told.append)
    assert (session.waiting, session.apart.is_busy, session.told) == (1, True, [])
    go.set()
    assert session.turn() == "done"
    assert (session.waiting, session.apart.is_busy, threads) == (0, False, ["flyt-apart"])


def test_an_error_comes_back_too() -> None:
    session = Session()

    def refused() -> None:
        raise DeviceError(200, "no image")

    def broken() -> None:
        raise ZeroDivisionError

    for work, code in ((refused, 200), (broken, 999)):
        session.apart.do(work, session.told.append)
        told = session.turn()
        assert isinstance(told, DeviceError)
        assert told.code == code
    assert (session.waiting, session.apart.is_busy) == (0, False)


def test_without_a_thread_it_is_an_error_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    session.apart.do(lambda: None, session.told.append)
    told = session.turn()
    assert isinstance(told, DeviceError)
    assert told.code == 2
    assert session.waiting == 0


def test_who_hears_may_begin_again() -> None:
    session = Session()

    def again(_: object) -> None:
        assert not session.apart.is_busy
        session.apart.do(lambda: "second", session.told.append)

    session.apart.do(lambda: "first", again)
    session.inbox.get(timeout=LIMIT)()
    assert session.turn() == "second"
