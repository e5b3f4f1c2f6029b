# SPDX-License-Identifier: Apache-2.0
"""A peer that sends anything else than the protocol: each frame is refused, and nothing is left."""

from __future__ import annotations

import copy
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from flyt import ipc
from flyt.errors import ConfigurationError, HandshakeError, PeerLost, PeerTimeout, ProtocolError
from flyt.ipc import frames, messages, sockets
from tests.ipc.test_sharing import eventually

MIB = 1 << 20


def sound_share() -> dict[str, Any]:
    """A share of a 2-MiB block that `messages.parse` takes."""
    return {
        "kind": "share",
        "id": 0,
        "token": b"",
        "block": {
            "key": b"k" * 16,
            "uuid": ipc.TwinDriver().uuid(0),
            "size": 2 * MIB,
            "chunks": [2 * MIB],
        },
        "layout": {
            "library": "numpy",
            "dtype": "float32",
            "shape": [4, 5],
            "strides": [20, 4],
            "storage": 128,
            "extent": 80,
            "offset": 0,
            "requires_grad": False,
            "parameter": False,
            "read_only": False,
        },
        "event": b"",
    }


def wire(share: dict[str, Any]) -> dict[str, Any]:
    """As it travels: block and layout are packed by themselves."""
    rest = {name: value for name, value in share.items() if name not in ("block", "layout")}
    parts = {name: share[name] for name in ("block", "layout") if name in share}
    return {**rest, "array": msgpack.packb(parts)}


def test_a_sound_share_is_taken() -> None:
    share = messages.parse(wire(sound_share()), 1)
    assert isinstance(share, messages.Share)
    assert share.layout.shape == (4, 5)


BAD: list[tuple[str, Any]] = [
    ("kind", "pickle"),
    ("kind", 3),
    ("id", -1),
    ("id", 1 << 64),
    ("id", True),
    ("id", 1.0),
    ("token", b"short"),
    ("token", "text"),
    ("event", b"e" * 63),
    ("extra", 1),
    ("block", []),
    ("block", None),  # a layout with bytes needs a block
    ("block.key", b""),
    ("block.key", "k" * 16),
    ("block.uuid", b"u" * 17),
    ("block.size", 0),
    ("block.size", -1),
    ("block.size", 2 * MIB + 1),
    ("block.size", (1 << 64) - 1),
    ("block.chunks", []),
    ("block.chunks", [0]),
    ("block.chunks", [-(2 * MIB)]),
    ("block.chunks", [1] * 254),
    ("block.chunks", 2 * MIB),
    ("block.chunks", [2 * MIB, 1]),  # two chunks, one descriptor
    ("block.chunks", [(1 << 47) + 1]),
    ("block.chunks", ["2"]),
    ("block.path", "/etc/passwd"),
    ("layout", None),
    ("layout.library", "os"),
    ("layout.dtype", "object"),
    ("layout.dtype", "float32\0"),
    ("layout.shape", [4]),
    ("layout.shape", [4, -5]),
    ("layout.shape", [1 << 60, 1 << 60]),
    ("layout.shape", [4, 5.0]),
    ("layout.shape", [1] * 65),
    ("layout.shape", "45"),
    ("layout.shape", [4, 6]),  # one element past the storage
    ("layout.strides", [20]),
    ("layout.strides", [24, 4]),
    ("layout.strides", [-20, 4]),
    ("layout.strides", [1 << 63, 4]),
    ("layout.offset", 4),
    ("layout.offset", -4),
    ("layout.storage", -1),
    ("layout.storage", 2 * MIB - 79),
    ("layout.storage", (1 << 64) - 1),
    ("layout.extent", 79),
    ("layout.extent", 3 * MIB),
    ("layout.requires_grad", 0),
    ("layout.read_only", None),
    ("layout.code", "import os"),
]


@pytest.mark.parametrize(("path", "value"), BAD, ids=[f"{p}={v!r:.30}" for p, v in BAD])
def test_each_wrong_field_is_refused(path: str, value: Any) -> None:
    message = copy.deepcopy(sound_share())
    *parents, last = path.split(".")
    place = message
    for parent in parents:
        place = place[parent]
    place[last] = value
    messages.parse(wire(sound_share()), 1)  # what is remembered of it excuses nothing
    with pytest.raises(ProtocolError):
        messages.parse(wire(message), 1)


@pytest.mark.parametrize(
    "array", [None, {}, b"", b"\x91" * 5000, msgpack.packb([1]), msgpack.packb({"layout": None})]
)
def test_each_wrong_array_is_refused(array: Any) -> None:
    message = {**wire(sound_share()), "array": array}
    with pytest.raises(ProtocolError):
        messages.parse(message, 1)


def test_an_array_has_no_unknown_parts() -> None:
    message = {**wire(sound_share()), "array": msgpack.packb({**sound_share(), "more": 1})}
    with pytest.raises(ProtocolError, match="unknown fields"):
        messages.parse(message, 1)


@pytest.mark.parametrize(
    "path", ["id", "token", "block", "block.chunks", "layout", "layout.shape", "event"]
)
def test_each_missing_field_is_refused(path: str) -> None:
    message = copy.deepcopy(sound_share())
    *parents, last = path.split(".")
    place = message
    for parent in parents:
        place = place[parent]
    del place[last]
    with pytest.raises(ProtocolError, match="lacks"):
        messages.parse(wire(message), 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ids", 7),
        ("ids", [-1]),
        ("ids", [True]),
        ("ids", [0] * 1025),
        ("mapped", b"k" * 16),
        ("mapped", [b"k" * 15]),
        ("mapped", ["k" * 16]),
        ("mapped", [b"k" * 16] * 1025),
    ],
)
def test_a_wrong_release_is_refused(field: str, value: Any) -> None:
    sound = {"kind": "release", "ids": [0], "mapped": [b"k" * 16]}
    assert messages.parse(sound, 0) == messages.Release((0,), (b"k" * 16,))
    with pytest.raises(ProtocolError):
        messages.parse({**sound, field: value}, 0)


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
anything = st.recursive(
    leaves | st.binary(max_size=17),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=8,
)
NAMES = [*wire(sound_share()), "ids", "mapped", "key", "reason", "version", "driver"]


@settings(deadline=None, database=None)  # another process may have the core
@given(st.dictionaries(st.sampled_from(NAMES), anything), st.integers(0, 3))
def test_any_map_is_a_message_or_a_protocol_error(value: dict[str, Any], fds: int) -> None:
    try:
        messages.parse(value, fds)
    except ProtocolError:
        return


@settings(deadline=None, database=None)  # another process may have the core
@given(st.sampled_from(["block", "layout"]), st.text(max_size=8), anything)
def test_any_part_is_a_message_or_a_protocol_error(part: str, field: str, value: Any) -> None:
    message = sound_share()
    fields = list(message[part])
    message[part][fields[len(field) % len(fields)]] = value
    try:
        packed = wire(message)
    except (OverflowError, ValueError):  # MessagePack itself has no such thing
        return
    try:
        messages.parse(packed, 1)
    except ProtocolError:
        return


@pytest.fixture
def attacker() -> Iterator[tuple[socket.socket, ipc.Connection]]:
    """The raw end of a connection that was greeted, and the victim's."""
    raw, theirs = ipc.pair()
    frames.send(raw, frames.encode({"kind": "hello", "version": 2, "driver": "emulated"}))
    victim = ipc.Connection(theirs)
    yield raw, victim
    victim.abort()
    raw.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


FRAMES = {
    "empty length": b"\0\0\0\0",
    "short": b"\x01",
    "length too large": struct.pack("<I", 500) + msgpack.packb({"kind": "bye"}),
    "length too small": struct.pack("<I", 1) + msgpack.packb({"kind": "bye"}),
    "a pickle": struct.pack("<I", len(pickle.dumps({}))) + pickle.dumps({}),
    "no map": struct.pack("<I", 2) + msgpack.packb([1]),
    "numbers as keys": struct.pack("<I", 3) + msgpack.packb({1: 2}),
    "too long": struct.pack("<I", 1 << 17) + bytes(1 << 17),
    "deep": struct.pack("<I", 5000) + b"\x91" * 5000,
    "an extension": frames.encode({"kind": msgpack.ExtType(4, b"x")}),
    "greets twice": frames.encode({"kind": "hello", "version": 2, "driver": "emulated"}),
    "releases what is not shared": frames.encode({"kind": "release", "ids": [7], "mapped": []}),
}


@pytest.mark.parametrize("name", FRAMES)
def test_each_wrong_frame_ends_the_connection(
    name: str, attacker: tuple[socket.socket, ipc.Connection]
) -> None:
    raw, victim = attacker
    read, write = os.pipe()
    before = descriptors()
    frames.send(raw, FRAMES[name], (read, write))  # descriptors that come with it are closed
    with pytest.raises(ProtocolError):
        ipc.recv(victim)
    victim.abort()
    assert descriptors() <= before
    os.close(read)
    os.close(write)
    with pytest.raises(ProtocolError):  # the reason stays
        ipc.recv(victim)


def test_descriptors_without_room_are_a_protocol_error_not_a_short_list() -> None:
    code = (
        "import os, resource\n"
        "from flyt import ipc\n"
        "from flyt.errors import ProtocolError\n"
        "from flyt.ipc import frames\n"
        "a, b = ipc.pair()\n"
        "fds = tuple(os.dup(0) for _ in range(40))\n"
        "frames.send(a, frames.encode({'kind': 'bye'}), fds)\n"
        "for fd in fds: os.close(fd)\n"
        "n = len(os.listdir('/proc/self/fd'))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (n + 8, n + 8))\n"
        "try: frames.receive(b)\n"
        "except ProtocolError as e: print(e, len(os.listdir('/proc/self/fd')) - n)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.startswith("descriptors were lost"), done.stderr
    assert done.stdout.split()[-1] == "0"


def test_received_descriptors_do_not_survive_exec(
    attacker: tuple[socket.socket, ipc.Connection],
) -> None:
    raw, victim = attacker
    with ipc.VirtualMemoryResource().allocate(1) as buffer:
        message = sound_share()
        message["layout"] |= {
            "shape": [],
            "strides": [],
            "storage": 0,
            "extent": 1,
            "dtype": "bool",
        }
        frames.send(raw, frames.encode(wire(message)), buffer.ipc_descriptor.fds)
        _, fds = victim.next_share()
        assert [os.get_inheritable(fd) for fd in fds] == [False]
        assert not os.get_inheritable(buffer.ipc_descriptor.fds[0])
        frames.close_all(fds)


@pytest.mark.parametrize("kind", ["pipe", "unsealed", "short"])
def test_a_descriptor_that_is_no_memory_is_refused(
    kind: str, attacker: tuple[socket.socket, ipc.Connection]
) -> None:
    raw, victim = attacker
    name = "flyt-ipc-" + ipc.TwinDriver().uuid(0).hex()
    if kind == "pipe":
        fd, other = os.pipe()
        os.close(other)
    else:
        fd = os.memfd_create(name, os.MFD_ALLOW_SEALING)
        os.truncate(fd, 2 * MIB if kind == "unsealed" else 4096)
    before = descriptors()
    frames.send(raw, frames.encode(wire(sound_share())), (fd,))
    with pytest.raises(Exception, match="CUDA error 1"):
        ipc.recv(victim)
    assert descriptors() == before
    os.close(fd)
    assert ipc.messages.parse(_answer(raw), 0) == messages.Release((0,))  # it is told to let go


def _answer(raw: socket.socket) -> dict[str, Any]:
    raw.settimeout(20)
    while True:
        received = frames.receive(raw)
        assert received is not None
        message = frames.decode(received[0])
        if message["kind"] != "hello":
            return message


def test_a_known_key_with_another_size_is_refused(
    attacker: tuple[socket.socket, ipc.Connection],
) -> None:
    raw, victim = attacker
    with ipc.VirtualMemoryResource().allocate(100) as mine:
        message = sound_share()
        message["block"]["key"] = mine.key
        frames.send(raw, frames.encode(wire(message)), mine.ipc_descriptor.fds)
        with pytest.raises(ProtocolError, match="describes another"):
            ipc.recv(victim)


def test_a_share_without_descriptors_of_an_unknown_block_is_refused(
    attacker: tuple[socket.socket, ipc.Connection],
) -> None:
    raw, victim = attacker
    frames.send(raw, frames.encode(wire(sound_share())))
    with pytest.raises(ProtocolError, match="without descriptors"):
        ipc.recv(victim)
    assert _answer(raw) == {"kind": "release", "ids": [0], "mapped": []}


def _shares(raw: socket.socket) -> tuple[dict[str, Any], int]:
    """The next share, and how many descriptors came with it."""
    raw.settimeout(20)
    while True:
        received = frames.receive(raw)
        assert received is not None
        frames.close_all(received[1])
        message = frames.decode(received[0])
        if message["kind"] == "share":
            return message | frames.unpack(message["array"]), len(received[1])


def test_descriptors_travel_until_the_receiver_says_that_the_block_is_mapped(
    attacker: tuple[socket.socket, ipc.Connection],
) -> None:
    raw, victim = attacker
    array = ipc.empty((10,))

    def sent(value: object, mapped: Callable[[dict[str, Any]], list[bytes]]) -> int:
        ipc.send(victim, value)
        share, count = _shares(raw)
        release = {"kind": "release", "ids": [share["id"]], "mapped": mapped(share)}
        frames.send(raw, frames.encode(release))
        victim.wait_released(20)
        return count

    assert sent(array, lambda _: []) == 1
    assert sent(array, lambda share: [b"?" * 16, share["block"]["key"]]) == 1  # one was never its
    assert sent(array, lambda _: []) == 0
    assert sent(array[3:], lambda _: []) == 0
    assert sent(ipc.empty((10,)), lambda _: []) == 1  # another block
    assert len(victim._mapped_keys) == 1  # a peer can't make it grow,
    del array
    assert eventually(lambda: not victim._mapped_keys)  # nor do blocks that are no more


def test_releases_are_gathered_and_none_waits_for_another_call(
    attacker: tuple[socket.socket, ipc.Connection],
) -> None:
    raw, victim = attacker
    count = 200
    with ipc.VirtualMemoryResource().allocate(2 * MIB) as buffer:
        block = {**sound_share()["block"], "key": b"g" * 16}
        for i in range(count):
            fds = () if i else buffer.ipc_descriptor.fds
            frames.send(raw, frames.encode(wire({**sound_share(), "id": i, "block": block})), fds)
            ipc.recv(victim)  # and dropped at once
        ids: list[int] = []
        answers = []
        while len(ids) < count:
            answers.append(_answer(raw))
            ids += answers[-1]["ids"]
    assert sorted(ids) == list(range(count))
    assert len(answers) <= count // 2
    assert [answer["mapped"] for answer in answers] == [[b"g" * 16]] + [[]] * (len(answers) - 1)


def test_an_answer_that_nobody_asked_for_is_let_go(
    attacker: tuple[socket.socket, ipc.Connection],
) -> None:
    raw, victim = attacker
    before = descriptors()
    with ipc.VirtualMemoryResource().allocate(2 * MIB) as buffer:
        message = {**sound_share(), "token": b"t" * 16}
        frames.send(raw, frames.encode(wire(message)), buffer.ipc_descriptor.fds)
        assert _answer(raw) == {"kind": "release", "ids": [0], "mapped": []}
        with pytest.raises(PeerTimeout):
            ipc.recv(victim, timeout=0.05)
    assert descriptors() == before


def test_a_claim_on_a_plain_connection_is_refused(
    both: tuple[ipc.Connection, ipc.Connection],
) -> None:
    with pytest.raises(Exception, match="serves no tokens"):
        both[0].claim(b"t" * 16)


# --- sockets -----------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("who", ["connecting", "listening"])
def test_another_user_is_refused_on_both_sides(who: str, peer: Callable[..., Any]) -> None:
    code = (
        "import os, sys\n"
        "from flyt import ipc\n"
        "from flyt.errors import FlytError\n"
        "os.setuid(54321)\n"
        "if sys.argv[1] == 'connecting': s = ipc.sockets.connect(sys.argv[2]); s.recv(1)\n"
        "else:\n"
        "  l = ipc.Listener(); print(l.name, flush=True)\n"
        "  s = l.accept(30); s.recv(1)\n"
    )
    with ipc.Listener() as listener:
        child = subprocess.Popen(
            [sys.executable, "-c", code, who, listener.name],
            env={**os.environ, "FLYT_IPC_DRIVER": "emulated"},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            name = "" if who == "connecting" else child.stdout.readline().strip()
            with pytest.raises(HandshakeError, match="user 54321"):
                _ = ipc.connect(name) if name else listener.connection(30)
        finally:
            child.wait(30)
            if child.stdout is not None:
                child.stdout.close()


def test_an_allowed_user_is_let_in() -> None:
    left, right = ipc.pair()
    with left, right:
        assert sockets.check_peer(left, frozenset({os.geteuid(), 1})) == os.getpid()
        with pytest.raises(HandshakeError, match="allowed_uids"):
            sockets.check_peer(left, frozenset({54321}))


def test_names_leave_no_file_and_are_not_reused() -> None:
    with ipc.Listener() as listener:
        with pytest.raises(ConfigurationError, match="in use"):
            ipc.Listener(listener.name)
        with open("/proc/net/unix") as table:
            assert f"@{listener.name}" in table.read()
    with pytest.raises(PeerLost, match="nobody listens"):
        ipc.connect(listener.name)
    with ipc.Listener() as one, ipc.Listener() as other:
        assert one.name != other.name


@pytest.mark.parametrize("name", ["", "x" * 108, "a\0b"])
def test_impossible_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError):
        sockets.connect(name)


def test_a_listener_waits_only_so_long() -> None:
    with ipc.Listener() as listener, pytest.raises(PeerTimeout):
        listener.connection(0.05)


def test_a_stream_socket_is_refused() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with right, pytest.raises(HandshakeError, match="SEQPACKET"):
        ipc.Connection(left)


def test_a_layout_of_our_own_is_checked_too() -> None:
    # A view past the end of its block: NumPy can be talked into it.
    array = ipc.empty((1 << 21,), "uint8")
    beyond = np.lib.stride_tricks.as_strided(array, (array.size + 1,), (1,))
    left, right = (ipc.Connection(sock) for sock in ipc.pair())
    with pytest.raises(Exception, match="exceeds its block"):
        ipc.send(left, beyond)
    left.abort()
    right.abort()
