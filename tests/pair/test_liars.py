# SPDX-License-Identifier: Apache-2.0
"""A client that lies gets a clear error, and nobody else notices anything.

All tests share one backend and one honest client, which verifies every byte it copies all the
while; after each lie it must have gone on.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from flyt.backend.visitors import HELLO_BYTES
from flyt.errors import SessionLost
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.shm import runs
from tests.pair.raw import (
    SILENCE,
    SOON,
    Honest,
    RawClient,
    RegionView,
    eventually,
    hear,
    say,
    session_of,
    status,
)

INVALID_VALUE = 1
MEMORY_ALLOCATION = 2
INVALID_DEVICE = 101
HUGE = (1 << 64) - 1
PATTERN = b"\xc3\x5a" * 4096


@pytest.fixture(scope="module")
def served(module_backend: Callable[..., Any]) -> Any:
    listen = [f"ipc:///tmp/flyt-liars-{os.getpid()}.sock", "tcp://127.0.0.1:*"]
    return module_backend(listen=listen, extra=["--sweep-seconds", "0.5"])


@pytest.fixture(scope="module")
def neighbour(served: Any) -> Iterator[Honest]:
    client = Honest(served)
    yield client
    client.close()


@pytest.fixture
def honest(neighbour: Honest) -> Iterator[Honest]:
    """The honest client; it must have noticed nothing at the test's end."""
    yield neighbour
    assert neighbour.carries_on(1), "the honest client stands still"


@pytest.fixture
def newcomer(served: Any, honest: Honest) -> Iterator[RawClient]:
    """A client that has its WELCOME and nothing else."""
    with RawClient(served.endpoint) as client:
        yield client


@pytest.fixture
def liar(newcomer: RawClient) -> RawClient:
    """A client with a window: a control page and two pages of staging."""
    result = newcomer.attach()
    assert result.status == 0, result
    return newcomer


@pytest.fixture
def victim(served: Any, honest: Honest) -> Iterator[RawClient]:
    """Another client with a window, and device memory that holds `PATTERN`."""
    with RawClient(served.endpoint) as client:
        assert client.attach().status == 0
        client.block = client.malloc(len(PATTERN))  # type: ignore[attr-defined]
        index = client.geometry.page_size
        client.bytes_at(index, len(PATTERN))[:] = PATTERN
        assert client.call(m.CopyIn, client.block, index, len(PATTERN), client.pid).status == 0  # type: ignore[attr-defined]
        yield client
        assert device_bytes(client) == PATTERN, "the victim's device memory was changed"


def device_bytes(client: Any) -> bytes:
    """What `victim`'s block holds."""
    index = 2 * client.geometry.page_size
    result = client.call(m.CopyOut, client.block, index, len(PATTERN), client.pid)
    assert result.status == 0, result
    return bytes(client.bytes_at(index, len(PATTERN)))


def refused(result: m.Result, status: int, *words: str) -> None:
    """The answer is this error, and its text says why."""
    assert result.status == status, result
    for word in words:
        assert word in result.text, f"{word!r} is not in {result.text!r}"


# --- frames -------------------------------------------------------------------------------------


def frames_of_another(client: RawClient, honest: Honest) -> tuple[tuple[int, int], ...]:
    with RegionView(client.welcome.region) as region:
        frames = region.frames_of(honest.pid)
    assert len(frames) >= 3
    return runs.from_frames(frames[:3])


def test_attach_with_frames_of_another_session(newcomer: RawClient, honest: Honest) -> None:
    theirs = frames_of_another(newcomer, honest)
    result = newcomer.attach(table=theirs)
    refused(result, m.Status.FRAMES_REFUSED, "belong to another session")
    assert sorted(result.values) == sorted(runs.frames_of(theirs))
    assert newcomer.attach().status == 0, "after a refusal an honest ATTACH works"


def test_attach_with_one_frame_of_another_among_own(newcomer: RawClient, honest: Honest) -> None:
    own = newcomer.take(2)
    stolen = frames_of_another(newcomer, honest)[0][0]
    result = newcomer.attach(table=(*own, (stolen, 1)))
    refused(result, m.Status.FRAMES_REFUSED, "belong to another session")
    assert result.values == (stolen,)
    newcomer.give_up(own)


def test_grow_by_frames_of_another_session(liar: RawClient, honest: Honest) -> None:
    result = liar.call(m.Grow, 8, frames_of_another(liar, honest))
    refused(result, m.Status.FRAMES_REFUSED, "belong to another session")
    assert liar.lives()


def test_grow_by_frames_of_its_own_that_are_in_use(liar: RawClient) -> None:
    result = liar.call(m.Grow, 8, liar.table)
    assert result.status == m.Status.FRAMES_REFUSED
    assert sorted(result.values) == sorted(runs.frames_of(liar.table))
    assert liar.lives()


BAD_TABLES = {
    "beyond the last": (lambda n: ((n, 3),), "but the region has the frames 0 to"),
    "half beyond the last": (lambda n: ((n - 2, 3),), "but the region has the frames 0 to"),
    "the largest number": (lambda n: ((HUGE, 3),), "but the region has the frames 0 to"),
    "listed twice": (lambda n: ((n - 4, 2), (n - 3, 1)), "twice"),
    "an empty run": (lambda n: ((n - 4, 0), (n - 3, 3)), "empty run"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_page_tables_that_are_none(newcomer: RawClient, name: str) -> None:
    make, words = BAD_TABLES[name]
    table = make(newcomer.geometry.page_count)
    refused(newcomer.attach(table=table), m.Status.FRAMES_REFUSED, words)
    assert newcomer.attach().status == 0
    refused(newcomer.call(m.Grow, 8, table), m.Status.FRAMES_REFUSED, words)
    assert newcomer.lives()


@pytest.mark.parametrize("table", [(), ((5, 1),), ((0, HUGE),), ((HUGE, HUGE), (HUGE, HUGE))])
def test_attach_with_too_few_or_too_many_pages(newcomer: RawClient, table: Any) -> None:
    refused(newcomer.attach(table=table), m.Status.PROTOCOL, "page table of", "pages at ATTACH")


@pytest.mark.parametrize(
    ("vpn", "table"), [(8, ()), (HUGE, ((1, 1),)), (8, ((0, HUGE),)), (1 << 40, ((1, 1),))]
)
def test_grow_out_of_the_window(liar: RawClient, vpn: int, table: Any) -> None:
    refused(liar.call(m.Grow, vpn, table), m.Status.PROTOCOL, "leaves the window's range")


def test_grow_over_pages_in_use(liar: RawClient) -> None:
    for vpn in (0, 1, 2):
        table = liar.take(1, vpn)
        refused(liar.call(m.Grow, vpn, table), m.Status.ADDRESS_TAKEN, "still in use")
        liar.give_up(table)
    assert liar.lives()


def test_two_grows_at_once_to_the_same_pages(liar: RawClient) -> None:
    tables = [liar.take(1, 8), liar.take(1, 8)]
    numbers = [liar.post(m.Grow, 8, table) for table in tables]
    first, second = (liar.answer(number) for number in numbers)
    assert first.status == 0, first
    refused(second, m.Status.ADDRESS_TAKEN, "in use")
    assert liar.call(m.Grow, 9, tables[1]).status == 0, "the refused frames were given back"


# --- addresses ----------------------------------------------------------------------------------

BASE, RESERVE = 0x1800_0000_0000, 1 << 30

BAD_RANGES = {
    "unaligned base": (BASE + 4096, RESERVE),
    "odd base": (BASE + 1, RESERVE),
    "unaligned length": (BASE, RESERVE + 4096),
    "no length": (BASE, 0),
    "below": (0x1000_0000_0000 - RESERVE, RESERVE),
    "null": (0, RESERVE),
    "above": (0x2000_0000_0000, RESERVE),
    "half above": (0x2000_0000_0000 - RESERVE // 2, RESERVE),
    "overflow": ((1 << 64) - RESERVE, 2 * RESERVE),
    "too long": (0x1000_0000_0000, 0x1000_0000_0000),
    "the largest numbers": ((1 << 64) - 65536, (1 << 64) - 65536),
}


@pytest.mark.parametrize("name", BAD_RANGES)
def test_ranges_where_no_window_may_be(newcomer: RawClient, name: str) -> None:
    base, reserve = BAD_RANGES[name]
    result = newcomer.attach(base=base, reserve=reserve)
    refused(result, m.Status.PROTOCOL, "must be page-aligned and lie between", f"{base:#x}")


@pytest.mark.parametrize("pages", [-1, 0, 1])
def test_a_range_that_the_worker_uses(newcomer: RawClient, victim: RawClient, pages: int) -> None:
    assert victim.window is not None
    base = victim.window.base + pages * victim.geometry.page_size
    refused(newcomer.attach(base=base), m.Status.ADDRESS_TAKEN, f"{base:#x} is in use")
    assert newcomer.attach().status == 0, "another address works"


# --- indices ------------------------------------------------------------------------------------


def bad_indices(page: int) -> dict[str, tuple[int, int]]:
    """For a window of a control page, two pages of staging, and one segment right behind."""
    return {
        "in the control page": (0, 16),
        "from the control page on": (page - 1, 2),
        "two segments": (3 * page - 1, 2),
        "staging and all": (page, 3 * page),
        "behind the last": (4 * page, 1),
        "past the last": (4 * page - 1, 2),
        "size overflows": (page, HUGE),
        "index overflows": (HUGE, 1),
        "both overflow": (HUGE, HUGE),
        "sum wraps to the start": (HUGE - page, 3 * page),
    }


@pytest.mark.parametrize("kind", [m.CopyIn, m.CopyOut])
def test_indices_outside_one_segment(liar: RawClient, kind: Any) -> None:
    page = liar.geometry.page_size
    liar.grow(1, 3)
    block = liar.malloc(8 * page)
    for name, (index, size) in bad_indices(page).items():
        result = liar.call(kind, block, index, size, liar.pid)
        assert result.status == INVALID_VALUE, f"{name}: {result}"
        assert "not within one segment" in result.text
    assert liar.call(kind, block, page, 2 * page, liar.pid).status == 0
    assert liar.call(kind, block, 3 * page, page, liar.pid).status == 0


def test_a_segment_that_was_given_up(liar: RawClient) -> None:
    page = liar.geometry.page_size
    liar.grow(1, 8)
    block = liar.malloc(page)
    assert liar.call(m.CopyIn, block, 8 * page, page, liar.pid).status == 0
    numbers = [liar.post(m.Shrink, 8), liar.post(m.CopyOut, block, 8 * page, page, liar.pid)]
    assert liar.answer(numbers[1]).status == INVALID_VALUE  # before its frames are another's
    assert liar.answer(numbers[0]).status == 0
    refused(liar.call(m.CopyOut, block, 8 * page, 1, liar.pid), INVALID_VALUE, "one segment")
    refused(liar.call(m.Shrink, 8), INVALID_VALUE, "not the start of a segment")


@pytest.mark.parametrize("vpn", [0, 1, 2, 3, 9, HUGE])
def test_shrinking_what_is_no_pinned_segment(liar: RawClient, vpn: int) -> None:
    liar.grow(2, 8)
    refused(liar.call(m.Shrink, vpn), INVALID_VALUE, "not the start of a segment")
    assert liar.lives()


@pytest.mark.parametrize("kind", [m.CopyIn, m.CopyOut])
def test_the_pid_of_another(liar: RawClient, honest: Honest, kind: Any) -> None:
    block = liar.malloc(4096)
    result = liar.call(kind, block, liar.geometry.page_size, 16, honest.pid)
    refused(result, m.Status.PROTOCOL, f"for pid {honest.pid}", f"session is of pid {liar.pid}")


# --- device memory ------------------------------------------------------------------------------


def test_device_pointers_of_another(liar: RawClient, victim: Any, honest: Honest) -> None:
    page, own = liar.geometry.page_size, liar.malloc(4096)
    for theirs in (victim.block, victim.block + 1, honest.device):
        lies = [
            (m.CopyIn, theirs, page, 16, liar.pid),
            (m.CopyOut, theirs, page, 16, liar.pid),
            (m.CopyOn, own, theirs, 16),
            (m.CopyOn, theirs, own, 16),
            (m.Memset, theirs, 0, 16),
            (m.Pull, theirs, 16),
            (m.Free, theirs),
            (m.Malloc, 0, 4096, theirs),
        ]
        for kind, *fields in lies:
            refused(liar.call(kind, *fields), INVALID_VALUE, f"{theirs:#x}", "of this session")
        result = liar.call(m.Push, theirs, 16, payload=bytes(16))
        refused(result, INVALID_VALUE, f"{theirs:#x}", "of this session")
    assert liar.lives()


def test_device_ranges_that_overflow(liar: RawClient) -> None:
    page, block = liar.geometry.page_size, liar.malloc(4096)
    for address, size in [(block, 4097), (block + 4095, 2), (block, HUGE), (HUGE, HUGE), (0, 1)]:
        refused(liar.call(m.Memset, address, 0, size), INVALID_VALUE, "of this session")
        refused(liar.call(m.CopyOn, address, block, size), INVALID_VALUE, "of this session")
    refused(liar.call(m.CopyIn, block, page, 4097, liar.pid), INVALID_VALUE, "of this session")
    for address in (block + 1, 0, HUGE):
        refused(liar.call(m.Free, address), INVALID_VALUE, "no block of this session")
    assert liar.call(m.Free, block).status == 0
    refused(liar.call(m.Free, block), INVALID_VALUE, "no block of this session")


def test_allocations_that_no_device_has(liar: RawClient) -> None:
    for size in (1 << 50, 1 << 63, HUGE):
        assert liar.call(m.Malloc, 0, size, 0).status == MEMORY_ALLOCATION
    for device in (7, (1 << 32) - 1):
        refused(liar.call(m.Malloc, device, 16, 0), INVALID_DEVICE, f"no device {device}")
        refused(liar.call(m.MemInfo, device), INVALID_DEVICE, f"no device {device}")
        refused(liar.call(m.EventCreate, 1 << 20, device, 0), INVALID_DEVICE, f"no device {device}")
    refused(liar.call(m.Malloc, 0, 0, 0), m.Status.PROTOCOL, "MALLOC of 0 bytes")
    assert liar.ends()


# --- the order of words -------------------------------------------------------------------------


def test_a_second_attach(liar: RawClient) -> None:
    refused(liar.attach(), m.Status.PROTOCOL, "second ATTACH")
    assert liar.ends()


def test_a_second_attach_before_the_first_is_answered(newcomer: RawClient) -> None:
    other = newcomer.take(3)
    newcomer.post_attach()
    assert newcomer.window is not None
    # Not `post_attach`: it writes a new proof, perhaps before the backend has read the first.
    token, reserve = newcomer.welcome.token, newcomer.window.reserve
    second = newcomer.post(m.Attach, token, False, BASE, reserve, other, 1)
    refused(newcomer.answer(second), m.Status.PROTOCOL, "second ATTACH")
    assert newcomer.ends()


def test_a_command_before_attach_was_granted(newcomer: RawClient) -> None:
    refused(newcomer.attach(table=((HUGE, 3),)), m.Status.FRAMES_REFUSED)
    refused(newcomer.call(m.Malloc, 0, 16, 0), m.Status.PROTOCOL, "Malloc came before ATTACH")
    assert newcomer.ends()


def test_region_commands_of_a_session_without_a_window(newcomer: RawClient) -> None:
    assert newcomer.attach_inline().status == 0
    block = newcomer.malloc(64)
    result = newcomer.call(m.CopyIn, block, newcomer.geometry.page_size, 16, newcomer.pid)
    refused(result, m.Status.PROTOCOL, "there is no window")
    assert newcomer.ends()


def test_a_false_proof_is_told_from_shared_memory(newcomer: RawClient) -> None:
    refused(newcomer.attach(proof=1 << 20), m.Status.PROOF_FAILED, "share=on")
    assert newcomer.attach_inline().status == 0, "the session goes on without a window"


# --- payloads -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "payload", "words"),
    [
        (16, b"", "not of the size it names"),
        (16, bytes(15), "not of the size it names"),
        (16, bytes(17), "not of the size it names"),
        (16, None, "not of the size it names"),
        (0, b"", "inline payload of 0 bytes"),
        ((1 << 20) + 1, bytes((1 << 20) + 1), "inline payload of 1048577 bytes"),
    ],
)
def test_payloads_of_a_wrong_size(liar: RawClient, size: int, payload: Any, words: str) -> None:
    block = liar.malloc(2 << 20)
    result = liar.call(m.Push, block, size, payload=payload)
    refused(result, m.Status.PROTOCOL, words)


def test_a_pull_larger_than_a_chunk(liar: RawClient) -> None:
    block = liar.malloc(2 << 20)
    refused(liar.call(m.Pull, block, (1 << 20) + 1), m.Status.PROTOCOL, "1048577 bytes")
    assert liar.ends()


# --- bytes that are no messages -----------------------------------------------------------------


def packed(*items: Any) -> bytes:
    return bytes(msgpack.packb(list(items)))


GARBAGE = {
    "nothing": (b"", "no MessagePack"),
    "noise": (b"\xc1" * 40, "no MessagePack"),
    "truncated": (m.COMMANDS.encode(m.Memset(1, 2, 3, 4))[:-1], "no MessagePack"),
    "two messages": (m.COMMANDS.encode(m.Ping(1)) * 2, "no MessagePack"),
    "deeply nested": (b"\x91" * 100_000, "no MessagePack"),
    "an endless length": (b"\xdd\xff\xff\xff\xff", "no MessagePack"),
    "no list": (bytes(msgpack.packb({"id": 1})), "no message"),
    "unknown type": (packed(200, 1), "unknown type"),
    "a type that is text": (packed("Ping", 1), "unknown type"),
    "too few fields": (packed(5, 1), "Free with 1 fields, not 2"),
    "too many fields": (packed(14, 1, 2), "Ping with 2 fields, not 1"),
    "a negative size": (packed(11, 1, 2, 3, -1, 0), "Memset.size that should be an integer"),
    "a float": (packed(4, 1, 0, 1.5, 0), "Malloc.size that should be an integer"),
    "too large a number": (packed(4, 1, 1 << 32, 16, 0), "Malloc.device that should be"),
    "runs that are none": (packed(2, 1, 8, [[1, 2, 3]]), "Grow.table that should hold runs"),
    "oversize": (bytes((4 << 20) + 1), "control message of 4194305 bytes"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_on_the_session_socket(liar: RawClient, name: str) -> None:
    data, words = GARBAGE[name]
    assert liar.dialer.send([data])
    refused(liar.answer(0), m.Status.PROTOCOL, "the client sent", words)
    assert liar.ends()


def test_a_message_larger_than_any_ends_the_connection(liar: RawClient) -> None:
    assert liar.dialer.send([bytes((16 << 20) + 1)])
    with pytest.raises(SessionLost):
        liar.answer(0)


def test_garbage_on_the_main_socket_gets_no_answer(served: Any, newcomer: RawClient) -> None:
    before = status(served)["garbage"]
    lies = [[data] for data, _ in GARBAGE.values() if len(data) <= HELLO_BYTES] + [
        [m.COMMANDS.encode(m.Ping(1)), b"second frame"],
        [m.HELLOS.encode(m.Hello(m.PROTOCOL_VERSION, (1,), 1, "x"))[:-1]],
        [packed(1, "1", [], 1, "x")],
        [packed(1, m.PROTOCOL_VERSION)],
        [packed(1, m.PROTOCOL_VERSION, [1, 2], 1, "x" * 5000)],
    ]
    for endpoint in served.endpoints:
        for frames in lies:
            dialer = newcomer.dial(Endpoint.parse(endpoint))
            assert dialer.send(frames)
    assert eventually(lambda: status(served)["garbage"] >= before + 2 * len(lies))
    assert hear(dialer, SILENCE) is None
    assert status(served)["garbage"] == before + 2 * len(lies)
    assert newcomer.attach().status == 0


@pytest.mark.parametrize(
    "hello",
    [
        m.HELLOS.encode(m.Hello(0, (1, 2), 1, "old")),
        m.HELLOS.encode(m.Hello(7, (1, 2), 1, "new")),
        packed(1, 0),
        packed(1, 7, {"shape": "of another age"}, [1, 2]),
    ],
)
def test_another_protocol_version_is_named(newcomer: RawClient, served: Any, hello: bytes) -> None:
    theirs = msgpack.unpackb(hello)[1]
    dialer = newcomer.dial(Endpoint.parse(served.endpoint))
    assert dialer.send([hello])
    frames = hear(dialer)
    assert frames is not None
    answer = m.WELCOMES.decode(frames[0])
    assert isinstance(answer, m.Refused)
    assert f"protocol {theirs}" in answer.text
    assert f"protocol {m.PROTOCOL_VERSION}" in answer.text
    older = "frontend" if theirs < m.PROTOCOL_VERSION else "backend"
    assert f"upgrade the {older}" in answer.text


def test_no_common_way_to_move_bytes_is_refused(served: Any, honest: Honest) -> None:
    answer = say(served.endpoint, m.Hello(m.PROTOCOL_VERSION, (99,), 1, "odd"))
    assert isinstance(answer, m.Refused)
    assert "share no way to move bytes" in answer.text


# --- strangers ----------------------------------------------------------------------------------


def words_of_a_stranger(client: RawClient, token: bytes) -> list[list[bytes]]:
    """What somebody without the right token, or too late with it, may try."""
    attach = m.Attach(1, token, True, 0, 0, (), 0)
    commands = [attach, m.Malloc(1, 0, 4096, 0), m.Ping(2), m.Bye(3)]
    return [*([m.COMMANDS.encode(command)] for command in commands), [b"\xc1" * 9], [b""]]


@pytest.fixture(params=["ipc", "tcp"])
def owner(request: pytest.FixtureRequest, served: Any, honest: Honest) -> Iterator[RawClient]:
    """A client with a WELCOME over either kind of endpoint."""
    endpoint = next(e for e in served.endpoints if e.startswith(request.param))
    with RawClient(endpoint) as client:
        yield client


def test_strangers_before_attach_get_nothing(owner: RawClient) -> None:
    stranger = owner.dial(owner.where)
    for frames in words_of_a_stranger(owner, bytes(16)):
        assert stranger.send(frames)
    assert hear(stranger, SILENCE) is None
    owner.hang_up(stranger)
    assert owner.attach().status == 0
    assert owner.lives()


def test_strangers_after_attach_get_nothing(owner: RawClient) -> None:
    assert owner.attach().status == 0
    block = owner.malloc(4096)
    # Not even who has the token: it binds one connection, the first.
    for token in (bytes(16), owner.welcome.token):
        stranger = owner.dial(owner.where)
        for frames in words_of_a_stranger(owner, token):
            assert stranger.send(frames)
        assert hear(stranger, SILENCE) is None
        owner.hang_up(stranger)
        assert owner.call(m.Memset, block, 1, 4096).status == 0
    assert owner.lives()


def test_the_token_of_another_session(owner: RawClient, victim: RawClient) -> None:
    number = owner.post_attach(token=victim.welcome.token)
    assert hear(owner.dialer, SILENCE) is None
    crossed = owner.dial(victim.where)
    attach = m.Attach(number, owner.welcome.token, True, 0, 0, (), 0)
    assert crossed.send([m.COMMANDS.encode(attach)])
    assert hear(crossed, SILENCE) is None
    assert victim.lives()
    assert owner.attach().status == 0


def test_connections_that_say_nothing_or_noise(owner: RawClient) -> None:
    assert owner.attach().status == 0
    ipc = owner.where.scheme == "ipc"
    place = owner.where.path if ipc else (owner.where.host, owner.where.port)
    for noise in [b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\xff" + b"\0" * 8 + b"\x7f"] * 5:
        with socket.socket(socket.AF_UNIX if ipc else socket.AF_INET) as plain:
            plain.settimeout(SOON)
            plain.connect(place)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may be cut first
                plain.sendall(noise)
        assert owner.lives()


def test_strangers_that_come_and_go_around_the_attach(served: Any, honest: Honest) -> None:
    # Descriptors are used again: the end of a stranger must not be taken for the client's.
    for _ in range(5):
        with RawClient(served.endpoint) as client:
            for _ in range(5):
                with socket.socket(socket.AF_UNIX) as plain:
                    plain.connect(client.where.path)
            assert client.attach().status == 0
            assert client.lives()


def test_all_that_lied_left_nothing(served: Any, honest: Honest) -> None:
    def clean() -> bool:
        report = status(served)
        mine = [s for s in report["sessions"] if s["pid"] == os.getpid()]
        return not mine and report["frames"]["reclaiming"] == 0

    assert eventually(clean), status(served)
    entry = session_of(served, honest.pid)
    assert entry is not None
    with RegionView(served.region) as region:
        # Frames that were taken and never granted come back with the second sweep.
        total, held = region.table.geometry.page_count, entry["frames"]
        assert eventually(lambda: len(region.free()) == total - held)
        assert region.dirty(region.free()) == []
