# SPDX-License-Identifier: Apache-2.0
"""cudaHostRegister: the caller's own memory counts as pinned, and is staged all the same."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart

DATA = Path(__file__).parent.parent / "data"
ORACLE = json.loads((DATA / "cudart-h100-13.0.json").read_text())
KINDS = json.loads((DATA / "cudart-h200-13.0-kinds.json").read_text())
STREAMS = json.loads((DATA / "cudart-h100-13.0-streams.json").read_text())
K = cudart.cudaMemcpyKind
SIZE = 65_536
"""Of the registered block, as in the recordings."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def code(answer: tuple[Any, ...]) -> int:
    return int(answer[0])


def address(place: Any) -> int:
    return int(place.ctypes.data) if isinstance(place, np.ndarray) else int(place)


def pages(size: int = 3 * SIZE) -> Bytes:
    """Ordinary memory that starts on a page."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def random(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.fixture
def host(session: flyt.Session) -> Bytes:
    """Three times the block's size; nothing of it is registered."""
    return pages()


@pytest.fixture
def block(host: Bytes) -> int:
    """Address of the registered first third of `host`."""
    assert cudart.cudaHostRegister(address(host), SIZE, 0) == (0,)
    return address(host)


# --- codes ---


def test_flags_as_recorded(host: Bytes) -> None:
    recorded = STREAMS["hostRegister_flags"]
    for flags, codes in recorded.items():
        answers = [
            code(cudart.cudaHostRegister(address(host), SIZE, int(flags))),
            code(cudart.cudaHostUnregister(address(host))),
        ]
        assert answers == codes, flags
    assert set(recorded) == {"0", "1", "2", "3", "4", "8", "16", "32"}


def test_registered_memory_as_recorded(host: Bytes, block: int) -> None:
    device = cudart.cudaMalloc(4096)[1]
    shown, (_, flags), free, memset, across, across_default, behind = STREAMS["registered"]
    assert "cudaMemoryTypeHost" in shown
    found = cudart.cudaPointerGetAttributes(block + 5)[1]
    assert found.type == cudart.cudaMemoryType.cudaMemoryTypeHost
    assert (found.device, found.devicePointer, found.hostPointer) == (0, block + 5, block + 5)
    assert cudart.cudaHostGetFlags(block) == (0, int(flags))
    assert code(cudart.cudaFreeHost(block)) == free
    assert code(cudart.cudaMemset(block, 1, 16)) == memset
    assert (host[:16] == 1).all()
    assert host[16] == 0
    h2d, default = K.cudaMemcpyHostToDevice, K.cudaMemcpyDefault
    assert code(cudart.cudaMemcpy(device, block + SIZE - 6, 4096, h2d)) == across
    assert code(cudart.cudaMemcpy(device, block + SIZE - 6, 2048, default)) == across_default
    assert code(cudart.cudaMemcpy(device, block + 70_000, 2048, default)) == behind


def test_the_oracle(host: Bytes) -> None:
    pinned = cudart.cudaHostAlloc(4096, 0)[1]
    start = address(host) + 3
    answers = {
        "hostUnregister_of_hostAlloc": cudart.cudaHostUnregister(pinned),
        "hostRegister_unaligned": cudart.cudaHostRegister(start, 4097, 0),
        "hostRegister_overlap": cudart.cudaHostRegister(start + 4096, 4096, 0),
        "hostUnregister_interior": cudart.cudaHostUnregister(start + 1),
        "hostUnregister": cudart.cudaHostUnregister(start),
        "hostUnregister_twice": cudart.cudaHostUnregister(start),
        "hostRegister_size0": cudart.cudaHostRegister(start, 0, 0),
    }
    wanted = {name for name in ORACLE if name.startswith(("hostRegister", "hostUnregister"))}
    assert set(answers) == wanted
    for name, answer in answers.items():
        assert (code(answer), answer[0].name) == (ORACLE[name]["rc"], ORACLE[name]["name"]), name


def test_what_can_not_be_registered(host: Bytes) -> None:
    pinned, device = cudart.cudaHostAlloc(8192, 0)[1], cudart.cudaMalloc(8192)[1]
    answers = {
        "hostRegister_null": cudart.cudaHostRegister(0, 4096, 0),
        "hostUnregister_null": cudart.cudaHostUnregister(0),
        "hostRegister_of_hostAlloc": cudart.cudaHostRegister(pinned, 4096, 0),
        "hostRegister_of_device": cudart.cudaHostRegister(device, 4096, 0),
    }
    for name, answer in answers.items():
        assert code(answer) == STREAMS[name], name
    # What was refused is not registered, and what it was stays so.
    assert cudart.cudaFreeHost(pinned) == (0,)
    assert cudart.cudaFree(device) == (0,)
    # No range of memory goes round the end of the address space.
    assert code(cudart.cudaHostRegister(address(host), (1 << 64) - 4096, 0)) == 1


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (-10, 3 * SIZE), (0, 1), (SIZE - 1, 2)])
def test_every_overlap_is_refused(host: Bytes, offset: int, size: int) -> None:
    block = address(host) + SIZE
    assert cudart.cudaHostRegister(block, SIZE, 0) == (0,)
    overlap = ORACLE["hostRegister_overlap"]["rc"]
    assert code(cudart.cudaHostRegister(block + offset, size, 0)) == overlap
    assert cudart.cudaHostUnregister(block) == (0,)


def test_neighbours_are_registered_each_for_itself(host: Bytes, block: int) -> None:
    """Measured on a GPU: one copy across two adjacent registrations is cudaErrorInvalidValue."""
    device = cudart.cudaMalloc(4096)[1]
    assert cudart.cudaHostRegister(block + SIZE, SIZE, 0) == (0,)
    across = cudart.cudaMemcpy(device, block + SIZE - 2048, 4096, K.cudaMemcpyHostToDevice)
    assert code(across) == 1
    assert cudart.cudaHostUnregister(block) == (0,)
    assert cudart.cudaHostGetFlags(block + SIZE)[0] == 0
    assert code(cudart.cudaHostGetFlags(block)) == KINDS["codes"]["hostGetFlags_pageable"]


def test_its_device_pointer_is_not_supported(block: int) -> None:
    """The deviation that docs/semantics.md names: kernels can't reach it."""
    for pointer in (block, block + 5):
        error, value = cudart.cudaHostGetDevicePointer(pointer, 0)
        assert (error.name, value) == ("cudaErrorNotSupported", None)
    assert "cudaHostAlloc" in flyt.last_failure()
    wanted = KINDS["codes"]["hostGetDevicePointer_flags1"]
    assert code(cudart.cudaHostGetDevicePointer(block, 1)) == wanted


def test_buffers_are_taken(session: flyt.Session) -> None:
    array = np.zeros((16, 256), np.float32)
    assert code(cudart.cudaHostRegister(array, array.nbytes + 1, 0)) == 1
    assert cudart.cudaHostRegister(array, array.nbytes, 0) == (0,)
    inside = cudart.cudaPointerGetAttributes(array.ctypes.data + array.nbytes - 1)[1]
    assert inside.type == cudart.cudaMemoryType.cudaMemoryTypeHost
    assert cudart.cudaHostUnregister(array) == (0,)
    after = cudart.cudaPointerGetAttributes(array)[1]
    assert after.type == cudart.cudaMemoryType.cudaMemoryTypeUnregistered


# --- copies ---


@pytest.mark.parametrize("registered_side", ["to", "from", "both"])
def test_kinds_are_those_of_pinned_memory(session: flyt.Session, registered_side: str) -> None:
    places = {
        "device": [cudart.cudaMalloc(4096)[1] for _ in range(2)],
        "pageable": [pages(4096) for _ in range(2)],
        "pinned": [cudart.cudaHostAlloc(4096, 0)[1] for _ in range(2)],
    }
    own = [pages(4096) for _ in range(2)]
    for side in (0, 1):
        if registered_side in (("to", "from")[side], "both"):
            assert cudart.cudaHostRegister(own[side], 4096, 0) == (0,)
            places["pinned"][side] = address(own[side])
    for key, wanted in KINDS["memcpy_kinds"].items():
        kind, _, pair = key.partition(":")
        to, _, origin = pair.partition("<-")
        answer = cudart.cudaMemcpy(
            address(places[to][0]), address(places[origin][1]), 4096, getattr(K, kind)
        )
        assert code(answer) == wanted, key


@pytest.mark.parametrize("size", [1, 4095, 4097, (5 << 20) + 3])
def test_every_byte_arrives_and_is_staged(session: flyt.Session, size: int) -> None:
    data, back = random(size), np.zeros(size + 2, np.uint8)
    for array in (data, back):
        assert cudart.cudaHostRegister(array, array.nbytes, 0) == (0,)
    device = cudart.cudaMalloc(size)[1]
    before = flyt.statistics()
    h2d, d2h = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost
    assert cudart.cudaMemcpy(device, address(data), size, h2d) == (0,)
    wanted = data.copy()
    data[:] = 0  # the source may be changed on return
    assert cudart.cudaMemcpy(address(back) + 1, device, size, d2h) == (0,)
    assert (back[1:-1] == wanted).all()
    assert (back[0], back[-1]) == (0, 0)
    moved = {name: value - before[name] for name, value in flyt.statistics().items()}
    assert (moved["staged_h2d_bytes"], moved["staged_d2h_bytes"]) == (size, size)
    assert (moved["pinned_h2d_bytes"], moved["pinned_d2h_bytes"]) == (0, 0)
    assert cudart.cudaHostUnregister(data) == cudart.cudaHostUnregister(back) == (0,)


def test_async_copies_are_complete_on_return(session: flyt.Session) -> None:
    size = 3 << 20
    data, back = random(size), pages(size)
    for array in (data, back):
        assert cudart.cudaHostRegister(array, size, 0) == (0,)
    device, (_, stream) = cudart.cudaMalloc(size)[1], cudart.cudaStreamCreate()
    h2d, d2h = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost
    assert cudart.cudaMemcpyAsync(device, data, size, h2d, stream) == (0,)
    wanted = data.copy()
    data[:] = 0
    assert cudart.cudaMemcpyAsync(back, device, size, d2h, stream) == (0,)
    assert (back == wanted).all()
    assert cudart.cudaStreamDestroy(stream) == (0,)


def test_without_a_window(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    daemon = backend(extra=["--no-region"])
    with pytest.warns(flyt.FlytWarning, match="inline"):
        connect(daemon)
    size = (2 << 20) + 5
    data, back = random(size), pages(size)
    for array in (data, back):
        assert cudart.cudaHostRegister(array, size, 0) == (0,)
    device = cudart.cudaMalloc(size)[1]
    assert cudart.cudaMemcpy(device, data, size, K.cudaMemcpyHostToDevice) == (0,)
    assert cudart.cudaMemcpy(back, device, size, K.cudaMemcpyDeviceToHost) == (0,)
    assert (back == data).all()
    # Pinned memory has no place in a window here either, and is still told apart.
    pinned = cudart.cudaHostAlloc(4096, 0)[1]
    assert cudart.cudaHostGetDevicePointer(pinned, 0) == (0, pinned)
    assert cudart.cudaFreeHost(pinned) == (0,)
    assert code(cudart.cudaFreeHost(address(data))) == 1
