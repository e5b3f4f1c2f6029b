# SPDX-License-Identifier: Apache-2.0
"""``--memory-limit``: each session's quota is a reservation, and cudaMemGetInfo shows it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

import flyt
import flyt as cudart
from flyt.rpc import messages as m
from tests.pair.raw import RawClient

MIB = 1 << 20
LIMIT = 8 * MIB
OUT_OF_MEMORY = 2


@pytest.fixture(scope="module")
def served(module_backend: Callable[..., Any]) -> Any:
    return module_backend(size="8M", extra=["--memory-limit", str(LIMIT)])


def malloc(size: int) -> int:
    error, address = cudart.cudaMalloc(size)
    assert error == 0, flyt.last_failure()
    return int(address)


def info() -> tuple[int, int]:
    error, free, total = cudart.cudaMemGetInfo()
    assert error == 0
    return int(free), int(total)


def test_the_quota_is_what_the_session_sees(served: Any, connect: Any) -> None:
    connect(served)
    assert info() == (LIMIT, LIMIT)
    first = malloc(5 * MIB)
    assert info() == (3 * MIB, LIMIT)
    second = malloc(3 * MIB)
    assert info() == (0, LIMIT), "an exact fit"
    assert int(cudart.cudaFree(first)[0]) == 0
    assert info() == (5 * MIB, LIMIT)
    assert int(cudart.cudaFree(second)[0]) == 0
    assert info() == (LIMIT, LIMIT)
    malloc(LIMIT)


def test_beyond_the_quota(served: Any, connect: Any) -> None:
    connect(served)
    malloc(LIMIT - 1)
    for size in (2, LIMIT, LIMIT + 1, 1 << 62):
        assert cudart.cudaMalloc(size) == (cudart.cudaError_t.cudaErrorMemoryAllocation, None)
        assert "--memory-limit" in flyt.last_failure()
        assert str(LIMIT) in flyt.last_failure()
        assert info() == (1, LIMIT), "a refusal takes nothing"
    malloc(1)
    assert info() == (0, LIMIT)


def test_refused_and_double_frees_give_nothing_back(served: Any, connect: Any) -> None:
    connect(served)
    block = malloc(MIB)
    assert int(cudart.cudaFree(block + 512)[0]) == 1
    assert info() == (LIMIT - MIB, LIMIT)
    assert int(cudart.cudaFree(block)[0]) == 0
    assert int(cudart.cudaFree(block)[0]) == 1
    assert info() == (LIMIT, LIMIT)


def test_requests_in_flight_are_reserved(served: Any) -> None:
    # The second is asked for before the first is answered: check-then-act would grant both.
    with RawClient(served.endpoint) as raw:
        assert raw.attach_inline().status == 0
        numbers = [raw.post(m.Malloc, 0, 5 * MIB, 0) for _ in range(3)]
        numbers.append(raw.post(m.MemInfo, 0))
        numbers.append(raw.post(m.Malloc, 0, 3 * MIB, 0))
        answers = dict.fromkeys(numbers)
        while None in answers.values():
            result = raw.next_result()
            answers[result.id] = result
        statuses = [answers[number].status for number in numbers]
        assert statuses == [0, OUT_OF_MEMORY, OUT_OF_MEMORY, 0, 0]
        assert answers[numbers[3]].values == (3 * MIB, LIMIT)


FILLS = """
import sys
import flyt, flyt as cudart
def say(*words):
    print(*words, flush=True)
blocks = []
while True:
    error, address = cudart.cudaMalloc(1 << 20)
    if error:
        break
    blocks.append(address)
say(len(blocks), int(error), cudart.cudaMemGetInfo()[1:])
sys.stdin.readline()
for block in blocks:
    cudart.cudaFree(block)
say(cudart.cudaMemGetInfo()[1:])
"""


def test_each_client_has_its_own(
    served: Any, start_client: Callable[..., subprocess.Popen[str]]
) -> None:
    clients = [start_client(FILLS, served) for _ in range(2)]
    expected = f"{LIMIT // MIB} {OUT_OF_MEMORY} (0, {LIMIT})\n"
    assert [client.stdout.readline() for client in clients] == [expected] * 2
    assert clients[0].communicate("\n")[0] == f"({LIMIT}, {LIMIT})\n"
    assert clients[1].communicate("\n")[0] == f"({LIMIT}, {LIMIT})\n"


@pytest.mark.emulated_only(reason="a device smaller than the quota")
def test_a_refusal_of_the_device_gives_the_reservation_back(backend: Any, connect: Any) -> None:
    size = 4 * MIB
    served = backend(
        size="8M", device_options=f"memory={size}", extra=["--memory-limit", str(LIMIT)]
    )
    connect(served)
    assert info() == (size, size), "the device has less than the quota"
    for _ in range(3):
        assert int(cudart.cudaMalloc(5 * MIB)[0]) == OUT_OF_MEMORY
    malloc(size)
    assert info() == (0, size)


def test_without_a_limit_the_device_is_seen(backend: Any, connect: Any) -> None:
    session = connect(backend(size="8M"))
    total = session.devices[0]["total_memory"]
    assert info()[1] == total
    malloc(2 * LIMIT)
