# SPDX-License-Identifier: Apache-2.0
"""A finalizer, or a signal's handler, that makes a CUDA call while its thread is in another one:
both calls answer as they would alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.frontend import express_link
from flyt.frontend.ways import StagedWay
from flyt.rpc import messages as m
from flyt.shm import ring

Kind = cudart.cudaMemcpyKind
H2D, D2H = Kind.cudaMemcpyHostToDevice, Kind.cudaMemcpyDeviceToHost
SIZE = 4096
LIMIT = 20.0

pytestmark = pytest.mark.skipif(
    ring.usable() is None, reason="--no-ring, or no C compiler was there when Flyt was installed"
)


@pytest.fixture
def slow(backend: Callable[..., Any], connect: Callable[..., flyt.Session]) -> flyt.Session:
    """Whose answers take longer than the short way waits."""
    return connect(backend(device_options="latency=0.2"))


def _block(size: int = SIZE) -> int:
    error, address = cudart.cudaMalloc(size)
    assert error == 0, flyt.last_failure()
    return int(address)


def _bytes_of(block: int) -> Any:
    back = np.zeros(SIZE, np.uint8)
    assert cudart.cudaMemcpy(back, block, SIZE, D2H) == (0,), flyt.last_failure()
    return back


def _once_after(function: Callable[..., Any], then: Callable[[], object]) -> Callable[..., Any]:
    """The function, with a call behind the first one, as a handler's may be."""
    left = [then]

    def called(*arguments: Any) -> Any:
        answer = function(*arguments)
        if left:
            left.pop()()
        return answer

    return called


def test_while_a_command_is_made(session: flyt.Session) -> None:
    """No number is given twice."""
    block = _block()
    codes: list[Any] = []
    before = session.connection.inflight.last_id

    def make(number: int) -> m.Ping:
        codes.append(cudart.cudaMemset(block, 5, SIZE))
        with session.connection.lock:
            pass
        codes.append(cudart.cudaMemset(block, 7, SIZE))
        return m.Ping(number)

    session.connection.call(make)
    with session.connection.lock:
        assert session.connection.inflight.last_id == before + 3
    assert codes == [(0,), (0,)]
    assert (_bytes_of(block) == 7).all()
    assert cudart.cudaDeviceSynchronize() == (0,)
    assert flyt.inflight() == []


def test_behind_an_interrupt_as_the_lock_is_given_back(session: flyt.Session) -> None:
    """What the tables have not lent the library does not go by."""
    block, lock = _block(), session.connection.lock
    lend, before = lock._end, session.connection.inflight.last_id

    def interrupted() -> None:
        lock._end = lend
        raise KeyboardInterrupt

    lock._end = interrupted
    with pytest.raises(KeyboardInterrupt):
        session.connection.submit(m.Ping, posted=True)
    assert cudart.cudaMemset(block, 7, SIZE) == (0,)
    with lock:
        assert session.connection.inflight.last_id == before + 2
    assert (_bytes_of(block) == 7).all()
    assert cudart.cudaDeviceSynchronize() == (0,)
    assert flyt.inflight() == []
    sent = session.connection.link.link.sent
    assert cudart.cudaMemset(block, 7, SIZE) == (0,)
    assert session.connection.link.link.sent == sent + 1, "the short way is open again"


@pytest.mark.emulated_only(reason="a slowed device")
def test_a_copy_to_the_host_is_not_taken_for_another(slow: flyt.Session) -> None:
    express = slow.express
    assert express is not None
    block, other = _block(), _block()
    pinned = flyt.pinned_empty(SIZE, np.uint8)
    assert cudart.cudaMemset(block, 7, SIZE) == (0,)
    assert cudart.cudaMemset(other, 8, SIZE) == (0,)
    assert cudart.cudaDeviceSynchronize() == (0,)
    codes: list[Any] = []
    express._out = _once_after(
        express._out, lambda: codes.append(cudart.cudaMemcpy(pinned, other, SIZE, D2H))
    )
    assert (_bytes_of(block) == 7).all()
    assert codes == [(0,)]
    assert (pinned == 8).all()
    assert not express.reader


@pytest.mark.emulated_only(reason="an injected fault, and a slowed device")
def test_an_error_is_told_once(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    """The inner copy hears of the outer one's error, whose caller does not wait yet."""
    session = connect(backend(device_options="latency=0.2,fault=copy:1:1"))
    express = session.express
    assert express is not None
    block = _block()
    pinned, other = (flyt.pinned_empty(SIZE, np.uint8) for _ in range(2))
    codes: list[int] = []

    def copy(source: Any) -> None:
        codes.append(cudart.cudaMemcpy(block, source, SIZE, H2D)[0])

    express._in = _once_after(express._in, lambda: copy(other))
    copy(pinned)
    codes.append(cudart.cudaDeviceSynchronize()[0])
    assert sorted(codes) == [0, 0, 1]


@pytest.mark.emulated_only(reason="an injected fault, and a slowed device")
def test_a_copy_that_is_waited_for_tells_of_what_went_before(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    connect(backend(device_options="latency=0.2,fault=fill:1:2"))
    block, pinned = _block(), flyt.pinned_empty(SIZE, np.uint8)
    assert cudart.cudaMemset(block, 7, SIZE) == (0,)
    assert cudart.cudaMemcpy(block, pinned, SIZE, H2D) == (1,)
    assert cudart.cudaDeviceSynchronize() == (0,)


@pytest.mark.emulated_only(reason="an injected fault, and a slowed device")
@pytest.mark.parametrize("fault", ["", ",fault=copy:1:1"], ids=["a success", "an error"])
def test_a_long_copy_whose_command_is_noted_before_it_is_awaited(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session], fault: str
) -> None:
    """It returns when it is done, and the error is its own."""
    session = connect(backend(device_options="latency=0.2" + fault))
    express = session.express
    assert express is not None
    size = 1 << 20
    block, pinned = _block(size), flyt.pinned_empty(size, np.uint8)
    pinned[:] = 0
    assert cudart.cudaMemset(block, 7, size) == (0,)
    assert cudart.cudaDeviceSynchronize() == (0,)
    noted: list[Any] = []
    express._out = _once_after(express._out, lambda: noted.extend(flyt.inflight()))
    assert cudart.cudaMemcpy(pinned, block, size, D2H) == ((1,) if fault else (0,))
    assert [command.name for command in noted] == ["CopyOut"]
    assert bool((pinned == 7).all()) is not bool(fault)
    assert cudart.cudaDeviceSynchronize() == (0,)


@pytest.mark.parametrize("way", ["short", "general"])
def test_while_the_worker_is_woken(session: flyt.Session, way: str) -> None:
    """The inner call's command is not left to a wake-up that is still to come."""
    block, connection = _block(), session.connection
    connection.room._step = 2 * LIMIT  # after which a lost wake-up is made up for
    wire = connection._wire
    deadline = time.monotonic() + LIMIT
    with connection.lock:
        while not wire.rings[0].sleeper():
            assert time.monotonic() < deadline
            time.sleep(0.002)
    wake, inner = wire._wake, [lambda: codes.append(cudart.cudaMemset(block, 7, SIZE)[0])]
    codes: list[int] = []

    def interrupted() -> bool:
        if inner:
            inner.pop()()
            codes.append(int((_bytes_of(block) == 7).all()))
        return wake()

    wire._wake = interrupted
    begin = time.monotonic()
    if way == "short":
        assert cudart.cudaMemset(block, 5, SIZE) == (0,)
    else:
        assert cudart.cudaFree(_block()) == (0,)
    assert cudart.cudaDeviceSynchronize() == (0,)
    assert time.monotonic() - begin < LIMIT
    assert codes == [0, 1]


@pytest.mark.emulated_only(reason="a slowed device")
def test_the_cell_is_not_given_up_by_another_call(slow: flyt.Session) -> None:
    """The inner copy is interrupted; the outer one's bytes are on their way to the cell yet."""
    express = slow.express
    assert express is not None
    block = _block()
    assert cudart.cudaMemset(block, 7, SIZE) == (0,)
    pinned = flyt.pinned_empty(SIZE, np.uint8)
    held: list[int] = []

    def interrupted() -> None:
        timer = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            cudart.cudaMemcpy(pinned, block, SIZE, D2H)
        timer.join()
        with slow.connection.lock:
            pending = slow.connection.inflight.get(express.reader)
            held.append(pending is not None and pending.finish is None)

    express._out = _once_after(express._out, interrupted)
    assert (_bytes_of(block) == 7).all()
    assert held == [True]


def test_while_the_tables_learn_of_copies(
    session: flyt.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that was answered meanwhile is in flight for ever."""
    block = _block()
    stream = cudart.cudaStreamCreate()[1]
    pending, left, codes = express_link.Pending, [3], list[Any]()

    def made(*arguments: Any) -> Any:
        answer = pending(*arguments)
        if left[0]:
            left[0] -= 1
            codes.append(cudart.cudaMemsetAsync(block, 7, SIZE, stream))
            codes.append(cudart.cudaStreamSynchronize(stream))
        return answer

    for _ in range(20):
        for _ in range(5):
            assert cudart.cudaMemsetAsync(block, 5, SIZE, stream) == (0,)
        monkeypatch.setattr(express_link, "Pending", made)
        assert cudart.cudaStreamQuery(stream)[0] in (0, 600)
        monkeypatch.undo()
        left[0] = 3
        assert cudart.cudaMemsetAsync(block, 9, SIZE, stream) == (0,)
        timer = threading.Timer(LIMIT, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        timer.start()
        assert cudart.cudaDeviceSynchronize() == (0,)
        timer.cancel()
        timer.join()
        assert flyt.inflight() == []
    assert set(codes) == {(0,)}
    assert codes, "the tables heard of no copy that was on its way"
    assert (_bytes_of(block) == 9).all()


def test_a_forked_child_in_the_middle_of_a_copy(session: flyt.Session) -> None:
    """The window is not there."""
    block, express = _block(), session.express
    assert express is not None
    data = np.ones(64, np.uint8)
    child = os.fork()
    if not child:
        went = express.to_device(block, data.ctypes.data, 64, 0, 0) or express.fill(
            block, 1, 8, 0, 0
        )
        os._exit(17 if not went else 1)
    deadline = time.monotonic() + LIMIT
    done, status = os.waitpid(child, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        time.sleep(0.01)
        done, status = os.waitpid(child, os.WNOHANG)
    if not done:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done
    assert os.waitstatus_to_exitcode(status) == 17
    assert (_bytes_of(block) == 0).all()


def _lock_of(part: Any) -> Any:
    return part._lock if hasattr(part, "_lock") else part._mutex


@pytest.mark.parametrize("part", ["counts", "users", "_slots", "_engine"])
def test_while_a_lock_is_held(session: flyt.Session, part: str) -> None:
    """The small locks, inside which signals are not held back, do not stop their own thread."""
    block, data = _block(1 << 20), np.ones(1 << 20, np.uint8)
    codes: list[Any] = []

    def work() -> None:
        with _lock_of(getattr(session, part)):
            codes.append(cudart.cudaMemcpy(block, data, 1 << 20, H2D))
            codes.append(cudart.cudaMemcpy(data, block, 1 << 20, D2H))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert codes == [(0,), (0,)]


@pytest.mark.parametrize("sent", [False, True])
def test_a_call_and_an_interrupt_while_a_command_is_sent(
    session: flyt.Session, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    """Whether it went out is told from whether the call within it sent anything."""
    block, wire = _block(), session.connection._wire
    send = wire.send
    codes: list[Any] = []

    def interrupted(frames: Any) -> bool:
        monkeypatch.undo()
        if sent:
            send(frames)
        codes.append(cudart.cudaMemset(block, 7, SIZE))
        raise KeyboardInterrupt

    before = session.connection.flow.sent
    monkeypatch.setattr(wire, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.connection.submit(m.Ping, posted=True)
    with session.connection.lock:
        assert session.connection.flow.sent == before + 1 + sent
    assert codes == [(0,)]
    assert (_bytes_of(block) == 7).all()
    assert flyt.inflight() == []


@pytest.mark.parametrize("inner", [H2D, D2H], ids=["to the device", "to the host"])
def test_a_copy_while_all_slots_are_another_copys(
    session: flyt.Session, monkeypatch: pytest.MonkeyPatch, inner: Kind
) -> None:
    """That one goes on only when the handler is back, and the handler's own handler is."""
    size, small = 64 << 20, 1 << 20
    outer, block = _block(size), _block(small)
    data, part = np.zeros(size, np.uint8), np.full(small, 9, np.uint8)
    assert cudart.cudaMemset(outer, 7, size) == (0,)
    codes: list[Any] = []
    nested: list[int] = []

    def handler(*_: object) -> None:
        nested.append(1)
        if len(nested) < 2:
            signal.raise_signal(signal.SIGUSR1)
        where = (block, part) if inner == H2D else (part, block)
        codes.append(cudart.cudaMemcpy(*where, small, inner))

    def hung(*_: object) -> None:
        raise TimeoutError("the handler's copy waits for the one that it has interrupted")

    previous = [signal.signal(signal.SIGUSR1, handler), signal.signal(signal.SIGALRM, hung)]
    before = _once_after(lambda *_: None, lambda: signal.raise_signal(signal.SIGUSR1))
    drain = StagedWay._drain
    monkeypatch.setattr(StagedWay, "_drain", lambda *what: (before(), drain(*what)))
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        assert cudart.cudaMemcpy(data, outer, size, D2H) == (0,), flyt.last_failure()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGUSR1, previous[0])
        signal.signal(signal.SIGALRM, previous[1])
    assert codes == [(0,), (0,)]
    assert (data == 7).all()
    back = np.zeros_like(part)
    assert cudart.cudaMemcpy(back, block, small, D2H) == (0,)
    assert (back == part).all()
    assert (part == (9 if inner == H2D else 0)).all()
    assert flyt.statistics()["staged_d2h_bytes"] == size + small, "slots are used as before"
