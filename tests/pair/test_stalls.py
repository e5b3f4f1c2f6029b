# SPDX-License-Identifier: Apache-2.0
"""A command that can't be taken yet: what comes behind it waits in order, and the session lives.

Inline copies wait for one of eight places in the worker's memory; so here all pageable bytes go
inline, by ZeroMQ or announced in the ring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.backend.bounce import SLOTS
from flyt.frontend.api.callbacks import launch
from flyt.frontend.ways import INLINE_DEPTH, InlineWay
from flyt.rpc import messages as m
from tests.pair.raw import LIMIT, RawClient, eventually

K = cudart.cudaMemcpyKind
H2D, D2H = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost
CHUNK = m.INLINE_CHUNK
NON_BLOCKING = 1

Connect = Callable[..., flyt.Session]


def ok(answer: tuple[Any, ...]) -> Any:
    assert answer[0] == 0, (answer, flyt.last_failure())
    return answer[1] if len(answer) > 1 else None


@pytest.fixture(params=["no region", "rings", "no rings"])
def inline(
    request: pytest.FixtureRequest, backend: Callable[..., Any], connect: Connect
) -> Connect:
    """``inline(extra, **arguments of the backend)``: a session whose pageable bytes go inline."""

    def start(*extra: str, **arguments: Any) -> flyt.Session:
        if request.param == "no region":
            served = backend(extra=["--no-region", *extra], **arguments)
            with pytest.warns(flyt.FlytWarning, match="without a region"):
                return connect(served)
        served = backend(extra=extra, **arguments)
        rings = {} if request.param == "rings" else {"FLYT_RING": "0"}
        session = connect(served, **rings)
        session.transfers._way = InlineWay(session.connection, CHUNK, session.counts)
        return session

    return start


class Uploads:
    """Threads that copy to the device, each on a stream and to a block of its own if not told."""

    def __init__(self, count: int, size: int, stream: int | None = None) -> None:
        self.data = [np.full(size, 1 + 17 * number % 251, np.uint8) for number in range(count)]
        self.blocks = [int(ok(cudart.cudaMalloc(size))) for _ in range(count)]
        self.answers: list[tuple[int, int]] = []
        self._threads = [
            threading.Thread(target=self._copy, args=(number, stream), daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _copy(self, number: int, stream: int | None) -> None:
        if stream is None:
            stream = ok(cudart.cudaStreamCreateWithFlags(NON_BLOCKING))
        data = self.data[number]
        code = cudart.cudaMemcpyAsync(self.blocks[number], data, data.size, H2D, stream)[0]
        self.answers.append((number, int(code)))

    def end(self) -> None:
        """All succeed."""
        for thread in self._threads:
            thread.join(LIMIT)
        assert sorted(self.answers) == [(number, 0) for number in range(len(self.data))]

    def check(self) -> None:
        """The bytes are where they should be."""
        for block, data in zip(self.blocks, self.data, strict=True):
            back = np.zeros_like(data)
            ok(cudart.cudaMemcpy(back, block, data.size, D2H))
            assert (back == data).all()


def under_way() -> int:
    return sum(command.name == "Push" for command in flyt.inflight())


@pytest.mark.parametrize("threads", [3, 70], ids=["slots", "credits"])
def test_a_host_function_returns_while_copies_of_several_threads_wait_for_it(
    inline: Connect, threads: int
) -> None:
    """More copies than the worker has slots for, or than the client has credits for."""
    inline()
    stream, begun, go = ok(cudart.cudaStreamCreate()), threading.Event(), threading.Event()

    def function(_: int) -> None:
        begun.set()
        go.wait(LIMIT)

    launch(stream, function)
    uploads = Uploads(threads, 5 * CHUNK + 7, stream)
    wanted = min(threads * INLINE_DEPTH, m.CREDITS)
    assert eventually(lambda: under_way() >= wanted)
    assert begun.wait(LIMIT)
    go.set()
    uploads.end()
    uploads.check()


@pytest.mark.emulated_only(reason="slowed copies")
def test_a_session_that_waits_for_its_device_is_not_given_up(inline: Connect) -> None:
    """The client hears of it within three heartbeats, or it would take the worker for dead."""
    inline("--heartbeat", "1", device_options="latency=4")
    Uploads(SLOTS + 1, CHUNK).end()


def test_what_is_behind_a_held_command_keeps_its_order_and_its_credit(one_backend: Any) -> None:
    stream = m.FIRST_STREAM
    with RawClient(one_backend.endpoint) as client:
        assert client.attach_inline().status == 0
        block = client.malloc(CHUNK)
        assert client.call(m.StreamCreate, stream, 0, NON_BLOCKING, 0).status == 0
        call = client.post(m.HostCall, stream)
        assert client.answer(call).status == 0
        behind = [
            client.post(m.Push, block, CHUNK, stream, payload=bytes([n]) * CHUNK)
            for n in range(SLOTS + 4)
        ]
        behind.append(client.post(m.Memset, block, 0xEE, CHUNK // 2, stream))
        ping = client.call(m.Ping)
        assert ping.status == 0
        # The held command was taken, the four behind it were not.
        assert ping.taken == call + SLOTS + 1 + 1
        returned = client.post(m.HostReturn, call)
        for number in (returned, *behind):
            assert client.answer(number).status == 0
        assert client.call(m.Pull, block, CHUNK, stream).status == 0
        assert client.payload == b"\xee" * (CHUNK // 2) + bytes([SLOTS + 3]) * (CHUNK // 2)
        assert client.call(m.Ping).taken == client._last


def test_who_has_no_credit_left_still_returns_from_a_host_function(one_backend: Any) -> None:
    """As many commands as there are credits wait behind the held one."""
    stream = m.FIRST_STREAM
    with RawClient(one_backend.endpoint) as client:
        assert client.attach_inline().status == 0
        block = client.malloc(CHUNK)
        assert client.call(m.StreamCreate, stream, 0, NON_BLOCKING, 0).status == 0
        call = client.post(m.HostCall, stream)
        assert client.answer(call).status == 0
        behind = [
            client.post(m.Push, block, 1, stream, payload=b"x")
            for _ in range(SLOTS + 1 + m.CREDITS)
        ]
        assert client.call(m.Ping).status == 0
        client.post(m.HostReturn, call)
        assert all(client.answer(number).status == 0 for number in behind)


def test_a_client_may_die_with_commands_held(one_backend: Any) -> None:
    stream = m.FIRST_STREAM
    with RawClient(one_backend.endpoint) as client:
        assert client.attach_inline().status == 0
        block = client.malloc(CHUNK)
        free = client.call(m.MemInfo, 0).values[0]
        assert client.call(m.StreamCreate, stream, 0, NON_BLOCKING, 0).status == 0
        assert client.call(m.HostCall, stream).status == 0
        for _ in range(SLOTS + 3):
            client.post(m.Push, block, CHUNK, stream, payload=bytes(CHUNK))
        assert client.call(m.Ping).status == 0
    with RawClient(one_backend.endpoint) as client:
        assert client.attach_inline().status == 0
        assert eventually(lambda: client.call(m.MemInfo, 0).values[0] > free)


@pytest.mark.emulated_only(reason="injected faults")
def test_a_copy_that_the_device_refuses_gives_its_place_back(backend: Callable[..., Any]) -> None:
    faults = ",".join(f"fault=copy:999:{number + 1}" for number in range(SLOTS + 1))
    with RawClient(backend(device_options=faults).endpoint) as client:
        assert client.attach_inline().status == 0
        block = client.malloc(CHUNK)
        for _ in range(SLOTS + 1):
            assert client.call(m.Push, block, 1, payload=b"x").status == 999
        unknown = m.FIRST_STREAM + 9
        for _ in range(SLOTS + 1):
            assert client.call(m.Push, block, 1, unknown, payload=b"x").status == 400
        assert client.call(m.Push, block, 1, payload=b"x").status == 0
