# SPDX-License-Identifier: Apache-2.0
"""Messages that are nearly right: a seeded mutator of everything that may travel."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import typing
from collections.abc import Callable, Iterator
from typing import Any

from flyt.rpc import messages as m
from flyt.rpc.codec import Digest, Vocabulary
from flyt.rpc.endpoints import Endpoint
from tests.faults.zmtp import Zmtp
from tests.pair.raw import say

SEEDS = 2000
"""Valid messages that the mutants of one vocabulary come from."""

EDGES = (0, 1, 127, 128, 255, 256, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)
TAGS = bytes([0x00, 0x7F, 0x80, 0x90, 0xA0, 0xC0, 0xC1, 0xC2, 0xC4, 0xC6, 0xCA, 0xCB, 0xCF, 0xD3])
TAGS += bytes([0xD4, 0xD9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xE0, 0xFF])
"""First bytes of MessagePack's types, lengths of 4 GiB among them."""


def _value(kind: Any, source: random.Random) -> Any:
    origin = typing.get_origin(typing.get_args(kind)[0]) or typing.get_args(kind)[0]
    if origin is int:
        return source.choice(EDGES[:5])  # fits the narrowest field
    if origin is bool:
        return source.random() < 0.5
    if origin is bytes:
        return source.randbytes(32 if kind is Digest else 16)
    if origin is str:
        return "x" * source.randrange(20)
    if origin is dict:
        return {"devices": [source.randrange(300)], "a": None}
    pairs = "tuple[int, int]" in str(typing.get_args(kind)[0])
    count = source.randrange(4)
    if pairs:
        return tuple((source.randrange(50), 1 + source.randrange(3)) for _ in range(count))
    return tuple(source.choice(EDGES) for _ in range(count))


def valid(vocabulary: Vocabulary, classes: typing.Sequence[type], source: random.Random) -> bytes:
    """A message as an honest side could send it."""
    cls = source.choice(classes)
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [_value(hints[field.name], source) for field in dataclasses.fields(cls)]
    return vocabulary.encode(cls(*fields))


def mutants(seeds: typing.Sequence[bytes], count: int, source: random.Random) -> Iterator[bytes]:
    """``count`` byte strings, each one to four small changes away from one of ``seeds``."""
    for _ in range(count):
        data = bytearray(source.choice(seeds))
        for _ in range(source.randrange(1, 5)):
            place = source.randrange(len(data) + 1)
            match source.randrange(7):
                case 0 if place < len(data):
                    data[place] ^= 1 << source.randrange(8)
                case 1 if place < len(data):
                    data[place] = source.choice(TAGS)
                case 2:
                    del data[place : place + source.randrange(1, 9)]
                case 3:
                    data[place:place] = source.randbytes(source.randrange(1, 9))
                case 4:
                    data[place:place] = data[source.randrange(len(data) + 1) :][:16]
                case 5:
                    edge = source.choice(EDGES)
                    data[place : place + 9] = b"\xcf" + edge.to_bytes(8, "big")
                case _:
                    data[place:] = source.choice(seeds)[place:]
        yield bytes(data)


PING = (1 << 64) - 7
"""An id that no mutant has."""


def send_mutants(backend: Any, count: int, source: random.Random, look: Callable[[], bool]) -> int:
    """``count`` mutants of commands, one after the other, each to a session that lives.

    Returns how many sessions they ended; ``look`` must stay true meanwhile.
    """
    seeds = [valid(m.COMMANDS, list(m.COMMAND_CODES.values()), source) for _ in range(SEEDS)]
    ended = 0
    with contextlib.ExitStack() as stack:
        peer: Zmtp | None = None
        for number, data in enumerate(mutants(seeds, count, source)):
            if peer is None:
                peer = stack.enter_context(_session(backend.endpoint))
            try:
                peer.send(data)
                peer.send(m.COMMANDS.encode(m.Ping(PING)))
                while not _is_pong(m.REPLIES.decode(peer.message()[0])):
                    pass
            except (BrokenPipeError, ConnectionResetError):
                ended += 1
                stack.close()
                peer = None
            if number % 250 == 0:
                assert look(), f"mutant {number}: the other client stands still"
    return ended


def _is_pong(reply: Any) -> bool:
    if isinstance(reply, m.Result) and reply.status == m.Status.PROTOCOL:
        raise ConnectionResetError(reply.text)  # its last word; it waits until we hang up
    if isinstance(reply, m.Done):
        return reply.first <= PING < reply.first + reply.count
    return isinstance(reply, m.Result) and reply.id == PING


def _session(endpoint: str) -> Zmtp:
    """A connection that has attached without a window."""
    welcome = say(endpoint, m.Hello(m.PROTOCOL_VERSION, (1, 2), os.getpid(), "mutant"))
    assert isinstance(welcome, m.Welcome), welcome
    peer = Zmtp(Endpoint.parse(endpoint).session(welcome.port, welcome.path))
    peer.send(m.COMMANDS.encode(m.Attach(1, welcome.token, True, 0, 0, (), 0)))
    peer.message()
    return peer
