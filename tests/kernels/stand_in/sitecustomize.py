# SPDX-License-Identifier: Apache-2.0
"""Gives the emulated device kernels, in every process of a backend that has this on its path.

A few kernels of Python's, whatever image they are looked up in; the compiled loop gets them by a
function of cuLaunchKernel's form. They tell which of the two ways they came.
"""

from __future__ import annotations

import ctypes
import struct
import time
from typing import Any

from flyt.backend.devices.base import Direct
from flyt.backend.devices.emulated import EmulatedDevice
from flyt.backend.devices.kernels import Kernels, Shape
from flyt.errors import DeviceError
from flyt.rpc.kernel_commands import FunctionFacts

BY_PYTHON, BY_THE_LOOP = 1, 2
INVALID_VALUE, NOT_FOUND, NOT_READY = 1, 500, 600
ATTRIBUTES = {0: 1024, 8: 48 << 10}
"""CUfunction_attribute: threads of a block, bytes of shared memory."""

SLOW_SECONDS = 0.003
"""Longer than the loop stays with it."""

busy_until = 0.0


def add(way: int, shape: tuple[int, ...], x: int, n: int) -> None:
    """``long long x[2]``: adds to the first, and leaves the way in the second."""
    del shape
    cells = (ctypes.c_int64 * 2).from_address(x)
    cells[0] += n
    cells[1] = way


def slow(way: int, shape: tuple[int, ...], x: int, n: int) -> None:
    """As `add`; the stream is busy for a while behind it, as the loop sees it."""
    global busy_until  # noqa: PLW0603 - one device's state
    add(way, shape, x, n)
    busy_until = time.monotonic() + SLOW_SECONDS


def tell(way: int, shape: tuple[int, ...], x: int) -> None:
    """``unsigned x[8]``: grid, block, shared memory, way."""
    (ctypes.c_uint32 * 8).from_address(x)[:] = [*shape, way]


def many(way: int, shape: tuple[int, ...], x: int, *more: int) -> None:
    """``long long x[2]``, and fifteen numbers: their sum, and the way."""
    del shape
    (ctypes.c_int64 * 2).from_address(x)[:] = [sum(more), way]


def refuse(way: int, shape: tuple[int, ...]) -> None:
    """No launch of it is taken."""
    raise DeviceError(INVALID_VALUE, "it is not taken")


KERNELS: dict[str, tuple[Any, str]] = {
    "add": (add, "<Qi"),
    "slow": (slow, "<Qi"),
    "tell": (tell, "<Q"),
    "many": (many, "<16Q"),
    "refuse": (refuse, "<"),
}
NAMES = list(KERNELS)


def run(way: int, function: int, shape: tuple[int, ...], params: Any) -> None:
    kernel, form = KERNELS[NAMES[function - 1]]
    layout = places(form)
    values = [ctypes.string_at(params[n], size) for n, (_, size) in enumerate(layout)]
    kernel(way, shape, *struct.unpack(form, b"".join(values)))


def places(form: str) -> tuple[tuple[int, int], ...]:
    kinds = form[1:].replace("16Q", "Q" * 16)
    sizes = [struct.calcsize(f"<{kind}") for kind in kinds]
    return tuple((sum(sizes[:n]), size) for n, size in enumerate(sizes))


class StandIn(Kernels):
    """Functions are numbers from 1 on."""

    def architecture(self) -> str:
        return "sm_90"

    def load(self, image: bytes) -> int:
        return 1

    def unload(self, module: int) -> None:
        pass

    def function(self, module: int, name: str) -> int:
        if name not in KERNELS:
            raise DeviceError(NOT_FOUND, f"there is no {name}")
        return NAMES.index(name) + 1

    def facts(self, function: int) -> FunctionFacts:
        return FunctionFacts(ATTRIBUTES, places(KERNELS[NAMES[function - 1]][1]))

    def set_attribute(self, function: int, attribute: int, value: int) -> None:
        ATTRIBUTES[attribute] = value

    def launch(self, function: int, shape: Shape, stream: Any, params: int) -> None:
        numbers = (*shape.grid, *shape.block, shape.shared)
        layout = places(KERNELS[NAMES[function - 1]][1])
        pointers = (ctypes.c_void_p * len(layout)).from_address(params)
        # They are taken at the call: the work comes in its stream's turn.
        values = [ctypes.create_string_buffer(size) for _, size in layout]
        for value, pointer in zip(values, pointers, strict=True):
            ctypes.memmove(value, pointer, len(value))
        if NAMES[function - 1] == "refuse" or shape.shared > ATTRIBUTES[8]:
            raise DeviceError(INVALID_VALUE, "it is not taken")

        def work() -> None:
            run(BY_PYTHON, function, numbers, values)

        DEVICES[0]._put("fill", [], 1, work, stream)


DEVICES: list[Any] = []


@ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p,
)  # fmt: skip
def launched(function: int, *rest: Any) -> int:
    *shape, _, params, _ = rest
    try:
        run(BY_THE_LOOP, function, tuple(shape), params)
    except DeviceError as exc:
        return exc.code
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def queried(_: int) -> int:
    return NOT_READY if time.monotonic() < busy_until else 0


_direct, _init = EmulatedDevice.direct, EmulatedDevice.__init__


def _with_launch(self: Any, stream: Any) -> Direct | None:
    found = _direct(self, stream)
    launch, query = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (launched, queried))
    return None if found is None else found._replace(launch=launch, query=query)


def _noted(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    DEVICES.append(self)


EmulatedDevice.kernels = StandIn()
EmulatedDevice.direct = _with_launch  # type: ignore[method-assign]
EmulatedDevice.__init__ = _noted  # type: ignore[method-assign]
