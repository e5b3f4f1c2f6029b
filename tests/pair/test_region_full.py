# SPDX-License-Identifier: Apache-2.0
"""A full region: pinned allocations fail with CUDA's code, pageable copies still work."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import flyt
import flyt as cudart

K = cudart.cudaMemcpyKind
H2D, D2H = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost
OUT_OF_MEMORY = cudart.cudaError_t.cudaErrorMemoryAllocation

COPY = """
import warnings, numpy as np, flyt
warnings.simplefilter("ignore")
data = np.random.default_rng(1).integers(0, 256, 3_000_001, dtype=np.uint8)
back = np.zeros_like(data)
device = flyt.cudaMalloc(data.nbytes)[1]
assert flyt.cudaMemcpy(device, data, data.nbytes, 1) == (0,), flyt.last_failure()
assert flyt.cudaMemcpy(back, device, data.nbytes, 2) == (0,), flyt.last_failure()
assert (back == data).all()
facts = flyt.statistics()
print(facts["fallback_inline"], facts["fallback_small_staging"], facts["slot_size"])
"""


def fill(page: int) -> list[int]:
    blocks = []
    while True:
        error, block = cudart.cudaHostAlloc(page, 0)
        if error:
            assert error == OUT_OF_MEMORY
            return blocks
        blocks.append(block)


def round_trip(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    device, back = cudart.cudaMalloc(size)[1], np.zeros_like(data)
    assert cudart.cudaMemcpy(device, data, size, H2D) == (0,)
    assert cudart.cudaMemcpy(back, device, size, D2H) == (0,)
    assert (back == data).all()
    assert cudart.cudaFree(device) == (0,)


def test_pinned_allocation_fails_and_pageable_copies_work(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    session = connect(backend(size="4M"))
    page = session.welcome.page_size
    blocks = fill(page)
    assert len(blocks) > 20
    assert "page frames" in flyt.last_failure()
    assert "--size" in flyt.last_failure()
    assert cudart.cudaMallocHost(1)[0] == OUT_OF_MEMORY
    assert cudart.cudaGetLastError() == (OUT_OF_MEMORY,)
    round_trip(3_000_001)
    # An exact fit: all that was freed can be had again, in one piece of any shape.
    for block in blocks:
        assert cudart.cudaFreeHost(block) == (0,)
    error, whole = cudart.cudaHostAlloc(len(blocks) * page, 0)
    assert error == 0, flyt.last_failure()
    assert cudart.cudaHostAlloc(1, 0)[0] == OUT_OF_MEMORY
    assert cudart.cudaFreeHost(whole) == (0,)
    assert len(fill(page)) == len(blocks)


def test_a_new_client_makes_do_with_less_or_goes_inline(
    backend: Callable[..., Any],
    connect: Callable[..., flyt.Session],
    run_client: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    daemon = backend(size="4M")
    page = connect(daemon).welcome.page_size
    blocks = fill(page)
    done = run_client(COPY, daemon)
    assert done.returncode == 0, done.stderr
    inline, _, _ = done.stdout.split()
    assert inline == "1"
    for block in blocks[:3]:  # a control page and two staging pages
        assert cudart.cudaFreeHost(block) == (0,)
    done = run_client(COPY, daemon, env={"FLYT_SLOT_SIZE": "131072"})
    assert done.returncode == 0, done.stderr
    inline, small, slot = done.stdout.split()
    assert (inline, small) == ("0", "1")
    assert int(slot) <= page
    round_trip(100_000)


def test_slots_as_set_by_the_user(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    daemon = backend(size="16M")
    for slots, size in (("2", "65536"), ("3", "1000000"), ("8", "4096")):
        with warnings.catch_warnings():
            connect(daemon, FLYT_STAGING_SLOTS=slots, FLYT_SLOT_SIZE=size)
        facts = flyt.statistics()
        assert facts["slots"] == int(slots)
        assert facts["slot_size"] == int(size) // 4096 * 4096
        round_trip(3_000_001)
