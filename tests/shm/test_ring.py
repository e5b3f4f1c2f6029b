# SPDX-License-Identifier: Apache-2.0
"""A ring: every message once and in order, no lost wake-up, and nothing believed that can't be."""

from __future__ import annotations

import mmap
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flyt.errors import RegionError
from flyt.shm import layout, memory, ring
from flyt.shm.native import Native, native
from flyt.shm.ring import RingDamaged, RingReader, RingWriter

PLACES = 8
WRITTEN, TAKEN, ASLEEP, ENTRIES = 0, 64, 128, layout.RING_HEADER
"""Where the words lie: each in a cache line of its own."""


@pytest.fixture
def library() -> Native:
    found = native()
    if found is None:
        pytest.skip("no C compiler was there when Flyt was installed")
    return found


@pytest.fixture
def page() -> Iterator[int]:
    size = layout.MIN_PAGE_SIZE
    address = memory.anonymous(size)
    yield address
    memory.release(address, size)


@pytest.fixture
def ends(library: Native, page: int) -> tuple[RingWriter, RingReader]:
    return RingWriter(library, page, PLACES), RingReader(library, page, PLACES)


def _word(page: int, at: int) -> int:
    return memory.load_word(page + at)


def test_messages_come_once_and_in_order(ends: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ends
    rng = random.Random(1)
    sent: list[bytes] = []
    got: list[bytes] = []
    while len(got) < 2000:
        for _ in range(rng.randint(0, PLACES)):
            if writer.room():
                sent.append(rng.randbytes(rng.choice([0, 1, 4, 63, 123, ring.LARGEST])))
                assert writer.write(sent[-1]) is False
        for _ in range(rng.randint(0, PLACES)):
            if (message := reader.read()) is not None:
                got.append(message)
        assert writer.room() == PLACES - (len(sent) - len(got))
    assert got == sent[: len(got)]
    assert reader.taken == len(got)


def test_a_read_in_the_middle_of_another_one(
    ends: tuple[RingWriter, RingReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a signal's handler, right behind the library's call: each gets its own message."""
    writer, reader = ends
    for message in (b"first", b"second", b"third"):
        writer.write(message)
    inner: list[bytes | None] = []
    read = reader._native.ring_read

    def interrupted(*given: Any) -> int:
        length = int(read(*given))
        if not inner:
            inner.append(None)
            inner[0] = reader.read()
        return length

    monkeypatch.setattr(reader._native, "ring_read", interrupted)
    assert (reader.read(), inner[0]) == (b"first", b"second")
    assert reader.read() == b"third"


def test_a_message_stays_until_it_is_dropped(ends: tuple[RingWriter, RingReader]) -> None:
    """And who drops it once more, or late, takes no other."""
    writer, reader = ends
    assert reader.peek() == (None, 0)
    for message in (b"first", ring.ELSEWHERE, b"third"):
        writer.write(message)
    assert [reader.peek(), reader.peek()] == [(b"first", 0)] * 2
    assert (reader.taken, writer.room()) == (0, PLACES - 3)
    for _ in range(2):
        reader.drop(b"first", 0)
        assert (reader.taken, reader.has_more, writer.room()) == (1, True, PLACES - 2)
    assert reader.peek() == (ring.ELSEWHERE, 1)
    for _ in range(2):
        reader.drop(ring.ELSEWHERE, 1)
        assert list(reader.position) == [2, 1]
    assert reader.read() == b"third"
    reader.drop(b"third", 2)
    assert (reader.peek(), reader.has_more, reader.taken) == ((None, 3), False, 3)


def test_the_words_lie_where_the_layout_says(
    page: int, ends: tuple[RingWriter, RingReader]
) -> None:
    writer, reader = ends
    writer.write(b"abc")
    writer.write(b"")
    assert (_word(page, WRITTEN), _word(page, TAKEN), _word(page, ASLEEP)) == (2, 0, 0)
    first = bytes(memory.view(page + ENTRIES, 7))
    assert first == struct.pack("<I", 3) + b"abc"
    reader.read()
    assert (_word(page, WRITTEN), _word(page, TAKEN)) == (2, 1)


def test_the_rings_of_a_control_page_share_nothing() -> None:
    def ends(start: int, places: int) -> int:
        return start + layout.RING_HEADER + places * layout.RING_ENTRY

    assert layout.BACKEND_PROOF + 8 <= layout.COMMAND_RING
    assert ends(layout.COMMAND_RING, layout.COMMAND_PLACES) <= layout.REPLY_RING
    assert ends(layout.REPLY_RING, layout.REPLY_PLACES) == layout.RINGS_END
    assert layout.RINGS_END <= layout.MIN_PAGE_SIZE


def test_a_message_that_does_not_fit(ends: tuple[RingWriter, RingReader]) -> None:
    with pytest.raises(RegionError, match="125 bytes"):
        ends[0].write(bytes(ring.LARGEST + 1))
    assert ends[1].read() is None


def test_a_sleeper_is_seen_until_it_was_woken(ends: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ends
    assert writer.sleeper() == 0
    assert reader.fall_asleep()
    number = writer.sleeper()
    assert number > 0
    writer.woken = number
    assert writer.sleeper() == 0
    reader.wake_up()
    assert reader.fall_asleep()
    assert writer.sleeper() not in (0, number), "another sleep"
    assert writer.write(b"x") is True
    assert writer.sleeper() == 0


def test_a_sleeper_is_woken_once_for_each_sleep(ends: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ends
    assert writer.write(b"1") is False
    assert reader.fall_asleep() is False, "there is a message already"
    assert writer.write(b"2") is True, "that it stays awake is not known yet"
    assert writer.write(b"3") is False
    reader.wake_up()
    assert [reader.read(), reader.read(), reader.read()] == [b"1", b"2", b"3"]
    assert reader.fall_asleep() is True
    assert [writer.write(b"x"), writer.write(b"y")] == [True, False]
    reader.wake_up()
    reader.read()
    reader.read()
    assert reader.fall_asleep() is True
    assert writer.write(b"z") is True, "another sleep"


def test_waiting_is_bounded(ends: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ends
    for polite in (False, True):
        assert reader.wait(0.001, polite=polite) is False
        assert reader.wait(0.0, polite=polite) is False
    writer.write(b"1")
    assert reader.wait(10.0, polite=False) is True


@pytest.mark.parametrize("written", [PLACES + 1, 1 << 32, (1 << 64) - 1])
def test_a_written_word_that_can_not_be(
    page: int, ends: tuple[RingWriter, RingReader], written: int
) -> None:
    memory.store_word(page + WRITTEN, written)
    with pytest.raises(RingDamaged, match="damaged"):
        ends[1].read()


def test_a_taken_word_that_can_not_be(page: int, ends: tuple[RingWriter, RingReader]) -> None:
    ends[0].write(b"1")
    for taken in (2, 1 << 63, (1 << 64) - PLACES - 1):
        memory.store_word(page + TAKEN, taken)
        with pytest.raises(RingDamaged, match="damaged"):
            ends[0].room()


@pytest.mark.parametrize("length", [ring.LARGEST + 1, 1 << 31, (1 << 32) - 1])
def test_a_length_that_can_not_be(
    page: int, ends: tuple[RingWriter, RingReader], length: int
) -> None:
    ends[0].write(b"abc")
    memory.view(page + ENTRIES, 4)[:] = struct.pack("<I", length)
    with pytest.raises(RingDamaged, match="damaged"):
        ends[1].read()


def test_a_wiped_page_is_told_from_an_empty_ring(
    page: int, ends: tuple[RingWriter, RingReader]
) -> None:
    writer, reader = ends
    writer.write(b"1")
    reader.read()
    memory.fill(page, 0, 4096)
    with pytest.raises(RingDamaged, match="damaged"):
        reader.read()


def test_a_hundred_thousand_hostile_states(library: Native, page: int) -> None:
    """Whatever the words say: a message of at most its place, nothing, or RingDamaged."""
    rng = random.Random(7)
    size = ENTRIES + PLACES * layout.RING_ENTRY
    outcomes = {"message": 0, "none": 0, "damaged": 0}
    near = [0, 1, 2, PLACES, PLACES + 1, 1 << 32, 1 << 63, (1 << 64) - 1]
    for _ in range(100_000):
        reader = RingReader(library, page, PLACES)
        memory.store_word(page + WRITTEN, rng.choice(near))
        at = page + ENTRIES
        memory.view(at, 4)[:] = struct.pack("<I", rng.choice([0, 1, 124, 125, rng.getrandbits(32)]))
        try:
            message = reader.read()
        except RingDamaged:
            outcomes["damaged"] += 1
            continue
        outcomes["none" if message is None else "message"] += 1
        assert message is None or len(message) <= ring.LARGEST
    assert min(outcomes.values()) > 1000
    assert bytes(memory.view(page + size, 64)) == bytes(64), "nothing behind the ring is touched"


STRESS = """
import os, random, select, sys, time
from flyt.shm import ring, memory
from flyt.shm.native import native
import ctypes, mmap
shared = mmap.mmap(int(sys.argv[1]), 65536)
page = ctypes.addressof(ctypes.c_char.from_buffer(shared))
wake, count = int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(count)
writer = ring.RingWriter(native(), page, 8)
for number in range(count):
    deadline = time.monotonic() + 60
    while not writer.room():
        if time.monotonic() > deadline:
            sys.exit("the reader takes nothing any more")
        time.sleep(0)
    if writer.write(number.to_bytes(4, "little") * rng.randint(1, 31)):
        os.eventfd_write(wake, 1)
    if not rng.randint(0, 50):
        time.sleep(rng.random() / 5000)
"""


def test_no_wake_up_is_lost_between_processes(library: Native, python: Callable[..., Any]) -> None:
    """The reader sleeps whenever it finds nothing, and nothing but the writer wakes it."""
    import ctypes
    import os
    import select

    count = 20_000
    descriptor = os.memfd_create("ring")
    wake = os.eventfd(0)
    try:
        os.ftruncate(descriptor, 65536)
        os.set_inheritable(descriptor, True)
        os.set_inheritable(wake, True)
        with mmap.mmap(descriptor, 65536) as shared:
            anchor = ctypes.c_char.from_buffer(shared)
            reader = RingReader(library, ctypes.addressof(anchor), PLACES)
            child = python(STRESS, str(descriptor), str(wake), str(count), fds=(descriptor, wake))
            sleeps = 0
            for number in range(count):
                while (message := reader.read()) is None:
                    if reader.fall_asleep():
                        sleeps += 1
                        assert select.select([wake], [], [], 30)[0], f"asleep before {number}"
                        os.eventfd_read(wake)
                    reader.wake_up()
                assert message[:4] == number.to_bytes(4, "little")
                assert message == message[:4] * (len(message) // 4)
            assert sleeps > 100
            assert child.finish() == ""
            del anchor, reader
    finally:
        os.close(descriptor)
        os.close(wake)
