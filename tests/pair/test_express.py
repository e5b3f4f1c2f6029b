# SPDX-License-Identifier: Apache-2.0
"""Small copies and fills, which take a short way on both sides: the same answers, the same order.

On the client's side `flyt.frontend.express`, in the worker `flyt.backend.plain`. Where there are no
rings all goes the general way, and these tests say that it answers alike.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.frontend.express import LOOK
from flyt.frontend.inflight import Pending
from flyt.frontend.ways import StagedWay
from flyt.rpc import messages as m
from flyt.shm import ring
from tests.pair.raw import LIMIT, RawClient, session_of
from tests.pair.test_ring import Ringer

Kind = cudart.cudaMemcpyKind
H2D, D2H, D2D = (
    Kind.cudaMemcpyHostToDevice,
    Kind.cudaMemcpyDeviceToHost,
    Kind.cudaMemcpyDeviceToDevice,
)
SIZE = 4096
AHEAD = 150
"""More commands than a worker's thread takes in one turn, and fewer than a ring holds."""
needs_rings = pytest.mark.skipif(
    ring.usable() is None, reason="--no-ring, or no C compiler was there when Flyt was installed"
)


@pytest.fixture(scope="module")
def served(module_backend: Callable[..., Any]) -> Any:
    return module_backend()


@pytest.fixture
def session(served: Any, connect: Callable[..., flyt.Session]) -> flyt.Session:
    return connect(served)


@pytest.fixture
def device(session: flyt.Session) -> int:
    error, address = cudart.cudaMalloc(SIZE)
    assert error == 0
    return int(address)


# --- the client's side ---

Case = Callable[[int, Any], tuple[Any, ...]]


def _gaps() -> Any:
    return np.zeros(2 * SIZE, np.uint8)[::2]


def _read_only() -> Any:
    array = np.zeros(SIZE, np.uint8)
    array.flags.writeable = False
    return array


def _waited(device: int, data: Any, stream: Any) -> tuple[Any, ...]:
    copied = cudart.cudaMemcpyAsync(device, data, SIZE, H2D, stream)
    return (*copied, *cudart.cudaStreamSynchronize(stream), len(flyt.inflight()))


CASES: dict[str, Case] = {
    "as it should be": lambda d, a: cudart.cudaMemcpy(a, d, SIZE, D2H),
    "a kind as a number": lambda d, a: cudart.cudaMemcpy(d, a, SIZE, 1),
    "two dimensions": lambda d, _: cudart.cudaMemcpy(np.ones((64, 64), np.uint8), d, SIZE, D2H),
    "Fortran's order": lambda d, _: cudart.cudaMemcpy(d, np.ones((64, 64), "u1", "F"), SIZE, H2D),
    "dates": lambda d, _: cudart.cudaMemcpy(d, np.zeros(512, "M8[s]"), SIZE, H2D),
    "an interior pointer": lambda d, a: cudart.cudaMemcpy(a, d + 100, 3996, D2H),
    "one byte too many": lambda d, a: cudart.cudaMemcpy(a, d + 1, SIZE, D2H),
    "one byte too many to the device": lambda d, a: cudart.cudaMemcpy(d + 1, a, SIZE, H2D),
    "one byte too many of a fill": lambda d, _: cudart.cudaMemset(d + 1, 1, SIZE),
    "before the block": lambda d, a: cudart.cudaMemcpy(a, d - 1, 16, D2H),
    "a short buffer": lambda d, _: cudart.cudaMemcpy(np.ones(100, "u1"), d, SIZE, D2H),
    "a short source": lambda d, _: cudart.cudaMemcpy(d, np.ones(100, "u1"), SIZE, H2D),
    "a read-only target": lambda d, _: cudart.cudaMemcpy(_read_only(), d, SIZE, D2H),
    "a read-only source": lambda d, _: cudart.cudaMemcpy(d, _read_only(), SIZE, H2D),
    "the wrong way round": lambda d, a: cudart.cudaMemcpy(d, a, SIZE, D2H),
    "the other wrong way": lambda d, a: cudart.cudaMemcpy(a, d, SIZE, H2D),
    "no kind": lambda d, a: cudart.cudaMemcpy(a, d, SIZE, 17),
    "by default": lambda d, a: cudart.cudaMemcpy(a, d, SIZE, 4),
    "nothing to copy": lambda _d, _a: cudart.cudaMemcpy(0, 0, 0, D2H),
    "nothing to fill": lambda _d, _a: cudart.cudaMemset(0, 0, 0),
    "to NULL": lambda d, _: cudart.cudaMemcpy(0, d, SIZE, D2H),
    "from NULL": lambda _, a: cudart.cudaMemcpy(a, 0, SIZE, D2H),
    "a fill at NULL": lambda _d, _a: cudart.cudaMemset(0, 1, SIZE),
    "a fill of host memory": lambda _, a: cudart.cudaMemset(a.ctypes.data, 1, SIZE),
    "a value of many bits": lambda d, _: cudart.cudaMemset(d, -3, SIZE),
    "bytes": lambda d, _: cudart.cudaMemcpy(d, bytes(SIZE), SIZE, H2D),
    "a bytearray": lambda d, _: cudart.cudaMemcpy(bytearray(SIZE), d, SIZE, D2H),
    "an address": lambda d, a: cudart.cudaMemcpy(a.ctypes.data, d, SIZE, D2H),
    "a stream's number": lambda d, a: cudart.cudaMemcpyAsync(a, d, SIZE, D2H, 1),
    "the thread's own stream": lambda d, a: cudart.cudaMemcpyAsync(a, d, SIZE, D2H, 2),
    "a stream that does not exist": lambda d, a: cudart.cudaMemcpyAsync(a, d, SIZE, D2H, 0x777),
    "no stream's number": lambda d, _: cudart.cudaMemsetAsync(d, 1, SIZE, 0x777),
    "a stream": lambda d, a: cudart.cudaMemcpyAsync(a, d, SIZE, D2H, cudart.cudaStreamCreate()[1]),
    "a value of 8 bits": lambda d, _: cudart.cudaMemset(d, np.int8(-1), SIZE),
    "a kind that is none": lambda d, a: cudart.cudaMemcpy(a, d, SIZE, (1 << 32) - 1),
    "None for a stream": lambda d, a: cudart.cudaMemcpyAsync(d, a, SIZE, H2D, None),
    "a wait for the default stream": lambda d, a: _waited(d, a, 0),
    "a wait for the legacy stream": lambda d, a: _waited(d, a, 1),
    "a wait for the thread's own stream": lambda d, a: _waited(d, a, 2),
    "a wait for a stream": lambda d, a: _waited(d, a, cudart.cudaStreamCreate()[1]),
    "a wait for no stream": lambda d, a: cudart.cudaStreamSynchronize(0x777),
    "a wait for None": lambda d, a: cudart.cudaStreamSynchronize(None),
    "larger than the cell": lambda d, _: cudart.cudaMemcpy(np.ones(1 << 17, "u1"), d, SIZE, D2H),
}
RAISES: dict[str, tuple[type[Exception], Case]] = {
    "gaps": (ValueError, lambda d, _: cudart.cudaMemcpy(d, _gaps(), SIZE, H2D)),
    "a negative size": (OverflowError, lambda d, a: cudart.cudaMemcpy(a, d, -1, D2H)),
    "a size of 65 bits": (OverflowError, lambda d, a: cudart.cudaMemcpy(a, d, 1 << 64, D2H)),
    "a wait below 0": (OverflowError, lambda _d, _a: cudart.cudaStreamSynchronize(-1)),
    "a wait for a text": (TypeError, lambda _d, _a: cudart.cudaStreamSynchronize("1")),
    "an address of 65 bits": (TypeError, lambda d, _: cudart.cudaMemcpy(1 << 64, d, 8, D2H)),
    "a value of 32 bits": (OverflowError, lambda d, _: cudart.cudaMemset(d, 1 << 31, SIZE)),
    "a kind of 41 bits": (OverflowError, lambda d, a: cudart.cudaMemcpy(a, d, SIZE, 1 << 40)),
    "a negative stream": (
        OverflowError,
        lambda d, a: cudart.cudaMemcpyAsync(d, a, SIZE, H2D, -1),
    ),
    "a stream of 65 bits": (
        OverflowError,
        lambda d, a: cudart.cudaMemcpyAsync(a, d, SIZE, D2H, 1 << 64),
    ),
    "a size of 65 bits for an address": (
        OverflowError,
        lambda d, a: cudart.cudaMemcpy(a.ctypes.data, d, (1 << 64) + 8, D2H),
    ),
    "a fill of 65 bits": (OverflowError, lambda d, _: cudart.cudaMemset(d, 1, (1 << 64) + 8)),
    "a target of 65 bits": (
        TypeError,
        lambda d, a: cudart.cudaMemcpy(d + (1 << 64), a, 8, H2D),
    ),
    "a source below 0": (TypeError, lambda d, a: cudart.cudaMemcpy(a, d - (1 << 64), 8, D2H)),
    "a fill at 65 bits": (TypeError, lambda d, _: cudart.cudaMemset(d + (1 << 64), 1, 8)),
    "a float for a size": (TypeError, lambda d, a: cudart.cudaMemcpy(a, d, 8.0, D2H)),
    "a text for an array": (TypeError, lambda d, _: cudart.cudaMemcpy("x", d, 8, D2H)),
}


@pytest.mark.parametrize("call", CASES.values(), ids=CASES.keys())
def test_both_ways_answer_alike(session: flyt.Session, device: int, call: Case) -> None:
    outcomes = []
    for express in (session.express, None):
        session.express = express
        data = np.arange(SIZE, dtype=np.uint16).astype(np.uint8)
        assert cudart.cudaMemset(device, 0x5A, SIZE) == (0,)
        answer = call(device, data)
        assert cudart.cudaDeviceSynchronize() == (0,)
        back = bytearray(SIZE)
        assert cudart.cudaMemcpy(back, device, SIZE, D2H) == (0,)
        outcomes.append((answer, bytes(data), bytes(back), len(flyt.inflight())))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("error", "call"), RAISES.values(), ids=RAISES.keys())
def test_both_ways_raise_alike(
    session: flyt.Session, device: int, error: type[Exception], call: Case
) -> None:
    for express in (session.express, None):
        session.express = express
        with pytest.raises(error):
            call(device, np.zeros(SIZE, np.uint8))


@needs_rings
def test_both_ways_count_alike(session: flyt.Session, device: int) -> None:
    counts = []
    for express in (session.express, None):
        session.express = express
        before = flyt.statistics()
        data = np.ones(SIZE, np.uint8)
        for _ in range(20):
            assert cudart.cudaMemcpy(device, data, SIZE, H2D) == (0,)
            assert cudart.cudaMemcpy(data, device, SIZE, D2H) == (0,)
            assert cudart.cudaMemset(device, 1, SIZE) == (0,)
        assert cudart.cudaDeviceSynchronize() == (0,)
        after = flyt.statistics()
        counts.append({name: after[name] - before[name] for name in after})
    assert counts[0] == counts[1]
    assert counts[0]["staged_d2h_bytes"] == 20 * SIZE


def test_freed_memory_is_refused(session: flyt.Session, device: int) -> None:
    data = np.ones(SIZE, np.uint8)
    for _ in range(3):
        assert cudart.cudaMemcpy(device, data, SIZE, H2D) == (0,)
    assert cudart.cudaFree(device) == (0,)
    assert cudart.cudaMemcpy(device, data, SIZE, H2D)[0] == 1
    assert cudart.cudaMemcpy(data, device, SIZE, D2H)[0] == 1
    assert cudart.cudaMemset(device, 1, SIZE)[0] == 1


def test_posts_in_flight_never_show_an_older_byte(session: flyt.Session, device: int) -> None:
    """The source is overwritten at once, and the ring of small copies goes round many times."""
    data, back = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    for number in range(3000):
        data[:] = number & 0xFF
        assert cudart.cudaMemcpyAsync(device, data, SIZE, H2D, 0) == (0,)
        data[:] = 0xEE
        if number % 50 == 0:
            assert cudart.cudaMemcpy(back, device, SIZE, D2H) == (0,)
            assert (back == number & 0xFF).all()


@needs_rings
def test_a_long_copy_wakes_the_worker_before_its_first_byte(
    session: flyt.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 8 << 20
    device, data = cudart.cudaMalloc(size)[1], np.arange(size // 8).view(np.uint8)
    assert cudart.cudaDeviceSynchronize() == (0,)
    order = []
    commands = session.connection._wire.rings[0]
    deadline = time.monotonic() + LIMIT
    while not commands.sleeper() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert commands.sleeper(), "the worker never sleeps"
    pack, link = StagedWay._pack, session.connection.link
    assert link is not None
    wake = link.wake

    def packs(way: StagedWay, flight: Any) -> None:
        order.append("pack")
        pack(way, flight)

    def wakes(asleep: int) -> None:
        order.append("wake")
        wake(asleep)

    monkeypatch.setattr(StagedWay, "_pack", packs)
    monkeypatch.setattr(link, "wake", wakes)
    assert cudart.cudaMemcpy(device, data, size, H2D) == (0,)
    assert order[0] == "wake"
    assert order.count("pack") > 1, "one part alone"
    back = np.zeros_like(data)
    assert cudart.cudaMemcpy(back, device, size, D2H) == (0,)
    assert np.array_equal(back, data)


@needs_rings
def test_the_parts_of_a_long_copy_take_the_short_way(
    session: flyt.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, slots = 100 << 20, session._slots
    assert slots is not None
    device, back = cudart.cudaMalloc(size)[1], np.zeros(size, np.uint8)
    data = np.random.default_rng(5).integers(0, 256, size, dtype=np.uint8)
    lent, is_lent = [], StagedWay._is_lent

    def counted(*arguments: Any) -> bool:
        lent.append(is_lent(*arguments))
        return lent[-1]

    monkeypatch.setattr(StagedWay, "_is_lent", counted)
    for _ in range(3):
        data ^= 0x5A
        assert cudart.cudaMemcpy(device, data, size, H2D) == (0,)
        assert cudart.cudaMemcpy(back, device, size, D2H) == (0,)
        assert np.array_equal(back, data)
    assert len(lent) > 2 * slots.count, "each slot went round"
    assert lent.count(True) > len(lent) / 2, "an answer of another kind is Python's to read"
    held: list[list[Any]] = [[] for _ in range(slots.count + 1)]
    assert [slots.try_take(one) for one in held] == [True] * slots.count + [False]
    for one in held:
        slots.give_back(one)


def test_threads_share_the_short_way(session: flyt.Session) -> None:
    """One place for copies to the host: who finds it taken goes the general way."""
    wrong: list[str] = []

    def work(number: int) -> None:
        device = cudart.cudaMalloc(SIZE)[1]
        back = np.zeros(SIZE, np.uint8)
        for round_ in range(200):
            value = (number * 50 + round_) & 0xFF
            codes = (
                cudart.cudaMemset(device, value, SIZE),
                cudart.cudaMemcpy(back, device, SIZE, D2H),
            )
            if codes != ((0,), (0,)) or not (back == value).all():
                wrong.append(f"thread {number}, round {round_}: {codes}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT * 6)
    assert not wrong
    assert len(flyt.inflight()) == 0


@pytest.mark.emulated_only(reason="a slowed device")
def test_an_interrupt_while_the_device_is_at_it(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    """Ctrl-C ends the call; the bytes that come later go nowhere, and the next calls are right."""
    session = connect(backend(device_options="latency=0.5"))
    device = cudart.cudaMalloc(SIZE)[1]
    assert cudart.cudaMemset(device, 7, SIZE) == (0,)
    left = np.zeros(SIZE, np.uint8)
    for _ in range(2):
        timer = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            cudart.cudaMemcpy(left, device, SIZE, D2H)
        timer.join()
        express = session.express
        if express is not None:
            assert express.reader, "the device will write there"
            express._free(Pending(express.reader - 1, "CopyOut", SIZE, (0, 0)))  # told once more
            assert express.reader, "another command's answer"
    back = np.zeros(SIZE, np.uint8)
    assert cudart.cudaMemcpy(back, device, SIZE, D2H) == (0,)
    assert (back == 7).all()
    assert not left.any()
    assert cudart.cudaDeviceSynchronize() == (0,)
    assert express is None or not express.reader
    assert len(flyt.inflight()) == 0


@pytest.mark.emulated_only(reason="an injected fault")
@pytest.mark.parametrize("fault", ["copy:1:3", "copy:1:3:async"])
def test_an_error_of_the_device(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session], fault: str
) -> None:
    connect(backend(device_options=f"fault={fault}"))
    device, back = cudart.cudaMalloc(SIZE)[1], np.zeros(SIZE, np.uint8)
    codes = [cudart.cudaMemcpy(back, device, SIZE, D2H)[0] for _ in range(5)]
    assert codes == [0, 0, 1, 0, 0]


def _goes_the_short_way(monkeypatch: pytest.MonkeyPatch, session: flyt.Session) -> list[int]:
    """One entry for each synchronise that goes the general way from now on."""
    general: list[int] = []
    wait = session.scheduler._wait

    def waits(pending: Any) -> None:
        general.append(1)
        wait(pending)

    monkeypatch.setattr(session.scheduler, "_wait", waits)
    return general


@needs_rings
def test_a_wait_for_small_work_takes_the_short_way(
    session: flyt.Session, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.express._link.hold_ns = 10**8
    data, stream = np.ones(SIZE, np.uint8), cudart.cudaStreamCreate()[1]
    assert cudart.cudaDeviceSynchronize() == (0,)
    general = _goes_the_short_way(monkeypatch, session)
    waits: list[Callable[[], Any]] = [
        cudart.cudaDeviceSynchronize,
        lambda: cudart.cudaStreamSynchronize(0),
        lambda: cudart.cudaStreamSynchronize(stream),
        flyt.Stream.default.sync,
    ]
    for wait in waits:
        for _ in range(10):
            assert cudart.cudaMemcpyAsync(device, data, SIZE, H2D, stream) == (0,)
            wait()
            assert not flyt.inflight()
    assert len(general) < 10, "now and then an answer is late"


@needs_rings
@pytest.mark.parametrize("quiet", [True, False], ids=["quiet", "not quiet"])
def test_a_look_reads_what_the_connection_has(
    session: flyt.Session, device: int, monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    """Now and then a post looks at the connection, and only if it has something at the tables."""
    said: list[int] = []
    fill, drain, drained = session.express._fill, session.connection.drain, []
    monkeypatch.setattr(session.express, "_fill", lambda *a: said.append(fill(*a)) or said[-1])
    monkeypatch.setattr(session.connection, "drain", lambda: drained.append(drain()))
    monkeypatch.setattr(session.connection._wire._dialer, "is_quiet", lambda: quiet)
    deadline = time.monotonic() + LIMIT
    while LOOK not in said and time.monotonic() < deadline:
        session.connection.call(m.Ping)  # the worker is awake
        session.express._state.since, session.express._state.looked = 31, 0
        drained.clear()
        assert cudart.cudaMemset(device, 7, SIZE) == (0,)
    assert LOOK in said
    assert bool(drained) != quiet


@pytest.mark.emulated_only(reason="a slowed device")
@pytest.mark.parametrize("flags", [0, 1], ids=["blocking", "non-blocking"])
def test_who_is_waited_for_is_done(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session], flags: int
) -> None:
    """The default stream also waits for blocking ones, a stream for itself, a device for all."""
    session = connect(backend(device_options="latency=0.2"))
    stream = cudart.cudaStreamCreateWithFlags(flags)[1]
    device, pinned = cudart.cudaMalloc(SIZE)[1], flyt.pinned_empty(SIZE, np.uint8)
    pinned[:] = 0

    def busy(value: int) -> None:
        assert cudart.cudaMemsetAsync(device, value, SIZE, stream) == (0,)
        assert cudart.cudaMemcpyAsync(pinned, device, SIZE, D2H, stream) == (0,)

    busy(1)
    assert cudart.cudaStreamSynchronize(0) == (0,)
    assert (pinned[0] == 1) == (not flags)
    assert cudart.cudaStreamSynchronize(stream) == (0,)
    assert (pinned == 1).all()
    busy(2)
    assert cudart.cudaStreamDestroy(stream) == (0,)
    assert cudart.cudaDeviceSynchronize() == (0,)
    assert (pinned == 2).all()
    assert cudart.cudaDeviceSynchronize() == (0,)
    assert not session.scheduler.table.has_dying, "kept for ever"


@pytest.mark.emulated_only(reason="an injected fault")
@pytest.mark.parametrize("own", [True, False], ids=["its own stream", "another stream"])
def test_a_wait_tells_the_error_of_a_post_once(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session], own: bool
) -> None:
    connect(backend(device_options="fault=copy:1:3:async"))
    device, pinned = cudart.cudaMalloc(SIZE)[1], flyt.pinned_empty(SIZE, np.uint8)
    stream, other = (cudart.cudaStreamCreate()[1] for _ in range(2))
    wait = (lambda: cudart.cudaStreamSynchronize(stream)) if own else cudart.cudaDeviceSynchronize
    codes = []
    for _ in range(5):
        assert cudart.cudaMemcpyAsync(device, pinned, SIZE, H2D, stream) == (0,)
        assert cudart.cudaMemsetAsync(device, 1, SIZE, other) == (0,)
        codes.append(int(wait()[0]))
    assert codes == [0, 0, 1, 0, 0]


# --- the worker's side ---


def test_order_with_all_that_is_not_plain(session: flyt.Session) -> None:
    """One order, as all streams here wait for each other; a model of the bytes tells."""
    rng = random.Random(17)
    stream = cudart.cudaStreamCreate()[1]
    event = cudart.cudaEventCreateWithFlags(2)[1]
    pinned = flyt.pinned_empty(SIZE, np.uint8)
    blocks = [cudart.cudaMalloc(SIZE)[1] for _ in range(3)]
    model = {block: np.zeros(SIZE, np.uint8) for block in blocks}
    back = np.zeros(SIZE, np.uint8)

    def part() -> tuple[int, int]:
        start = rng.randrange(SIZE)
        return start, rng.randrange(1, SIZE - start + 1)

    for step in range(3000):
        block, other = rng.sample(blocks, 2)
        start, size = part()
        queue = rng.choice([0, stream])
        what = rng.randrange(12)
        if what <= 1:
            data = np.frombuffer(rng.randbytes(size), np.uint8).copy()
            answer = cudart.cudaMemcpyAsync(block + start, data, size, H2D, queue)
            model[block][start : start + size] = data
        elif what <= 3:
            answer = cudart.cudaMemsetAsync(block + start, step, size, queue)
            model[block][start : start + size] = step & 0xFF
        elif what <= 5:
            answer = cudart.cudaMemcpyAsync(back, block + start, size, D2H, queue)
            assert np.array_equal(back[:size], model[block][start : start + size]), step
        elif what == 6:
            answer = cudart.cudaMemcpyAsync(block + start, other + start, size, D2D, queue)
            model[block][start : start + size] = model[other][start : start + size]
        elif what == 7:
            answer = cudart.cudaMemset2D(block, 64, step, 32, SIZE // 64)
            model[block].reshape(-1, 64)[:, :32] = step & 0xFF
        elif what == 8:
            assert cudart.cudaEventRecord(event, queue) == (0,)
            answer = cudart.cudaStreamWaitEvent(stream, event, 0)
        elif what == 9:
            assert cudart.cudaStreamSynchronize(stream) == (0,)
            pinned[:] = model[block]
            answer = cudart.cudaMemcpy(other, pinned, SIZE, H2D)
            model[other][:] = model[block]
        elif what == 10:
            assert cudart.cudaFree(block) == (0,)
            blocks.remove(block)
            del model[block]
            answer, fresh = cudart.cudaMalloc(SIZE)
            answer = (answer,)
            blocks.append(fresh)
            model[fresh] = np.zeros(SIZE, np.uint8)
        else:
            answer = cudart.cudaStreamSynchronize(queue)
        assert answer == (0,), step
    for block in blocks:
        assert cudart.cudaMemcpy(back, block, SIZE, D2H) == (0,)
        assert np.array_equal(back, model[block])


def test_small_copies_behind_long_work(session: flyt.Session) -> None:
    """What the device is still at, on the same stream or on one that the stream waits for."""
    size = 32 << 20  # not done at the call, even by the emulated device
    big, stream = cudart.cudaMalloc(size)[1], cudart.cudaStreamCreate()[1]
    end, back = big + size - SIZE, np.zeros(SIZE, np.uint8)
    for number in range(1, 30):
        queue = stream if number % 2 else 0
        assert cudart.cudaMemsetAsync(big, number, size, queue) == (0,)
        assert cudart.cudaMemcpy(back, end, SIZE, D2H) == (0,)
        assert (back == number).all()
        assert cudart.cudaMemsetAsync(big, 0xEE, size, queue) == (0,)
        assert cudart.cudaMemset(end, number, SIZE) == (0,)
        assert cudart.cudaMemcpyAsync(back, end, SIZE, D2H, stream) == (0,)
        assert (back == number).all()


def test_more_blocks_and_streams_than_are_noted(session: flyt.Session) -> None:
    """The worker's loop keeps 64 blocks and 16 streams in mind."""
    blocks = [cudart.cudaMalloc(64)[1] for _ in range(100)]
    streams = [cudart.cudaStreamCreate()[1] for _ in range(20)]
    back = np.zeros(64, np.uint8)
    for round_ in range(3):
        for number, block in enumerate(blocks):
            stream = streams[number % len(streams)]
            assert cudart.cudaMemsetAsync(block, number + round_, 64, stream) == (0,)
        for number, block in enumerate(blocks):
            stream = streams[number % len(streams)]
            assert cudart.cudaMemcpyAsync(back, block, 64, D2H, stream) == (0,)
            assert (back == number + round_).all()


@pytest.fixture
def ringer(served: Any) -> Iterator[Ringer]:
    if ring.usable() is None:
        pytest.skip("--no-ring, or no C compiler was there when Flyt was installed")
    with RawClient(served.endpoint) as client:
        yield Ringer(client)


class Plain:
    """A client whose copies the worker has served without Python for a while."""

    def __init__(self, ringer: Ringer) -> None:
        self.ringer, self.client = ringer, ringer.client
        self.page = self.client.geometry.page_size
        self.block, self.other = (self.call(m.Malloc, 0, SIZE, 0).values[0] for _ in range(2))
        for _ in range(10):
            assert self.copy_in() == 0
            assert self.status(m.Memset, self.block, 1, SIZE) == 0

    def call(self, kind: Callable[..., Any], *fields: Any) -> Any:
        number = self.ringer.post(kind, *fields)
        answer = self.ringer.hear()
        assert answer.first == number if isinstance(answer, m.Done) else answer.id == number
        return answer

    def burst(self, *commands: tuple[Any, ...]) -> list[int]:
        """Statuses of these commands, which the compiled loop sees first: more than a turn's share
        of fills comes before them, so that the thread is at the ring, and awake."""
        before = [(m.Memset, self.other, 0, 1)] * AHEAD
        numbers = [self.ringer.post(*command) for command in (*before, *commands)]
        answers: dict[int, int] = {}
        while len(answers) < len(numbers):
            reply = self.ringer.hear()
            if isinstance(reply, m.Done):
                answers |= dict.fromkeys(range(reply.first, reply.first + reply.count), 0)
            elif isinstance(reply, m.Result):
                answers[reply.id] = reply.status
        return [answers[number] for number in numbers[AHEAD:]]

    def status(self, kind: Callable[..., Any], *fields: Any) -> int:
        answer = self.call(kind, *fields)
        return 0 if isinstance(answer, m.Done) else int(answer.status)

    def copy_in(self, index: int = 0, stream: int = 0) -> int:
        at = index or self.page
        return self.status(m.CopyIn, self.block, at, SIZE, self.client.pid, stream)

    def device_bytes(self) -> bytes:
        index = 2 * self.page
        assert self.status(m.CopyOut, self.block, index, SIZE, self.client.pid) == 0
        return bytes(self.client.bytes_at(index, SIZE))


@pytest.fixture
def plain(ringer: Ringer) -> Plain:
    return Plain(ringer)


def test_a_block_that_was_freed_is_nobodys(plain: Plain) -> None:
    copy = m.CopyIn, plain.block, plain.page, SIZE, plain.client.pid
    fill = m.Memset, plain.block, 1, SIZE
    assert plain.burst(copy, fill, (m.Free, plain.block), copy, fill) == [0, 0, 0, 1, 1]
    assert plain.burst(copy) == [1]
    assert plain.burst(fill) == [1]
    assert plain.ringer.lives()


def test_frames_that_were_given_up_are_not_read(plain: Plain) -> None:
    client, vpn = plain.client, 64
    table = client.take(1, vpn)
    assert client.window is not None
    client.window.map(vpn, table)
    assert plain.status(m.Grow, vpn, table) == 0
    index = vpn * plain.page
    client.bytes_at(index, SIZE)[:] = b"\xaa" * SIZE
    assert plain.copy_in(index) == 0
    copy = m.CopyIn, plain.block, index, SIZE, client.pid
    *_, last = statuses = plain.burst(copy, (m.Shrink, vpn), copy)
    assert plain.device_bytes() == b"\xaa" * SIZE
    assert (statuses[0], last) == (0, 1)


def test_a_stream_that_was_destroyed_is_none(plain: Plain) -> None:
    stream = 0x5000
    assert plain.status(m.StreamCreate, stream, 0, 0, 0) == 0
    assert plain.copy_in(stream=stream) == 0
    copy = m.CopyIn, plain.block, plain.page, SIZE, plain.client.pid, stream
    assert plain.burst(copy, (m.StreamDestroy, stream), copy) == [0, 0, 400]


def test_what_is_beyond_is_refused_and_moves_nothing(plain: Plain) -> None:
    assert plain.status(m.Memset, plain.block, 0, SIZE) == 0
    before, pid, page = bytes(SIZE), plain.client.pid, plain.page
    plain.client.bytes_at(page, 2 * page)[:] = b"\xcc" * (2 * page)
    beyond = [
        (plain.block + 1, page, SIZE),
        (plain.block, 3 * page - SIZE + 1, SIZE),
        (plain.block, 0, SIZE),
        (plain.block, page - 1, SIZE),
        ((1 << 64) - 1, page, SIZE),
        (plain.block, (1 << 64) - 1, SIZE),
        (plain.block, page, (1 << 64) - 1),
    ]
    for copy in (m.CopyIn, m.CopyOut):
        assert plain.burst(*((copy, *case, pid) for case in beyond)) == [1] * len(beyond)
    assert plain.burst((m.Memset, plain.block + 1, 0xCC, SIZE)) == [1]
    assert plain.device_bytes() == before


def test_another_process_is_named(plain: Plain) -> None:
    plain.ringer.post(m.CopyIn, plain.block, plain.page, SIZE, plain.client.pid + 1)
    assert "is for pid" in plain.ringer.refusal()


def test_what_is_no_message_ends_the_session(plain: Plain) -> None:
    entry = m.COMMANDS.encode(m.CopyIn(9, plain.block, plain.page, SIZE, plain.client.pid, 0))
    plain.ringer.say(entry[:-1])
    assert "MessagePack" in plain.ringer.refusal()


def test_it_is_counted(served: Any, plain: Plain) -> None:
    def moved() -> int:
        entry = session_of(served, plain.client.pid)
        assert entry is not None
        return int(entry["bytes_moved"])

    before = moved()
    copy = m.CopyIn, plain.block, plain.page, SIZE, plain.client.pid
    assert plain.burst(*[copy] * 50) == [0] * 50
    deadline = time.monotonic() + LIMIT
    while moved() != before + 50 * SIZE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert moved() == before + 50 * SIZE


def test_credits_come_back(plain: Plain) -> None:
    """However many commands are served: what the answers say was taken is what was sent."""
    sent = plain.call(m.Ping).taken
    for round_ in range(1, 5):
        plain.burst((m.Memset, plain.block, 1, SIZE))
        assert plain.call(m.Ping).taken == sent + round_ * (AHEAD + 2)
