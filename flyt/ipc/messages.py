# SPDX-License-Identifier: Apache-2.0
"""What two processes say to each other: each message declared once, and checked in one place.

After `parse` a message can't be invalid: every field has its type and bounds, and a layout lies
inside its block. Any map gives either a message or a ProtocolError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from flyt.errors import ProtocolError, SharingError
from flyt.ipc.buffer import KEY_BYTES, MAX_CHUNKS, MAX_SIZE, IPCBufferDescriptor
from flyt.ipc.driver import UUID_BYTES
from flyt.ipc.dtypes import ITEMSIZES

VERSION = 2
"""Of this protocol; both sides must speak the same."""

MAX_DIMENSIONS = 64
"""NumPy's own limit, and PyTorch's."""

MAX_TEXT = 400
"""Characters of a reason; longer ones are cut."""

TOKEN_BYTES = 16
EVENT_BYTES = 64
"""CU_IPC_HANDLE_SIZE."""

MAX_ID = 1 << 63
MAX_RELEASED = 1024
"""Shares that one Release names, and blocks."""

LIBRARIES = ("numpy", "torch", "cupy")


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """The first message of each side."""

    kind: ClassVar[str] = "hello"
    version: int
    driver: str


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A block of memory; its descriptors travel beside the message, until it is mapped there."""

    key: bytes
    uuid: bytes
    size: int
    chunks: tuple[int, ...]

    def descriptor(self, fds: tuple[int, ...]) -> IPCBufferDescriptor:
        return IPCBufferDescriptor(self.key, self.uuid, self.size, self.chunks, fds)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
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


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """An array is the receiver's too, until it sends Release with this id."""

    kind: ClassVar[str] = "share"
    id: int
    token: bytes
    """The Claim that this answers, else empty."""
    block: Block | None
    layout: Layout
    event: bytes
    """Of an interprocess event that orders the receiver's work, else empty."""


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


def to_map(message: Message) -> dict[str, Any]:
    """For `flyt.ipc.frames.encode`."""
    content = {name: getattr(message, name) for name in _NAMES[type(message)]}
    for name in (
        "block",
        "layout",
    ):  # dataclasses.asdict copies deeply, and takes ten times as long
        part = content.get(name)
        if part is not None:
            content[name] = {n: getattr(part, n) for n in _NAMES[type(part)]}
    return {"kind": message.kind, **content}


_NAMES: dict[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in dataclasses.fields(kind))
    for kind in (Hello, Block, Layout, Share, Release, Ended, Claim, Refusal, Bye)
}


# --- checking ----------------------------------------------------------------------------------


class _Fields:
    """Takes the fields out of a peer's map one by one, each with its check; none may be left."""

    def __init__(self, what: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise ProtocolError(f"the peer's {what} is no map")
        self._what, self._map = what, dict(value)

    def _take(self, name: str) -> Any:
        if name not in self._map:
            raise ProtocolError(f"the peer's {self._what} lacks {name}")
        return self._map.pop(name)

    def integer(self, name: str, low: int = 0, high: int = MAX_SIZE) -> int:
        return self._bounded(name, self._take(name), low, high)

    def _bounded(self, name: str, value: Any, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ProtocolError(f"the peer's {self._what}.{name} is no integer in {low}..{high}")
        return value

    def integers(self, name: str, count: int, low: int, high: int = MAX_SIZE) -> tuple[int, ...]:
        value = self._take(name)
        if not isinstance(value, list) or len(value) > count:
            raise ProtocolError(f"the peer's {self._what}.{name} is no list of up to {count}")
        return tuple(self._bounded(name, item, low, high) for item in value)

    def octets(self, name: str, *lengths: int) -> bytes:
        value = self._take(name)
        if not isinstance(value, bytes) or len(value) not in lengths:
            raise ProtocolError(f"the peer's {self._what}.{name} has not {lengths} bytes")
        return value

    def names(self, name: str, count: int, length: int) -> tuple[bytes, ...]:
        value = self._take(name)
        if (
            not isinstance(value, list)
            or len(value) > count
            or not all(isinstance(item, bytes) and len(item) == length for item in value)
        ):
            raise ProtocolError(
                f"the peer's {self._what}.{name} is no list of up to {count} times {length} bytes"
            )
        return tuple(value)

    def text(self, name: str, allowed: tuple[str, ...] = ()) -> str:
        value = self._take(name)
        if not isinstance(value, str) or (allowed and value not in allowed):
            raise ProtocolError(f"the peer's {self._what}.{name} is none of {', '.join(allowed)}")
        return value[:MAX_TEXT]

    def truth(self, name: str) -> bool:
        value = self._take(name)
        if not isinstance(value, bool):
            raise ProtocolError(f"the peer's {self._what}.{name} is neither true nor false")
        return value

    def part(self, name: str) -> _Fields | None:
        value = self._take(name)
        return None if value is None else _Fields(f"{self._what}.{name}", value)

    def end(self) -> None:
        if self._map:
            raise ProtocolError(f"the peer's {self._what} has unknown fields")


def _hello(fields: _Fields) -> Hello:
    return Hello(fields.integer("version"), fields.text("driver"))


def _block(fields: _Fields) -> Block:
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


def _layout(fields: _Fields | None, size: int) -> Layout:
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


def _share(fields: _Fields) -> Share:
    ident = fields.integer("id", 0, MAX_ID)
    token = fields.octets("token", 0, TOKEN_BYTES)
    part = fields.part("block")
    block = None if part is None else _block(part)
    layout = _layout(fields.part("layout"), 0 if block is None else block.size)
    return Share(ident, token, block, layout, fields.octets("event", 0, EVENT_BYTES))


def _release(fields: _Fields) -> Release:
    return Release(
        fields.integers("ids", MAX_RELEASED, 0, MAX_ID),
        fields.names("mapped", MAX_RELEASED, KEY_BYTES),
    )


def _ended(fields: _Fields) -> Ended:
    return Ended(fields.octets("key", KEY_BYTES))


def _claim(fields: _Fields) -> Claim:
    return Claim(fields.octets("token", TOKEN_BYTES))


def _refusal(fields: _Fields) -> Refusal:
    return Refusal(fields.octets("token", TOKEN_BYTES), fields.text("reason"))


def _bye(_: _Fields) -> Bye:
    return Bye()


_PARSERS: dict[str, Callable[[_Fields], Message]] = {
    Hello.kind: _hello,
    Share.kind: _share,
    Release.kind: _release,
    Ended.kind: _ended,
    Claim.kind: _claim,
    Refusal.kind: _refusal,
    Bye.kind: _bye,
}


def parse(value: dict[str, Any], fds: int) -> Message:
    """The message in a peer's map, which came with so many descriptors.

    A share comes with those of its block, or with none when the receiver has said that it is mapped.
    """
    fields = _Fields("message", value)
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
