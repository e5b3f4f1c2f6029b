# SPDX-License-Identifier: Apache-2.0
"""Launches in the compiled loop: what reaches the device's function, and what is left to Python.

The emulated device runs no kernels, so the function is the test's own, of cuLaunchKernel's form.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from flyt.backend import plain, plain_table
from flyt.backend.modules import ParameterBlock
from flyt.backend.plain import IDLE, LOOK, OTHER
from flyt.errors import ProtocolError
from flyt.rpc import messages as m
from flyt.rpc.kernel_commands import FunctionFacts
from flyt.shm.native import native
from tests.backend.test_plain import (
    DEVICE,
    INVALID_VALUE,
    LARGE,
    LINGER,
    LONG,
    NOT_READY,
    STREAM,
    Loop,
    Slow,
    copy_in,
    fill,
    left_alone,
    loop,  # noqa: F401 - a fixture, shared
)

pytestmark = pytest.mark.skipif(
    native() is None, reason="no C compiler was there when Flyt was installed"
)

FUNCTION, HANDLE, QUEUE = 1 << 20, 0xF00, 0x1234
FACTS = FunctionFacts({}, ((0, 8), (8, 4), (12, 1)))
PARAMS = bytes(range(1, FACTS.size + 1))
SHAPE = (1, 2, 3, 4, 5, 6, 70_000)

Launch = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p,
)  # fmt: skip


class Gpu(Slow):
    """A device with one function, for the streams of `Slow`; its work is done at once, if not told
    otherwise."""

    def __init__(self, loop: Loop) -> None:  # noqa: F811 - the fixture's value
        super().__init__(loop)
        self.code = 0
        self.launched: list[Any] = []
        self._launch = Launch(self._launched)
        for row in range(2):
            launch = ctypes.cast(self._launch, ctypes.c_void_p)
            loop.table.queue[row].launch = launch.value
        self.params = ParameterBlock(FACTS)
        loop.table.function[0] = plain_table.Function(
            FUNCTION, DEVICE, HANDLE, FACTS.size, self.params.start, self.params.address
        )
        loop.table.functions = 1

    def _launched(self, function: int, *rest: Any) -> int:
        *shape, stream, params, extra = rest
        values = [ctypes.string_at(params[n], size) for n, (_, size) in enumerate(FACTS.params)]
        assert (function, stream, extra) == (HANDLE, QUEUE, None)
        self.launched.append((tuple(shape), b"".join(values)))
        return self.refuses


@pytest.fixture
def gpu(loop: Loop) -> Gpu:  # noqa: F811 - the fixture
    return Gpu(loop)


def launch(**changed: Any) -> tuple[Any, ...]:
    x, y, z, i, j, k, shared = SHAPE
    fields = {
        "code": 103, "id": 1, "function": FUNCTION, "x": x, "y": y, "z": z, "i": i, "j": j, "k": k,
        "shared": shared, "stream": STREAM, "attributes": [], "params": PARAMS, "now": False,
    }  # fmt: skip
    return tuple({**fields, **changed}.values())


def test_a_launch_arrives_as_it_was_sent(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    loop.put(*launch())
    loop.put(*launch(id=2, x=2**32 - 1, shared=0, params=bytes(FACTS.size)))
    loop.table.taken = 7
    assert loop.serve() == IDLE
    assert gpu.launched == [(SHAPE, PARAMS), ((2**32 - 1, *SHAPE[1:6], 0), bytes(FACTS.size))]
    assert loop.answers() == [m.Done(9, 1, 2)]
    assert (loop.table.taken, loop.table.moved, loop.table.count) == (9, 0, 0)


def test_it_is_what_the_codec_makes_of_it(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    message = m.Launch(3, FUNCTION, *SHAPE, STREAM, (), PARAMS, False)
    loop.commands.write(m.COMMANDS.encode(message))
    assert loop.serve() == IDLE
    assert gpu.launched == [(SHAPE, PARAMS)]


def test_a_function_without_parameters(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    seen = []
    nothing = Launch(lambda *_: seen.append(1) or 0)
    loop.table.queue[0].launch = ctypes.cast(nothing, ctypes.c_void_p).value
    empty = ParameterBlock(FunctionFacts({}, ()))
    loop.table.function[0] = plain_table.Function(
        FUNCTION, DEVICE, HANDLE, empty.size, empty.start, empty.address
    )
    loop.put(*launch(params=b""))
    assert loop.serve() == IDLE
    assert (seen, len(loop.answers())) == ([1], 1)
    loop.table.taken = 0
    assert left_alone(loop, msgpack.packb(launch())), "parameters that it does not take"
    del gpu


LEFT: dict[str, Callable[[], Any]] = {
    "an unknown function": lambda: launch(function=FUNCTION + 1),
    "a function of 64 bits": lambda: launch(function=FUNCTION + (1 << 32)),
    "an unknown stream": lambda: launch(stream=STREAM + 9),
    "too few parameters": lambda: launch(params=PARAMS[:-1]),
    "too many parameters": lambda: launch(params=PARAMS + b"x"),
    "no parameters": lambda: launch(params=b""),
    "a text for parameters": lambda: launch(params="x" * FACTS.size),
    "a number for parameters": lambda: launch(params=1),
    "an attribute": lambda: launch(attributes=[2, 1, 0, 0]),
    "nothing for attributes": lambda: launch(attributes=None),
    "the driver's own answer": lambda: launch(now=True),
    "a number for a flag": lambda: launch(now=0),
    "a grid of 33 bits": lambda: launch(x=1 << 32),
    "a block of 64 bits": lambda: launch(k=2**64 - 1),
    "shared memory of 33 bits": lambda: launch(shared=1 << 32),
    "a negative number": lambda: launch(y=-1),
    "another code": lambda: launch(code=104),
    "a field too few": lambda: launch()[:-1],
    "a field too many": lambda: (*launch(), 0),
    "only numbers": lambda: (103, *range(1, 14)),
}


@pytest.mark.parametrize("fields", LEFT.values(), ids=LEFT.keys())
def test_what_is_not_plain_is_left_in_the_ring(
    loop: Loop,  # noqa: F811
    gpu: Gpu,
    fields: Callable[[], tuple[Any, ...]],
) -> None:
    assert left_alone(loop, msgpack.packb(fields()))
    assert not gpu.launched


def test_other_forms_of_the_same_message_are_left(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    entry = msgpack.packb(launch())
    tail = entry[-len(PARAMS) - 4 :]
    assert tail[:3] == bytes([0x90, 0xC4, len(PARAMS)])
    head = entry[: -len(tail)]
    for other in (
        head + b"\xdc\0\0" + tail[1:],  # attributes by a longer form
        head + b"\x90\xc5\0" + tail[2:],  # parameters by a longer form
        head + tail[:-1] + b"\xc3",
        b"\xdc\0\x0e" + entry[1:],
        head + b"\x90\xc4\xff" + tail[3:],  # more bytes than there are
        head + b"\x90\xc4\x00" + tail[3:],
    ):
        assert left_alone(loop, other)
    assert not gpu.launched


def test_every_truncation_and_every_appendix_is_left(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    whole = msgpack.packb(launch(id=2**40))
    for length in range(len(whole)):
        assert left_alone(loop, whole[:length]), length
    for extra in (b"\0", b"\xc2", b"\x90"):
        assert left_alone(loop, whole + extra)
    assert not gpu.launched


def test_a_device_without_kernels_leaves_it(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    loop.table.queue[0].launch = None
    assert left_alone(loop, msgpack.packb(launch()))
    loop.table.functions = 0
    assert left_alone(loop, msgpack.packb(launch(stream=STREAM + 1)))
    assert not gpu.launched


def test_a_function_and_a_stream_of_two_devices_are_left(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    loop.table.queue[0].device = 1
    assert left_alone(loop, msgpack.packb(launch()))
    assert not gpu.launched


def test_a_wild_entry_does_nothing_or_what_python_would_do(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    rng = random.Random(12)
    served = 0
    for _ in range(20_000):
        entry = bytearray(msgpack.packb(launch()))
        for _ in range(rng.randrange(3)):
            entry[rng.randrange(len(entry))] = rng.randrange(256)
        if rng.random() < 0.1:
            del entry[rng.randrange(len(entry))]
        loop.table.taken = 0
        loop.commands.write(bytes(entry))
        if loop.serve(linger=1) == OTHER:
            assert loop.read.read() == entry
            assert not gpu.launched
            continue
        served += 1
        command = m.COMMANDS.decode(bytes(entry))
        assert isinstance(command, m.Launch)
        shape = (
            command.grid_x, command.grid_y, command.grid_z,
            command.block_x, command.block_y, command.block_z, command.shared,
        )  # fmt: skip
        assert gpu.launched.pop() == (shape, command.params)
        assert (command.function, command.attributes, command.now) == (FUNCTION, (), False)
        assert command.stream in (STREAM, STREAM + 1)
        [answer] = loop.answers()
        assert (answer.first, answer.count) == (command.id, 1)
    assert served > 2000


def test_what_python_refuses_is_left(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    """One end of the contract of the test above, by itself: no message is served that is none."""
    entry = msgpack.packb(launch(x=1 << 32))
    with pytest.raises(ProtocolError):
        m.COMMANDS.decode(entry)
    assert left_alone(loop, entry)
    del gpu


def test_what_the_driver_refuses_is_left_in_the_ring(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    gpu.refuses = INVALID_VALUE
    assert left_alone(loop, msgpack.packb(launch()))
    assert len(gpu.launched) == 1
    assert loop.table.count == 0


# --- what shares an answer, and what waits for what ---


def test_a_copy_behind_kernels_shares_their_answer(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    gpu.code, gpu.ready_after = NOT_READY, 5
    for command in (launch(), launch(id=2), copy_in(loop, id=3)):
        loop.put(*command)
    assert loop.serve(most=LONG) == IDLE
    assert loop.answers() == [m.Done(3, 1, 3)]
    assert (len(gpu.launched), gpu.moved) == (2, [64])


def test_no_copy_waits_for_a_kernel_behind_it(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    for command in (launch(), fill(loop, id=2), launch(id=3), launch(id=4), fill(loop, id=5)):
        loop.put(*command)
    assert loop.serve() == IDLE
    assert loop.answers() == [m.Done(2, 1, 2), m.Done(5, 3, 3)]


def test_a_kernel_begins_when_the_copy_before_it_was_answered(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    gpu.code = NOT_READY
    for command in (copy_in(loop), launch(id=2)):
        loop.put(*command)
    assert loop.serve(most=LINGER) == LOOK
    assert (loop.table.count, loop.table.launches, gpu.launched) == (1, 0, [])


def test_a_row_of_kernels_is_bounded_and_goes_on(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    for number in range(70):
        loop.put(*launch(id=number))
    assert loop.serve() == IDLE
    assert [a.count for a in loop.answers()] == [32, 32, 6]
    assert len(gpu.launched) == 70


def test_a_kernel_that_takes_long_is_the_callers(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    gpu.code = NOT_READY
    for command in (launch(id=4), launch(id=5), fill(loop, id=6)):
        loop.put(*command)
    assert loop.serve(most=LINGER) == LOOK
    table = loop.table
    assert (table.first, table.count, table.launches, table.stream) == (4, 3, 2, STREAM)
    assert loop.answers() == []
    assert not table.slow, "it may share a mark with what follows it"


@pytest.mark.parametrize("what", ["a kernel", "a copy"])
def test_another_stream_does_not_wait_for_a_kernel(
    loop: Loop,  # noqa: F811
    gpu: Gpu,
    what: str,
) -> None:
    gpu.code = NOT_READY
    other = STREAM + 1
    second = launch(id=2, stream=other) if what == "a kernel" else copy_in(loop, id=2, stream=other)
    loop.put(*launch())
    loop.put(*second)
    assert loop.serve(most=LONG) == OTHER
    assert (loop.table.count, len(gpu.launched), gpu.moved) == (1, 1, [])
    assert loop.read.read() == msgpack.packb(second)


def test_a_large_copy_behind_a_kernel_shares_no_answer(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    loop.table.largest = plain.UNBOUNDED
    loop.table.block[0].end += LARGE
    loop.table.segment[0].end += LARGE
    loop.put(*launch())
    loop.put(*copy_in(loop, id=2, size=LARGE))
    assert loop.serve() == IDLE
    assert loop.answers() == [m.Done(1, 1, 1), m.Done(2, 2, 1)]
    assert gpu.moved == [LARGE]


def test_a_launch_behind_a_large_copy_is_pythons(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    gpu.code = NOT_READY
    loop.table.largest = plain.UNBOUNDED
    loop.table.block[0].end += LARGE
    loop.table.segment[0].end += LARGE
    loop.put(*copy_in(loop, size=LARGE))
    loop.put(*launch(id=2))
    assert loop.serve() == OTHER
    assert not gpu.launched


def test_a_kernel_that_fails_is_the_callers(loop: Loop, gpu: Gpu) -> None:  # noqa: F811
    gpu.code = 700
    loop.put(*launch())
    assert loop.serve() == OTHER
    assert (loop.table.count, loop.table.launches, loop.answers()) == (1, 1, [])
