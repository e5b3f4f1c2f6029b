# SPDX-License-Identifier: Apache-2.0
"""What two processes say to each other: each message declared once, and checked in one place.

After `parse` a message can't be invalid: every field has its type and bounds, and a layout lies
inside its block. Any map gives either a message or a ProtocolError.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from flyt.errors import ProtocolError, SharingError
from flyt.ipc import frames
from flyt.ipc.buffer import KEY_BYTES, MAX_CHUNKS, MAX_SIZE, IPCBufferDescriptor
from flyt.ipc.driver import UUID_BYTES
from flyt.ipc.dtypes import ITEMSIZES
from flyt.ipc.fields import Fields

VERSION = 2
"""Of this protocol; both sides must speak the same."""

MAX_DIMENSIONS = 64
"""NumPy's own limit, and PyTorch's."""

TOKEN_BYTES = 16
EVENT_BYTES = 64
"""CU_IPC_HANDLE_SIZE."""

MAX_ID = 1 << 63
REMEMBERED = 128
"""Arrays whose description is packed and checked once, not at each hand-off."""

MAX_RELEASED = 1024
"""Shares that one Release names, and blocks."""

LIBRARIES = ("numpy", "torch", "cupy")


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """The first message of each side."""

    kind: ClassVar[str] = "hello"
    version: int
    driver: str


# Named tuples: made, hashed and compared at each hand-off, in C.


class Block(NamedTuple):
    """A block of memory; its descriptors travel beside the message, until it is mapped there."""

    key: bytes
    uuid: bytes
    size: int
    chunks: tuple[int, ...]

    def descriptor(self, fds: tuple[int, ...]) -> IPCBufferDescriptor:
        return IPCBufferDescriptor(self.key, self.uuid, self.size, self.chunks, fds)


class Layout(NamedTuple):
    """An array over a block. Byte counts; strides too, and they may be negative or zero."""

    library: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    """Where the array's storage begins in the block."""
    extent: int
    """Bytes of the storage."""
    offset: int
    """Where the first element lies in the storage."""
    requires_grad: bool = False
    parameter: bool = False
    read_only: bool = False


class _Share(NamedTuple):
    id: int
    token: bytes
    """The Claim that this answers, else empty."""
    block: Block | None
    layout: Layout
    event: bytes
    """Of an interprocess event that orders the receiver's work, else empty."""


class Share(_Share):
    """An array is the receiver's too, until it sends Release with this id."""

    __slots__ = ()
    kind: ClassVar[str] = "share"


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """The receiver has let go of shares."""

    kind: ClassVar[str] = "release"
    ids: tuple[int, ...]
    mapped: tuple[bytes, ...] = ()
    """Keys of blocks that it keeps mapped until Ended: their shares need no descriptors now."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A block that was shared here is no more: a mapping that nobody uses can go."""

    kind: ClassVar[str] = "ended"
    key: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """Asks for the array that a one-time token stands for."""

    kind: ClassVar[str] = "claim"
    token: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """A claim can't be met."""

    kind: ClassVar[str] = "refusal"
    token: bytes
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Bye:
    """The sender shares nothing more here; what is shared stays so until it is released."""

    kind: ClassVar[str] = "bye"


Message = Hello | Share | Release | Ended | Claim | Refusal | Bye


def encode(message: Message) -> bytes:
    """The message's frame."""
    if isinstance(message, Share):
        head = _head if not message.token else _head.__wrapped__  # a token is never used again
        return head(message[1:]) + _NUMBER.pack(message.id)
    return frames.encode({"kind": message.kind, **_fields_of(message)})


def _fields_of(message: Message) -> dict[str, Any]:
    # dataclasses.asdict copies deeply, and takes ten times as long
    return {name: getattr(message, name) for name in _NAMES[type(message)]}


_NUMBER = struct.Struct(">Q")
"""How MessagePack writes an integer as large as `MAX_ID`, behind a byte that says so."""


@functools.lru_cache(REMEMBERED)
def _head(rest: tuple[bytes, Block | None, Layout, bytes]) -> bytes:
    """A share's frame but for its number: the same each time that an array is sent."""
    token, block, layout, event = rest
    parts = {"block": None if block is None else block._asdict(), "layout": layout._asdict()}
    array = frames.pack(parts)
    frame = frames.encode(
        {"kind": Share.kind, "token": token, "array": array, "event": event, "id": MAX_ID}
    )
    return frame[: -_NUMBER.size]


_NAMES: dict[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in dataclasses.fields(kind))
    for kind in (Hello, Release, Ended, Claim, Refusal, Bye)
}


# --- checking ----------------------------------------------------------------------------------


def _hello(fields: Fields) -> Hello:
    return Hello(fields.integer("version"), fields.text("driver"))


def _block(fields: Fields) -> Block:
    block = Block(
        fields.octets("key", KEY_BYTES),
        fields.octets("uuid", UUID_BYTES),
        fields.integer("size", 1),
        fields.integers("chunks", MAX_CHUNKS, 1),
    )
    fields.end()
    if not block.chunks or not block.size <= sum(block.chunks) <= MAX_SIZE:
        raise ProtocolError("the peer's block is larger than its chunks")
    return block


def _layout(fields: Fields | None, size: int) -> Layout:
    if fields is None:
        raise ProtocolError("the peer shares no layout")
    layout = Layout(
        fields.text("library", LIBRARIES),
        fields.text("dtype", tuple(ITEMSIZES)),
        fields.integers("shape", MAX_DIMENSIONS, 0),
        fields.integers("strides", MAX_DIMENSIONS, -MAX_SIZE),
        fields.integer("storage"),
        fields.integer("extent"),
        fields.integer("offset"),
        fields.truth("requires_grad"),
        fields.truth("parameter"),
        fields.truth("read_only"),
    )
    fields.end()
    check_layout(layout, size)
    return layout


def check_layout(layout: Layout, size: int) -> None:
    """Raise ProtocolError unless every element lies in its storage, and the storage in ``size``."""
    if len(layout.shape) != len(layout.strides):
        raise ProtocolError("a shape and strides of different lengths")
    if layout.storage + layout.extent > size:
        raise ProtocolError("the storage exceeds its block")
    if 0 in layout.shape:
        if layout.offset > layout.extent:
            raise ProtocolError("an empty array begins behind its storage")
        return
    steps = [(n - 1) * step for n, step in zip(layout.shape, layout.strides, strict=True)]
    first = layout.offset + sum(step for step in steps if step < 0)
    last = layout.offset + sum(step for step in steps if step > 0) + ITEMSIZES[layout.dtype]
    if first < 0 or last > layout.extent:
        raise ProtocolError("the array has elements outside its storage")


@functools.lru_cache(REMEMBERED)
def _unpack(array: bytes) -> tuple[Block | None, Layout]:
    """Checked once: the same bytes always give the same, or the same error."""
    fields = Fields("message.array", frames.unpack(array))
    part = fields.part("block")
    block = None if part is None else _block(part)
    layout = _layout(fields.part("layout"), 0 if block is None else block.size)
    fields.end()
    return block, layout


def _share(fields: Fields) -> Share:
    ident = fields.integer("id", 0, MAX_ID)
    token = fields.octets("token", 0, TOKEN_BYTES)
    block, layout = _unpack(fields.packed("array"))
    return Share(ident, token, block, layout, fields.octets("event", 0, EVENT_BYTES))


def _release(fields: Fields) -> Release:
    return Release(
        fields.integers("ids", MAX_RELEASED, 0, MAX_ID),
        fields.names("mapped", MAX_RELEASED, KEY_BYTES),
    )


def _ended(fields: Fields) -> Ended:
    return Ended(fields.octets("key", KEY_BYTES))


def _claim(fields: Fields) -> Claim:
    return Claim(fields.octets("token", TOKEN_BYTES))


def _refusal(fields: Fields) -> Refusal:
    return Refusal(fields.octets("token", TOKEN_BYTES), fields.text("reason"))


def _bye(_: Fields) -> Bye:
    return Bye()


_PARSERS: dict[str, Callable[[Fields], Message]] = {
    Hello.kind: _hello,
    Share.kind: _share,
    Release.kind: _release,
    Ended.kind: _ended,
    Claim.kind: _claim,
    Refusal.kind: _refusal,
    Bye.kind: _bye,
}


_known: dict[bytes, tuple[bytes, Block | None, Layout, bytes]] = {}
"""What follows from a head that was checked once: what it says but for the number."""


def decode(frame: bytes, fds: int) -> Message:
    """The message in a peer's frame, which came with so many descriptors.

    Raises
    ------
    ProtocolError
        It is none.
    """
    head = frame[: -_NUMBER.size]
    known = None if fds else _known.get(head)
    if known is not None:
        (ident,) = _NUMBER.unpack_from(frame, len(head))
        if ident <= MAX_ID:
            return Share(ident, *known)
    message = parse(frames.decode(frame), fds)
    # Only what this process would have written itself: then the number is what follows the head.
    if isinstance(message, Share) and not fds and not message.token and _head(message[1:]) == head:
        if len(_known) >= REMEMBERED:
            _known.clear()
        _known[head] = message[1:]
    return message


def parse(value: dict[str, Any], fds: int) -> Message:
    """The message in a peer's map, which came with so many descriptors.

    A share comes with those of its block, or with none once the receiver has said it is mapped.
    """
    fields = Fields("message", value)
    kind = fields.text("kind", tuple(_PARSERS))
    message = _PARSERS[kind](fields)
    fields.end()
    block = message.block if isinstance(message, Share) else None
    if fds and fds != (len(block.chunks) if block else 0):
        raise ProtocolError(f"the peer's {kind} came with {fds} descriptors")
    return message


def require_layout(layout: Layout, size: int) -> None:
    """The same check for our own arrays: an error is the user's, not a peer's."""
    try:
        check_layout(layout, size)
    except ProtocolError as exc:
        raise SharingError(f"this array can't be described: {exc}") from exc
