# SPDX-License-Identifier: Apache-2.0
"""An interrupt in a small copy: at whatever line it comes, no byte, credit or command is lost.

A signal that another thread got is raised by its handler wherever the interpreter looks next, which
the shield of the connection's lock does not keep off.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.frontend import connection, express, express_link, inflight, staging, staging_ring, ways
from flyt.rpc import messages as m
from flyt.rpc.patience import Deadline
from flyt.shm import ring
from tests.pair.interrupter import Interrupter, Lines
from tests.pair.test_express import D2H, H2D, SIZE

pytestmark = pytest.mark.skipif(ring.usable() is None, reason="the short way needs rings")

LINES: Lines = {
    **{
        module.__file__: None
        for module in (express, express_link, inflight, staging, staging_ring, ways)
    },
    connection.__file__: {"succeeded"},  # the rest is the general way's for the most part
}

ASLEEP = 0.02
"""Seconds after which a worker that has nothing to do sleeps."""

LOOKS = 32
"""Of so many posts the last one has the connection looked at."""

SETTLE = 2.5
"""Seconds: all that is on its way has come by then."""

LONG = 3 << 20
"""Bytes: two slots, the second one twice as full as the first."""

BY_SLOTS = np.full(1 << 20, 5, np.uint8)
"""Too large for the short way, and for the ring of small copies."""

CALLS: dict[str, Callable[[int, Any, int], Any]] = {
    "to host": lambda device, data, _: cudart.cudaMemcpy(data, device, SIZE, D2H),
    "to host, late": lambda device, data, _: cudart.cudaMemcpy(data, device, SIZE, D2H),
    "to host, asleep": lambda device, data, _: cudart.cudaMemcpy(data, device, SIZE, D2H),
    "to device": lambda device, data, _: cudart.cudaMemcpy(device, data, SIZE, H2D),
    "to device, asleep": lambda device, data, _: cudart.cudaMemcpy(device, data, SIZE, H2D),
    "to device, looking": lambda device, data, _: cudart.cudaMemcpy(device, data, SIZE, H2D),
    "long": lambda device, data, _: cudart.cudaMemcpy(device, data, LONG, H2D),
    "fill": lambda device, *_: cudart.cudaMemset(device, 7, SIZE),
    "to pinned": lambda device, _, pinned: cudart.cudaMemcpy(pinned, device, SIZE, D2H),
    "from pinned": lambda device, _, pinned: cudart.cudaMemcpy(device, pinned, SIZE, H2D),
    "to pinned, long": lambda device, _, pinned: cudart.cudaMemcpy(pinned, device, LONG, D2H),
    "from pinned, long": lambda device, _, pinned: cudart.cudaMemcpy(device, pinned, LONG, H2D),
    "by slots": lambda device, *_: (
        cudart.cudaMemcpy(device, BY_SLOTS, len(BY_SLOTS), H2D),
        cudart.cudaDeviceSynchronize(),
    ),
    "a wait": lambda device, data, _: (
        cudart.cudaMemcpy(device, data, SIZE, H2D),
        cudart.cudaDeviceSynchronize(),
    ),
    "a wait for a stream": lambda device, data, _: (
        cudart.cudaMemcpy(device, data, SIZE, H2D),
        cudart.cudaStreamSynchronize(0),
    ),
    "behind a stream": lambda device, _, pinned: cudart.cudaMemcpyAsync(
        device, pinned, SIZE, H2D, 0
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_line_loses_nothing(
    one_backend: Any, connect: Callable[..., Any], name: str
) -> None:
    session, bad, at = connect(one_backend), [], 0
    if "late" in name:  # it sends, and looks for no answer
        session.express._link.hold_ns = 0
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    device, pinned = cudart.cudaMalloc(LONG)[1], cudart.cudaHostAlloc(LONG, 0)[1]
    data = np.full(LONG, 5, np.uint8)
    interrupter = None
    while interrupter is None or interrupter.where:
        # The worker knows what it is asked, and no look is due.
        for _ in range(2 if name == "long" else 20):
            for other, each in CALLS.items():
                if (other == "long") == (name == "long"):
                    each(device, data, pinned)
        assert cudart.cudaDeviceSynchronize() == (0,)
        if "asleep" in name:
            time.sleep(ASLEEP)
        state = session.express._state
        state.since, state.looked = LOOKS - 1 if "looking" in name else 0, 0
        at += 1
        interrupter = Interrupter(at, LINES)
        sys.settrace(interrupter)
        try:
            CALLS[name](device, data, pinned)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if faults := faults_of(session):
            bad.append(f"{interrupter.where}: {faults}")
            session = connect(one_backend)  # the tables of the old one are what they are
            device, pinned = cudart.cudaMalloc(LONG)[1], cudart.cudaHostAlloc(LONG, 0)[1]
    assert at > 5, "the short way was not taken"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask, "signals stay blocked"
    assert not bad, "\n".join(bad)


def faults_of(session: Any) -> list[str]:
    wire, found = session.connection, []
    if wire.lock.reading._is_owned():
        found.append("the lock is held for ever")
    wire.settle(Deadline.after(SETTLE))
    if left := flyt.inflight():
        found.append(f"in flight for ever: {[command.name for command in left]}")
        return found
    last = session.scheduler.table._legacy[0].last
    if last is not None and not last.done:
        found.append("cudaDeviceSynchronize would wait for ever")
    if session.express.reader:
        found.append("the cell is taken for ever")
    slots, held = session._slots, [[] for _ in range(session._slots.count)]
    if lost := sum(not slots.try_take(one) for one in held):
        found.append(f"{lost} slots are lost")
    for one in held:
        slots.give_back(one)
    wire.call(m.Ping)
    if lost := wire.flow.sent - wire.flow.taken:
        found.append(f"{lost} credits are lost")
    return found


@pytest.mark.emulated_only(reason="only the emulated device can slow its copies down")
@pytest.mark.parametrize("short", [True, False], ids=["short way", "general way"])
def test_the_place_of_an_interrupted_copy_is_its_own(
    backend: Callable[..., Any],
    connect: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    short: bool,
) -> None:
    session = connect(backend(device_options="latency=0.3"))
    if not short:
        session.express = session.transfers._way._express = None
    first, second = (cudart.cudaMalloc(SIZE)[1] for _ in range(2))
    assert cudart.cudaDeviceSynchronize() == (0,)

    def interrupted() -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session.connection._wire, "wants_a_look", interrupted)
        if session.express is not None:
            session.express._state.since, session.express._state.looked = LOOKS - 1, 0
            patch.setattr(session.express._link, "is_quiet", interrupted)
            patch.setattr(session.express._link, "wake", lambda _: interrupted())
        with pytest.raises(KeyboardInterrupt):
            cudart.cudaMemcpy(first, np.full(SIZE, 1, np.uint8), SIZE, H2D)
    assert cudart.cudaMemcpy(second, np.full(SIZE, 2, np.uint8), SIZE, H2D) == (0,)
    back = np.zeros(SIZE, np.uint8)
    assert cudart.cudaMemcpy(back, first, SIZE, D2H) == (0,)
    assert set(back) <= {0, 1}, "the bytes of another copy"
