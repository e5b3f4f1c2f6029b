# SPDX-License-Identifier: Apache-2.0
"""The codec: any bytes are a message or a ProtocolError; any message comes back as it was."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any, NamedTuple

import msgpack
import pytest
from hypothesis import given, settings, strategies as st

from flyt.backend import orders
from flyt.errors import ProtocolError
from flyt.rpc import codec, messages
from flyt.rpc.codec import MAX_MESSAGE_BYTES, MAX_RUNS, Vocabulary

VOCABULARIES = {
    "HELLOS": messages.HELLOS,
    "WELCOMES": messages.WELCOMES,
    "COMMANDS": messages.COMMANDS,
    "REPLIES": messages.REPLIES,
    "TO_WORKER": orders.TO_WORKER,
    "FROM_WORKER": orders.FROM_WORKER,
    "TO_KEEPER": orders.TO_KEEPER,
    "FROM_KEEPER": orders.FROM_KEEPER,
}
MESSAGES = [
    pytest.param(vocabulary, code, shape.cls, id=f"{name}-{shape.cls.__name__}")
    for name, vocabulary in VOCABULARIES.items()
    for code, shape in vocabulary._shapes.items()
]

any_vocabulary = st.sampled_from(list(VOCABULARIES.values()))
every_vocabulary = pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
every_message = pytest.mark.parametrize(("vocabulary", "code", "cls"), MESSAGES)


class Kind(NamedTuple):
    """A field type: how to draw values, the values at its bounds, and what it must refuse."""

    values: st.SearchStrategy[Any]
    bounds: tuple[Any, ...]
    wrong: tuple[Any, ...]


def _unsigned(bits: int) -> Kind:
    top = (1 << bits) - 1
    beyond = () if bits == 64 else (top + 1,)  # MessagePack has no integer above 64 bits
    wrong = (-1, *beyond, True, 1.0, "1", b"1", None, [1], {})
    return Kind(st.integers(0, top), (0, 1, top >> 1, top), wrong)


_no_integers = (-(1 << 63), True, 1.0, "1", b"1", None, [1])
_words = st.integers(0, (1 << 64) - 1)
_plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=4,
)

KINDS: dict[Any, Kind] = {
    codec.U8: _unsigned(8),
    codec.U32: _unsigned(32),
    codec.U64: _unsigned(64),
    codec.Flag: Kind(st.booleans(), (False, True), (0, 1, None, "", b"\1")),
    codec.Token: Kind(
        st.binary(min_size=16, max_size=16),
        (bytes(16), b"\xff" * 16),
        (b"", bytes(15), bytes(17), "x" * 16, None, [0] * 16),
    ),
    codec.Digest: Kind(
        st.binary(min_size=32, max_size=32),
        (bytes(32), b"\xff" * 32),
        (b"", bytes(31), bytes(33), "x" * 32, None, [0] * 32),
    ),
    codec.Params: Kind(
        st.binary(max_size=60),
        (b"", b"\xff" * 32_764),
        (bytes(32_765), "x", None, 1, [0]),
    ),
    codec.Text: Kind(
        st.text(max_size=60),
        ("", "x" * 4096, "\N{SNOWMAN}" * 4096, "a\0b"),
        ("x" * 4097, b"x", None, 1, ["x"]),
    ),
    codec.Numbers: Kind(
        st.lists(_words, max_size=64).map(tuple),
        ((), ((1 << 64) - 1,) * 64),
        ([0] * 65, *([bad] for bad in _no_integers), 5, {}, None, "12", b"12"),
    ),
    codec.Frames: Kind(
        st.lists(_words, max_size=80).map(tuple),
        ((), (7,) * (1 << 20)),
        ([0] * ((1 << 20) + 1), *([bad] for bad in _no_integers), 5, {}, None, "12"),
    ),
    codec.Runs: Kind(
        st.lists(st.tuples(_words, _words), max_size=40).map(tuple),
        ((), (((1 << 64) - 1, 0),), ((1, 2),) * MAX_RUNS),
        (
            [[0, 1]] * (MAX_RUNS + 1),
            *([1], [[1]], [[1, 2, 3]], [[]], [["a", 1]], [b"ab"], ["ab"]),
            *([[bad, 1]] for bad in _no_integers),
            *([[1, bad]] for bad in _no_integers),
            *(5, {}, None, "12"),
        ),
    ),
    codec.Document: Kind(
        st.dictionaries(st.text(max_size=8), _plain, max_size=5),
        ({}, {"devices": [{"name": "H100", "total_memory": 85 << 30}], "": None}),
        ([], None, 1, "{}", {b"key": 1}, {"a": 1, b"b": 2}),
    ),
}


def _fields(cls: type) -> dict[str, Kind]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: KINDS[hints[field.name]] for field in dataclasses.fields(cls)}


def _smallest(cls: type) -> Any:
    return cls(**{name: kind.bounds[0] for name, kind in _fields(cls).items()})


def _typical(cls: type) -> Any:
    """A message with as many different bytes as there are fields, none of them at a bound."""
    typical: dict[Any, Any] = {
        codec.U8: 0x5A,
        codec.U32: 0x1234_5678,
        codec.U64: 0x2000_0010_0000,
        codec.Flag: False,
        codec.Token: bytes(range(16)),
        codec.Digest: bytes(range(32)),
        codec.Params: bytes(range(12)),
        codec.Text: "/dev/shm/flyt",
        codec.Numbers: (1, 300, 1 << 40),
        codec.Frames: (2, 3, 70_000),
        codec.Runs: ((5, 1), (900, 4)),
        codec.Document: {"devices": [{"name": "H100", "memory": 1 << 36, "unit": 0.5}], "n": None},
    }
    hints = typing.get_type_hints(cls, include_extras=True)
    return cls(*(typical[hints[field.name]] for field in dataclasses.fields(cls)))


def _messages(vocabulary: Vocabulary) -> st.SearchStrategy[Any]:
    shapes = vocabulary._shapes.values()
    return st.one_of(
        *(
            st.builds(shape.cls, **{n: kind.values for n, kind in _fields(shape.cls).items()})
            for shape in shapes
        )
    )


def _check_any(vocabulary: Vocabulary, data: bytes) -> None:
    """The invariant: a message that can be said again, or a ProtocolError; nothing else."""
    try:
        message = vocabulary.decode(data)
    except ProtocolError:
        return
    assert type(message) in vocabulary
    again = vocabulary.encode(message)
    assert vocabulary.encode(vocabulary.decode(again)) == again


# --- the declarations ------------------------------------------------------------------------


@pytest.mark.parametrize("module", [messages, orders])
def test_every_declared_message_is_in_a_vocabulary(module: Any) -> None:
    declared = [
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls) and dataclasses.is_dataclass(cls)
    ]
    assert declared
    missing = [c for c in declared if not any(c in v for v in VOCABULARIES.values())]
    assert missing == []


@every_vocabulary
def test_a_code_means_one_class(vocabulary: Vocabulary) -> None:
    classes = [shape.cls for shape in vocabulary._shapes.values()]
    assert len(set(classes)) == len(classes)


def test_every_command_and_result_starts_with_its_id() -> None:
    for shape in (*messages.COMMANDS._shapes.values(), messages.REPLIES._shapes[1]):
        assert shape.names[0] == "id", shape.cls
    assert messages.HELLOS._shapes[1].names[0] == "version"  # for ever: see foreign_version


def test_a_status_is_no_cuda_error() -> None:
    assert all(10_000 < status < 1 << 32 for status in messages.Status)


# --- what is well-formed ---------------------------------------------------------------------


@every_vocabulary
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_what_can_be_built_comes_back(vocabulary: Vocabulary, data: st.DataObject) -> None:
    message = data.draw(_messages(vocabulary))
    packed = vocabulary.encode(message)
    assert vocabulary.decode(packed) == message
    assert vocabulary.decode(memoryview(packed)) == message
    assert type(vocabulary.decode(packed)) is type(message)


@every_message
def test_the_bounds_of_every_field_are_inside(vocabulary: Vocabulary, code: int, cls: type) -> None:
    for name, kind in _fields(cls).items():
        for value in kind.bounds:
            message = dataclasses.replace(_smallest(cls), **{name: value})
            assert vocabulary.decode(vocabulary.encode(message)) == message


@every_message
def test_what_is_beyond_the_bounds_of_a_field_is_refused_by_name(
    vocabulary: Vocabulary, code: int, cls: type
) -> None:
    for at, (name, kind) in enumerate(_fields(cls).items()):
        for wrong in kind.wrong:
            items = [code, *dataclasses.astuple(_smallest(cls))]
            items[1 + at] = wrong
            with pytest.raises(ProtocolError, match=rf"sent {cls.__name__}\.{name} that should "):
                vocabulary.decode(msgpack.packb(items))


@every_message
def test_one_field_more_or_less_is_refused(vocabulary: Vocabulary, code: int, cls: type) -> None:
    items = [code, *dataclasses.astuple(_smallest(cls))]
    with pytest.raises(ProtocolError, match=f"{cls.__name__} with {len(items)} fields"):
        vocabulary.decode(msgpack.packb([*items, 0]))
    with pytest.raises(ProtocolError):  # with no field left it is an empty list
        vocabulary.decode(msgpack.packb(items[:-1]))


# --- what is not -----------------------------------------------------------------------------


@given(vocabulary=any_vocabulary, data=st.binary(max_size=200))
@settings(max_examples=10_000, deadline=None)
def test_any_bytes(vocabulary: Vocabulary, data: bytes) -> None:
    _check_any(vocabulary, data)


@given(
    vocabulary=any_vocabulary,
    items=st.lists(_plain, max_size=6),
    code=st.integers(0, 20),
    tail=st.binary(max_size=2),
)
@settings(max_examples=200, deadline=None)
def test_any_messagepack(vocabulary: Vocabulary, items: list[Any], code: int, tail: bytes) -> None:
    _check_any(vocabulary, msgpack.packb([code, *items]) + tail)
    _check_any(vocabulary, msgpack.packb(items) + tail)


@every_message
def test_every_byte_changed(vocabulary: Vocabulary, code: int, cls: type) -> None:
    packed = vocabulary.encode(_typical(cls))
    others = (0x00, 0x80, 0x90, 0xA1, 0xC0, 0xC1, 0xC4, 0xC7, 0xCA, 0xD6, 0xDF, 0xFF)
    for at, byte in enumerate(packed):
        for new in {*(byte ^ (1 << bit) for bit in range(8)), *others} - {byte}:
            _check_any(vocabulary, packed[:at] + bytes([new]) + packed[at + 1 :])


@every_message
def test_every_byte_left_out_or_doubled(vocabulary: Vocabulary, code: int, cls: type) -> None:
    packed = vocabulary.encode(_typical(cls))
    for at in range(len(packed)):
        _check_any(vocabulary, packed[:at] + packed[at + 1 :])
        _check_any(vocabulary, packed[:at] + packed[at : at + 1] + packed[at:])


@every_message
def test_cut_short_or_followed_by_more(vocabulary: Vocabulary, code: int, cls: type) -> None:
    packed = vocabulary.encode(_typical(cls))
    for length in range(len(packed)):
        with pytest.raises(ProtocolError):
            vocabulary.decode(packed[:length])
    for more in (b"\0", b"\xc1", packed):
        with pytest.raises(ProtocolError):
            vocabulary.decode(packed + more)


@every_vocabulary
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x90", id="empty-list"),
        pytest.param(b"\x01", id="no-list"),
        pytest.param(b"\x81\x01\x02", id="map"),
        pytest.param(b"\x91\x00", id="code-0"),
        pytest.param(b"\x91\x7f", id="unknown-code"),
        pytest.param(b"\x91\xff", id="negative-code"),
        pytest.param(b"\x91\xc3", id="true-as-code"),
        pytest.param(b"\x91\xcb\x3f\xf0" + bytes(6), id="1.0-as-code"),
        pytest.param(b"\x91\x90", id="list-as-code"),
        pytest.param(b"\x91\x80", id="map-as-code"),
        pytest.param(b"\x91" * 100_000, id="deep"),
        pytest.param(b"\x81\xa1k" * 100_000, id="deep-maps"),
        pytest.param(b"\xdd\xff\xff\xff\xff\x01", id="4-G-items"),
        pytest.param(b"\x92\x01\xdb\xff\xff\xff\xffx", id="4-GiB-text"),
        pytest.param(b"\x92\x01\xa1\xff", id="not-utf-8"),
        pytest.param(b"\x92\x01\xa3\xed\xa0\x80", id="surrogate"),
        pytest.param(b"\x92\x01\xc7\x05\xff12345", id="odd-timestamp"),
        pytest.param(b"\x92\x01\x82\x90\x01\x80\x02", id="unhashable-keys"),
    ],
)
def test_refused_in_words(vocabulary: Vocabulary, data: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"^{vocabulary.name} sent "):
        vocabulary.decode(data)


def test_the_largest_message() -> None:
    full = messages.COMMANDS.encode(messages.Grow(1, 1, ((1 << 63, 1 << 31),) * MAX_RUNS))
    assert len(full) < MAX_MESSAGE_BYTES
    assert len(messages.COMMANDS.decode(full).table) == MAX_RUNS
    long = full + bytes(MAX_MESSAGE_BYTES + 1 - len(full))
    with pytest.raises(ProtocolError, match=rf"{len(long)} bytes; the limit is {len(long) - 1}"):
        messages.COMMANDS.decode(long)


def test_a_message_of_another_direction_is_no_member() -> None:
    assert messages.Ping in messages.COMMANDS
    assert messages.Ping not in messages.REPLIES
    assert messages.Result not in messages.COMMANDS
