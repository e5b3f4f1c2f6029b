# SPDX-License-Identifier: Apache-2.0
"""The in-flight table: each command ends exactly once."""

from __future__ import annotations

import threading

import pytest

from flyt.frontend.inflight import InflightTable, Pending


@pytest.fixture
def table() -> InflightTable:
    return InflightTable()


def _add(table: InflightTable, name: str = "CopyIn", size: int = 0) -> Pending:
    pending = Pending(table.next_id(), name, size, (0, size))
    table.add(pending)
    return pending


def test_ids_count_up_from_1(table: InflightTable) -> None:
    assert [table.next_id() for _ in range(3)] == [1, 2, 3]


def test_an_answer_ends_its_command_alone(table: InflightTable) -> None:
    first, second = _add(table), _add(table)
    assert len(table) == 2
    got = table.answer(second.id, status=2, text="full", values=(7,), payload=b"x")
    assert got is second
    assert (second.done, second.ended) == (True, False)
    assert (second.status, second.text, second.values, second.payload) == (2, "full", (7,), b"x")
    assert not first.done
    assert [c.id for c in table.snapshot()] == [first.id]


def test_answers_that_belong_to_nothing(table: InflightTable) -> None:
    pending = _add(table)
    ends: list[Pending] = []
    pending.finish = ends.append
    assert table.answer(99, status=0, text="") is None
    assert table.answer(0, status=0, text="") is None
    assert not pending.done
    assert table.answer(pending.id, status=0, text="") is pending
    assert table.answer(pending.id, status=1, text="again") is None
    assert pending.status == 0
    assert ends == [pending]


def test_all_fail_once(table: InflightTable) -> None:
    commands = [_add(table) for _ in range(5)]
    ends: list[int] = []
    for pending in commands:
        pending.finish = lambda p: ends.append(p.id)
        pending.event = threading.Event()
    table.answer(2, status=0, text="")
    assert [p.id for p in table.fail_all(46, "gone")] == [1, 3, 4, 5]
    assert ends == [2, 1, 3, 4, 5]
    assert all(p.done and p.event is not None and p.event.is_set() for p in commands)
    assert [p.ended for p in commands] == [True, False, True, True, True]
    assert [p.status for p in commands] == [46, 0, 46, 46, 46]
    assert len(table) == 0
    assert table.fail_all(46, "gone") == []


def test_what_is_shown(table: InflightTable) -> None:
    assert table.describe() == "nothing was in flight"
    _add(table, "CopyIn", 4096)
    line = table.snapshot()[0]
    assert (line.id, line.name, line.size, line.pages) == (1, "CopyIn", 4096, (0, 4096))
    assert 0 <= line.age < 60
    assert table.describe() == "in flight: CopyIn #1 (4096 bytes, 0.0 s)"
    for _ in range(5):
        _add(table, "Free")
    text = table.describe()
    assert text.startswith("in flight: CopyIn #1 (4096 bytes")
    assert "Free #4 (0 bytes" in text
    assert "#5" not in text
    assert text.endswith(" and 2 more")


def test_who_waits(table: InflightTable) -> None:
    _add(table)
    second, third = _add(table), _add(table)
    assert table.waiting() is None
    second.event, third.event = threading.Event(), threading.Event()
    assert table.waiting() is second
    table.answer(second.id, status=0, text="")
    assert table.waiting() is third
