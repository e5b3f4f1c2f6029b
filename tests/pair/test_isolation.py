# SPDX-License-Identifier: Apache-2.0
"""Nobody sees another session's old bytes: device memory, pinned memory, staging."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.rpc import messages as m
from tests.pair.raw import LIMIT, RawClient, RegionView, eventually, status

K = cudart.cudaMemcpyKind
SIZES = (1, 3, 511, 512, 4096, 65_536, 100_001, 1 << 20, (2 << 20) + 1, 16 << 20)
"""Below, at and above what allocators round to."""

FILLS = """
import os, sys
import numpy as np
import flyt, flyt as cudart
K = cudart.cudaMemcpyKind
sizes = [int(size) for size in sys.argv[2].split(",")]
def must(answer):
    if answer[0] != 0:
        raise SystemExit(f"{answer[0]!r}: {flyt.last_failure()}")
    return answer[-1]
blocks = [must(cudart.cudaMalloc(size)) for size in sizes]
for block, size in zip(blocks, sizes):
    must(cudart.cudaMemset(block, 0xA5, size))
secret = np.full(8 << 20, 0xA5, np.uint8)
must(cudart.cudaMemcpy(blocks[-1], secret, secret.nbytes, K.cudaMemcpyHostToDevice))
pinned = [flyt.pinned_empty(1 << 20, np.uint8) for _ in range(8)]
for array in pinned:
    array[:] = 0xA5
must(cudart.cudaDeviceSynchronize())
if sys.argv[1] == "freed":
    array = None
    del pinned
    for block in blocks:
        must(cudart.cudaFree(block))
    must(cudart.cudaDeviceSynchronize())
print("done", flush=True)
sys.stdin.readline()
if sys.argv[1] == "ended":
    sys.exit(0)
os._exit(0)
"""

WAYS = {
    "freed": "frees all and stays connected",
    "ended": "ends in order, freeing nothing",
    "vanished": "ends without a word",
    "killed": "is killed",
}


@pytest.fixture(scope="module")
def served(module_backend: Callable[..., Any]) -> Any:
    return module_backend(size="24M")


def predecessor(served: Any, start_client: Callable[..., Any], way: str) -> Any:
    """A client that filled all it could get with 0xA5, and then let go of it."""
    client = start_client(FILLS, served, way, ",".join(map(str, SIZES)))
    assert client.stdout.readline() == "done\n"
    if way == "freed":
        return client
    if way == "killed":
        client.kill()
    else:
        client.stdin.write("\n")
        client.stdin.flush()
    client.wait(LIMIT)
    assert eventually(
        lambda: (
            all(s["pid"] != client.pid for s in status(served)["sessions"])
            and status(served)["frames"]["reclaiming"] == 0
        )
    )
    return client


def device_bytes(address: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    back = np.full(size, 0x5A, np.uint8)
    answer = cudart.cudaMemcpy(back, address, size, K.cudaMemcpyDeviceToHost)
    assert answer[0] == 0, flyt.last_failure()
    return back


@pytest.mark.parametrize("way", WAYS)
def test_nothing_old_shows(
    served: Any, connect: Any, start_client: Callable[..., Any], way: str
) -> None:
    client = predecessor(served, start_client, way)
    free_frames_are_zero(served, client.pid if way == "freed" else 0)
    connect(served)
    new_device_memory_is_zero()
    new_pinned_memory_is_zero()


def wait_for_free_frames(served: Any, holder: int = 0) -> None:
    """Wait for the frames of who has left: they are zeroed first."""
    with RegionView(served.region) as region:
        count = region.table.geometry.page_count
        kept = len(region.frames_of(holder))
        assert eventually(lambda: len(region.free()) >= count - kept)


def free_frames_are_zero(served: Any, holder: int) -> None:
    """In the region's file itself: not even who forgets to zero what it takes sees old bytes."""
    wait_for_free_frames(served, holder)
    with RegionView(served.region) as region:
        count = region.table.geometry.page_count
        assert region.dirty(region.free()) == []
    with RawClient(served.endpoint) as raw:
        assert raw.attach().status == 0
        page = raw.geometry.page_size
        assert bytes(raw.bytes_at(page, 2 * page)) == bytes(2 * page), "its staging"
        raw.grow(count // 4, 16)
        size = count // 4 * page
        assert bytes(raw.bytes_at(16 * page, size)) == bytes(size)


def new_device_memory_is_zero() -> None:
    for size in (*SIZES, *reversed(SIZES)):
        error, address = cudart.cudaMalloc(size)
        assert error == 0, flyt.last_failure()
        assert not device_bytes(address, size).any(), f"old bytes in {size} new ones"


def new_pinned_memory_is_zero() -> None:
    arrays = []
    error = 0
    while not error:
        error, address = cudart.cudaHostAlloc(1 << 20, 0)
        if not error:
            arrays.append(address)
    assert int(error) == 2
    assert len(arrays) > 12, "no frame of the predecessor's is left out"
    for address in arrays:
        back = np.empty(1 << 20, np.uint8)
        answer = cudart.cudaMemcpy(back, address, back.nbytes, K.cudaMemcpyDefault)
        assert answer[0] == 0
        assert not back.any()


def test_memory_that_a_session_freed_is_zero_when_it_comes_back(served: Any, connect: Any) -> None:
    wait_for_free_frames(served)
    connect(served)
    for size in SIZES:
        _, address = cudart.cudaMalloc(size)
        assert cudart.cudaMemset(address, 0xA5, size)[0] == 0
        assert cudart.cudaFree(address)[0] == 0
        _, address = cudart.cudaMalloc(size)
        assert not device_bytes(address, size).any()


def test_inline_payloads_show_nothing_of_others(served: Any) -> None:
    with RawClient(served.endpoint) as first:
        assert first.attach_inline().status == 0
        block = first.malloc(1 << 20)
        assert first.call(m.Push, block, 1 << 20, payload=b"\xa5" * (1 << 20)).status == 0
        with RawClient(served.endpoint) as second:
            assert second.attach_inline().status == 0
            own = second.malloc(1 << 20)
            assert second.call(m.Pull, own, 1 << 20).status == 0
            assert second.payload == bytes(1 << 20)


def test_a_session_sees_only_its_own_frames(served: Any) -> None:
    with RawClient(served.endpoint) as first, RawClient(served.endpoint) as second:
        assert first.attach().status == 0
        assert second.attach().status == 0
        page = first.geometry.page_size
        first.bytes_at(page, page)[:] = b"\xa5" * page
        assert bytes(second.bytes_at(page, 2 * page)) == bytes(2 * page)
        block = second.malloc(page)
        assert second.call(m.CopyIn, block, page, page, os.getpid()).status == 0
        assert second.call(m.CopyOut, block, 2 * page, page, os.getpid()).status == 0
        assert bytes(second.bytes_at(2 * page, page)) == bytes(page)
