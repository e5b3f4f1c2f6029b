# SPDX-License-Identifier: Apache-2.0
"""The compiled half of the short way: what it takes, what it writes into a ring, which answers it
reads, and what it notes for the tables."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from flyt.frontend.express_link import (
    COPY_IN,
    COPY_OUT,
    FILL,
    LAUNCH,
    NOTES,
    NOWHERE,
    ROWS,
    Area,
    Link,
)
from flyt.frontend.plain_kernel import Fields, PlainKernel
from flyt.rpc import messages as m
from flyt.shm import layout, memory, ring
from flyt.shm.native import LIBRARY, native
from flyt.shm.ring import RingReader, RingWriter, backend_rings, frontend_rings

pytestmark = pytest.mark.skipif(
    native() is None, reason="no C compiler was there when Flyt was installed"
)

PID = 4711
PAGE = layout.RINGS_END + 4096 - layout.RINGS_END % 4096
ELSEWHERE, LOOK, SENT = -1, -2, -3
PINNED, DEVICE = 1, 2
OF_MEMORY = -1
MOMENT, LONG = 100_000, 10**10
"""Nanoseconds."""
CALL = 77
BLOCK, BLOCK_SIZE, ORDINAL = 1 << 45, 1 << 20, 3
"""Device memory, that nobody here touches."""
STAGING, INDEX = 1 << 20, 1 << 16
"""Bytes of the area, and its place in the window."""
PINNED_INDEX = 1 << 30


class Ends:
    """The short way's link, and the backend's ends of the rings."""

    commands: RingReader
    replies: RingWriter

    def __init__(self) -> None:
        library = native()
        assert library is not None
        self.library = library
        self.page = memory.anonymous(PAGE)
        self.staging, self.host, self.pinned = (memory.anonymous(STAGING) for _ in range(3))
        self.commands, self.replies = backend_rings(library, self.page)
        self.written, self.read_end = frontend_rings(library, self.page)
        link = self.link = Link(pid=PID, credits=200)
        link.commands, link.commands_written, link.command_places = self.written.place
        link.replies, link.replies_read, link.reply_places = self.read_end.place
        area = Area.over(self.staging, INDEX, STAGING)
        link.ring, link.ring_index, link.ring_size = area.address, area.at, area.ring
        link.cell, link.cell_index = area.address + area.ring, area.at + area.ring
        link.cell_size = area.cell
        self.at = ctypes.addressof(link)
        self.calls = library.entries(self.at)
        assert library.express_add(self.at, BLOCK, BLOCK_SIZE, DEVICE, ORDINAL, NOWHERE)
        assert library.express_add(self.at, self.pinned, STAGING, PINNED, 0, PINNED_INDEX)

    def into(self, host: int, size: int = 64, at: int = 0, *, wait: bool = False) -> int:
        """A copy to the device."""
        patience = MOMENT if wait else 0
        return int(self.calls["express_in"](BLOCK + at, host, size, OF_MEMORY, wait, patience, 1))

    def out(self, host: int, size: int = 64, *, wait: bool = True, patience: int = MOMENT) -> int:
        """A copy from the device."""
        return int(self.calls["express_out"](host, BLOCK, size, OF_MEMORY, wait, patience, 1, CALL))

    def fill(self, size: int = 64, at: int = 0) -> int:
        return int(self.calls["express_fill"](BLOCK + at, 7, size, 5))

    def sync(self, stream: int, *, last: int = 0, patience: int = MOMENT) -> int:
        return int(self.calls["express_sync"](stream, last, patience, 1))

    def read(self) -> bool:
        return bool(self.library.express_read(self.at))

    def wait(self, number: int, patience: int = MOMENT) -> None:
        self.library.express_wait(self.at, number, patience, 1)

    @property
    def notes(self) -> list[tuple[int, int]]:
        """Numbers and codes of what is noted and not answered."""
        link = self.link
        rows = [link.note[n % NOTES] for n in range(link.first, link.first + link.count)]
        return [(note.id, note.code) for note in rows if not note.answered]

    @property
    def rows(self) -> list[tuple[int, int]]:
        return [(row.first, row.count) for row in self.link.row[: self.link.rows]]

    def say(self, *replies: object) -> None:
        for reply in replies:
            self.replies.write(m.REPLIES.encode(reply))

    def heard(self, kind: type) -> object:
        """The next command, which is one of this kind."""
        command = m.COMMANDS.decode(self.commands.read() or b"")
        assert isinstance(command, kind)
        return command


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.library.express_end(made.at)
    for address, size in ((made.page, PAGE), *((a, STAGING) for a in (made.staging, made.host))):
        memory.release(address, size)
    memory.release(made.pinned, STAGING)


def test_the_link_is_what_the_library_thinks(ends: Ends) -> None:
    assert ctypes.sizeof(Link) == ends.library.express_size


# --- what it sends ---


def test_commands_are_what_the_codec_makes_of_them(ends: Ends) -> None:
    rng, link = random.Random(5), ends.link
    library, calls, number = ends.library, ends.calls, 0
    for _ in range(2000):
        base, size, stream, device = (
            rng.choice([rng.getrandbits(bits) for bits in (7, 8, 16, 17, 32, 33, 62)]) or 1
            for _ in range(4)
        )
        link.last_id = number = rng.choice([number, rng.getrandbits(rng.choice([8, 31, 33, 60]))])
        base, size = base | 1 << 62, size % (1 << 60) + 1
        library.express_add(ends.at, base, size, DEVICE, device, NOWHERE)
        library.express_add(ends.at, 1 << 61, 1 << 60, PINNED, 0, 0)
        at = rng.randrange(size)
        size = rng.randrange(1, size - at + 1)
        host, index = (1 << 61) + at, at
        expected: list[object] = [
            m.CopyIn(number + 1, base + at, index, size, PID, device),
            m.CopyIn(number + 2, base + at, index, size, PID, stream),
            m.CopyOut(number + 3, base + at, index, size, PID, stream),
            m.Memset(number + 4, base + at, size & 0xFF, size, stream),
        ]
        said = [
            calls["express_in"](base + at, host, size, OF_MEMORY, 0, 0, 1),
            calls["express_in"](base + at, host, size, stream, 0, 0, 1),
            calls["express_out"](host, base + at, size, stream, 0, 0, 1, CALL),
            calls["express_fill"](base + at, size & 0xFF, size, stream),
        ]
        assert set(said) <= {0, LOOK}
        for command in expected:
            assert ends.commands.read() == m.COMMANDS.encode(command)
        library.express_remove(ends.at, base)
        library.express_heard(ends.at)
        link.sent = link.taken = 0


def test_pageable_bytes_are_taken_at_the_call(ends: Ends) -> None:
    for value in (1, 2):
        ctypes.memset(ends.host, value, 100)
        assert ends.into(ends.host, 100) == 0
        ctypes.memset(ends.host, 9, 100)
        command = ends.heard(m.CopyIn)
        assert isinstance(command, m.CopyIn)
        assert (command.stream, command.size) == (ORDINAL, 100)
        staged = ctypes.string_at(ends.staging + command.index - INDEX, 100)
        assert staged == bytes([value]) * 100


def test_a_place_is_not_given_twice(ends: Ends) -> None:
    """All places of the ring, then none, until the oldest is answered."""
    size, places = 60 << 10, set[int]()
    while ends.into(ends.host, size) == 0:
        command = ends.heard(m.CopyIn)
        assert isinstance(command, m.CopyIn)
        places.add(command.index)
    assert len(places) == STAGING // size - 1, "the ring's end is too short for one more"
    assert ends.into(ends.host, size) == ELSEWHERE
    ends.say(m.Done(1, 2, 1))
    assert ends.into(ends.host, size) == ELSEWHERE, "they come back in their order"
    ends.say(m.Done(2, 1, 1))
    assert ends.into(ends.host, size) == 0
    assert ends.into(ends.host, size) == 0
    assert ends.into(ends.host, size) == ELSEWHERE


def test_a_place_that_python_heard_of_is_free_when_it_says_so(ends: Ends) -> None:
    while ends.into(ends.host, 60 << 10) == 0:
        continue
    ends.library.express_heard(ends.at)
    assert ends.into(ends.host, 60 << 10) == ELSEWHERE
    ends.library.express_answered(ends.at, 1, 1)
    assert ends.into(ends.host, 60 << 10) == 0


Refused = Callable[[Ends], int]
REFUSED: dict[str, Refused] = {
    "behind the block": lambda e: e.into(e.host, 64, BLOCK_SIZE - 63),
    "before the block": lambda e: e.into(e.host, 64, -1),
    "an address that wraps": lambda e: e.into(e.host, 64, (1 << 64) - BLOCK - 1),
    "a size that wraps": lambda e: e.into(e.host, (1 << 64) - 1),
    "a fill behind the block": lambda e: e.fill(64, BLOCK_SIZE - 63),
    "no device memory": lambda e: e.into(e.host, 64, e.host - BLOCK),
    "into pinned memory": lambda e: e.into(e.host, 64, e.pinned - BLOCK),
    "from device memory": lambda e: e.into(BLOCK),
    "from before device memory": lambda e: e.into(BLOCK - 1),
    "from the end of device memory": lambda e: e.into(BLOCK + BLOCK_SIZE - 1),
    "to device memory": lambda e: e.out(BLOCK),
    "behind pinned memory": lambda e: e.into(e.pinned + STAGING - 63),
    "to behind pinned memory": lambda e: e.out(e.pinned + STAGING - 63),
    "more than a place": lambda e: e.into(e.host, 64 << 10),
    "more than the cell": lambda e: e.out(e.host, (16 << 10) + 1),
    "a host range that wraps": lambda e: e.into((1 << 64) - 32),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_plain_goes_elsewhere(ends: Ends, call: Refused) -> None:
    assert call(ends) == ELSEWHERE
    assert ends.commands.read() is None
    assert (ends.link.news, ends.link.sent) == (0, 0)


def test_registered_memory_goes_elsewhere(ends: Ends) -> None:
    ends.library.express_add(ends.at, ends.host + 4096, 4096, PINNED, 0, NOWHERE)
    for host in (ends.host + 4096 - 63, ends.host + 4096, ends.host + 8191):
        assert ends.into(host) == ends.out(host) == ELSEWHERE
    assert ends.into(ends.host + 4096 - 64) == ends.into(ends.host + 8192) == 0
    ends.library.express_remove(ends.at, ends.host + 4096)
    assert ends.into(ends.host + 4096) == 0


def test_a_block_to_the_end_of_all_addresses(ends: Ends) -> None:
    start = ends.host + 4096
    ends.library.express_add(ends.at, start, (1 << 64) - start, PINNED, 0, NOWHERE)
    assert ends.into(start) == ends.into(start - 63) == ELSEWHERE
    assert ends.into(start - 64) == 0


def test_many_blocks_are_found_by_address(ends: Ends) -> None:
    rng = random.Random(3)
    starts = [(1 << 50) + n * 512 for n in range(1000)]
    rng.shuffle(starts)
    for start in starts:
        assert ends.library.express_add(ends.at, start, 256, DEVICE, 0, NOWHERE)
    gone = set(starts[::3])
    for start in gone:
        ends.library.express_remove(ends.at, start)
        ends.library.express_remove(ends.at, start)  # once too often does no harm
    for start in starts:
        for at, inside in ((0, True), (255, True), (256, False), (-1, False)):
            said = ends.calls["express_fill"](start + at, 1, 1, 0)
            assert (said != ELSEWHERE) == (inside and start not in gone), (start, at)
            if said != ELSEWHERE:
                assert ends.commands.read() is not None
                ends.link.taken = ends.link.sent
                ends.library.express_heard(ends.at)


@pytest.mark.parametrize("field", ["shut", "credits"])
def test_something_has_to_be_seen_to_first(ends: Ends, field: str) -> None:
    setattr(ends.link, field, 1 if field == "shut" else 0)
    assert ends.fill() == ends.into(ends.host) == ends.out(ends.host) == ELSEWHERE
    assert ends.commands.read() is None


def test_credits_come_back_with_answers(ends: Ends) -> None:
    ends.link.credits = 2
    assert [ends.fill() for _ in range(3)] == [0, 0, ELSEWHERE]
    ends.say(m.Done(1, 1, 1))
    assert [ends.fill() for _ in range(2)] == [0, ELSEWHERE]


@pytest.mark.parametrize("what", ["credits", "notes", "bytes"])
def test_a_post_waits_a_while_for_its_place(ends: Ends, what: str) -> None:
    """An answer that comes meanwhile makes room; without one it goes the general way."""
    size = 64
    if what == "credits":
        ends.link.credits = 2
    else:
        ends.link.credits = 1 << 20
        size = 64 if what == "notes" else ends.link.ring_size // 16
    posts = 0
    while ends.into(ends.host, size) != ELSEWHERE:
        assert ends.commands.read(), "it is the worker's, and has left its place"
        posts += 1
    ends.link.patience = LONG
    without_gil = ctypes.CDLL(str(LIBRARY)).flyt_express_in
    without_gil.restype = ctypes.c_int64
    without_gil.argtypes = (
        ctypes.c_void_p, *[ctypes.c_uint64] * 3, ctypes.c_int64, ctypes.c_int, ctypes.c_uint64,
        ctypes.c_int,
    )  # fmt: skip
    timer = threading.Timer(0.05, ends.say, [m.Done(posts, 1, posts)])
    timer.start()
    said = without_gil(ends.at, BLOCK, ends.host, size, OF_MEMORY, 0, 0, 1)
    timer.join()
    assert said in (0, LOOK)
    assert ends.link.sent == posts + 1
    ends.link.patience = MOMENT
    while (said := ends.into(ends.host, size)) != ELSEWHERE:
        assert said in (0, LOOK)
    ends.link.patience = LONG
    ends.say(m.Result(posts + 1, 1, posts + 1, (), "no"))
    assert ends.into(ends.host, size) == ELSEWHERE, "that is Python's to read, so at once"


def test_damaged_rings_are_left(ends: Ends) -> None:
    memory.store_word(ends.page + layout.REPLY_RING, 1 << 40)
    assert not ends.read()
    assert ends.fill() == ELSEWHERE
    memory.store_word(ends.page + layout.REPLY_RING, 0)
    memory.store_word(ends.page + layout.COMMAND_RING + 64, 1 << 40)
    assert ends.fill() == ends.into(ends.host) == ends.out(ends.host) == ELSEWHERE
    assert (ends.link.news, ends.link.sent, ends.link.reader) == (0, 0, 0)


def test_a_full_ring_takes_nothing(ends: Ends) -> None:
    ends.link.credits = 1 << 20
    taken = 0
    while ends.fill() != ELSEWHERE:
        taken += 1
    assert taken == min(layout.COMMAND_PLACES, NOTES)


def test_the_connection_is_looked_at_now_and_then(ends: Ends) -> None:
    said = []
    for _ in range(5):
        ends.link.looked = 0
        said += [ends.fill() for _ in range(20)]
    assert [n for n, one in enumerate(said, 1) if one == LOOK] == [32, 64, 96]


def test_the_connection_is_looked_at_once_in_a_millisecond(ends: Ends) -> None:
    assert LOOK in [ends.fill() for _ in range(32)]
    ends.link.looked += 10**12  # a look that stays fresh for the test
    assert LOOK not in [ends.fill() for _ in range(64)]
    ends.link.looked = 0
    assert ends.fill() == LOOK


def test_a_sleeper_is_told_of_until_it_was_woken(ends: Ends) -> None:
    assert ends.commands.fall_asleep()
    assert ends.fill() == ends.into(ends.host) == 1
    ends.link.woken = 1
    assert ends.fill() == 0
    assert ends.out(ends.host, patience=0) == SENT - 4
    assert ends.link.asleep == 0


# --- what it reads ---


def test_successes_are_told_in_rows(ends: Ends) -> None:
    ends.link.last_id = ends.link.sent = 300
    assert not ends.read()
    ends.say(m.Done(3, 1, 3), m.Done(4, 4, 1), m.Done(9, 5, 200), m.Done(10, 250, 1))
    assert ends.read()
    assert ends.rows == [(1, 204), (250, 1)]
    assert ends.link.taken == 10
    assert not ends.read()


def test_too_many_rows_are_left_for_the_next_time(ends: Ends) -> None:
    ends.link.last_id = ends.link.sent = 300
    ends.say(*(m.Done(n, 2 * n, 1) for n in range(1, 20)))
    assert ends.read()
    assert len(ends.rows) == ROWS
    ends.library.express_heard(ends.at)
    assert ends.read()
    assert ends.rows == [(2 * n, 1) for n in range(ROWS + 1, 20)]


@pytest.mark.parametrize(
    "entry",
    [
        m.REPLIES.encode(m.Result(2, 0, 1, (), "")),
        m.REPLIES.encode(m.Result(2, 700, 1, (1,), "x")),
        m.REPLIES.encode(m.Credit(5)),
        m.REPLIES.encode(m.Sticky(700, "gone")),
        m.REPLIES.encode(m.Done(1, 2, 1))[:-1],
        m.REPLIES.encode(m.Done(1, 2, 1)) + b"\0",
        m.REPLIES.encode(m.Done(1, 1, 100)),  # more than were sent
        m.REPLIES.encode(m.Done(1, 9, 2)),  # to a command that was never sent
        b"\x94\x04\x01\x02\xcf\x00\x00\x00\x01\x00\x00\x00\x00",  # a count of 33 bits
        b"\x94\x05\x01\x02\x01",  # four words of another code
        b"\xc1",
        ring.ELSEWHERE,
    ],
)
def test_what_is_no_plain_answer_is_left(ends: Ends, entry: bytes) -> None:
    ends.link.last_id = ends.link.sent = 9
    ends.say(m.Done(1, 1, 1))
    ends.replies.write(entry)
    ends.say(m.Done(9, 9, 1))
    assert ends.read()
    assert ends.rows == [(1, 1)]
    assert not ends.read()
    assert ends.fill() == ELSEWHERE, "Python has to see it first"
    assert ends.read_end.read() == entry
    assert ends.read()
    assert ends.rows == [(1, 1), (9, 1)]


def test_what_was_sent_is_noted_until_it_is_answered(ends: Ends) -> None:
    ends.link.last_id = 40
    assert ends.fill() == ends.into(ends.host) == ends.into(ends.pinned) == 0
    assert ends.notes == [(41, FILL), (42, COPY_IN), (43, COPY_IN)]
    ends.link.sent = 50
    ends.say(m.Done(4, 42, 1), m.Done(5, 39, 2))
    assert ends.read()
    assert (ends.notes, ends.rows) == ([(41, FILL), (43, COPY_IN)], [(39, 2)])
    ends.say(m.Done(6, 41, 1))
    assert ends.read()
    assert (ends.notes, ends.link.first) == ([(43, COPY_IN)], 43)
    assert (ends.link.posts, ends.link.staged_in, ends.link.pinned_in) == (3, 64, 64)


def test_a_train_is_noted_as_far_as_it_is_on_its_way(ends: Ends) -> None:
    for number in range(1, 2000):
        assert ends.into(ends.host, 4096) in (0, LOOK)
        assert ends.commands.read() is not None
        if number % 7 == 0:
            ends.say(m.Done(number, number - 6, 7))
    assert len(ends.notes) <= 7
    assert ends.link.posts == 1999


def test_waiting_for_an_answer_that_comes_in_a_row(ends: Ends) -> None:
    ends.link.last_id = ends.link.sent = 11
    ends.say(m.Done(3, 1, 3), m.Done(9, 4, 6), m.Done(10, 10, 1))
    ends.wait(9, LONG)
    assert ends.link.taken == 9, "no further than it has to"
    ends.wait(11)
    assert ends.rows == [(1, 10)]


def test_waiting_ends_at_any_other_answer(ends: Ends) -> None:
    ends.link.last_id = ends.link.sent = 2
    ends.say(m.Done(1, 1, 1), m.Result(2, 700, 2, (), "x"))
    ends.wait(2, LONG)
    assert ends.rows == [(1, 1)]
    assert m.REPLIES.decode(ends.read_end.read() or b"") == m.Result(2, 700, 2, (), "x")


# --- copies that are waited for ---


def test_bytes_that_take_longer_are_the_callers(ends: Ends) -> None:
    assert ends.out(ends.host) == SENT - 1
    assert (ends.link.reader, ends.link.owner) == (1, CALL)
    assert ends.out(ends.host) == ELSEWHERE, "there is one cell"
    assert ends.notes == [(1, COPY_OUT)]
    assert (ends.link.calls, ends.link.staged_out) == (1, 64)


def test_bytes_of_an_answer_that_is_there(ends: Ends) -> None:
    """The command comes after its answer here: nobody else's bytes are in the cell."""
    ends.link.last_id, ends.link.sent = 7, 8
    ends.say(m.Done(8, 7, 1))
    assert ends.read()
    ctypes.memset(ends.staging, 5, STAGING)
    ends.replies.write(m.REPLIES.encode(m.Done(9, 8, 1)))
    assert ends.out(ends.host) == ELSEWHERE, "an answer to what was not sent is Python's"
    assert ctypes.string_at(ends.host, 64) == bytes(64)


def test_pinned_copies_that_are_waited_for(ends: Ends) -> None:
    assert ends.into(ends.pinned, wait=True) == SENT - 1
    assert ends.out(ends.pinned) == SENT - 2
    assert (ends.link.calls, ends.link.posts, ends.link.reader) == (2, 0, 0)
    command = ends.heard(m.CopyIn)
    assert isinstance(command, m.CopyIn)
    assert command.index == PINNED_INDEX


# --- synchronises ---

QUEUE = 5
"""The stream of `Ends.fill`."""


def test_a_stream_is_done_when_its_last_command_is(ends: Ends) -> None:
    for _ in range(3):
        assert ends.fill() == 0
    ends.say(m.Done(2, 1, 2))
    assert ends.sync(QUEUE) == ELSEWHERE
    ends.say(m.Done(3, 3, 1))
    assert ends.sync(QUEUE) == 0
    assert ends.commands.taken == 0, "it sends nothing"


def test_other_streams_are_not_waited_for(ends: Ends) -> None:
    assert ends.fill() == ends.into(ends.pinned) == 0  # on QUEUE, and on the device's legacy stream
    ends.say(m.Done(2, 2, 1))
    assert ends.sync(ORDINAL) == 0
    assert ends.sync(QUEUE) == ELSEWHERE
    assert ends.into(ends.pinned) == 0
    ends.say(m.Done(3, 1, 1))
    assert ends.sync(QUEUE) == 0
    assert ends.sync(ORDINAL) == ELSEWHERE


def test_a_command_that_python_knows_of_is_waited_for(ends: Ends) -> None:
    ends.link.last_id = ends.link.sent = 9
    assert ends.sync(QUEUE, last=7) == ELSEWHERE
    ends.say(m.Done(6, 1, 6))
    assert ends.sync(QUEUE, last=7) == ELSEWHERE
    ends.say(m.Done(7, 7, 1))
    assert ends.sync(QUEUE, last=7) == 0
    assert ends.fill() == 0
    assert ends.sync(QUEUE, last=7) == ELSEWHERE, "a later one stands in the notes"
    assert ends.rows == [(1, 7)]


def test_an_answer_that_comes_meanwhile_ends_the_wait(ends: Ends) -> None:
    assert ends.fill() == 0
    timer = threading.Timer(0.05, ends.say, (m.Done(1, 1, 1),))
    timer.start()
    while ends.sync(QUEUE, patience=10**6) == ELSEWHERE and timer.is_alive():
        time.sleep(0.001)
    timer.join()
    assert ends.sync(QUEUE) == 0


def test_an_error_behind_the_answer_is_pythons_to_tell(ends: Ends) -> None:
    assert ends.fill() == ends.into(ends.pinned) == 0
    error = m.Result(2, 700, 2, (), "x")
    ends.say(m.Done(1, 1, 1), error)
    assert ends.sync(QUEUE) == ELSEWHERE
    assert m.REPLIES.decode(ends.read_end.read() or b"") == error


def test_without_a_fresh_answer_the_connection_is_looked_at(ends: Ends) -> None:
    assert ends.sync(QUEUE) == ELSEWHERE, "nothing was ever heard"
    assert ends.fill() == 0
    ends.say(m.Done(1, 1, 1))
    assert ends.sync(QUEUE) == 0
    time.sleep(0.002)
    assert ends.sync(QUEUE) == ELSEWHERE
    ends.link.shut = 1
    assert ends.fill() == ELSEWHERE
    ends.link.shut = 0
    assert ends.fill() == 0
    ends.say(m.Done(2, 2, 1))
    ends.link.shut = 1
    assert ends.sync(QUEUE) == ELSEWHERE


# --- what Python hands over ---

GOOD: dict[str, tuple[object, ...]] = {
    "express_in": (BLOCK, BLOCK, 64, 5, 0, 0, 1),
    "express_out": (BLOCK, BLOCK, 64, 5, 0, 0, 1, CALL),
    "express_fill": (BLOCK, 7, 64, 5),
    "express_part": (BLOCK, 0, 64, 5, BLOCK),
    "express_launch": (BLOCK, (1, 1, 1), (1, 1, 1), 0, 5, b""),
    "express_sync": (5, 0, 0, 1),
}
"""Arguments of the right kinds, one set for each call."""


class Refuses:
    def __index__(self) -> int:
        raise RuntimeError("not now")


class Number(int):
    pass


@pytest.mark.parametrize("name", sorted(GOOD))
def test_arguments_that_are_none_of_its_kind_go_elsewhere(ends: Ends, name: str) -> None:
    """And leave no exception and no reference behind; the general way names what is wrong."""
    call, good = ends.calls[name], GOOD[name]
    wrong: list[object] = [
        None, "64", 64.0, [], (), (1, 1), (1, 1, 1, 1), (1, 1, "1"), (1, 1, -1), (1, 1, 1 << 32),
        bytearray(b"xyz"), Refuses(), object(), -(1 << 70), 1 << 64, (1 << 64) - 1,
    ]  # fmt: skip
    own = [
        one for one in wrong if isinstance(one, (list, bytearray, Refuses)) or type(one) is object
    ]
    counts = [sys.getrefcount(one) for one in own]
    for _ in range(100):
        for place in range(len(good)):
            for one in wrong:
                arguments = (*good[:place], one, *good[place + 1 :])
                assert call(*arguments) == ELSEWHERE, (place, one)
        assert call(*good[:-1]) == call(*good, 1) == call() == ELSEWHERE
    del arguments, one
    assert [sys.getrefcount(one) for one in own] == counts
    assert not ends.commands.read()
    assert not ends.link.news


def test_sizes_of_nothing_go_elsewhere(ends: Ends) -> None:
    assert ends.fill(0) == ends.into(ends.host, 0) == ends.into(ends.pinned, 0) == ELSEWHERE
    assert ends.out(ends.host, 0) == ends.out(ends.pinned, 0) == ELSEWHERE
    assert not ends.commands.read()


@pytest.mark.parametrize(
    ("value", "byte"),
    [(0, 0), (255, 255), (256, 0), (-1, 255), ((1 << 31) - 1, 255), (-(1 << 31), 0)],
)
def test_a_fill_takes_the_low_byte_of_an_int(ends: Ends, value: int, byte: int) -> None:
    assert ends.calls["express_fill"](BLOCK, value, 64, 5) == 0
    assert ends.heard(m.Memset) == m.Memset(1, BLOCK, byte, 64, 5)


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1, 1 << 32, 1 << 63])
def test_a_fill_takes_no_more_than_an_int(ends: Ends, value: int) -> None:
    assert ends.calls["express_fill"](BLOCK, value, 64, 5) == ELSEWHERE


def test_kinds_of_int_are_ints(ends: Ends) -> None:
    assert ends.calls["express_fill"](Number(BLOCK), True, Number(64), Number(5)) == 0
    assert ends.heard(m.Memset) == m.Memset(1, BLOCK, 1, 64, 5)


@pytest.mark.parametrize("name", sorted(GOOD))
def test_no_code_of_a_program_runs_within_a_call(ends: Ends, name: str) -> None:
    """It would run with the lock held, and its exception, an interrupt's too, would be lost."""
    ran = []

    class Indexed:
        def __index__(self) -> int:
            ran.append(name)
            raise KeyboardInterrupt

    good = GOOD[name]
    for place in range(len(good)):
        arguments = (*good[:place], Indexed(), *good[place + 1 :])
        assert ends.calls[name](*arguments) == ELSEWHERE
    assert not ran


def test_the_calls_outlive_what_made_them(ends: Ends) -> None:
    again = ends.library.entries(ends.at)
    assert set(again) == set(GOOD) == set(ends.calls)
    for call in again.values():
        assert "flyt" in (call.__doc__ or "")
        assert sys.getrefcount(call) <= 4
    del again
    assert ends.fill() == 0


# --- launches ---

FUNCTION, LIMITS = 1 << 20, ((2**31 - 1, 65535, 65535), (1024, 1024, 64))
ATTRIBUTES = {0: 1024, 8: 48 << 10}
"""CUfunction_attribute: threads of a block, bytes of shared memory."""
Shape = tuple[int, int, int, int, int, int, int]


def kernel(size: int = 12, number: int = FUNCTION) -> PlainKernel:
    return PlainKernel(number, size, ATTRIBUTES, *LIMITS)


def launch(
    ends: Ends, shape: Shape = (1, 1, 1, 1, 1, 1, 0), size: int = 12, known: int | None = None
) -> int:
    """A launch with so many bytes of parameters, of a function that takes as many, or ``known``."""
    one, params = kernel(size if known is None else known), bytes(range(256))[:size]
    grid, block, shared = shape[:3], shape[3:6], shape[6]
    return ends.calls["express_launch"](one.at, grid, block, shared, QUEUE, params)


def test_the_kernel_is_what_the_library_thinks(ends: Ends) -> None:
    assert ctypes.sizeof(Fields) == ends.library.express_kernel_size


def test_a_launch_is_what_the_codec_makes_of_it(ends: Ends) -> None:
    rng, link = random.Random(9), ends.link
    for _ in range(2000):
        link.last_id = rng.getrandbits(rng.choice([5, 8, 31, 33, 60]))
        number, stream = (rng.getrandbits(rng.choice([7, 8, 21, 33, 62])) for _ in range(2))
        grid = tuple(rng.randrange(1, rng.choice([2, 200, 300, most + 1])) for most in LIMITS[0])
        block = (rng.choice([1, 32, 256]), rng.choice([1, 2, 4]), 1)
        shared, params = rng.randrange(48 << 10), rng.randbytes(rng.choice([0, 1, 8, 31]))
        one = kernel(len(params), number)
        said = ends.calls["express_launch"](one.at, grid, block, shared, stream, params)
        assert said in (0, LOOK)
        expected = m.Launch(
            link.last_id, number, *grid, *block, shared, stream, (), params, False
        )  # fmt: skip
        assert ends.commands.read() == m.COMMANDS.encode(expected)
        assert ends.notes == [(link.last_id, LAUNCH)]
        ends.library.express_heard(ends.at)
        link.sent = link.taken = 0


NOT_TAKEN: dict[str, Shape] = {
    "shared memory beyond 32 bits": (1, 1, 1, 1, 1, 1, 1 << 32),
    "no block": (0, 1, 1, 1, 1, 1, 0),
    "no thread": (1, 1, 1, 1, 1, 0, 0),
    "too many blocks": (1 << 31, 1, 1, 1, 1, 1, 0),
    "too many rows of blocks": (1, 65536, 1, 1, 1, 1, 0),
    "too long a block": (1, 1, 1, 1025, 1, 1, 0),
    "too high a block": (1, 1, 1, 1, 1, 65, 0),
    "too many threads": (1, 1, 1, 1024, 2, 1, 0),
    "many too many threads": (1, 1, 1, 1024, 1024, 64, 0),
    "too much shared memory": (1, 1, 1, 1, 1, 1, (48 << 10) + 1),
    "everything": (2**32 - 1,) * 7,
}


@pytest.mark.parametrize("shape", NOT_TAKEN.values(), ids=NOT_TAKEN.keys())
def test_what_the_driver_may_refuse_goes_elsewhere(ends: Ends, shape: Shape) -> None:
    assert not kernel().takes(shape[:3], shape[3:6], shape[6])
    assert launch(ends, shape) == ELSEWHERE
    assert (ends.commands.read(), ends.link.news) == (None, 0)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1, 1, 0), (2**31 - 1, 65535, 65535, 16, 1, 64, 48 << 10)]
)
def test_what_the_driver_takes_at_most(ends: Ends, shape: Shape) -> None:
    assert kernel().takes(shape[:3], shape[3:6], shape[6])
    assert launch(ends, shape) == 0


def test_parameters_of_another_size_go_elsewhere(ends: Ends) -> None:
    assert launch(ends, size=11, known=12) == launch(ends, size=13, known=12) == ELSEWHERE
    assert ends.commands.read() is None


def test_parameters_as_long_as_a_place(ends: Ends) -> None:
    """One byte more goes by the connection: that is Python's."""
    ends.link.last_id = 1 << 40
    most = max(size for size in range(120) if launch(ends, size=size) != ELSEWHERE)
    last = b""
    while (entry := ends.commands.read()) is not None:
        last = entry
    assert len(last) == ring.LARGEST
    assert len(m.COMMANDS.decode(last).params) == most
    assert launch(ends, size=most + 1) == launch(ends, size=255) == ELSEWHERE


def test_launches_are_posts_with_credits_notes_and_looks(ends: Ends) -> None:
    said = []
    for _ in range(4):
        ends.link.looked = 0
        said += [launch(ends) for _ in range(16)]
    assert [n for n, one in enumerate(said, 1) if one == LOOK] == [32, 64]
    assert (ends.link.posts, ends.link.calls) == (64, 0)
    ends.link.credits = 64
    assert launch(ends) == ELSEWHERE
    ends.say(m.Done(64, 1, 64))
    assert launch(ends) == 0
    assert ends.sync(QUEUE) == ELSEWHERE, "the last one is not done"
    ends.link.shut = 1
    assert launch(ends) == ELSEWHERE
