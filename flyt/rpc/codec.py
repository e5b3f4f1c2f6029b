# SPDX-License-Identifier: Apache-2.0
"""From declared messages to bytes and back: one encoder and one checking decoder.

A `message` is a dataclass, never changed once made (`frozen` makes the making four times as slow),
whose fields are annotated with the types below; a `Vocabulary`
maps numeric codes to such classes. On the wire a message is one MessagePack array: the code,
then the fields in order. Whatever bytes come in, `Vocabulary.decode` either returns a message
whose every field was checked, or raises `ProtocolError`; nothing else.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgpack

from flyt.errors import ProtocolError

Checker = Callable[[Any], Any]
T = typing.TypeVar("T")


class _Local(threading.local):
    """A packer for each thread: `msgpack.packb` makes one for each message."""

    def __init__(self) -> None:
        self.pack = msgpack.Packer().pack


_local = _Local()

MAX_MESSAGE_BYTES = 4 << 20
"""No control message needs more: a page table of 65,536 scattered runs packs to under 1 MiB."""

MAX_RUNS = 65_536
"""The kernel allows a process about 65,000 mappings, so no window has more runs."""


class _Bad(Exception):
    """A field's check failed; turned into ProtocolError where the field's name is known."""


def _unsigned(bits: int) -> Checker:
    limit = 1 << bits

    def check(value: Any) -> int:
        if type(value) is not int or not 0 <= value < limit:
            raise _Bad(f"should be an integer of {bits} bits")
        return value

    return check


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise _Bad("should be a boolean")
    return value


def _octets(low: int, high: int) -> Checker:
    def check(value: Any) -> bytes:
        if type(value) is not bytes or not low <= len(value) <= high:
            raise _Bad(f"should be {low} to {high} bytes")
        return value

    return check


def _text(high: int) -> Checker:
    def check(value: Any) -> str:
        if type(value) is not str or len(value) > high:
            raise _Bad(f"should be text of at most {high} characters")
        return value

    return check


def _numbers(high: int) -> Checker:
    item = _unsigned(64)

    def check(value: Any) -> tuple[int, ...]:
        if type(value) not in (list, tuple) or len(value) > high:
            raise _Bad(f"should be a list of at most {high} integers")
        return tuple(item(v) for v in value)

    return check


def _runs(value: Any) -> tuple[tuple[int, int], ...]:
    item = _unsigned(64)
    if type(value) not in (list, tuple) or len(value) > MAX_RUNS:
        raise _Bad(f"should be a list of at most {MAX_RUNS} runs")
    out = []
    for run in value:
        if type(run) not in (list, tuple) or len(run) != 2:
            raise _Bad("should hold runs of the form [first, count]")
        out.append((item(run[0]), item(run[1])))
    return tuple(out)


def _document(value: Any) -> dict[str, Any]:
    if type(value) is not dict or not all(type(k) is str for k in value):
        raise _Bad("should be a map with text keys")
    return value


U8 = Annotated[int, _unsigned(8)]
U32 = Annotated[int, _unsigned(32)]
U64 = Annotated[int, _unsigned(64)]
_LIMITS: dict[Any, int] = {U8: 1 << 8, U32: 1 << 32, U64: 1 << 64}
Flag = Annotated[bool, _flag]
Token = Annotated[bytes, _octets(16, 16)]
Digest = Annotated[bytes, _octets(32, 32)]
Params = Annotated[bytes, _octets(0, 32_764)]
"""Parameters of a kernel: CUDA takes no more."""
Text = Annotated[str, _text(4096)]
Numbers = Annotated[tuple[int, ...], _numbers(64)]
Frames = Annotated[tuple[int, ...], _numbers(1 << 20)]
Runs = Annotated[tuple[tuple[int, int], ...], _runs]
Document = Annotated[dict[str, Any], _document]
"""A map for what only people and the same version read (device snapshots, status)."""


if typing.TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[Any], Any]:
        """For type checkers only; Python 3.10 has none of its own."""
        return lambda function: function


@dataclass_transform(field_specifiers=(dataclasses.field,))
def message(cls: type[T]) -> type[T]:
    """Make a class a message.

    As a dataclass, but only ``__init__`` is made for each class: to compile comparison and
    representation too would let every process start 50 ms later.
    """
    made: Any = dataclasses.dataclass(slots=True, eq=False, repr=False)(cls)
    made.__eq__, made.__hash__, made.__repr__ = _equal, None, _shown
    return typing.cast("type[T]", made)


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and all(
        getattr(one, name) == getattr(other, name) for name in one.__match_args__
    )


def _shown(one: Any) -> str:
    fields = (f"{f.name}={getattr(one, f.name)!r}" for f in dataclasses.fields(one) if f.repr)
    return f"{type(one).__name__}({', '.join(fields)})"


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    cls: type
    names: tuple[str, ...]
    checks: tuple[Checker, ...]
    fields: Callable[[Any], tuple[Any, ...]]
    """Reads all fields of a message."""
    limits: tuple[int, ...] | None
    """Where all fields are unsigned: what code and fields must be below, all checked together."""


def _shape(cls: type) -> _Shape:
    hints = typing.get_type_hints(cls, include_extras=True)
    names = tuple(f.name for f in dataclasses.fields(cls))
    checks = tuple(hints[name].__metadata__[0] for name in names)
    limits = tuple(_LIMITS.get(hints[name], 0) for name in names)
    return _Shape(cls, names, checks, _reader(names), (1 << 64, *limits) if all(limits) else None)


def _reader(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)


_INT = {int}


class Vocabulary:
    """The messages that may travel in one direction.

    Parameters
    ----------
    name : str
        Who speaks it, for error messages: "the client", "the backend".
    messages : mapping of int to type
        Message classes by wire code.
    """

    def __init__(self, name: str, messages: Mapping[int, type]) -> None:
        self.name = name
        self._shapes = {code: _shape(cls) for code, cls in messages.items()}
        self._codes = {shape.cls: (code, shape.fields) for code, shape in self._shapes.items()}

    def __contains__(self, cls: type) -> bool:
        return cls in self._codes

    def encode(self, message: Any) -> bytes:
        """Pack a message of this vocabulary."""
        code, fields = self._codes[type(message)]
        return typing.cast(bytes, _local.pack((code, *fields(message))))

    def decode(self, data: bytes | memoryview) -> Any:
        """Unpack and check one message.

        Raises
        ------
        ProtocolError
            For any bytes that are not exactly one well-formed message of this vocabulary.
        """
        items = self._unpack(data)
        shape = self._shapes.get(items[0]) if items and type(items[0]) is int else None
        if shape is None:
            raise ProtocolError(f"{self.name} sent a message of unknown type")
        if len(items) - 1 != len(shape.checks):
            raise ProtocolError(
                f"{self.name} sent {shape.cls.__name__} with {len(items) - 1} fields, "
                f"not {len(shape.checks)}"
            )
        if (
            shape.limits is not None
            and set(map(type, items)) == _INT
            and min(items) >= 0
            and all(map(operator.lt, items, shape.limits))
        ):
            return shape.cls(*items[1:])
        values = []
        for name, check, value in zip(shape.names, shape.checks, items[1:], strict=True):
            try:
                values.append(check(value))
            except _Bad as bad:
                raise ProtocolError(
                    f"{self.name} sent {shape.cls.__name__}.{name} that {bad}"
                ) from None
        return shape.cls(*values)

    def _unpack(self, data: bytes | memoryview) -> list[Any]:
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"{self.name} sent a control message of {len(data)} bytes; "
                f"the limit is {MAX_MESSAGE_BYTES}"
            )
        try:
            items = msgpack.unpackb(data)
        except (ValueError, TypeError, msgpack.UnpackException, RecursionError, MemoryError) as exc:
            raise ProtocolError(f"{self.name} sent bytes that are no MessagePack: {exc!r}") from exc
        if type(items) is not list:
            raise ProtocolError(f"{self.name} sent MessagePack that is no message")
        return items
