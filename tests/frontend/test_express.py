# SPDX-License-Identifier: Apache-2.0
"""The compiled half of the short way: what it writes into a ring, and which answers it reads."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator

import pytest

from flyt.frontend.express_link import COPY_IN, COPY_OUT, FILL, Link
from flyt.rpc import messages as m
from flyt.shm import layout, memory, ring
from flyt.shm.native import native
from flyt.shm.ring import RingReader, RingWriter, backend_rings, frontend_rings

pytestmark = pytest.mark.skipif(
    native() is None, reason="no C compiler was there when Flyt was installed"
)

PID = 4711
PAGE = layout.RINGS_END + 4096 - layout.RINGS_END % 4096
FULL, DAMAGED = -3, -2
MOMENT, LONG = 100_000, 10**10
"""Nanoseconds."""


class Ends:
    """The short way's link, and the backend's ends of the rings."""

    commands: RingReader
    replies: RingWriter

    def __init__(self) -> None:
        library = native()
        assert library is not None
        self.library = library
        self.page = memory.anonymous(PAGE)
        self.commands, self.replies = backend_rings(library, self.page)
        self.written, self.read_end = frontend_rings(library, self.page)
        link = self.link = Link(pid=PID)
        link.commands, link.commands_written, link.command_places = self.written.place
        link.replies, link.replies_read, link.reply_places = self.read_end.place

    def post(self, *words: int) -> int:
        return int(self.library.express_post(ctypes.byref(self.link), *words))

    def call(self, number: int, patience: int = MOMENT) -> int:
        link = ctypes.byref(self.link)
        words = (COPY_OUT, number, 1 << 45, 4096, 64, 0)
        return int(self.library.express_call(link, *words, patience, 1))

    def wait(self, number: int, patience: int = MOMENT) -> int:
        """How many answers came."""
        self.library.express_wait(ctypes.byref(self.link), number, patience, 1)
        return int(self.link.count)

    def read(self) -> tuple[int, int, int] | None:
        """Taken, first and count of the row that was read."""
        if not self.library.express_read(ctypes.byref(self.link)):
            assert self.link.count == 0
            return None
        return self.link.taken, self.link.first, self.link.count

    def say(self, *replies: object) -> None:
        for reply in replies:
            self.replies.write(m.REPLIES.encode(reply))


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    memory.release(made.page, PAGE)


def test_the_link_is_what_the_library_thinks(ends: Ends) -> None:
    assert ctypes.sizeof(Link) == ends.library.express_size


def test_commands_are_what_the_codec_makes_of_them(ends: Ends) -> None:
    rng = random.Random(5)
    for _ in range(2000):
        number, address, second, size, stream = (
            rng.choice([rng.getrandbits(bits) for bits in (0, 7, 8, 16, 17, 32, 33, 64)])
            for _ in range(5)
        )
        for code, kind in ((COPY_IN, m.CopyIn), (COPY_OUT, m.CopyOut)):
            assert ends.post(code, number, address, second, size, stream) == 0
            command = kind(number, address, second, size, PID, stream)
            assert ends.commands.read() == m.COMMANDS.encode(command)
        assert ends.post(FILL, number, address, second & 0xFF, size, stream) == 0
        fill = m.Memset(number, address, second & 0xFF, size, stream)
        assert ends.commands.read() == m.COMMANDS.encode(fill)


def test_answers_in_a_row_are_read_together(ends: Ends) -> None:
    assert ends.read() is None
    ends.say(m.Done(3, 1, 3), m.Done(4, 4, 1), m.Done(9, 5, 200))
    assert ends.read() == (9, 1, 204)
    assert ends.read() is None


def test_a_gap_begins_another_row(ends: Ends) -> None:
    ends.say(m.Done(1, 1, 1), m.Done(2, 3, 1), m.Done(3, 2, 1))
    assert [ends.read() for _ in range(4)] == [(1, 1, 1), (2, 3, 1), (3, 2, 1), None]


@pytest.mark.parametrize(
    "entry",
    [
        m.REPLIES.encode(m.Result(2, 0, 1, (), "")),
        m.REPLIES.encode(m.Result(2, 700, 1, (1,), "x")),
        m.REPLIES.encode(m.Credit(5)),
        m.REPLIES.encode(m.Sticky(700, "gone")),
        m.REPLIES.encode(m.Done(1, 2, 1))[:-1],
        m.REPLIES.encode(m.Done(1, 2, 1)) + b"\0",
        b"\x94\x04\x01\x02\xcf\x00\x00\x00\x01\x00\x00\x00\x00",  # a count of 33 bits
        b"\x94\x05\x01\x02\x01",  # four words of another code
        b"\xc1",
        ring.ELSEWHERE,
    ],
)
def test_what_is_no_plain_answer_is_left(ends: Ends, entry: bytes) -> None:
    ends.say(m.Done(1, 1, 1))
    ends.replies.write(entry)
    ends.say(m.Done(9, 9, 1))
    assert ends.read() == (1, 1, 1)
    assert ends.read() is None
    assert ends.read_end.read() == entry
    assert ends.read() == (9, 9, 1)


def test_damaged_rings_are_left(ends: Ends) -> None:
    memory.store_word(ends.page + layout.REPLY_RING, 1 << 40)
    assert ends.read() is None
    assert ends.call(1) == 0
    memory.store_word(ends.page + layout.COMMAND_RING + 64, 1 << 40)
    assert ends.post(FILL, 1, 2, 3, 4, 5) == DAMAGED


def test_a_full_ring_takes_nothing(ends: Ends) -> None:
    for number in range(layout.COMMAND_PLACES):
        assert ends.post(FILL, number, 2, 3, 4, 5) == 0
    assert ends.post(FILL, 1, 2, 3, 4, 5) == FULL
    assert ends.call(1) == FULL
    assert (ends.link.count, ends.written.written) == (0, layout.COMMAND_PLACES)


def test_a_call_waits_for_its_answer(ends: Ends) -> None:
    def backend() -> None:
        while not ends.commands.wait(1.0, polite=True):
            continue
        ends.say(m.Done(7, 5, 2), m.Done(8, 7, 1))

    thread = threading.Thread(target=backend)
    thread.start()
    assert ends.call(7, LONG) == 0
    assert (ends.link.taken, ends.link.first, ends.link.count) == (8, 5, 3)
    thread.join()


def test_a_call_ends_at_any_other_answer(ends: Ends) -> None:
    ends.say(m.Done(1, 1, 1), m.Result(2, 700, 2, (), "x"))
    assert ends.call(2, LONG) == 0
    assert ends.link.count == 1
    assert m.REPLIES.decode(ends.read_end.read() or b"") == m.Result(2, 700, 2, (), "x")


def test_a_call_waits_for_no_longer_than_it_may(ends: Ends) -> None:
    ends.say(m.Done(1, 1, 1))
    assert ends.call(2) == 0
    assert (ends.link.first, ends.link.count) == (1, 1)


def test_a_call_does_not_wait_for_a_sleeper(ends: Ends) -> None:
    assert ends.commands.fall_asleep()
    assert ends.call(2, LONG) == 1
    assert ends.commands.read() is not None


def test_waiting_for_an_answer_that_comes_in_a_row(ends: Ends) -> None:
    ends.say(m.Done(3, 1, 3), m.Done(9, 4, 6), m.Done(10, 10, 1))
    assert ends.wait(9, LONG) == 9
    assert (ends.link.first, ends.link.taken) == (1, 9)
    assert ends.wait(11) == 1
    assert ends.wait(11) == 0
