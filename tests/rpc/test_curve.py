# SPDX-License-Identifier: Apache-2.0
"""CURVE between our sockets: who comes in, whose name the messages bear, what others can read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from flyt.rpc.curve import Gate
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.keys import ClientKeys, KeyPair
from flyt.rpc.sockets import Dialer, Incoming, Listener, open_context

LIMIT = 10.0
"""Seconds: a hang, not a measure of speed."""

SILENCE = 0.3
"""Seconds without a message that count as none; one takes milliseconds."""


def pair() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


SERVER, OTHER_SERVER, KNOWN, UNKNOWN = pair(), pair(), pair(), pair()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    one = open_context()
    yield one
    one.term()


@pytest.fixture
def gate(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Gate]:
    one = Gate(context, lambda key: key == KNOWN.public)
    yield one
    one.close()


@pytest.fixture
def guarded(context: zmq.Context[zmq.Socket[bytes]], gate: Gate) -> Iterator[Listener]:
    with contextlib.closing(Listener(context, "tcp://127.0.0.1:*", key=SERVER)) as one:
        yield one


def until(done: Callable[[], object], seconds: float = LIMIT) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def first(listener: Listener, seconds: float = LIMIT) -> Incoming | None:
    found: list[Incoming] = []

    def look() -> bool:
        if (incoming := listener.receive()) is not None:
            found.append(incoming)
        return bool(found)

    until(look, seconds)
    return found[0] if found else None


def ended(dialer: Dialer) -> bool:
    dialer.check()
    return dialer.lost is not None


def test_a_known_key_comes_in_under_its_name(
    context: zmq.Context[zmq.Socket[bytes]], guarded: Listener
) -> None:
    keys = ClientKeys(KNOWN, SERVER.public)
    with contextlib.closing(Dialer(context, guarded.endpoint, keys=keys)) as dialer:
        dialer.send([b"hello"])
        incoming = first(guarded)
        assert incoming is not None
        assert incoming.frames == [b"hello"]
        assert incoming.peer.key == incoming.peer.proven == KNOWN.public.decode()
        guarded.send(incoming.identity, [b"answer"])
        assert until(dialer.readable)
        assert dialer.receive() == [b"answer"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (ClientKeys(UNKNOWN, SERVER.public), "does not know this client's key"),
        (ClientKeys(KNOWN, OTHER_SERVER.public), "another key than the one in FLYT_SERVER_KEY"),
        (None, "set FLYT_KEY and FLYT_SERVER_KEY"),
    ],
    ids=["unknown key", "wrong server", "no key"],
)
def test_others_are_told_why_and_not_a_byte_of_theirs_arrives(
    context: zmq.Context[zmq.Socket[bytes]],
    guarded: Listener,
    keys: ClientKeys | None,
    words: str,
) -> None:
    with contextlib.closing(Dialer(context, guarded.endpoint, keys=keys)) as dialer:
        dialer.send([b"hello"])
        assert until(lambda: ended(dialer)), "it is left in the dark"
        assert dialer.refused
        assert words in str(dialer.lost)
        assert first(guarded, SILENCE) is None


def test_a_client_with_keys_sends_nothing_to_a_server_without(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    with contextlib.closing(Listener(context, "tcp://127.0.0.1:*")) as listener:
        keys = ClientKeys(KNOWN, SERVER.public)
        with contextlib.closing(Dialer(context, listener.endpoint, keys=keys)) as dialer:
            dialer.send([b"hello"])
            assert until(lambda: ended(dialer))
            assert dialer.refused
            assert "uses no keys" in str(dialer.lost)
            assert first(listener, SILENCE) is None


def test_without_a_gate_nobody_comes_in(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with contextlib.closing(Listener(context, "tcp://127.0.0.1:*", key=SERVER)) as listener:
        keys = ClientKeys(KNOWN, SERVER.public)
        with contextlib.closing(Dialer(context, listener.endpoint, keys=keys)) as dialer:
            dialer.send([b"hello"])
            assert first(listener, SILENCE) is None


def test_ipc_needs_no_key(
    context: zmq.Context[zmq.Socket[bytes]], gate: Gate, tmp_path_factory: pytest.TempPathFactory
) -> None:
    address = f"ipc://{tmp_path_factory.mktemp('c')}/s"
    with contextlib.closing(Listener(context, address, key=SERVER)) as listener:
        with contextlib.closing(Dialer(context, Endpoint.parse(address))) as dialer:
            dialer.send([b"hello"])
            incoming = first(listener)
        assert incoming is not None
        assert incoming.frames == [b"hello"]
        assert incoming.peer.key == ""
        assert incoming.peer.uid >= 0
