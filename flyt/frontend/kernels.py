# SPDX-License-Identifier: Apache-2.0
"""Modules, functions and launches of a session: the core under every face that runs code.

A launch is posted when all that CUDA checks at the call is known to hold here: the device's limits
and the function's. Any other launch is a call, and the driver's own answer is the answer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from typing import TYPE_CHECKING, Any

from flyt.errors import DeviceError, ProtocolError
from flyt.frontend.inflight import Make, Pending
from flyt.frontend.plain_kernel import PlainKernel, Three
from flyt.frontend.pointers import Allocation, Space
from flyt.frontend.streams import Stream
from flyt.rpc import messages as m
from flyt.rpc.handshake import Feature
from flyt.rpc.kernel_commands import (
    CACHE_CONFIG,
    MAX_IMAGE_BYTES,
    Compiled,
    FunctionFacts,
)

if TYPE_CHECKING:
    from flyt.frontend.session import Session

LaunchAttribute = tuple[int, int, int, int]
"""CUlaunchAttributeID, and up to three values."""

INVALID_VALUE = 1
MEMORY_ALLOCATION = 2
INVALID_IMAGE = 200
INVALID_HANDLE = 400
NOT_SUPPORTED = 801

IMAGE_TRIES = 2
"""The worker may forget an image between its last part and the command that names it; not twice,
unless many clients crowd its store."""

_FIRST_HANDLE = 1 << 20
_STEP = 16
_WORD = 1 << 32


@dataclasses.dataclass(slots=True, eq=False)
class Module:
    """A loaded image."""

    number: int
    device: int
    functions: dict[str, Function] = dataclasses.field(default_factory=dict)
    variables: dict[str, Allocation] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True, eq=False)
class Function:
    """A kernel of a module, and what the driver says of it."""

    number: int
    module: Module
    name: str
    facts: FunctionFacts
    plain: PlainKernel | None = None
    """Made of the facts, at the first launch."""

    @property
    def device(self) -> int:
        return self.module.device


class Kernels:
    """What a session does with code."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._connection = session.connection
        self._numbers = itertools.count(_FIRST_HANDLE, _STEP)
        self._modules: dict[int, Module] = {}
        self._functions: dict[int, Function] = {}
        self._limits: dict[int, tuple[Three, Three]] = {}

    # --- images ---

    def _with_image(self, make: Make, image: bytes) -> Pending:
        """Call a command that names an image; send the image first if the worker lacks it."""
        if Feature.KERNELS not in self._session.welcome.features:
            raise DeviceError(
                NOT_SUPPORTED, "this backend's version runs no kernels: upgrade flyt-backend"
            )
        if not image:
            raise DeviceError(INVALID_IMAGE, "an image without a byte")
        if len(image) > MAX_IMAGE_BYTES:
            raise DeviceError(
                MEMORY_ALLOCATION, f"an image of {len(image)} bytes; {MAX_IMAGE_BYTES} are allowed"
            )
        for _ in range(IMAGE_TRIES):
            answer = self._connection.call(make, size=len(image))
            if answer.status != m.Status.UNKNOWN_IMAGE:
                return answer
            self._send(image)
        answer = self._connection.call(make, size=len(image))
        if answer.status == m.Status.UNKNOWN_IMAGE:
            raise DeviceError(MEMORY_ALLOCATION, "the backend has no room to keep the image")
        return answer

    def _send(self, image: bytes) -> None:
        digest = hashlib.sha256(image).digest()
        chunk = self._session.welcome.inline_chunk
        sent = []
        for at in range(0, len(image), chunk):
            part = image[at : at + chunk]
            make = _image_part(digest, at, len(image))
            sent.append(self._connection.submit(make, size=len(part), payload=part))
        for pending in sent:
            self._connection.wait(pending)
        for pending in sent:
            self._connection.checked(pending)
        self._session.counts.add("image_bytes", len(image))

    def compile(
        self, source: bytes, name: str, options: list[str], expressions: list[str], device: int
    ) -> Compiled:
        """NVRTC on the backend; the worker keeps the cubin.

        No digest of a cubin means that the source is at fault; the log says how.
        """
        digest = hashlib.sha256(source).digest()
        request = {"name": name, "options": options, "expressions": expressions}
        answer = self._with_image(lambda number: m.Compile(number, device, digest, request), source)
        compiled = Compiled.unpack(answer.payload)
        if compiled.image and len(compiled.names) != len(expressions):
            raise ProtocolError("the backend's answer to COMPILE names too few expressions")
        return compiled

    # --- modules ---

    def load(self, image: bytes, device: int) -> Module:
        """A module from a cubin, a fatbin or PTX."""
        number = next(self._numbers)
        digest = hashlib.sha256(image).digest()
        answer = self._with_image(lambda n: m.ModuleLoad(n, number, device, digest), image)
        return self._loaded(number, device, answer)

    def load_compiled(self, digest: bytes, device: int) -> Module | None:
        """A module from what `compile` left with the worker; None if that has forgotten it."""
        number = next(self._numbers)
        answer = self._connection.call(lambda n: m.ModuleLoad(n, number, device, digest))
        if answer.status == m.Status.UNKNOWN_IMAGE:
            return None
        return self._loaded(number, device, answer)

    def _loaded(self, number: int, device: int, answer: Pending) -> Module:
        if any(answer.values):  # its kernels may print: each call that synchronises shows it
            self._session.scheduler.prints = True
            self._session.express = None  # whose calls nobody hears of
        with self._connection.lock:
            return self._modules.setdefault(number, Module(number, device))

    def module(self, number: int) -> Module:
        """A module by its handle, or DeviceError cudaErrorInvalidResourceHandle."""
        with self._connection.lock.reading:
            module = self._modules.get(number)
        if module is None:
            raise DeviceError(INVALID_HANDLE, f"{number:#x} is no module of this process")
        return module

    def unload(self, module: Module) -> None:
        """cuModuleUnload; waits for this session's work on its device."""
        with self._connection.lock:
            if self._modules.pop(module.number, None) is None:
                raise DeviceError(INVALID_HANDLE, "the module is unloaded already")
            for function in module.functions.values():
                del self._functions[function.number]
            lent = list(module.variables.values())
            for block in lent:
                self._session.pointers.take_back(block.address)
        self._connection.call(lambda number: m.ModuleUnload(number, module.number))
        with self._connection.lock:
            for block in lent:
                self._session.reservations.give(block.address, max(block.size, 1))

    def variable(self, module: Module, name: str) -> Allocation:
        """cuModuleGetGlobal; asked once."""
        known = module.variables.get(name)
        if known is not None:
            return known
        answer = self._connection.call(lambda number: m.GlobalGet(number, module.number, name))
        if len(answer.values) != 2:
            raise ProtocolError("the backend's answer to GLOBAL_GET is not two numbers")
        address, size = answer.values
        block = Allocation(Space.DEVICE, address, size, module.device, lent=True)
        with self._connection.lock:
            if not self._session.reservations.take(address, max(size, 1)):
                raise DeviceError(
                    MEMORY_ALLOCATION,
                    f"the variable {name} lies at {address:#x}, which this process uses itself; "
                    "load the module again",
                )
            self._session.pointers.add(block)
            module.variables[name] = block
        return block

    # --- functions ---

    def get_function(self, module: Module, name: str) -> Function:
        """cuModuleGetFunction; asked once, with attributes and the layout of its parameters."""
        known = module.functions.get(name)
        if known is not None:
            return known
        handle = next(self._numbers)
        answer = self._connection.call(
            lambda number: m.FunctionGet(number, module.number, handle, name)
        )
        function = Function(handle, module, name, FunctionFacts.unpack(answer.payload))
        with self._connection.lock:
            self._functions[handle] = module.functions[name] = function
        return function

    def function(self, number: int) -> Function:
        """A function by its handle, or DeviceError cudaErrorInvalidResourceHandle."""
        function = self._functions.get(number)
        if function is None:
            raise DeviceError(INVALID_HANDLE, f"{number:#x} is no function of this process")
        return function

    def set_attribute(self, function: Function, attribute: int, value: int) -> None:
        """cuFuncSetAttribute."""
        answer = self._connection.call(
            lambda number: m.FunctionSet(number, function.number, attribute, value % _WORD)
        )
        function.facts, function.plain = FunctionFacts.unpack(answer.payload), None

    def set_cache_config(self, function: Function, config: int) -> None:
        """cuFuncSetCacheConfig."""
        self.set_attribute(function, CACHE_CONFIG, config)

    def occupancy(self, function: Function, block: int, shared: int, flags: int = 0) -> int:
        """Blocks of so many threads that one multiprocessor holds."""
        if not 0 <= block < _WORD or not 0 <= shared < 1 << 64 or not 0 <= flags < _WORD:
            raise DeviceError(INVALID_VALUE, f"a block of {block} threads and {shared} bytes")
        answer = self._connection.call(
            lambda number: m.Occupancy(number, function.number, block, shared, flags)
        )
        if len(answer.values) != 1:
            raise ProtocolError("the backend's answer to OCCUPANCY is not one number")
        return answer.values[0]

    # --- launches ---

    def launch(
        self,
        function: Function,
        grid: Three,
        block: Three,
        shared: int,
        stream: Stream,
        params: bytes,
        attributes: tuple[LaunchAttribute, ...] = (),
    ) -> None:
        """cuLaunchKernelEx; ``params`` is packed as the function's facts say."""
        if stream.device != function.device:
            raise DeviceError(INVALID_HANDLE, "the stream belongs to another device")
        plain, express = function.plain or self._plain(function), self._session.express
        if (
            express is not None
            and not attributes
            and express.launch(plain, grid, block, shared, stream.number, params)
        ):
            return
        now = bool(attributes) or not plain.takes(grid, block, shared)
        if now and not all(0 <= n < _WORD for n in (*grid, *block, shared)):
            raise DeviceError(INVALID_VALUE, f"a launch of {grid} blocks of {block} threads")
        flat = tuple(n for attribute in attributes for n in attribute) if attributes else ()

        def make(number: int) -> m.Launch:
            return m.Launch(
                number, function.number, *grid, *block, shared, stream.number, flat, params, now
            )

        if not now:
            self._connection.submit(make, posted=True, stream=stream)
            return
        self._connection.call(make)
        self._connection.submit(
            lambda number: m.Reach(number, stream.number), posted=True, stream=stream
        )

    def _plain(self, function: Function) -> PlainKernel:
        """What the driver is known to take of it."""
        if function.plain is None:
            grids, blocks = self._limits.get(function.device) or self._read_limits(function.device)
            facts = function.facts
            function.plain = PlainKernel(
                function.number, facts.size, facts.attributes, grids, blocks
            )
        return function.plain

    def _read_limits(self, device: int) -> tuple[Three, Three]:
        known = self._session.devices[device]["attributes"]
        grids, blocks = (
            (known.get(f"Max{what}X", 0), known.get(f"Max{what}Y", 0), known.get(f"Max{what}Z", 0))
            for what in ("GridDim", "BlockDim")
        )
        self._limits[device] = (grids, blocks)
        return grids, blocks


def _image_part(digest: bytes, at: int, total: int) -> Any:
    return lambda number: m.ImagePart(number, digest, at, total)
