# SPDX-License-Identifier: Apache-2.0
"""Commands and replies through the rings of the control page: order, sleep, and those who lie."""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.errors import SessionLost
from flyt.rpc import messages as m
from flyt.shm import layout, memory, ring
from flyt.shm.ring import RingReader, RingWriter
from tests.pair.raw import LIMIT, Honest, RawClient, eventually, worker_of

H2D, D2H = (
    cudart.cudaMemcpyKind.cudaMemcpyHostToDevice,
    cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost,
)

pytestmark = pytest.mark.skipif(
    ring.usable() is None, reason="--no-ring, or no C compiler was there when Flyt was installed"
)


@pytest.fixture(scope="module")
def served(module_backend: Callable[..., Any]) -> Any:
    return module_backend(extra=["--sweep-seconds", "0.5"])


@pytest.fixture
def rings(served: Any, connect: Callable[..., flyt.Session]) -> flyt.Session:
    return connect(served, FLYT_RING="1")


def control_page(session: flyt.Session) -> int:
    assert session.memory is not None
    assert session.memory.window is not None
    return session.memory.window.base


def written(session: flyt.Session) -> int:
    return memory.load_word(control_page(session) + layout.COMMAND_RING)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- honest clients ---


def test_every_command_after_attach_takes_a_place(rings: flyt.Session) -> None:
    before, sent = written(rings), rings.statistics()["calls"] + rings.statistics()["posts"]
    device = cudart.cudaMalloc(4096)[1]
    data, back = np.arange(4096, dtype=np.uint8), np.zeros(4096, np.uint8)
    assert cudart.cudaMemcpy(device, data, 4096, H2D) == (0,)
    assert cudart.cudaMemcpy(back, device, 4096, D2H) == (0,)
    assert np.array_equal(back, data)
    now = rings.statistics()["calls"] + rings.statistics()["posts"]
    assert written(rings) - before == now - sent >= 3


def test_without_rings(served: Any, connect: Callable[..., flyt.Session]) -> None:
    session = connect(served, FLYT_RING="0")
    device, back = cudart.cudaMalloc(64)[1], bytearray(64)
    assert cudart.cudaMemcpy(device, bytes(range(64)), 64, H2D) == (0,)
    assert cudart.cudaMemcpy(back, device, 64, D2H) == (0,)
    assert (back, written(session)) == (bytes(range(64)), 0)


def test_a_command_too_long_for_its_place_keeps_it(rings: flyt.Session) -> None:
    """A pinned block of scattered frames: its page table does not fit into an entry."""
    small = []
    while not (block := cudart.cudaHostAlloc(65_536, 0))[0]:
        small.append(block[1])
    for address in small[::2]:
        assert cudart.cudaFreeHost(address) == (0,)
    device, stream = cudart.cudaMalloc(1 << 20)[1], cudart.cudaStreamCreate()[1]
    for value in range(10):
        assert cudart.cudaMemsetAsync(device, value, 1 << 20, stream) == (0,)
        big = flyt.pinned_empty(48 * 65_536, np.uint8)
        runs = rings.memory.window.table(
            (big.ctypes.data - control_page(rings)) // rings.memory.geometry.page_size
        )
        assert cudart.cudaMemcpyAsync(big, device, 1 << 20, D2H, stream) == (0,)
        assert cudart.cudaStreamSynchronize(stream) == (0,)
        assert (big[: 1 << 20] == value).all()
        del big
    assert runs is not None
    assert len(m.COMMANDS.encode(m.Grow(1, 1, runs))) > ring.LARGEST, "it was not scattered"


def test_more_posts_than_places(rings: flyt.Session) -> None:
    device, stream = cudart.cudaMalloc(4096)[1], cudart.cudaStreamCreate()[1]
    data, back = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    for number in range(5 * layout.COMMAND_PLACES):
        data[:] = number & 0xFF
        assert cudart.cudaMemcpyAsync(device, data, 4096, H2D, stream) == (0,)
    assert cudart.cudaMemcpyAsync(back, device, 4096, D2H, stream) == (0,)
    assert (back == data).all()
    assert cudart.cudaStreamQuery(stream) == (0,)


def test_more_answers_than_places(served: Any, rings: flyt.Session) -> None:
    """The worker falls behind, and then the program computes: nobody reads meanwhile. Both the
    compiled loop and Python answer, each with what room the other has left."""
    worker = worker_of(served, os.getpid())
    device, page = cudart.cudaMalloc(64)[1], control_page(rings)
    streams = [cudart.cudaStreamCreateWithFlags(1)[1] for _ in range(2)]
    for stream in streams:  # the loop knows both from the second fill on
        for _ in range(2):
            assert cudart.cudaMemset(device, 1, 64) == (0,)
            assert cudart.cudaMemsetAsync(device, 1, 64, stream) == (0,)
            assert cudart.cudaDeviceSynchronize() == (0,)
    words = layout.COMMAND_RING, layout.COMMAND_RING + 64, layout.REPLY_RING, layout.REPLY_RING + 64

    def is_done_or_full() -> bool:
        posted, taken, answers, read = (memory.load_word(page + word) for word in words)
        return posted == taken or answers - read == layout.REPLY_PLACES

    for value in range(3):
        os.kill(worker, signal.SIGSTOP)
        try:
            for number in range(200):
                assert cudart.cudaMemsetAsync(device, value, 64, streams[number % 2]) == (0,)
        finally:
            os.kill(worker, signal.SIGCONT)
        assert eventually(is_done_or_full)
        time.sleep(0.05)  # were there no room, it would be found out now
        assert cudart.cudaDeviceSynchronize() == (0,), flyt.last_failure()
    back = bytearray(64)
    assert cudart.cudaMemcpy(back, device, 64, D2H) == (0,)
    assert back == bytes([2]) * 64


def test_an_idle_session_burns_nothing(served: Any, rings: flyt.Session) -> None:
    device = cudart.cudaMalloc(64)[1]
    assert cudart.cudaMemset(device, 1, 64) == (0,)
    assert cudart.cudaDeviceSynchronize() == (0,)
    worker = worker_of(served, os.getpid())
    time.sleep(0.2)  # the last wake-ups are over
    before, seconds = processor_seconds(worker), 3.0
    time.sleep(seconds)
    assert processor_seconds(worker) - before <= 0.02 * seconds, "a spin would take all of them"


@pytest.mark.emulated_only(reason="needs a slowed device")
def test_who_waits_long_sleeps(backend: Callable[..., Any], connect: Any) -> None:
    served = backend(device_options="latency=1.0")
    connect(served, FLYT_RING="1")
    device = cudart.cudaMalloc(64)[1]
    assert cudart.cudaDeviceSynchronize() == (0,)
    used, started = time.process_time(), time.monotonic()
    assert cudart.cudaMemcpy(bytearray(64), device, 64, D2H) == (0,)
    assert time.monotonic() - started >= 1.0
    assert time.process_time() - used < 0.3


def test_a_neighbour_that_overwrites_the_rings(rings: flyt.Session, served: Any) -> None:
    """Another process of the same guest may do that: no hang, no wrong byte, at worst the end."""
    rng = random.Random(3)
    device = cudart.cudaMalloc(4096)[1]
    codes = set()
    for number in range(200):
        at = rng.choice([layout.COMMAND_RING, layout.REPLY_RING]) + 8 * rng.randrange(24)
        word = rng.choice([0, 1, rng.getrandbits(64), (1 << 64) - 1])
        memory.store_word(control_page(rings) + at, word)
        data, back = np.full(4096, number, np.uint8), np.zeros(4096, np.uint8)
        started = time.monotonic()
        codes |= {cudart.cudaMemcpy(device, data, 4096, H2D)[0]}
        codes |= {last := cudart.cudaMemcpy(back, device, 4096, D2H)[0]}
        assert time.monotonic() - started < LIMIT
        if last:
            assert "control page" in (flyt.last_failure() or "")
            break
        assert (back == number).all()
    assert codes <= {0, 46}
    with RawClient(served.endpoint) as other:
        assert other.attach().status == 0
        assert other.lives()


# --- hostile clients ---


class Ringer:
    """A raw client that uses its rings as it likes."""

    def __init__(self, client: RawClient) -> None:
        library = ring.native()
        assert library is not None
        assert client.attach(ring=True).status == 0
        assert client.window is not None
        self.client = client
        self.page = client.window.base
        self.commands: RingWriter
        self.replies: RingReader
        self.commands, self.replies = ring.frontend_rings(library, self.page)
        self.number = 1000

    def post(self, kind: Callable[..., Any], *fields: Any) -> int:
        self.number += 1
        self.say(m.COMMANDS.encode(kind(self.number, *fields)))
        return self.number

    def say(self, entry: bytes) -> None:
        if self.commands.write(entry):
            assert self.client.dialer.send([m.KICK])

    def hear(self) -> Any:
        """The next reply of the ring."""
        found: list[bytes] = []

        def look() -> bool:
            entry = self.replies.read()
            if entry is not None:
                found.append(entry)
            return bool(found)

        assert eventually(look, LIMIT)
        return m.REPLIES.decode(found[0])

    def lives(self) -> bool:
        number = self.post(m.Ping)
        reply = self.hear()
        assert isinstance(reply, m.Done), reply
        assert reply.first <= number < reply.first + reply.count, reply
        return True

    def refusal(self) -> str:
        """Why the backend ended the session, as its last word says."""
        result = self.client.next_result()
        assert result.status == m.Status.PROTOCOL
        assert self.client.ends()
        return result.text


@pytest.fixture(scope="module")
def neighbour(served: Any) -> Iterator[Honest]:
    client = Honest(served)
    yield client
    client.close()


@pytest.fixture
def ringer(served: Any, neighbour: Honest) -> Iterator[Ringer]:
    with RawClient(served.endpoint) as client:
        ringer = Ringer(client)
        assert ringer.lives()
        yield ringer
    assert neighbour.carries_on(1), "the honest client stands still"


def test_a_command_past_the_ring(ringer: Ringer) -> None:
    ringer.client.post(m.Ping)
    assert "past its ring" in ringer.refusal()


def test_a_written_word_that_can_not_be(ringer: Ringer) -> None:
    memory.store_word(ringer.page + layout.COMMAND_RING, 1 << 40)
    assert ringer.client.dialer.send([m.KICK])
    assert "damaged" in ringer.refusal()


def test_a_taken_word_that_can_not_be(ringer: Ringer) -> None:
    memory.store_word(ringer.page + layout.REPLY_RING + 64, 1 << 40)
    for _ in range(2 * layout.REPLY_PLACES):  # until the backend looks at it
        if not ringer.commands.room():  # it takes nothing any more
            break
        ringer.say(m.COMMANDS.encode(m.MemInfo(1, 0)))
        time.sleep(0.001)
        if ringer.client.dialer.check() or ringer.client.dialer.lost:
            break
    assert "damaged" in ringer.refusal()


def test_garbage_in_an_entry(ringer: Ringer) -> None:
    ringer.say(b"\xc1 garbage")
    assert "MessagePack" in ringer.refusal()


def test_an_announced_command_that_never_comes(ringer: Ringer) -> None:
    ringer.say(ring.ELSEWHERE)
    ringer.say(m.COMMANDS.encode(m.Ping(1)))
    for _ in range(15):
        time.sleep(1)
        ringer.client.dialer.send([m.KICK])
        ringer.client.dialer.check()
        if ringer.client.dialer.readable() or ringer.client.dialer.lost:
            break
    assert "announced" in ringer.refusal()


def test_an_announced_command_that_comes_late(ringer: Ringer) -> None:
    number = ringer.number = ringer.number + 1
    ringer.say(ring.ELSEWHERE)
    after = ringer.post(m.Ping)
    time.sleep(0.3)
    assert ringer.replies.read() is None, "its place was taken by the next"
    assert ringer.client.dialer.send([m.COMMANDS.encode(m.MemInfo(number, 0))])
    assert ringer.hear().id == number
    assert ringer.hear().first == after


def test_a_client_that_reads_no_replies(served: Any, ringer: Ringer) -> None:
    """The backend stops taking its commands; what is kept for it is bounded by the rings."""
    sent = 0
    until = time.monotonic() + 2
    while time.monotonic() < until:
        if ringer.commands.room():
            ringer.post(m.MemInfo, 0)
            sent += 1
        else:
            time.sleep(0.005)
    assert sent <= layout.COMMAND_PLACES + layout.REPLY_PLACES + 64, "it took without end"
    answered = [ringer.hear().id for _ in range(sent)]
    assert answered == list(range(ringer.number - sent + 1, ringer.number + 1))
    assert ringer.lives()


def test_a_client_that_reads_late_what_the_compiled_loop_has_answered(
    served: Any, ringer: Ringer
) -> None:
    """The loop's replies take places too: when none is left, Python's wait for one."""
    ringer.post(m.Malloc, 0, 4096, 0)
    (block,) = ringer.hear().values
    window = ringer.client.window
    assert window is not None
    first, index = ringer.number + 1, window.geometry.page_size

    def answers() -> int:
        return memory.load_word(ringer.page + layout.REPLY_RING)

    for number in range(layout.REPLY_PLACES + 40):
        said = answers()
        ringer.post(m.CopyIn, block, index, 64, os.getpid(), 0)
        if number < layout.REPLY_PLACES:  # one by one, so that each has an answer of its own
            assert eventually(lambda said=said: answers() != said, LIMIT)
    time.sleep(0.1)  # the last ones are done by now, and find no place
    numbers: list[int] = []
    while len(numbers) < layout.REPLY_PLACES + 40:
        reply = ringer.hear()
        assert isinstance(reply, m.Done), reply
        numbers += range(reply.first, reply.first + reply.count)
    assert numbers == list(range(first, ringer.number + 1))
    assert ringer.lives()


def test_random_bytes_all_over_the_rings(served: Any, neighbour: Honest) -> None:
    """A thousand hostile states, each on a live session, beside an honest client."""
    rng = random.Random(11)
    ended = 0
    for round_ in range(40):
        with RawClient(served.endpoint) as client:
            ringer = Ringer(client)
            for _ in range(25):
                at = rng.choice([0, 64, 128, 192, rng.randrange(0, 60_000, 8)])
                start = rng.choice([layout.COMMAND_RING, layout.REPLY_RING])
                if start + at + 8 <= layout.MIN_PAGE_SIZE:
                    word = rng.choice([0, 1, rng.getrandbits(64), (1 << 64) - 1])
                    memory.view(ringer.page + start + at, 8)[:] = struct.pack("<Q", word)
                if not client.dialer.send([m.KICK]):
                    break
            ended += eventually(client.dialer.readable, 0.05)  # its last word
        if round_ % 10 == 0:
            assert neighbour.carries_on(1), "the honest client stands still"
    assert ended > 0
    assert neighbour.carries_on(2), "the honest client stands still"
    with RawClient(served.endpoint) as client:
        assert Ringer(client).lives(), "the worker lives"


def test_rings_where_the_backend_has_none(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    served = backend(env={"FLYT_RING": "0"})
    session = connect(served, FLYT_RING="1")
    assert cudart.cudaMemGetInfo()[0] == 0
    assert written(session) == 0, "it was not offered"
    with RawClient(served.endpoint) as client:
        result = client.attach(ring=True)
        assert result.status == m.Status.PROTOCOL
        assert "did not offer" in result.text
        with pytest.raises(SessionLost):
            client.call(m.Ping)
