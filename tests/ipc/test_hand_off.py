# SPDX-License-Identifier: Apache-2.0
"""What one hand-off in a loop does, counted, and the short ways of messages that come again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings, strategies as st

from flyt import ipc
from flyt.errors import ProtocolError
from flyt.ipc import frames, messages
from flyt.ipc.messages import MAX_ID, REMEMBERED, Block, Layout, Share, decode, encode

BLOCK = Block(b"k" * 16, b"u" * 16, 4096, (4096,))
LAYOUT = Layout("numpy", "uint8", (16,), (1,), 0, 16, 0)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Each test sees its heads for the first time."""
    messages._head.cache_clear()
    messages._known.clear()
    yield
    messages._known.clear()


def functions_called(call: Callable[[], Any]) -> int:
    """Calls of Python functions in this thread."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


def test_a_hand_off_in_a_loop_runs_little_python(
    both: tuple[ipc.Connection, ipc.Connection],
) -> None:
    """59 functions to send before anything was remembered, and 35 since."""
    array = ipc.empty((1000,))
    sent = []
    for _ in range(20):
        sent.append(functions_called(lambda: ipc.send(both[0], array)))
        ipc.recv(both[1])
    assert min(sent[10:]) <= 46


def test_releases_of_one_message_are_taken_at_once(
    both: tuple[ipc.Connection, ipc.Connection],
) -> None:
    """The lock is taken twice for a message, not for each share that it names."""
    held = [ipc.empty((3,)) for _ in range(50)]
    for array in held:
        ipc.send(both[0], array)
    ids = tuple(both[0]._exports)
    count = functions_called(lambda: both[0]._take_release(messages.Release(ids)))
    assert both[0].shares_out == 0
    assert count < len(ids)


@pytest.mark.parametrize(("ids", "wrong"), [((7,), 7), ((0, 0), 0), ((0, 7, 8), 7)])
def test_what_is_not_held_can_not_be_released(
    ids: tuple[int, ...], wrong: int, both: tuple[ipc.Connection, ipc.Connection]
) -> None:
    ipc.send(both[0], ipc.empty((3,)))
    with pytest.raises(ProtocolError, match=f"share {wrong},"):
        both[0]._take_release(messages.Release(ids))


def test_nothing_is_left_of_arrays_that_are_gone(
    both: tuple[ipc.Connection, ipc.Connection],
) -> None:
    array = ipc.empty((3,))
    for _ in range(10):
        ipc.send(both[0], array)
        got = ipc.recv(both[1])
        assert len(both[1].holdings._held) == 1
        del got
    both[0].wait_released(60)
    assert not both[1].holdings._held


@given(
    ident=st.integers(0, MAX_ID),
    again=st.integers(0, MAX_ID),
    token=st.sampled_from((b"", b"t" * 16)),
    event=st.sampled_from((b"", b"e" * 64)),
    length=st.integers(0, 64),
    block=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_a_share_that_comes_again_is_what_was_sent(
    ident: int, again: int, token: bytes, event: bytes, length: int, block: bool
) -> None:
    length = length if block else 0
    layout = LAYOUT._replace(shape=(length,), extent=length)
    for number in (ident, again, ident):
        share = Share(number, token, BLOCK if block else None, layout, event)
        frame = encode(share)
        assert decode(frame, 0) == share
        assert messages.parse(frames.decode(frame), 0) == share


def test_a_known_head_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    decode(encode(Share(0, b"", BLOCK, LAYOUT, b"")), 0)
    monkeypatch.setattr(messages, "parse", None)
    assert decode(encode(Share(7, b"", BLOCK, LAYOUT, b"")), 0).id == 7  # type: ignore[union-attr]


@pytest.mark.parametrize("number", [MAX_ID + 1, (1 << 64) - 1])
def test_a_known_head_with_an_impossible_number_is_refused(number: int) -> None:
    frame = encode(Share(0, b"", BLOCK, LAYOUT, b""))
    decode(frame, 0)
    with pytest.raises(ProtocolError, match=r"\.id"):
        decode(frame[:-8] + number.to_bytes(8, "big"), 0)


def test_a_known_head_with_descriptors_is_counted() -> None:
    frame = encode(Share(0, b"", BLOCK, LAYOUT, b""))
    decode(frame, 0)
    assert decode(frame, 1) == decode(frame, 0)
    with pytest.raises(ProtocolError, match="2 descriptors"):
        decode(frame, 2)


@pytest.mark.parametrize("last", ["event", "array", "id"])
def test_of_another_order_of_fields_nothing_is_assumed(last: str) -> None:
    """Only behind our own head are the last eight bytes the number: here they are of `last`."""
    layout = LAYOUT._asdict()
    fields = {"kind": "share", "id": 9, "token": b"", "event": b"", "array": b""}
    for i in range(1, 4):
        layout["storage"] = layout.pop("storage") * 0 + (i if last == "array" else 0)
        fields["array"] = msgpack.packb({"block": BLOCK._asdict(), "layout": layout})
        fields["event"] = b"e" * 56 + bytes((0, 0, 0, 0, 0, 0, 0, i if last == "event" else 0))
        fields["id"] = i if last == "id" else 9
        fields[last] = fields.pop(last)
        got = decode(frames.encode(fields), 0)
        assert isinstance(got, Share)
        assert (got.id, got.event) == (fields["id"], fields["event"])
        assert got.layout == LAYOUT._replace(storage=layout["storage"])


def test_what_is_known_is_bounded() -> None:
    for i in range(3 * REMEMBERED):
        decode(encode(Share(i, b"", BLOCK, LAYOUT._replace(storage=i), b"")), 0)
        assert len(messages._known) <= REMEMBERED
    assert messages._known


def test_tokens_are_not_remembered() -> None:
    """Each is used once, so it would only drive out what comes again."""
    share = Share(0, b"", BLOCK, LAYOUT, b"")
    decode(encode(share), 0)
    before = messages._head.cache_info().currsize
    for i in range(REMEMBERED // 2):
        answer = share._replace(token=i.to_bytes(16, "big"))
        assert decode(encode(answer), 0) == answer
    assert messages._head.cache_info().currsize == before
    assert len(messages._known) == 1
