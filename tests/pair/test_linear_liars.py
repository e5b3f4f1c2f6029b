# SPDX-License-Identifier: Apache-2.0
"""Clients that lie about rows, pools, host functions and shared memory: refused, and nobody else
is harmed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flyt.backend.stream_commands import MAX_GATES
from flyt.rpc import messages as m
from tests.pair.raw import RawClient

KIB, MIB = 1 << 10, 1 << 20
SIZE = 64 * KIB
PROTOCOL = m.Status.PROTOCOL
HUGE = (1 << 64) - 1


@pytest.fixture
def client(one_backend: Any) -> Iterator[RawClient]:
    with RawClient(one_backend.endpoint) as raw:
        assert raw.attach().status == 0
        yield raw


def status_of(client: RawClient, command: Any, *fields: Any) -> int:
    return int(client.call(command, *fields).status)


def test_rows_leave_neither_block_nor_window(client: RawClient) -> None:
    block, index, pid = client.malloc(SIZE), client.geometry.page_size, client.pid
    good = (m.Way.IN, block, 1024, index, 1024, 1000, 64, pid, 0)
    assert status_of(client, m.CopyRows, *good) == 0
    for name, change in {
        "more rows than the block has": {6: 65},
        "an end behind the block": {1: block + 25},
        "a pitch that leads out of the block": {2: 1040},
        "a pitch that leads out of the window": {4: 1 << 40},
        "an index behind the window": {3: 1 << 50},
        "the control page": {3: 0},
        "sizes whose product overflows": {2: HUGE, 4: HUGE, 6: HUGE},
        "a width that overflows": {2: HUGE, 4: HUGE, 5: HUGE},
        "a stream that there is not": {8: 4096},
    }.items():
        fields = [change.get(n, field) for n, field in enumerate(good)]
        assert status_of(client, m.CopyRows, *fields) in (1, 400), name
    wrong = [{2: 999}.get(n, field) for n, field in enumerate(good)]
    assert status_of(client, m.CopyRows, *wrong) == 12
    assert status_of(client, m.FillRows, block, 1024, 1, 1000, 65, 0) == 1
    assert status_of(client, m.FillRows, block, 999, 1, 1000, 64, 0) == 12
    assert status_of(client, m.FillRows, block + SIZE, 16, 1, 16, 1, 0) == 1
    assert status_of(client, m.CopyRows, *good) == 0


PROTOCOL_ERRORS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "a way that there is not": lambda b: (m.CopyRows, 3, b, 16, b, 16, 16, 2, 0, 0),
    "no rows": lambda b: (m.CopyRows, m.Way.ON, b, 16, b, 16, 16, 0, 0, 0),
    "rows without bytes": lambda b: (m.FillRows, b, 16, 1, 0, 4, 0),
    "rows without their payload": lambda b: (m.PushRows, b, 16, 16, 4, 0),
    "more inline rows than a payload": lambda b: (m.PullRows, b, 1024, 1024, 2048, 0),
    "memory of 0 bytes": lambda _: (m.MallocAsync, 0, 0, 0, 0),
    "a pool's number that is too low": lambda _: (m.PoolCreate, 5, 0, 0),
}


@pytest.mark.parametrize("name", PROTOCOL_ERRORS)
def test_what_no_frontend_says_ends_the_session(one_backend: Any, name: str) -> None:
    with RawClient(one_backend.endpoint) as raw, RawClient(one_backend.endpoint) as other:
        assert raw.attach().status == other.attach().status == 0
        block = raw.malloc(4 * MIB)
        assert status_of(raw, *PROTOCOL_ERRORS[name](block)) == PROTOCOL
        assert other.malloc(SIZE)


def test_pools_and_memory_that_there_are_not(client: RawClient) -> None:
    assert status_of(client, m.PoolDestroy, 4096) == 1
    assert status_of(client, m.PoolDestroy, 0) == 1, "a default pool"
    assert status_of(client, m.PoolGet, 0, 99) == 1
    assert status_of(client, m.PoolGet, 7, 4) == 101, "the default pool of no device"
    assert status_of(client, m.PoolSet, 0, 5, 1) == 1
    assert status_of(client, m.MallocAsync, 4096, SIZE, 0, 0) == 1
    plain = client.malloc(SIZE)
    assert status_of(client, m.FreeAsync, plain, 0) == 1, "memory of no pool"
    assert status_of(client, m.FreeAsync, plain + 1, 0) == 1
    pooled = client.value(m.MallocAsync, 0, SIZE, 0, 0)
    assert status_of(client, m.ShareMemory, pooled) == 1
    assert status_of(client, m.FreeAsync, pooled, 4096) == 400
    assert status_of(client, m.FreeAsync, pooled, 0) == 0
    assert status_of(client, m.FreeAsync, pooled, 0) == 1
    assert status_of(client, m.CopyIn, pooled, client.geometry.page_size, 16, client.pid) == 1


def test_returns_of_functions_that_were_not_called(client: RawClient) -> None:
    assert status_of(client, m.HostReturn, 12345) == 0
    assert status_of(client, m.HostCall, 4096) == 400
    assert status_of(client, m.Passed, 4096) == 400
    assert status_of(client, m.HostCall, 0) == 0


def test_functions_without_end_are_bounded(client: RawClient) -> None:
    assert status_of(client, m.StreamCreate, 4096, 0, 1, 0) == 0
    for _ in range(MAX_GATES):
        client.post(m.HostCall, 4096)
    assert status_of(client, m.HostCall, 4096) == 2


def test_shared_memory_is_held_once_and_by_its_token(one_backend: Any) -> None:
    with RawClient(one_backend.endpoint) as one, RawClient(one_backend.endpoint) as other:
        assert one.attach().status == other.attach().status == 0
        block = one.malloc(SIZE)
        values = one.call(m.ShareMemory, block).values
        token = b"".join(value.to_bytes(8, "little") for value in values)
        assert status_of(other, m.OpenMemory, token[:-1] + bytes([token[-1] ^ 1])) == 400
        assert status_of(other, m.CopyIn, block, other.geometry.page_size, 16, other.pid) == 1
        assert other.call(m.OpenMemory, token).values == (block, SIZE, 0)
        assert status_of(other, m.CopyIn, block, other.geometry.page_size, 16, other.pid) == 0
        assert status_of(other, m.ShareMemory, block) == 1, "it is not its own"
        assert status_of(one, m.CloseMemory, block) == 1, "it was not opened"
        assert status_of(other, m.OpenMemory, token) == PROTOCOL
        assert status_of(one, m.CopyIn, block, one.geometry.page_size, 16, one.pid) == 0
