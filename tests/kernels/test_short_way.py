# SPDX-License-Identifier: Apache-2.0
"""Launches by the short way, through a real backend whose emulated device has a few kernels.

`tests/kernels/stand_in` gives it those. What a GPU makes of launches `test_on_gpu.py` tells.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt import driver
from flyt.frontend import connection, express, express_link, inflight
from flyt.rpc import messages as m
from flyt.rpc.patience import Deadline
from flyt.shm import ring
from tests.pair.interrupter import Interrupter, Lines

pytestmark = [
    pytest.mark.skipif(ring.usable() is None, reason="the short way needs rings"),
    pytest.mark.emulated_only(reason="a stand-in for its kernels"),
]

STAND_IN = Path(__file__).with_name("stand_in")
IMAGE = b".version 8.0 // of the stand-in"
BY_PYTHON, BY_THE_LOOP = 1, 2
H2D, D2H = (
    cudart.cudaMemcpyKind.cudaMemcpyHostToDevice,
    cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost,
)
INVALID_VALUE, INVALID_HANDLE = 1, 400
LIMIT = 10.0


@pytest.fixture(scope="module")
def served(module_backend: Callable[..., Any]) -> Any:
    path = os.pathsep.join([str(STAND_IN), os.environ["PYTHONPATH"]])
    return module_backend(env={"PYTHONPATH": path})


@pytest.fixture
def session(served: Any, connect: Callable[..., flyt.Session]) -> flyt.Session:
    return connect(served)


@pytest.fixture
def module(session: flyt.Session, tmp_path: Path) -> flyt.RawModule:
    del session
    image = tmp_path / "image.ptx"
    image.write_bytes(IMAGE)
    return flyt.RawModule(path=image)


@pytest.fixture
def cells(session: flyt.Session) -> int:
    """Two numbers of 64 bits on the device, both 0."""
    return int(cudart.cudaMalloc(64)[1])


def read(cells: int, count: int = 2, kind: Any = np.int64) -> list[int]:
    back = np.zeros(count, kind)
    assert cudart.cudaMemcpy(back, cells, back.nbytes, D2H) == (0,)
    return [int(n) for n in back]


def posts(session: flyt.Session, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what goes the general way from now on."""
    seen: list[str] = []
    made = session.connection._made

    def note(*args: Any, **kwargs: Any) -> Any:
        pending = made(*args, **kwargs)
        seen.append(pending.name)
        return pending

    monkeypatch.setattr(session.connection, "_made", note)
    return seen


def sent(session: flyt.Session) -> int:
    with session.connection.lock:
        return session.connection.flow.sent


def test_launches_take_the_short_way_on_both_sides(
    session: flyt.Session, module: flyt.RawModule, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = module.get_function("add")
    add(1, 1, (cells, 0))
    assert read(cells) == [0, BY_PYTHON]
    general = posts(session, monkeypatch)
    deadline, total = time.monotonic() + LIMIT, 0
    while read(cells)[1] != BY_THE_LOOP and time.monotonic() < deadline:
        total += 5
        add(1, 1, (cells, 5))
        flyt.Stream.default.sync()
    assert read(cells) == [total, BY_THE_LOOP]
    for n in range(500):
        add(1, 1, (cells, n))
        total += n
    assert read(cells)[0] == total
    assert general.count("Launch") < 250, f"{general}"


@pytest.mark.parametrize("short", [True, False], ids=["short way", "general way"])
def test_shapes_arrive(
    session: flyt.Session, module: flyt.RawModule, cells: int, short: bool
) -> None:
    if not short:
        session.express = None
    tell = module.get_function("tell")
    for shape in (
        (1, 1, 1, 1, 1, 1, 0), (2**31 - 1, 65535, 65535, 1, 2, 64, 48 << 10),
        (1, 2, 3, 1024, 1, 1, 1), (70_000, 1, 1, 1, 1024, 1, 0),
    ):  # fmt: skip
        for _ in range(3):
            tell(shape[:3], shape[3:6], (cells,), shared_mem=shape[6])
            assert read(cells, 8, np.uint32)[:7] == list(shape)


SHAPES: dict[str, tuple[Any, Any, int]] = {
    "no block": (0, 1, 0),
    "no thread": (1, 0, 0),
    "too many threads": (1, (1024, 2), 0),
    "too long a block": (1, (1, 1, 65), 0),
    "too many blocks": ((1, 65536), 1, 0),
    "too much shared memory": (1, 1, (48 << 10) + 1),
    "a grid below 0": (-1, 1, 0),
    "shared memory below 0": (1, 1, -1),
    "a grid of 33 bits": (1 << 32, 1, 0),
    "a grid of 65 bits": ((1 << 64) + 1, 1, 0),
    "NumPy's numbers": ((np.int64(3),), (np.uint8(2), 1), 0),
    "true": (True, (True,), 0),
    "a float": ((1.0, 1, 1), 1, 0),
}


@pytest.mark.parametrize(("grid", "block", "shared"), SHAPES.values(), ids=SHAPES.keys())
def test_both_ways_answer_alike(
    session: flyt.Session, module: flyt.RawModule, cells: int, grid: Any, block: Any, shared: int
) -> None:
    tell, outcomes = module.get_function("tell"), []
    for way in (session.express, None):
        session.express = way
        assert cudart.cudaMemset(cells, 0, 64) == (0,)
        try:
            tell(grid, block, (cells,), shared_mem=shared)
            code = 0
        except flyt.DeviceError as exc:
            code = exc.code
        late = cudart.cudaDeviceSynchronize()
        outcomes.append((code, late, read(cells, 7, np.uint32)))
    assert outcomes[0] == outcomes[1]


def test_a_limit_that_was_changed_is_kept(module: flyt.RawModule, cells: int) -> None:
    tell = module.get_function("tell")
    most = tell.max_dynamic_shared_size_bytes
    tell(1, 1, (cells,), shared_mem=2000)
    try:
        tell.max_dynamic_shared_size_bytes = 1000
        with pytest.raises(flyt.DeviceError) as caught:
            tell(1, 1, (cells,), shared_mem=2000)
        assert caught.value.code == INVALID_VALUE
    finally:
        tell.max_dynamic_shared_size_bytes = most
    tell(1, 1, (cells,), shared_mem=3000)
    assert read(cells, 8, np.uint32)[6] == 3000


def test_parameters_that_no_place_of_the_ring_holds(module: flyt.RawModule, cells: int) -> None:
    many = module.get_function("many")
    for n in range(20):
        many(1, 1, (cells, *[(1 << 40) + n] * 15))
        assert read(cells) == [15 * ((1 << 40) + n), BY_PYTHON]


def test_launches_and_copies_keep_their_order(
    session: flyt.Session, module: flyt.RawModule, cells: int
) -> None:
    rng = random.Random(8)
    add, total = module.get_function("add"), 0
    stream, back = cudart.cudaStreamCreate()[1], np.zeros(1, np.int64)
    pinned = flyt.pinned_empty(1, np.int64)
    for step in range(4000):
        queue, what = rng.choice([0, int(stream)]), rng.randrange(8)
        if what <= 3:
            add(1, 1, (cells, step), stream=queue)
            total += step
        elif what == 4:
            total = step
            value = np.full(1, total)
            assert cudart.cudaMemcpyAsync(cells, value, 8, H2D, queue) == (0,)
        elif what == 5:
            assert cudart.cudaMemcpyAsync(back, cells, 8, D2H, queue) == (0,)
            assert back[0] == total, step
        elif what == 6:
            assert cudart.cudaMemcpyAsync(pinned, cells, 8, D2H, queue) == (0,)
            assert cudart.cudaStreamSynchronize(queue) == (0,)
            assert pinned[0] == total, step
        else:
            assert cudart.cudaMemsetAsync(cells, 0, 8, queue) == (0,)
            total = 0
    assert read(cells)[0] == total
    assert not flyt.inflight()


def test_kernels_that_take_longer_than_the_loop_stays(module: flyt.RawModule, cells: int) -> None:
    """Python completes what the loop began; what comes meanwhile is put behind it."""
    slow, add, total = module.get_function("slow"), module.get_function("add"), 0
    other, kinds = int(cudart.cudaStreamCreate()[1]), set[int]()
    for step in range(60):
        for kernel, stream in ((slow, 0), (slow, 0), (add, 0), (add, other)):
            kernel(1, 1, (cells, step), stream=stream)
            total += step
        if step % 3 == 0:
            assert cudart.cudaStreamSynchronize(0) == (0,)
        elif step % 3 == 1:
            sum_, way = read(cells)
            assert sum_ == total
            kinds.add(way)
        time.sleep(0.005 if step % 2 else 0)
    assert cudart.cudaDeviceSynchronize() == (0,)
    assert read(cells)[0] == total
    assert not flyt.inflight()
    assert BY_PYTHON in kinds


def test_a_row_longer_than_the_credits(
    session: flyt.Session, module: flyt.RawModule, cells: int
) -> None:
    add = module.get_function("add")
    for _ in range(3000):
        add(1, 1, (cells, 1))
    assert read(cells)[0] == 3000
    session.connection.call(m.Ping)
    flow = session.connection.flow
    assert flow.sent == flow.taken
    assert flow.posts >= 3000


@pytest.mark.parametrize("short", [True, False], ids=["short way", "general way"])
def test_a_launch_that_the_driver_refuses_is_told_late(
    session: flyt.Session, module: flyt.RawModule, cells: int, short: bool
) -> None:
    if not short:
        session.express = None
    add, refuse = module.get_function("add"), module.get_function("refuse")
    for _ in range(3):
        for _ in range(10):
            add(1, 1, (cells, 1))
        refuse(1, 1, ())
        assert cudart.cudaDeviceSynchronize()[0] == INVALID_VALUE
        assert cudart.cudaDeviceSynchronize() == (0,)
    assert read(cells)[0] == 30


def test_an_unloaded_module_is_forgotten(
    session: flyt.Session, module: flyt.RawModule, cells: int
) -> None:
    add = module.get_function("add")
    for _ in range(30):
        add(1, 1, (cells, 1))
    assert read(cells)[0] == 30
    _, function = module._function("add")
    stream = session.scheduler.stream(0, 0)
    params = int(cells).to_bytes(8, "little") + bytes([1, 0, 0, 0])
    session.kernels.launch(function, (1, 1, 1), (1, 1, 1), 0, stream, params)
    session.kernels.unload(function.module)
    session.kernels.launch(function, (1, 1, 1), (1, 1, 1), 0, stream, params)
    assert cudart.cudaDeviceSynchronize()[0] == INVALID_HANDLE
    assert read(cells)[0] == 31


def test_the_drivers_face_takes_it_too(
    session: flyt.Session, module: flyt.RawModule, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert driver.cuInit(0) == (0,)
    assert driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1]) == (0,)
    number = module.get_function("add").kernel
    arguments = ((cells, 7), (ctypes.c_void_p, ctypes.c_int))
    general = posts(session, monkeypatch)
    for _ in range(20):
        answer = driver.cuLaunchKernel(number, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0)
        assert answer == (driver.CUresult.CUDA_SUCCESS,)
    assert read(cells)[0] == 140
    assert driver.cuCtxSetCurrent(None) == (0,)
    assert driver.cuDevicePrimaryCtxRelease(0) == (0,)
    assert "Launch" not in general


LINES: Lines = {
    **{module.__file__: None for module in (express, express_link, inflight)},
    connection.__file__: {"succeeded"},
}


@pytest.mark.parametrize("name", ["awake", "asleep", "looking", "and a wait"])
def test_an_interrupt_at_any_line_loses_nothing(
    session: flyt.Session,
    module: flyt.RawModule,
    cells: int,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add, at, bad = module.get_function("add"), 0, []
    add(1, 1, (cells, 1))  # the first goes the general way
    general = posts(session, monkeypatch)
    interrupter = None
    while interrupter is None or interrupter.where:
        for _ in range(20):
            add(1, 1, (cells, 1))
        assert cudart.cudaDeviceSynchronize() == (0,)
        before, count = read(cells)[0], sent(session)
        if name == "asleep":
            time.sleep(0.02)
        state = session.express._state
        state.since, state.looked = (31, 0) if name == "looking" else (0, 0)
        at += 1
        interrupter = Interrupter(at, LINES)
        sys.settrace(interrupter)
        try:
            add(1, 1, (cells, 1))
            if name == "and a wait":
                flyt.Stream.default.sync()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert not session.connection.lock.reading._is_owned(), interrupter.where
        session.connection.settle(Deadline.after(2.5))
        left = [command.name for command in flyt.inflight()]
        launched, flow = sent(session) - count, session.connection.flow
        session.connection.call(m.Ping)
        if read(cells)[0] - before != launched or launched > 1 or left or flow.sent != flow.taken:
            bad.append(f"{interrupter.where}: {launched} sent, {left} left, {flow.taken} taken")
    assert at > 3, "no line of the short way was interrupted"
    assert general.count("Launch") == 0, "the short way was not taken"
    assert not bad, "\n".join(bad)
