# SPDX-License-Identifier: Apache-2.0
"""The modules and functions of one session, by the numbers that the frontend minted."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib

from flyt.backend.blocks import Block
from flyt.backend.devices.base import Device
from flyt.backend.devices.kernels import Handle
from flyt.backend.images import ImageStore, Upload
from flyt.backend.streams import SessionStream
from flyt.errors import DeviceError, ProtocolError
from flyt.rpc.kernel_commands import FunctionFacts

INVALID_HANDLE = 400
MEMORY_ALLOCATION = 2

MAX_MODULES = 1024
MAX_FUNCTIONS = 16_384
"""What one session may have of each; programs with more have lost track of theirs."""

MAX_MODULE_BYTES = 512 << 20
"""Images of a session's modules together: their code lies in device memory beside the quota."""


class ParameterBlock:
    """Where a function's parameters lie while it is launched: the driver wants a pointer to each
    and takes the bytes before it returns.

    Attributes
    ----------
    start, size : int
        Address of the bytes, and how many there are.
    address : int
        Of the pointers.
    """

    def __init__(self, facts: FunctionFacts) -> None:
        self.size = facts.size
        self._bytes = ctypes.create_string_buffer(max(1, facts.size))
        start = ctypes.addressof(self._bytes)
        pointers = [start + offset for offset, _ in facts.params]
        self._pointers = (ctypes.c_void_p * max(1, len(pointers)))(*pointers)
        self.start = start
        self.address = ctypes.addressof(self._pointers)

    def fill(self, params: bytes) -> None:
        ctypes.memmove(self.start, params, self.size)


@dataclasses.dataclass(slots=True, eq=False)
class Module:
    """One loaded image; ``lent`` are the blocks of its variables."""

    device: Device
    handle: Handle
    size: int
    lent: list[Block] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False)
class Function:
    module: Module
    handle: Handle
    facts: FunctionFacts
    params: ParameterBlock


class ModuleTable:
    """Modules and functions of one session; its thread alone uses it.

    Attributes
    ----------
    version : int
        Another one whenever a module is gone.
    """

    def __init__(self, images: ImageStore) -> None:
        self._images = images
        self._modules: dict[int, Module] = {}
        self._functions: dict[int, Function] = {}
        self._bytes = 0
        self._upload: Upload | None = None
        self.version = 0
        self.may_print = False
        self._launched: dict[SessionStream, int] = {}

    # --- images ---

    def take_part(self, digest: bytes, offset: int, total: int, part: bytes) -> None:
        """One part of an image; the last one puts it into the worker's store.

        Raises
        ------
        ProtocolError
            Parts out of order, or bytes that have another digest.
        DeviceError
            The image is too large.
        """
        if not offset:
            self._drop_upload()
            self._images.expect(total)
            self._upload = Upload(digest, total)
        upload = self._upload
        if upload is None:
            return  # its first part was refused, and the client has heard that
        if (upload.digest, upload.total, len(upload.data)) != (digest, total, offset):
            raise ProtocolError("the parts of an image do not come in their order")
        if not part or offset + len(part) > total:
            raise ProtocolError("a part of an image has not the size it should have")
        upload.data += part
        if upload.is_whole():
            image = bytes(upload.data)
            self._drop_upload()
            if hashlib.sha256(image).digest() != digest:
                raise ProtocolError("an image's bytes have not the digest that names them")
            self._images.put(image)

    def _drop_upload(self) -> None:
        if self._upload is not None:
            self._images.arrived(self._upload.total)
            self._upload = None

    # --- modules ---

    def check_room(self, number: int, size: int) -> None:
        """Before a module is loaded; DeviceError when the session has too many."""
        if number in self._modules:
            raise ProtocolError(f"module number {number:#x} is taken")
        if len(self._modules) >= MAX_MODULES or self._bytes + size > MAX_MODULE_BYTES:
            raise DeviceError(
                MEMORY_ALLOCATION,
                f"the session has {len(self._modules)} modules of {self._bytes} bytes; it may have "
                f"{MAX_MODULES}, of {MAX_MODULE_BYTES} bytes",
            )

    def add(self, number: int, module: Module) -> None:
        self._modules[number] = module
        self._bytes += module.size

    def module(self, number: int) -> Module:
        """A module, or DeviceError cudaErrorInvalidResourceHandle."""
        module = self._modules.get(number)
        if module is None:
            raise DeviceError(INVALID_HANDLE, f"module {number:#x} does not exist")
        return module

    def remove(self, number: int) -> Module:
        """Take a module out, and its functions."""
        module = self.module(number)
        del self._modules[number]
        self._bytes -= module.size
        self.version += 1
        self._functions = {n: f for n, f in self._functions.items() if f.module is not module}
        return module

    # --- functions ---

    def check_function(self, number: int) -> None:
        """Before a function is looked up."""
        if number in self._functions:
            raise ProtocolError(f"function number {number:#x} is taken")
        if len(self._functions) >= MAX_FUNCTIONS:
            raise DeviceError(
                MEMORY_ALLOCATION, f"the session has {MAX_FUNCTIONS} functions already"
            )

    def add_function(
        self, number: int, module: Module, handle: Handle, facts: FunctionFacts
    ) -> None:
        if module in self._modules.values():  # it may have been unloaded meanwhile
            self._functions[number] = Function(module, handle, facts, ParameterBlock(facts))

    def function(self, number: int) -> Function:
        """A function, or DeviceError cudaErrorInvalidResourceHandle."""
        function = self._functions.get(number)
        if function is None:
            raise DeviceError(INVALID_HANDLE, f"function {number:#x} does not exist")
        return function

    # --- launches ---

    def launches(self, stream: SessionStream) -> int:
        """How much of a stream's unmarked work was launches when `was_launched` was told last."""
        return self._launched.get(stream, 0)

    def was_launched(self, stream: SessionStream, unmarked: int) -> None:
        """All of so much unmarked work of the stream is launches."""
        self._launched[stream] = unmarked

    # --- the end ---

    def destroy(self) -> None:
        """Unload everything, whatever fails meanwhile; all work is done."""
        self._drop_upload()
        modules, self._modules = list(self._modules.values()), {}
        self._functions.clear()
        with contextlib.ExitStack() as steps:
            for module in modules:
                steps.callback(module.device.kernels.unload, module.handle)
