# SPDX-License-Identifier: Apache-2.0
"""Commands about code: images, modules, functions, launches, compilation.

An image (cubin, fatbin, PTX, or source to compile) is named by the SHA-256 of its bytes. It
crosses once: a worker keeps what it was given, and a command that names an image it does not have
is answered with `flyt.rpc.messages.Status.UNKNOWN_IMAGE`; then the frontend sends the parts and
says it again. Handles of modules and functions are minted by the frontend. What all commands share
is told in `flyt.rpc.messages`.
"""

from __future__ import annotations

import dataclasses
import struct

from flyt.errors import ProtocolError
from flyt.rpc.codec import U32, U64, Digest, Document, Flag, Numbers, Params, Text, message

MAX_IMAGE_BYTES = 64 << 20
"""No kernel library that a program loads by itself is larger; a worker keeps a few of these."""

MAX_PARAMETERS = 4096
"""Parameters of one kernel: 32,764 bytes are CUDA's limit, and one takes 8 of them or so."""

CACHE_CONFIG = 1 << 16
"""`FunctionSet.attribute` for cuFuncSetCacheConfig; CUfunction_attribute's values are small."""


@message
class ImagePart:
    """Bytes of an image, the message's second frame; an image's parts come in order."""

    id: U64
    image: Digest
    offset: U64
    total: U64


@message
class ModuleLoad:
    """cuModuleLoadData. Values: [1] if its kernels may print, and the worker keeps that for
    `Printed`; else none."""

    id: U64
    module: U64
    device: U32
    image: Digest


@message
class ModuleUnload:
    id: U64
    module: U64


@message
class FunctionGet:
    """cuModuleGetFunction. The Result's second frame is a `FunctionFacts`."""

    id: U64
    module: U64
    function: U64
    name: Text


@message
class FunctionSet:
    """cuFuncSetAttribute, or with `CACHE_CONFIG` cuFuncSetCacheConfig; the Result's second frame is
    the function's new `FunctionFacts`."""

    id: U64
    function: U64
    attribute: U32
    value: U32
    """A C int's bits."""


@message
class GlobalGet:
    """cuModuleGetGlobal. Values: [address, size]."""

    id: U64
    module: U64
    name: Text


@message
class Occupancy:
    """cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags. Values: [blocks]."""

    id: U64
    function: U64
    block: U32
    shared: U64
    flags: U32


@message
class Reach:
    """Nothing at all; answered, as every command with a stream, when the stream has reached it."""

    id: U64
    stream: U64


@message
class Printed:
    """What kernels that are done have printed, and was not told yet: the Result's second frame, of
    `flyt.rpc.messages.INLINE_CHUNK` bytes at most; no frame when there is nothing."""

    id: U64
    device: U32


@message
class Launch:
    """cuLaunchKernelEx. ``params`` is the parameter buffer, laid out as `FunctionFacts` says."""

    id: U64
    function: U64
    grid_x: U32
    grid_y: U32
    grid_z: U32
    block_x: U32
    block_y: U32
    block_z: U32
    shared: U32
    stream: U64
    attributes: Numbers
    """Of the launch, four numbers each: CUlaunchAttributeID and up to three values."""
    params: Params
    now: Flag = False
    """Answered as soon as the driver has taken it, with the driver's own answer: a `Reach` follows,
    since this says nothing of the stream."""


@message
class Compile:
    """NVRTC on the source ``image``, for a device. The Result's second frame is a `Compiled`."""

    id: U64
    device: U32
    image: Digest
    request: Document
    """``name``: the source's name in messages; ``options`` and ``expressions``: lists of text."""


KERNEL_CODES = {
    96: ImagePart,
    97: ModuleLoad,
    98: ModuleUnload,
    99: FunctionGet,
    100: FunctionSet,
    101: GlobalGet,
    102: Occupancy,
    103: Launch,
    104: Compile,
    105: Reach,
    106: Printed,
}


@dataclasses.dataclass(frozen=True, slots=True)
class FunctionFacts:
    """What the driver says of a function: its attributes, and where its parameters lie.

    Attributes
    ----------
    attributes : dict of int to int
        By CUfunction_attribute.
    params : tuple of (offset, size)
        In bytes of the parameter buffer.
    size : int
        Bytes of the parameter buffer.
    sizes : list of int
        Of the parameters.
    form : struct.Struct or None
        Puts each parameter's bytes at its place; None where the places are not in their order.
    """

    attributes: dict[int, int]
    params: tuple[tuple[int, int], ...]
    size: int = dataclasses.field(init=False)
    sizes: list[int] = dataclasses.field(init=False)
    form: struct.Struct | None = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        size = max((offset + size for offset, size in self.params), default=0)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "sizes", [size for _, size in self.params])
        object.__setattr__(self, "form", self._form())

    def _form(self) -> struct.Struct | None:
        parts, at = ["<"], 0
        for offset, size in self.params:
            if offset < at:
                return None
            parts.append(f"{offset - at}x{size}s")
            at = offset + size
        return struct.Struct("".join(parts))

    def pack(self) -> bytes:
        """The bytes of the frame."""
        flat = [n for pair in self.attributes.items() for n in pair]
        places = [n for pair in self.params for n in pair]
        counts = len(self.attributes), len(self.params)
        return struct.pack(f"<2I{len(flat)}i{len(places)}I", *counts, *flat, *places)

    @classmethod
    def unpack(cls, data: bytes | None) -> FunctionFacts:
        """From the frame of an answer; ProtocolError if it is none."""
        if data is None or len(data) < 8:
            raise ProtocolError("the backend's answer holds no facts of a function")
        known, places = struct.unpack_from("<2I", data)
        if len(data) != 8 + 8 * (known + places) or places > MAX_PARAMETERS:
            raise ProtocolError("the backend's facts of a function are not of the size they name")
        flat = struct.unpack_from(f"<{2 * known}i", data, 8)
        where = struct.unpack_from(f"<{2 * places}I", data, 8 + 8 * known)
        return cls(
            dict(zip(flat[::2], flat[1::2], strict=True)),
            tuple(zip(where[::2], where[1::2], strict=True)),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """What a compilation gave.

    Attributes
    ----------
    image : bytes
        The digest of the cubin, which the worker keeps; empty when the compilation failed.
    names : tuple of str
        The mangled names of the expressions, in their order.
    log : str
        The compiler's.
    """

    image: bytes
    names: tuple[str, ...]
    log: str

    def pack(self) -> bytes:
        """The bytes of the frame."""
        parts = [self.image, *(n.encode() for n in self.names), self.log.encode()]
        head = struct.pack(f"<I{len(parts)}I", len(parts), *map(len, parts))
        return head + b"".join(parts)

    @classmethod
    def unpack(cls, data: bytes | None) -> Compiled:
        """From the frame of an answer; ProtocolError if it is none."""
        try:
            (count,) = struct.unpack_from("<I", data or b"")
            lengths = struct.unpack_from(f"<{count}I", data or b"", 4)
        except (struct.error, MemoryError) as exc:
            raise ProtocolError("the backend's answer to COMPILE can't be read") from exc
        parts, at = [], 4 + 4 * count
        for length in lengths:
            parts.append((data or b"")[at : at + length])
            at += length
        if count < 2 or at != len(data or b"") or len(parts[0]) not in (0, 32):
            raise ProtocolError("the backend's answer to COMPILE is not of the size it names")
        try:
            return cls(parts[0], tuple(p.decode() for p in parts[1:-1]), parts[-1].decode())
        except UnicodeDecodeError as exc:
            raise ProtocolError("the backend's answer to COMPILE is not UTF-8") from exc
