# SPDX-License-Identifier: Apache-2.0
"""An error of each of the device's operations reaches the client that the operation was for, with
its own CUDA code, and no other client of the same worker."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt as cudart
from flyt.backend.devices.emulated_options import OPERATIONS
from flyt.rpc import messages as m
from tests.pair.raw import RawClient, eventually, status, threads_of, worker_of

pytestmark = pytest.mark.emulated_only(reason="injects faults, which a GPU has no option for")

K = cudart.cudaMemcpyKind
NTH = 12
"""The call of each operation that fails: late enough that the other client has all it needs."""

ROUNDS = 18
SIZE = 4096

CODES = dict(
    zip(
        sorted(OPERATIONS),
        (
            2,
            12,
            20,
            35,
            36,
            37,
            43,
            49,
            52,
            98,
            101,
            200,
            201,
            208,
            209,
            214,
            216,
            217,
            218,
            219,
            220,
            300,
            304,
            401,
            999,
        ),
        strict=True,
    )
)
"""A cudaError_t for each operation, none of them sticky: the code tells which one failed."""

RARE = {"create_pool": 2, "destroy_pool": 1}
"""What a session seldom does: the first pool is the other client's, and our end comes first."""

MINTED = {"create_stream", "create_event"}
"""Their handles are the frontend's: what uses one that was not made is CUDA's error 400 then."""

RECORDING = {"record", "wait_event"}
"""They may fail in cudaEventRecord; the time of an event without a record is CUDA's error 400."""

OUT_OF_SIGHT = {"destroy_pool", "unregister", "query"}
"""Done when the client has its answer or has gone, or (query) never asked for by a session."""


_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
FUNCTION = ctypes.cast(_function, ctypes.c_void_p).value or 0
"""The address of a host function that does nothing."""


def rounds(seen: list[int]) -> None:
    """Everything that a client can ask of a device, over and over; codes go to ``seen``."""

    def note(answer: tuple[Any, ...]) -> Any:
        if answer[0] != 0:
            seen.append(int(answer[0]))
            cudart.cudaGetLastError()
            return None
        return answer[-1]

    data, back = np.arange(SIZE, dtype=np.uint8), np.zeros(SIZE, np.uint8)
    for _ in range(ROUNDS):
        device = note(cudart.cudaMalloc(SIZE))
        pinned = note(cudart.cudaHostAlloc(SIZE, 0))
        stream, start, end = (
            note(make())
            for make in (cudart.cudaStreamCreate, cudart.cudaEventCreate, cudart.cudaEventCreate)
        )
        note(cudart.cudaMemGetInfo())
        pool = cudart.cudaDeviceGetDefaultMemPool(0)[1]
        note(cudart.cudaMemPoolTrimTo(pool, 0))
        threshold = cudart.cudaMemPoolAttr.cudaMemPoolAttrReservedMemHigh
        note(cudart.cudaMemPoolSetAttribute(pool, threshold, 0))
        note(cudart.cudaMemPoolGetAttribute(pool, threshold))
        note(cudart.cudaDeviceSynchronize())
        if device is not None:
            note(cudart.cudaMemcpy(device, data, SIZE, K.cudaMemcpyHostToDevice))
            note(cudart.cudaMemset(device, 7, SIZE))
            note(cudart.cudaMemset2D(device, 64, 7, 32, 64))
            note(cudart.cudaMemcpy2D(device, 64, data, 64, 32, 64, K.cudaMemcpyHostToDevice))
            note(cudart.cudaMemcpy(back, device, SIZE, K.cudaMemcpyDeviceToHost))
            note(cudart.cudaDeviceSynchronize())
        if None not in (stream, start, end):
            for event in (start, end):
                note(cudart.cudaEventRecord(event, stream))
            note(cudart.cudaStreamWaitEvent(stream, end, 0))
            note(cudart.cudaLaunchHostFunc(stream, cudart.cudaHostFn_t(FUNCTION), 0))
            note(cudart.cudaStreamSynchronize(stream))
            note(cudart.cudaEventElapsedTime(start, end))
            note(cudart.cudaEventQuery(end))
        for undo, thing in (
            (cudart.cudaFree, device),
            (cudart.cudaFreeHost, pinned),
            (cudart.cudaStreamDestroy, stream),
            (cudart.cudaEventDestroy, start),
            (cudart.cudaEventDestroy, end),
        ):
            if thing is not None:
                note(undo(thing))
        note(cudart.cudaDeviceSynchronize())


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_it_reaches_its_client_alone(
    backend: Callable[..., Any], connect: Any, operation: str
) -> None:
    code, nth = CODES[operation], RARE.get(operation, NTH)
    served = backend(size="16M", device_options=f"fault={operation}:{code}:{nth}")
    with RawClient(served.endpoint) as other:
        assert other.attach_as_clients_do().status == 0
        block, index = other.malloc(SIZE), other.geometry.page_size
        other.bytes_at(index, SIZE)[:] = b"\x5a" * SIZE
        assert other.call(m.CopyIn, block, index, SIZE, other.pid).status == 0
        threads, free = threads_of(other_worker := worker_of(served, other.pid)), info(other)
        session = connect(served)
        seen: list[int] = []
        rounds(seen)
        if operation in OUT_OF_SIGHT:
            assert seen == []
        else:
            assert seen[:1] == [code], seen
            follows = {400} if operation in MINTED | RECORDING else set()
            assert set(seen[1:]) <= follows | (set() if operation in MINTED else {code}), seen
        session.close()
        assert eventually(lambda: len(status(served)["sessions"]) == 1)
        assert eventually(lambda: threads_of(other_worker) == threads), "its threads are left"
        if operation != "free":  # that block can't be given back: it stays out of use
            assert info(other) == free
        assert other.call(m.CopyOut, block, 2 * index, SIZE, other.pid).status == 0
        assert bytes(other.bytes_at(2 * index, SIZE)) == b"\x5a" * SIZE
        assert other.malloc(SIZE)
        assert worker_of(served, other.pid) == other_worker, "the worker lives on"


def info(client: RawClient) -> int:
    """Free device memory."""
    return client.value(m.MemInfo, 0)
