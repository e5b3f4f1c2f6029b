# SPDX-License-Identifier: Apache-2.0
"""An error of each of the device's operations reaches the client that the operation was for, with
its own CUDA code, and no other client of the same worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.backend.devices.emulated_options import OPERATIONS
from flyt.rpc import messages as m
from tests.pair.raw import RawClient, eventually, session_of, status, worker_of

pytestmark = pytest.mark.emulated_only(reason="injects faults, which a GPU has no option for")

K = cudart.cudaMemcpyKind
NTH = 40
"""The call of each operation that fails: late enough that the other client has all it needs."""

ROUNDS = 60
SIZE = 4096

CODES = dict(
    zip(sorted(OPERATIONS), (2, 11, 20, 30, 35, 36, 49, 52, 54, 98, 101, 200, 204, 216, 300, 304,
                             400, 401, 600, 801, 999), strict=False)
)  # fmt: skip
"""A code for each operation, none of them sticky, so that the code tells which one failed."""

OUT_OF_SIGHT = {"destroy_pool", "unregister", "destroy_stream", "destroy_event"}
"""What happens after the client was answered, or at its end: the log has these."""


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
        note(cudart.cudaDeviceSynchronize())
        if device is not None:
            note(cudart.cudaMemcpy(device, data, SIZE, K.cudaMemcpyHostToDevice))
            note(cudart.cudaMemset(device, 7, SIZE))
            note(cudart.cudaMemcpy(back, device, SIZE, K.cudaMemcpyDeviceToHost))
            note(cudart.cudaDeviceSynchronize())
        if None not in (stream, start, end):
            for event in (start, end):
                note(cudart.cudaEventRecord(event, stream))
            note(cudart.cudaStreamWaitEvent(stream, end, 0))
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
    code = CODES[operation]
    served = backend(size="16M", device_options=f"fault={operation}:{code}:{NTH}")
    with RawClient(served.endpoint) as other:
        assert other.attach().status == 0
        block, index = other.malloc(SIZE), other.geometry.page_size
        other.bytes_at(index, SIZE)[:] = b"\x5a" * SIZE
        assert other.call(m.CopyIn, block, index, SIZE, other.pid).status == 0
        connect(served)
        worker = worker_of(served, os.getpid())
        seen: list[int] = []
        rounds(seen)
        print(operation, code, seen, flyt.last_failure())
        if operation in OUT_OF_SIGHT:
            assert not seen or set(seen) == {code}
        else:
            assert set(seen) == {code}, f"{operation}: {seen}"
        assert other.call(m.CopyOut, block, 2 * index, SIZE, other.pid).status == 0
        assert bytes(other.bytes_at(2 * index, SIZE)) == b"\x5a" * SIZE
        assert other.malloc(SIZE)
        assert worker_of(served, os.getpid()) == worker
    assert eventually(lambda: len(status(served)["sessions"]) == 1)
    assert session_of(served, os.getpid()) is not None
