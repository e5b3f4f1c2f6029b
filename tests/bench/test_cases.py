# SPDX-License-Identifier: Apache-2.0
"""Every byte that a round moves is compared: one wrong byte anywhere, and the round fails."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flyt.bench.cases import (
    CASES,
    WARM_BYTES,
    Burst,
    Case,
    Copy,
    Latency,
    Loop,
    Post,
    Reference,
    Train,
    compare,
)
from flyt.bench.runtimes import Asynchronous, BenchFailed, Memcpy, NoRoom
from flyt.bench.together import Mix, Stream, Threads, Together

SIZE, CALLS = 40, 7


class Plain(Memcpy, Asynchronous):
    """Plain memory with everything that a case may ask for. `spoil`, if set, gets each call's
    number, destination and size, after the call; the copies that only warm up don't count."""

    def __init__(self) -> None:
        super().__init__()
        self.spoil: Callable[[int, int, int], None] | None = None
        self.count = 0
        self.streams = 0
        move = self.copy

        def copy(dst: int, src: int, size: int) -> None:
            move(dst, src, size)
            self._after(dst, size)

        def fill(dst: int, value: int, size: int, _stream: Any) -> None:
            ctypes.memset(dst, value, size)
            self._after(dst, size)

        self.copy, self.fill = copy, fill

    def _after(self, dst: int, size: int) -> None:
        if size in {WARM_BYTES, SIZE * CALLS // 2}:
            return
        self.count += 1
        if self.spoil is not None:
            self.spoil(self.count, dst, size)

    def create_stream(self) -> int:
        self.streams += 1
        return 1

    def destroy_stream(self, stream: Any) -> None:
        self.streams -= 1

    @property
    def blocks(self) -> int:
        return len(self._blocks)


def flip(address: int) -> None:
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 1


def run(case: Case | Threads) -> None:
    """A round, whichever way this case is run."""
    if not isinstance(case, Together | Threads):
        case.round()
        return
    parts = Stream.PARTS if isinstance(case, Stream) else Mix.PARTS
    case.begin()
    for part in parts:
        case.ready(part)
        began, ended = case.times(part, 0.0)
        assert ended >= began
    case.end()


KINDS: list[type[Case]] = [Copy, Loop, Latency, Burst, Train, Post, Stream, Mix]
MOVES = {
    Copy: 2 * CALLS,
    Loop: 2 * CALLS,
    Latency: 2 * CALLS,
    Burst: CALLS,
    Train: CALLS,
    Post: CALLS,
    Stream: 2 * CALLS,
    Mix: 2 * CALLS,
}
"""Calls of a round that are timed; each of them can go wrong."""


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_pass_and_nothing_stays(kind: type[Case]) -> None:
    runtime = Plain()
    for pinned in (False, True):
        case = kind(runtime, Reference(), pinned=pinned, size=SIZE, calls=CALLS)
        for _ in range(3):
            run(case)
        case.close()
    assert (runtime.blocks, runtime.streams) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_byte_of_any_call_is_found(kind: type[Case]) -> None:
    for wrong in range(1, MOVES[kind] + 1):
        runtime = Plain()
        case = kind(runtime, Reference(), pinned=False, size=SIZE, calls=CALLS)
        run(case)
        runtime.count = 0

        def spoil(number: int, dst: int, size: int, wrong: int = wrong) -> None:
            if number == wrong:
                flip(dst + size - 1)

        runtime.spoil = spoil
        with pytest.raises(BenchFailed, match=rf"1 of {SIZE * CALLS} bytes are wrong"):
            run(case)
        case.close()


@pytest.mark.parametrize("kind", [k for k in KINDS if k is not Post])
@pytest.mark.parametrize("to_device", [True, False], ids=["h2d", "d2h"])
def test_a_copy_that_does_nothing_is_found(kind: type[Case], to_device: bool) -> None:
    """The bytes of the round before lie in both places: they must not pass for this round's."""
    runtime = Plain()
    case = kind(runtime, Reference(), pinned=False, size=SIZE, calls=CALLS)
    run(case)
    copy, inside = runtime.copy, range(case.device, case.device + case.total)

    def lazy(dst: int, src: int, size: int) -> None:
        if (dst in inside) != to_device:
            copy(dst, src, size)

    runtime.copy = lazy
    with pytest.raises(BenchFailed, match=f"{SIZE * CALLS} of {SIZE * CALLS} bytes are wrong"):
        run(case)
    case.close()


@pytest.mark.parametrize("to_device", [True, False], ids=["h2d", "d2h"])
def test_what_leads_can_not_pass_for_what_is_timed(to_device: bool) -> None:
    runtime = Plain()
    case = Loop(runtime, Reference(), pinned=False, size=SIZE, calls=CALLS)
    run(case)
    copy, inside = runtime.copy, range(case.device, case.device + case.total)

    def lazy(dst: int, src: int, size: int) -> None:
        if (dst in inside) != to_device or size != SIZE:
            copy(dst, src, size)

    runtime.copy = lazy
    with pytest.raises(BenchFailed, match=rf"2[5-8]\d of {SIZE * CALLS} bytes are wrong"):
        run(case)
    case.close()


def test_a_memset_that_does_nothing_is_found() -> None:
    runtime = Plain()
    runtime.fill = lambda *_: None
    case = Post(runtime, Reference(), pinned=False, size=SIZE, calls=CALLS)
    with pytest.raises(BenchFailed, match="memsets"):
        case.round()
    case.close()


def test_threads_have_bytes_of_their_own() -> None:
    runtime = Plain()
    threads = Threads(runtime, pinned=False, size=SIZE, calls=CALLS, threads=3)
    run(threads)
    runtime.count = 0
    runtime.spoil = lambda number, dst, size: flip(dst) if number == 20 else None
    with pytest.raises(BenchFailed, match="1 of"):
        run(threads)
    threads.close()
    assert runtime.blocks == 0


def test_a_fault_in_a_thread_is_the_callers() -> None:
    runtime = Plain()
    threads = Threads(runtime, pinned=False, size=SIZE, calls=CALLS, threads=2)
    threads.begin()

    def refuse(_number: int, _dst: int, _size: int) -> None:
        raise BenchFailed("a copy failed")

    runtime.spoil = refuse
    with pytest.raises(BenchFailed, match="a copy failed"):
        threads.times("mix", 0.0)
    threads.close()


def test_without_room_a_case_gives_back_what_it_had() -> None:
    class Small(Plain):
        def host_alloc(self, size: int) -> int:
            raise NoRoom(f"{size} bytes")

    runtime = Small()
    with pytest.raises(NoRoom):
        Copy(runtime, Reference(), pinned=True, size=SIZE, calls=CALLS)
    assert runtime.blocks == 0


@pytest.mark.parametrize("sizes", [(1, 7, 8, 9, 9), (64, 3, 64), (64, 3) * 200])
def test_the_reference_changes_in_every_byte(sizes: tuple[int, ...]) -> None:
    reference = Reference()
    last: dict[int, Any] = {}
    for size in sizes:
        found = reference.renew(size)
        assert found.size == size
        if size in last:
            assert (found != last[size]).all()
        last[size] = found.copy()


def test_compare_says_how_many_and_where() -> None:
    wanted = np.zeros(10 << 20, np.uint8)
    got = wanted.copy()
    got[[9 << 20, (9 << 20) + 5]] = 1
    compare("same", wanted, wanted)
    with pytest.raises(BenchFailed, match=rf"2 of {10 << 20} bytes .* offset {9 << 20}"):
        compare("other", got, wanted)


def test_every_case_of_one_client_has_a_test_here() -> None:
    assert set(CASES.values()) <= set(KINDS)
