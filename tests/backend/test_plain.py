# SPDX-License-Identifier: Apache-2.0
"""The compiled loop that serves plain commands: what it does, and all that it leaves to Python.

The table is filled here as `flyt.backend.plain` fills it, over memory of the test's own. A device
that takes its time is made of functions of the form that the driver's have.
"""

from __future__ import annotations

import ctypes
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from flyt.backend import plain, plain_table
from flyt.backend.plain import IDLE, KICK, LATE, LOOK, OTHER
from flyt.backend.plain_table import Table
from flyt.errors import DeviceError
from flyt.rpc import messages as m
from flyt.shm import layout, memory
from flyt.shm.native import Native, native
from flyt.shm.ring import RingReader, RingWriter, backend_rings, frontend_rings

pytestmark = pytest.mark.skipif(
    native() is None, reason="no C compiler was there when Flyt was installed"
)

PID, STREAM, DEVICE = 4711, 0x50, 0
BLOCK = 8192
"""Bytes of the one block, and of the one segment."""
INDEX = 65_536
"""Where in the window the segment begins."""
LINGER, LONG = 200_000, 10**11
"""Nanoseconds; the second bounds a hang."""
NOT_READY, INVALID_VALUE = 600, 1
PAGE = layout.RINGS_END + 4096 - layout.RINGS_END % 4096

Move = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
)
Query = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Loop:
    """A table, its rings, and the client's ends of them."""

    commands: RingWriter
    replies: RingReader

    def __init__(self) -> None:
        library = native()
        assert library is not None
        self.library: Native = library
        self.page = memory.anonymous(PAGE)
        self.memory = memory.anonymous(2 * BLOCK)
        self.block, segment = self.memory, self.memory + BLOCK
        self.commands, self.replies = frontend_rings(library, self.page)
        self.read, self.written = backend_rings(library, self.page)
        table = self.table = Table(base=segment - INDEX, pid=PID, largest=plain.LARGEST)
        table.commands, table.commands_read, table.command_places = self.read.place
        table.replies, table.replies_written, table.reply_places = self.written.place
        table.block[0] = plain_table.Range(self.block, self.block + BLOCK, DEVICE)
        table.segment[0] = plain_table.Range(INDEX, INDEX + BLOCK, 0)
        table.queue[0] = plain_table.Stream(
            STREAM, DEVICE, 0, library.plain_move, library.plain_fill, None, None
        )
        table.blocks = table.segments = table.streams = 1
        self.device = memory.view(self.block, BLOCK)
        self.window = memory.view(segment, BLOCK)

    def close(self) -> None:
        memory.release(self.page, PAGE)
        memory.release(self.memory, 2 * BLOCK)

    def put(self, *fields: Any) -> None:
        self.commands.write(msgpack.packb(fields))

    def serve(self, linger: int = LINGER, most: int = LONG, longest: int = 10**9) -> int:
        table = ctypes.byref(self.table)
        return int(self.library.plain_serve(table, linger, most, longest, True))

    def answers(self) -> list[m.Done]:
        found = []
        while (entry := self.replies.read()) is not None:
            found.append(m.REPLIES.decode(entry))
        return found


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def copy_in(loop: Loop, **changed: Any) -> tuple[Any, ...]:
    fields = {
        "code": 6, "id": 1, "address": loop.block, "index": INDEX, "size": 64, "pid": PID,
        "stream": STREAM,
    }  # fmt: skip
    return tuple({**fields, **changed}.values())


def fill(loop: Loop, **changed: Any) -> tuple[Any, ...]:
    fields = {"code": 11, "id": 1, "address": loop.block, "value": 7, "size": 64, "stream": STREAM}
    return tuple({**fields, **changed}.values())


def copy_out(loop: Loop, **changed: Any) -> tuple[Any, ...]:
    return copy_in(loop, code=7, **changed)


# --- what it does ---


def test_the_table_is_what_the_library_thinks(loop: Loop) -> None:
    assert ctypes.sizeof(Table) == loop.library.plain_size


def test_copies_and_fills_move_their_bytes_and_are_answered(loop: Loop) -> None:
    loop.window[:64] = bytes(range(64))
    loop.put(*copy_in(loop, address=loop.block + 100))
    loop.put(*fill(loop, id=2, address=loop.block + 120, size=4))
    loop.put(*copy_out(loop, id=3, address=loop.block + 100, index=INDEX + BLOCK - 64))
    loop.table.taken = 40
    assert loop.serve() == IDLE
    expected = bytearray(range(64))
    expected[20:24] = bytes([7]) * 4
    assert bytes(loop.device[100:164]) == bytes(loop.window[-64:]) == bytes(expected)
    assert not any(loop.device[:100])
    assert not any(loop.device[164:])
    assert loop.answers() == [m.Done(43, 1, 3)]
    assert (loop.table.taken, loop.table.moved, loop.table.count) == (43, 128, 0)


@pytest.mark.parametrize("value", [0, 0x7F, 0x80, 0xFF, 0x100, 0xFFFF, 1 << 16, 1 << 32])
def test_numbers_of_every_length_come_back(loop: Loop, value: int) -> None:
    loop.put(*fill(loop, id=value))
    loop.table.taken = value
    assert loop.serve() == IDLE
    assert loop.answers() == [m.Done(value + 1, value, 1)]


def test_numbers_that_do_not_follow_are_answered_apart(loop: Loop) -> None:
    for number in (5, 6, 9, 9, 2**64 - 1, 0):
        loop.put(*fill(loop, id=number))
    assert loop.serve() == IDLE
    told = [(a.first, a.count) for a in loop.answers()]
    # Of 64 bits: what is not answered here is Python's, whose numbers don't go round.
    assert told == [(5, 2), (9, 1), (9, 1), (2**64 - 1, 1), (0, 1)]


def test_a_batch_is_bounded(loop: Loop) -> None:
    for number in range(100):
        loop.put(*fill(loop, id=number))
    assert loop.serve() == IDLE
    assert [a.count for a in loop.answers()] == [32, 32, 32, 4]


def test_it_returns_now_and_then_however_much_comes(loop: Loop) -> None:
    for number in range(200):
        loop.put(*fill(loop, id=number, size=1))
    assert loop.serve(most=1) == LOOK
    assert 0 < loop.table.taken < 200
    assert loop.serve() == IDLE
    assert loop.table.taken == 200
    assert sum(answer.count for answer in loop.answers()) == 200


def test_a_sleeping_client_is_woken_once_for_each_sleep(loop: Loop) -> None:
    for sleep in (1, 2):
        assert loop.replies.fall_asleep()
        loop.put(*fill(loop, id=sleep))
        assert loop.serve() == KICK
        assert loop.table.woken == sleep
        loop.put(*fill(loop, id=sleep + 10))
        assert loop.serve() == IDLE
        assert len(loop.answers()) == 2


# --- what it leaves ---

LEFT: dict[str, Callable[[Loop], Any]] = {
    "another command": lambda loop: (14, 1),
    "an unknown code": lambda loop: (200, 1),
    "no field": lambda loop: (),
    "no code": lambda loop: ("a",),
    "a field too few": lambda loop: copy_in(loop)[:-1],
    "a field too many": lambda loop: (*copy_in(loop), 0),
    "a fill with a field too many": lambda loop: (*fill(loop), 0),
    "sixteen fields": lambda loop: (*copy_in(loop), *range(9)),
    "a negative number": lambda loop: copy_in(loop, size=-1),
    "a text": lambda loop: copy_in(loop, index="x"),
    "a float": lambda loop: copy_in(loop, address=1.5),
    "nothing for a number": lambda loop: copy_in(loop, pid=None),
    "a size of 0": lambda loop: copy_in(loop, size=0),
    "a size above the block's": lambda loop: copy_in(loop, size=BLOCK + 1),
    "a size above what is brief": lambda loop: copy_in(loop, size=plain.LARGEST + 1),
    "a huge size": lambda loop: copy_in(loop, size=2**64 - 1),
    "one byte behind the block": lambda loop: copy_in(loop, address=loop.block + BLOCK - 63),
    "the block's end": lambda loop: copy_in(loop, address=loop.block + BLOCK),
    "one byte before the block": lambda loop: copy_in(loop, address=loop.block - 1),
    "the last address": lambda loop: copy_in(loop, address=2**64 - 1),
    "the address 0": lambda loop: copy_in(loop, address=0),
    "one byte behind the segment": lambda loop: copy_in(loop, index=INDEX + BLOCK - 63),
    "one byte before the segment": lambda loop: copy_out(loop, index=INDEX - 1),
    "the control page": lambda loop: copy_out(loop, index=0),
    "an index that wraps": lambda loop: copy_in(loop, index=2**64 - 32),
    "another's pid": lambda loop: copy_in(loop, pid=PID + 1),
    "a pid of 64 bits": lambda loop: copy_in(loop, pid=PID + (1 << 32)),
    "an unknown stream": lambda loop: copy_in(loop, stream=STREAM + 1),
    "an unknown stream of a fill": lambda loop: fill(loop, stream=0),
    "a fill beyond the block": lambda loop: fill(loop, address=loop.block + BLOCK - 63),
    "a value of 9 bits": lambda loop: fill(loop, value=256),
}


def left_alone(loop: Loop, entry: bytes) -> bool:
    """Whether nothing happens, and the entry is there for Python."""
    before = bytes(loop.device), bytes(loop.window)
    loop.commands.write(entry)
    why = loop.serve()
    nothing = (bytes(loop.device), bytes(loop.window)) == before and not loop.answers()
    return why == OTHER and nothing and not loop.table.taken and loop.read.read() == entry


@pytest.mark.parametrize("fields", LEFT.values(), ids=LEFT.keys())
def test_what_is_not_plain_is_left_in_the_ring(
    loop: Loop, fields: Callable[[Loop], tuple[Any, ...]]
) -> None:
    loop.window[:] = b"\xff" * BLOCK
    assert left_alone(loop, msgpack.packb(fields(loop)))


def test_an_entry_that_announces_another_message_is_left(loop: Loop) -> None:
    assert left_alone(loop, b"")


def test_every_truncation_and_every_appendix_is_left(loop: Loop) -> None:
    whole = msgpack.packb(copy_in(loop, id=2**40, size=300))
    for length in range(len(whole)):
        assert left_alone(loop, whole[:length]), length
    for extra in (b"\0", b"\x90", whole):
        assert left_alone(loop, whole + extra)


def test_a_wild_entry_does_nothing_or_what_python_would_do(loop: Loop) -> None:
    """Whatever is served must be a command that Python's decoder takes, with the same fields."""
    rng = random.Random(11)
    served = 0
    for _ in range(20_000):
        entry = bytearray(msgpack.packb(rng.choice([copy_in, copy_out, fill])(loop)))
        for _ in range(rng.randrange(3)):
            entry[rng.randrange(len(entry))] = rng.randrange(256)
        loop.table.taken = loop.table.moved = 0
        loop.commands.write(bytes(entry))
        if loop.serve(linger=1) == OTHER:
            assert loop.read.read() == entry
            continue
        served += 1
        command = m.COMMANDS.decode(bytes(entry))
        [answer] = loop.answers()
        assert (answer.first, answer.count) == (command.id, 1)
        assert loop.block <= command.address <= loop.block + BLOCK - command.size
        if not isinstance(command, m.Memset):
            assert command.pid == PID
            assert INDEX <= command.index <= INDEX + BLOCK - command.size
            assert loop.table.moved == command.size
    assert served > 2000


def test_memory_and_stream_of_two_devices_are_left(loop: Loop) -> None:
    loop.table.queue[0].device = 1
    assert left_alone(loop, msgpack.packb(fill(loop)))


def test_what_was_served_before_is_answered_first(loop: Loop) -> None:
    loop.put(*fill(loop))
    loop.put(14, 2)
    assert loop.serve() == OTHER
    assert loop.answers() == [m.Done(1, 1, 1)]
    assert loop.read.read() == msgpack.packb((14, 2))


@pytest.mark.parametrize("word", [0, 64])
def test_a_damaged_ring_of_commands_is_left(loop: Loop, word: int) -> None:
    memory.store_word(loop.page + layout.COMMAND_RING + word, 1 << 40)
    assert loop.serve() == (OTHER if word == 0 else IDLE), "what was taken is this side's to say"


def test_a_length_that_can_not_be_is_left(loop: Loop) -> None:
    loop.put(*fill(loop))
    place = loop.page + layout.COMMAND_RING + layout.RING_HEADER
    memory.view(place, 4)[:] = (layout.RING_ENTRY).to_bytes(4, "little")
    assert loop.serve() == OTHER
    assert not any(loop.device)


def test_without_room_for_the_answer_nothing_is_taken(loop: Loop) -> None:
    for number in range(layout.REPLY_PLACES):
        loop.put(*fill(loop, id=2 * number))
    assert loop.serve() == IDLE
    loop.put(*fill(loop, value=9))
    assert loop.serve() == OTHER
    assert loop.device[0] == 7
    loop.answers()
    assert loop.serve() == IDLE
    assert loop.device[0] == 9


def test_an_answer_that_finds_a_damaged_ring_is_left_to_python(loop: Loop) -> None:
    """The client has the ring overwritten between the look for room and the answer."""

    def work(*_: object) -> int:
        memory.store_word(loop.page + layout.REPLY_RING + 64, 1 << 40)
        return 0

    move = Move(work)
    loop.table.queue[0].move = ctypes.cast(move, ctypes.c_void_p)
    loop.put(*copy_in(loop, id=8))
    assert loop.serve() == OTHER
    assert (loop.table.first, loop.table.count, loop.table.stream) == (8, 1, STREAM)
    assert loop.table.taken == 1


def test_a_command_is_what_it_was_when_it_was_read(loop: Loop) -> None:
    """The client changes the entry while its copy runs: the next look is at the next place."""
    place = loop.page + layout.COMMAND_RING + layout.RING_HEADER
    seen = []

    def work(to: int, origin: int, size: int, _: object) -> int:
        seen.append((to, origin, size))
        memory.view(place, 100)[:] = b"\xff" * 100
        return 0

    move = Move(work)
    loop.table.queue[0].move = ctypes.cast(move, ctypes.c_void_p)
    loop.put(*copy_in(loop))
    loop.put(*copy_out(loop, id=2, address=loop.block + 1))
    assert loop.serve() == IDLE
    window = loop.memory + BLOCK
    assert seen == [(loop.block, window, 64), (window, loop.block + 1, 64)]
    assert loop.answers() == [m.Done(2, 1, 2)]


# --- a device that is not done when the call is back ---


class Slow:
    """Streams whose work is done when the test says so."""

    def __init__(self, loop: Loop) -> None:
        self.code, self.refuses, self.asked = NOT_READY, 0, 0
        self.moved: list[int] = []
        self._functions = Move(self._move), Query(self._query)
        move, query = (ctypes.cast(f, ctypes.c_void_p).value for f in self._functions)
        for row in range(2):
            loop.table.queue[row] = plain_table.Stream(
                STREAM + row, DEVICE, 0x1234, move, loop.library.plain_fill, query, None
            )
        loop.table.streams = 2
        self.ready_after = 1 << 60

    def _move(self, to: int, origin: int, size: int, stream: int) -> int:
        assert stream == 0x1234
        self.moved.append(size)
        return self.refuses

    def _query(self, stream: int) -> int:
        assert stream == 0x1234
        self.asked += 1
        return 0 if self.asked > self.ready_after else self.code


def test_what_is_under_way_is_answered_when_it_is_done(loop: Loop) -> None:
    slow = Slow(loop)
    slow.ready_after = 5
    loop.put(*copy_in(loop))
    loop.put(*copy_in(loop, id=2))
    assert loop.serve(most=10**9) == IDLE
    assert (slow.asked, len(slow.moved)) == (6, 2)
    assert loop.answers() == [m.Done(2, 1, 2)]


def test_what_takes_long_is_the_callers(loop: Loop) -> None:
    Slow(loop)
    loop.put(*copy_in(loop, id=4))
    assert loop.serve(most=LINGER) == LOOK
    assert (loop.table.first, loop.table.count, loop.table.stream) == (4, 1, STREAM)
    assert loop.answers() == []


def test_another_command_does_not_wait_for_what_is_under_way(loop: Loop) -> None:
    slow = Slow(loop)
    loop.put(*copy_in(loop))
    loop.put(14, 2)
    assert loop.serve(most=10**10) == OTHER
    assert (loop.table.count, slow.asked) == (1, 1)


def test_work_of_another_stream_waits_for_what_is_under_way(loop: Loop) -> None:
    slow = Slow(loop)
    loop.put(*copy_in(loop, size=1))
    loop.put(*copy_in(loop, id=2, size=2, stream=STREAM + 1))
    assert loop.serve(most=LINGER) == LOOK
    assert slow.moved == [1]
    loop.table.count, slow.ready_after = 1, slow.asked + 3
    assert loop.serve() in (IDLE, LOOK)
    assert slow.moved == [1, 2]
    assert loop.answers()[0] == m.Done(1, 1, 1)


LARGE = (64 << 10) + 1
"""Bytes: more than what is brief."""


@pytest.fixture
def large(loop: Loop) -> Slow:
    """A device that takes copies of any size; nobody touches what they name."""
    loop.table.largest = plain.UNBOUNDED
    loop.table.block[0].end += 1 << 40
    loop.table.segment[0].end += 1 << 40
    return Slow(loop)


@pytest.mark.parametrize("size", [LARGE, 1 << 32, 1 << 40])
def test_a_large_copy_is_waited_for_longer(loop: Loop, large: Slow, size: int) -> None:
    large.ready_after = 100
    loop.put(*copy_in(loop, size=size))
    assert loop.serve(most=1) in (IDLE, LOOK)
    assert large.moved == [size]
    assert loop.answers() == [m.Done(1, 1, 1)]
    assert loop.table.moved == size


def test_a_large_copy_that_takes_too_long_is_the_callers(loop: Loop, large: Slow) -> None:
    loop.put(*copy_out(loop, id=4, size=LARGE))
    assert loop.serve(most=1, longest=LINGER) == LATE
    assert (loop.table.first, loop.table.count, loop.table.slow) == (4, 1, 1)
    assert loop.answers() == []


@pytest.mark.parametrize("stream", [STREAM, STREAM + 1])
@pytest.mark.parametrize("size", [1, LARGE])
def test_nothing_waits_behind_a_large_copy(loop: Loop, large: Slow, stream: int, size: int) -> None:
    loop.put(*copy_in(loop, size=LARGE))
    loop.put(*copy_in(loop, id=2, size=size, stream=stream))
    assert loop.serve() == OTHER
    assert (large.moved, loop.table.count) == ([LARGE], 1)
    assert loop.read.read() == msgpack.packb(copy_in(loop, id=2, size=size, stream=stream))


def test_a_large_copy_shares_no_answer(loop: Loop, large: Slow) -> None:
    large.ready_after = 3
    loop.put(*copy_in(loop))
    loop.put(*copy_out(loop, id=2, size=LARGE))
    assert loop.serve() == IDLE
    assert loop.answers() == [m.Done(1, 1, 1), m.Done(2, 2, 1)]


def test_a_device_without_an_engine_takes_no_large_copy(loop: Loop, large: Slow) -> None:
    loop.table.largest = plain.LARGEST
    assert left_alone(loop, msgpack.packb(copy_in(loop, size=LARGE)))
    loop.put(*copy_in(loop, size=LARGE - 1))
    large.ready_after = 0
    assert loop.serve() == IDLE
    assert large.moved == [LARGE - 1]


@pytest.mark.parametrize("excess", [1, 1 << 41, (1 << 64) - LARGE])
def test_a_large_copy_stays_in_its_bounds(loop: Loop, large: Slow, excess: int) -> None:
    del large
    room = loop.table.block[0].end - loop.block
    assert left_alone(loop, msgpack.packb(copy_in(loop, size=min(room + excess, 2**64 - 1))))


def test_what_the_device_refuses_is_left_in_the_ring(loop: Loop) -> None:
    slow = Slow(loop)
    slow.refuses = INVALID_VALUE
    assert left_alone(loop, msgpack.packb(copy_out(loop)))
    assert loop.table.count == 0


def test_what_fails_on_the_device_is_the_callers(loop: Loop) -> None:
    slow = Slow(loop)
    slow.code = 719
    loop.put(*copy_in(loop))
    assert loop.serve() == OTHER
    assert (loop.table.count, loop.answers()) == (1, [])


# --- large ones in a row: behind each is a mark ---

Record = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
MARKS = 4


class Marked:
    """The device's events: a test says how far its work is."""

    def __init__(self, loop: Loop, large: Slow) -> None:
        self.large, self.recorded, self.refuses, self.fails = large, list[int](), 0, 0
        self.through = 0
        """So many of the marks are reached."""
        self.fills = 0
        self.each_time = 0
        """After so many questions in vain one more is; 0: never."""
        self._asked = 0
        self._functions = Record(self._record), Query(self._reached)
        record, reached = (ctypes.cast(f, ctypes.c_void_p).value for f in self._functions)
        loop.table.record, loop.table.reached = record, reached
        loop.table.marks, loop.table.marked = MARKS, DEVICE
        for row in range(MARKS):
            loop.table.mark[row] = 0x100 + row
        large.code = 719  # nobody asks the stream

    def _record(self, event: int, stream: int) -> int:
        assert stream == 0x1234
        assert event not in self.recorded[self.through :], "one that is not reached yet"
        assert len(self.recorded) < len(self.large.moved) + self.fills, "behind its own copy"
        self.recorded.append(event)
        return self.refuses

    def _reached(self, event: int) -> int:
        oldest = len(self.recorded) - 1
        while oldest >= 0 and self.recorded[oldest] != event:
            oldest -= 1
        assert oldest >= 0, "an event that was not recorded counts as reached"
        if oldest < self.through:
            return self.fails
        self._asked += 1
        if self.each_time and self._asked % self.each_time == 0:
            self.through += 1
        return NOT_READY


@pytest.fixture
def marked(loop: Loop, large: Slow) -> Marked:
    return Marked(loop, large)


def test_large_copies_follow_each_other_up_to_the_marks_there_are(
    loop: Loop, marked: Marked
) -> None:
    for number in range(1, 7):
        loop.put(*copy_in(loop, id=number, size=LARGE))
    assert loop.serve(longest=LINGER) == LATE
    assert (marked.large.moved, loop.table.count) == ([LARGE] * MARKS, MARKS)
    assert loop.answers() == []
    marked.through = 3
    assert loop.serve(longest=LINGER) == LATE
    assert (len(marked.large.moved), loop.table.first, loop.table.count) == (6, 4, 3)
    assert loop.answers() == [m.Done(4, 1, 3)]
    marked.through = 6
    assert loop.serve() == IDLE
    assert loop.answers() == [m.Done(6, 4, 3)]
    assert (loop.table.count, loop.table.moved) == (0, 6 * LARGE)


def test_a_row_of_large_ones_goes_on_as_they_are_done(loop: Loop, marked: Marked) -> None:
    marked.each_time = 5
    for number in range(1, 41):
        loop.put(*copy_in(loop, id=number, size=LARGE))
    assert loop.serve(most=1) == LOOK, "now and then it looks up"
    while (why := loop.serve()) != IDLE:
        assert why == LOOK
    told = loop.answers()
    assert [a.first for a in told] == [1 + sum(b.count for b in told[:i]) for i in range(len(told))]
    assert sum(a.count for a in told) == 40
    assert len(marked.recorded) == 40


@pytest.mark.parametrize("kind", [copy_in, copy_out, fill])
def test_small_ones_join_a_row_of_large_ones(
    loop: Loop, marked: Marked, kind: Callable[..., Any]
) -> None:
    loop.put(*copy_in(loop, size=LARGE))
    loop.put(*kind(loop, id=2, size=1))
    marked.fills = kind is fill  # the library's own does them
    marked.through = 1
    assert loop.serve(longest=LINGER) == LATE
    assert (len(marked.recorded), loop.table.first, loop.table.count) == (2, 2, 1)
    assert loop.answers()[0].first == 1


@pytest.mark.parametrize(
    "changed", [{"stream": STREAM + 1}, {"id": 9}], ids=["another stream", "another number"]
)
def test_what_does_not_follow_is_the_callers_with_the_row(
    loop: Loop, marked: Marked, changed: dict[str, int]
) -> None:
    loop.put(*copy_in(loop, size=LARGE))
    second = copy_in(loop, **{"id": 2, "size": LARGE, **changed})
    loop.put(*second)
    assert loop.serve() == OTHER
    assert (marked.large.moved, loop.table.count) == ([LARGE], 1)
    assert loop.read.read() == msgpack.packb(second)


def test_marks_of_another_device_are_not_used(loop: Loop, marked: Marked) -> None:
    loop.table.marked = DEVICE + 1
    loop.put(*copy_in(loop, size=LARGE))
    loop.put(*copy_in(loop, id=2, size=LARGE))
    marked.large.code = NOT_READY
    assert loop.serve() == OTHER
    assert (marked.recorded, loop.table.count) == ([], 1)


def test_a_mark_that_is_refused_is_the_callers(loop: Loop, marked: Marked) -> None:
    marked.refuses = 719
    loop.put(*copy_in(loop, id=3, size=LARGE))
    assert loop.serve() == OTHER
    assert (loop.table.first, loop.table.count, loop.table.taken) == (3, 1, 1)
    assert loop.answers() == []


def test_what_fails_behind_what_is_done_is_the_callers(loop: Loop, marked: Marked) -> None:
    marked.through, marked.fails = 2, 719
    for number in (1, 2):
        loop.put(*copy_in(loop, id=number, size=LARGE))
    assert loop.serve() == OTHER
    assert (loop.table.first, loop.answers()) == (1, [])


def test_a_row_takes_no_more_than_there_is_room_to_answer(loop: Loop, marked: Marked) -> None:
    marked.through = 1 << 30
    for number in range(layout.REPLY_PLACES - 2):
        loop.put(*copy_in(loop, id=3 * number, size=LARGE))
        while loop.serve() == OTHER:
            continue
    assert len(marked.recorded) == layout.REPLY_PLACES - 2
    marked.through = len(marked.recorded)
    for number in (1001, 1002, 1003):
        loop.put(*copy_in(loop, id=number, size=LARGE))
    assert loop.serve(longest=LINGER) == LATE
    assert loop.table.count == 2


@pytest.mark.parametrize("each_time", [1, 3])
def test_all_credits_find_their_answers_in_a_ring_that_nobody_reads(
    loop: Loop, marked: Marked, each_time: int
) -> None:
    """A client posts all that it may and computes: none of its copies waits until it reads."""
    marked.each_time = each_time
    for number in range(1, m.CREDITS + 1):
        loop.put(*copy_in(loop, id=number, size=LARGE))
    while (why := loop.serve()) != IDLE:
        assert why == LOOK
    assert len(marked.recorded) == m.CREDITS > layout.REPLY_PLACES
    assert sum(answer.count for answer in loop.answers()) == m.CREDITS


# --- small copies to the device that continue each other: one copy ---


class Moves:
    """What the device is asked to move; it does so."""

    def __init__(self, loop: Loop) -> None:
        self.sizes: list[int] = []
        self.refuses = 0
        self._loop = loop
        self._function = Move(self._move)
        loop.table.queue[0].move = ctypes.cast(self._function, ctypes.c_void_p)

    def _move(self, to: int, origin: int, size: int, _: object) -> int:
        self.sizes.append(size)
        if not self.refuses:
            ctypes.memmove(to, origin, size)
        return self.refuses


def row(loop: Loop, count: int, size: int = 64, **last: Any) -> None:
    """So many copies in a row; ``last`` changes the last one."""
    for i in range(count):
        changed = last if i == count - 1 else {}
        at = {"address": loop.block + i * size, "index": INDEX + i * size}
        loop.put(*copy_in(loop, **{"id": i + 1, "size": size, **at, **changed}))


def test_copies_that_continue_each_other_are_one(loop: Loop) -> None:
    moves = Moves(loop)
    loop.window[:] = random.Random(1).randbytes(BLOCK)
    row(loop, 5)
    assert loop.serve() == IDLE
    assert moves.sizes == [320]
    assert bytes(loop.device[:320]) == bytes(loop.window[:320])
    assert not any(loop.device[320:])
    assert loop.answers() == [m.Done(5, 1, 5)]
    assert (loop.table.taken, loop.table.moved, loop.table.run) == (5, 320, 0)


@pytest.mark.parametrize(
    "last",
    [
        {"address": 64},
        {"index": INDEX + 256},
        {"id": 9},
        {"stream": STREAM + 1},
        {"code": 7},
    ],
    ids=["elsewhere on the device", "from elsewhere", "another number", "another stream", "back"],
)
def test_what_does_not_continue_is_a_copy_of_its_own(loop: Loop, last: dict[str, int]) -> None:
    moves = Moves(loop)
    loop.table.queue[1] = loop.table.queue[0]
    loop.table.queue[1].number = STREAM + 1
    loop.table.streams = 2
    loop.window[:] = random.Random(2).randbytes(BLOCK)
    if "address" in last:
        last = {"address": loop.block + 256}
    row(loop, 3, **last)
    before = bytes(loop.window)
    assert loop.serve() == IDLE
    assert moves.sizes == [128, 64]
    assert bytes(loop.device[:128]) == before[:128]
    assert sum(a.count for a in loop.answers()) == 3


def test_a_run_ends_where_its_block_or_segment_ends(loop: Loop) -> None:
    """Two blocks side by side are two: the driver refuses a copy across both."""
    for what in ("block", "segment"):
        moves = Moves(loop)
        rows, count = (loop.table.block, "blocks") if what == "block" else (
            loop.table.segment, "segments",
        )  # fmt: skip
        whole = rows[0].start, rows[0].end
        rows[1] = plain_table.Range(whole[0] + 128, whole[1], DEVICE)
        rows[0].end = whole[0] + 128
        setattr(loop.table, count, 2)
        row(loop, 4)
        assert loop.serve() == IDLE
        assert moves.sizes == [128, 128], what
        rows[0].end = whole[1]
        setattr(loop.table, count, 1)
        loop.answers()


def test_a_run_is_brief(loop: Loop) -> None:
    sizes: list[int] = []
    move = Move(lambda _to, _from, size, _stream: sizes.append(size) or 0)
    loop.table.block[0].end += 1 << 20
    loop.table.segment[0].end += 1 << 20
    loop.table.queue[0].move = ctypes.cast(move, ctypes.c_void_p)
    row(loop, 40, 4096)
    assert loop.serve() == IDLE
    assert sizes == [64 << 10, 64 << 10, 32 << 10]
    assert [a.count for a in loop.answers()] == [32, 8]


@pytest.mark.parametrize("then", ["nothing", "a fill", "another command"])
def test_a_run_that_is_refused_is_the_callers(loop: Loop, then: str) -> None:
    moves = Moves(loop)
    moves.refuses = INVALID_VALUE
    loop.put(*fill(loop, id=0, address=loop.block + 4096))
    row(loop, 3)
    if then == "a fill":
        loop.put(*fill(loop, id=4))
    elif then == "another command":
        loop.put(14, 4)
    assert loop.serve() == OTHER
    assert moves.sizes == [192], "once"
    table = loop.table
    assert (table.first, table.count, table.run) == (0, 4, 3)
    assert (table.run_to, table.run_from, table.run_size) == (loop.block, loop.memory + BLOCK, 192)
    assert loop.answers() == []


def test_a_run_is_begun_before_the_loop_looks_up(loop: Loop) -> None:
    moves = Moves(loop)
    loop.window[:] = random.Random(3).randbytes(BLOCK)
    row(loop, 15)
    assert loop.serve(most=1) == LOOK
    assert sum(moves.sizes) == 64 * loop.table.taken > 0
    assert loop.table.run == 0


class Session:
    """What `PlainCommands` needs of one, with a device that refuses what comes from address 0."""

    def __init__(self) -> None:
        self.said: list[tuple[int, int]] = []
        stream = types.SimpleNamespace(device=self)
        table = types.SimpleNamespace(get=lambda _: stream, use=lambda _: 0x77)
        self.holdings = types.SimpleNamespace(streams=table, unmarked=lambda _: 0)
        self.pid = PID

    def copy(self, to: int, origin: int, size: int, stream: int) -> None:
        assert (to, size, stream) == (5, 192, 0x77)
        if not origin:
            raise DeviceError(700, "the device refuses it")

    def complete(self, number: int, streams: list[Any], *, brief: bool) -> None:
        assert brief
        assert len(streams) == 1
        self.said.append((number, 0))

    def fail(self, number: int, exc: DeviceError) -> None:
        self.said.append((number, exc.code))


@pytest.mark.parametrize(("origin", "code"), [(9, 0), (0, 700)])
def test_python_begins_a_run_or_fails_its_commands_alone(origin: int, code: int) -> None:
    session: Any = Session()
    commands = plain.PlainCommands(session, None, None, None)  # type: ignore[arg-type]
    table = Table(first=10, count=5, run=3, run_to=5, run_from=origin, run_size=192)
    commands._complete(table)
    assert session.said == [(10, 0), (11, 0), (12, code), (13, code), (14, code)]


@pytest.mark.parametrize("end", ["gone", "waits", "inbox"])
def test_a_row_without_end_does_not_keep_the_thread_from_its_socket(end: str) -> None:
    session: Any = types.SimpleNamespace(holdings=Session().holdings, pid=PID, said=[])
    session.holdings.moved = 0
    session.complete = lambda number, _, brief: session.said.append((number, brief))
    inbox: list[int] = []
    turns = 0

    class Wire:
        rings = (None, types.SimpleNamespace(woken=0))
        gone, is_quiet = False, True

        def glance(self) -> None:
            if turns == 3:
                self.gone, self.is_quiet = end == "gone", end != "waits"
                inbox.extend([1] if end == "inbox" else [])

    def serve(table: Any, *_: Any) -> int:
        nonlocal turns
        turns += 1
        assert turns < 10, "it looks at nothing else"
        given = commands._table
        given.count, given.first, given.slow, given.marks, given.taken = 1, turns, 1, 1, turns
        return LOOK

    answers = types.SimpleNamespace(taken=0, were_given=lambda *_: None)
    commands = plain.PlainCommands(session, Wire(), answers, inbox)  # type: ignore[arg-type]
    assert commands._run(serve, 0.0) == LOOK
    assert (turns, session.said) == (3, [(3, False)])
