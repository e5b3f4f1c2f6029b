# SPDX-License-Identifier: Apache-2.0
"""Linear memory on two devices: peer copies, rows across, and pools of a device that is not the
stream's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.frontend import current
from flyt.frontend.api.callbacks import launch
from flyt.frontend.ways import InlineWay
from flyt.rpc import messages as m
from tests.pair.raw import SOON, eventually

K = cudart.cudaMemcpyKind
D2H, D2D = K.cudaMemcpyDeviceToHost, K.cudaMemcpyDeviceToDevice
SIZE = 1 << 16
LIMIT = 30.0
NOT_READY = 600


def ok(answer: tuple[Any, ...]) -> Any:
    assert answer[0] == 0, (answer, flyt.last_failure())
    return answer[1] if len(answer) > 1 else None


@pytest.fixture(scope="module")
def two_devices(module_backend: Callable[..., Any], device_kind: str) -> Any:
    options = "memory=256M,devices=2" if device_kind == "emulated" else ""
    return module_backend(device_options=options)


@pytest.fixture
def two(two_devices: Any, connect: Callable[..., flyt.Session]) -> Iterator[flyt.Session]:
    session = connect(two_devices)
    if len(session.devices) < 2:
        pytest.skip("it takes two devices, and this machine has one")
    yield session
    current.thread.device = 0


def block(device: int, value: int) -> int:
    ok(cudart.cudaSetDevice(device))
    address = int(ok(cudart.cudaMalloc(SIZE)))
    ok(cudart.cudaMemset(address, value, SIZE))
    ok(cudart.cudaDeviceSynchronize())
    ok(cudart.cudaSetDevice(0))
    return address


def read(address: int, size: int = SIZE) -> np.ndarray[Any, np.dtype[np.uint8]]:
    back = np.zeros(size, np.uint8)
    ok(cudart.cudaMemcpy(back, address, size, D2H))
    return back


def test_a_peer_copy_is_in_both_devices_order(two: flyt.Session) -> None:
    first, second = block(0, 1), block(1, 2)
    ok(cudart.cudaSetDevice(1))
    blocking, go = ok(cudart.cudaStreamCreate()), threading.Event()
    launch(blocking, lambda _: go.wait(LIMIT) and None)
    ok(cudart.cudaMemsetAsync(second, 5, SIZE, blocking))
    ok(cudart.cudaSetDevice(0))
    ok(cudart.cudaMemcpyPeer(first, 0, second, 1, SIZE))  # asynchronous to the host
    assert cudart.cudaStreamQuery(0)[0] == NOT_READY
    go.set()
    ok(cudart.cudaDeviceSynchronize())
    assert (read(first) == 5).all(), "device 1's blocking stream came first"
    stream = ok(cudart.cudaStreamCreate())
    ok(cudart.cudaMemsetAsync(first, 7, SIZE, stream))
    ok(cudart.cudaMemcpyPeerAsync(second, 1, first, 0, SIZE, stream))
    ok(cudart.cudaStreamSynchronize(stream))
    assert (read(second) == 7).all()


def test_inline_bytes_are_in_both_devices_order(
    two: flyt.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the legacy stream into another device's memory, where no memory is shared."""
    way = InlineWay(two.connection, m.INLINE_CHUNK, two.counts)
    monkeypatch.setattr(two.transfers, "_way", way)
    data = np.full(m.INLINE_CHUNK, 7, np.uint8)
    ok(cudart.cudaSetDevice(1))
    second = ok(cudart.cudaMalloc(data.size))
    blocking, go = ok(cudart.cudaStreamCreate()), threading.Event()
    launch(blocking, lambda _: go.wait(LIMIT) and None)
    ok(cudart.cudaMemsetAsync(second, 5, data.size, blocking))
    ok(cudart.cudaSetDevice(0))

    def function_returns() -> None:
        eventually(under_way, SOON)  # the copy, which waits for it
        go.set()

    opener = threading.Thread(target=function_returns)
    opener.start()
    ok(cudart.cudaMemcpyAsync(second, data, data.size, K.cudaMemcpyHostToDevice, 0))
    opener.join(LIMIT)
    for device in (1, 0):
        ok(cudart.cudaSetDevice(device))
        ok(cudart.cudaDeviceSynchronize())
    assert (read(second, data.size) == 7).all(), "device 1's blocking stream came first"


def under_way() -> bool:
    return any(command.name.startswith("Push") for command in flyt.inflight())


def test_rows_and_boxes_across(two: flyt.Session) -> None:
    first, second = block(0, 1), block(1, 2)
    ok(cudart.cudaMemcpy2D(second, 64, first, 32, 16, 100, D2D))
    seen = read(second).reshape(-1, 64)
    assert (seen[:100, :16] == 1).all()
    assert (seen[:, 16:] == 2).all()
    p = cudart.cudaMemcpy3DPeerParms()
    p.srcPtr, p.srcDevice = cudart.make_cudaPitchedPtr(second, 64, 64, 8), 1
    p.dstPtr, p.dstDevice = cudart.make_cudaPitchedPtr(first, 64, 64, 8), 0
    p.extent = cudart.make_cudaExtent(64, 8, 4)
    ok(cudart.cudaMemcpy3DPeer(p))
    ok(cudart.cudaDeviceSynchronize())
    assert np.array_equal(read(first, 64 * 32), read(second, 64 * 32))
    p.srcDevice = 9
    assert cudart.cudaMemcpy3DPeer(p)[0] == 101
    cudart.cudaGetLastError()


def test_memory_of_another_devices_pool(two: flyt.Session) -> None:
    """cudaDeviceSetMemPool's note: cudaMallocFromPoolAsync is for another device than the
    stream's."""
    stream, back = ok(cudart.cudaStreamCreate()), block(0, 1)
    pool = ok(cudart.cudaDeviceGetDefaultMemPool(1))
    assert cudart.cudaDeviceSetMemPool(0, pool)[0] == 1, "the pool is not local to the device"
    address = ok(cudart.cudaMallocFromPoolAsync(SIZE, pool, stream))
    assert ok(cudart.cudaPointerGetAttributes(address)).device == 1
    ok(cudart.cudaMemcpyAsync(back, address, SIZE, D2D, stream))
    ok(cudart.cudaFreeAsync(address, stream))
    ok(cudart.cudaStreamSynchronize(stream))
    assert (read(back) == 0).all()
    used = ok(cudart.cudaMemPoolGetAttribute(pool, cudart.cudaMemPoolAttr(7)))
    assert int(used) == 0
    cudart.cudaGetLastError()
