# SPDX-License-Identifier: Apache-2.0
"""Stream-ordered memory: its quota, its limits, and what a stream that waits makes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings.driver import cuuint64_t

import flyt
import flyt as cudart
from flyt.frontend.api.callbacks import launch

MIB = 1 << 20
LIMIT = 30.0
A = cudart.cudaMemPoolAttr
D2H = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost


def ok(answer: tuple[Any, ...]) -> Any:
    assert answer[0] == 0, (answer, flyt.last_failure())
    return answer[1] if len(answer) > 1 else None


def code(answer: tuple[Any, ...]) -> int:
    cudart.cudaGetLastError()
    return int(answer[0])


@pytest.fixture(scope="module")
def limited_backend(module_backend: Callable[..., Any]) -> Any:
    return module_backend(extra=["--memory-limit", "4M"])


@pytest.fixture
def limited(limited_backend: Any, connect: Callable[..., flyt.Session]) -> flyt.Session:
    """A session that may have 4 MiB."""
    return connect(limited_backend)


@pytest.fixture
def held(limited: flyt.Session) -> Any:
    """A stream that waits in a host function, and what lets it go on."""
    stream, go = ok(cudart.cudaStreamCreateWithFlags(1)), threading.Event()
    launch(stream, lambda _: go.wait(LIMIT) and None)
    yield stream, go
    go.set()
    ok(cudart.cudaStreamSynchronize(stream))


def used() -> int:
    free, total = cudart.cudaMemGetInfo()[1:]
    return int(total - free)


def properties(size: int = 0) -> Any:
    made = cudart.cudaMemPoolProps()
    made.allocType = cudart.cudaMemAllocationType.cudaMemAllocationTypePinned
    location = made.location
    location.type, location.id = cudart.cudaMemLocationType.cudaMemLocationTypeDevice, 0
    made.location, made.maxSize = location, size
    return made


def test_every_way_to_memory_counts(limited: flyt.Session) -> None:
    stream = ok(cudart.cudaStreamCreate())
    pool = ok(cudart.cudaMemPoolCreate(properties()))
    extent = cudart.make_cudaExtent(512, 1024, 1)
    blocks = [
        ok(cudart.cudaMalloc(MIB)),
        ok(cudart.cudaMallocAsync(MIB, stream)),
        ok(cudart.cudaMallocFromPoolAsync(MIB, pool, stream)),
        int(ok(cudart.cudaMalloc3D(extent)).ptr),
    ]
    assert used() == 3 * MIB + MIB // 2
    for call in (
        lambda: cudart.cudaMalloc(MIB),
        lambda: cudart.cudaMallocAsync(MIB, stream),
        lambda: cudart.cudaMallocFromPoolAsync(MIB, pool, stream),
        lambda: cudart.cudaMallocPitch(1024, 1024),
    ):
        assert code(call()) == 2
    for block in blocks:
        ok(cudart.cudaFree(block))
    assert used() == 0


def test_memory_counts_until_its_stream_has_freed_it(limited: flyt.Session, held: Any) -> None:
    stream, go = held
    other = ok(cudart.cudaStreamCreateWithFlags(1))
    address = ok(cudart.cudaMallocAsync(3 * MIB, stream))
    ok(cudart.cudaFreeAsync(address, stream))
    assert used() == 3 * MIB
    assert code(cudart.cudaMallocAsync(2 * MIB, other)) == 2, "another stream has to wait"
    assert code(cudart.cudaMalloc(2 * MIB)) == 2
    for _ in range(20):  # its own may have it again, but not twice
        again = ok(cudart.cudaMallocAsync(3 * MIB, stream))
        assert code(cudart.cudaMallocAsync(2 * MIB, stream)) == 2
        ok(cudart.cudaMemsetAsync(again, 1, 3 * MIB, stream))
        ok(cudart.cudaFreeAsync(again, stream))
    assert used() == 3 * MIB
    go.set()
    ok(cudart.cudaStreamSynchronize(stream))
    assert used() == 0
    ok(cudart.cudaFree(ok(cudart.cudaMallocAsync(4 * MIB, other))))


def test_a_pool_has_its_own_limit(limited: flyt.Session) -> None:
    stream = ok(cudart.cudaStreamCreate())
    pool = ok(cudart.cudaMemPoolCreate(properties(MIB)))
    assert int(ok(cudart.cudaMemPoolGetAttribute(pool, A.cudaMemPoolAttrMaxPoolSize))) == MIB
    address = ok(cudart.cudaMallocFromPoolAsync(MIB, pool, stream))
    assert code(cudart.cudaMallocFromPoolAsync(1, pool, stream)) == 2
    assert used() == MIB, "what was refused does not count"
    ok(cudart.cudaFreeAsync(address, stream))
    ok(cudart.cudaFreeAsync(ok(cudart.cudaMallocFromPoolAsync(MIB, pool, stream)), stream))


def test_a_threshold_keeps_nothing_from_the_quota(limited: flyt.Session) -> None:
    stream = ok(cudart.cudaStreamCreate())
    for _ in range(4):
        pool = ok(cudart.cudaMemPoolCreate(properties()))
        threshold = A.cudaMemPoolAttrReleaseThreshold
        ok(cudart.cudaMemPoolSetAttribute(pool, threshold, cuuint64_t(1 << 40)))
        seen = ok(cudart.cudaMemPoolGetAttribute(pool, threshold))
        assert (type(seen), int(seen)) == (cuuint64_t, 1 << 40)
        ok(cudart.cudaFreeAsync(ok(cudart.cudaMallocFromPoolAsync(4 * MIB, pool, stream)), stream))
        ok(cudart.cudaStreamSynchronize(stream))
    assert used() == 0


def test_new_memory_is_clear_for_every_stream(limited: flyt.Session, device_kind: str) -> None:
    stream, other = (ok(cudart.cudaStreamCreateWithFlags(1)) for _ in range(2))
    back, go = np.ones(MIB, np.uint8), threading.Event()
    first = ok(cudart.cudaMalloc(MIB))
    ok(cudart.cudaMemset(first, 0xAB, MIB))
    ok(cudart.cudaFree(first))
    launch(stream, lambda _: go.wait(LIMIT) and None)
    address = ok(cudart.cudaMallocAsync(MIB, stream))
    assert device_kind != "emulated" or address == first, "memory with old bytes"
    threading.Timer(0.2, go.set).start()
    ok(cudart.cudaMemcpyAsync(back, address, MIB, D2H, other))  # not ordered behind `stream`
    assert (back == 0).all()
    assert go.is_set()
    ok(cudart.cudaFreeAsync(address, stream))


def test_what_is_refused(limited: flyt.Session) -> None:
    stream = ok(cudart.cudaStreamCreate())
    plain = ok(cudart.cudaMalloc(4096))
    assert code(cudart.cudaFreeAsync(plain, stream)) == 1, "memory of cudaMalloc"
    assert code(cudart.cudaFreeAsync(0, stream)) == 1
    address = ok(cudart.cudaMallocAsync(4096, stream))
    assert code(cudart.cudaFreeAsync(address + 512, stream)) == 1
    assert code(cudart.cudaFreeAsync(address, 0xBAD)) == 400
    ok(cudart.cudaFreeAsync(address, stream))
    assert code(cudart.cudaFreeAsync(address, stream)) == 1, "twice"
    assert code(cudart.cudaMallocAsync(4096, 0xBAD)) == 400
    assert code(cudart.cudaMallocFromPoolAsync(4096, 0xBAD, stream)) == 1
    for call in (cudart.cudaMemPoolDestroy, lambda p: cudart.cudaMemPoolTrimTo(p, 0)):
        assert code(call(0xBAD)) == 1
    for field, value, expected in (
        ("handleTypes", cudart.cudaMemAllocationHandleType(1), 801),
        ("allocType", cudart.cudaMemAllocationType(2), 801),
        ("allocType", cudart.cudaMemAllocationType(0), 1),
    ):
        wrong = properties()
        setattr(wrong, field, value)
        assert code(cudart.cudaMemPoolCreate(wrong)) == expected, field
    pool = ok(cudart.cudaMemPoolCreate(properties()))
    assert code(cudart.cudaDeviceSetMemPool(7, pool)) == 1  # recorded
    assert code(cudart.cudaDeviceSetMemPool(0, 0xBAD)) == 1
    strange = getattr(A, "cudaMemPoolAttrLocalityDomainId", None)  # not in every version
    assert strange is None or code(cudart.cudaMemPoolGetAttribute(pool, strange)) == 1


def test_pools_end_with_their_session(
    limited_backend: Any, limited: flyt.Session, connect: Callable[..., flyt.Session]
) -> None:
    stream = ok(cudart.cudaStreamCreate())
    pool = ok(cudart.cudaMemPoolCreate(properties()))
    ok(cudart.cudaMallocFromPoolAsync(MIB, pool, stream))
    connect(limited_backend)
    assert used() == 0
    assert code(cudart.cudaMemPoolDestroy(pool)) == 1


# --- what cudaFree gives back, everyone may have ---

LARGE = 64 * MIB
TRIM_FAILS = int(cudart.cudaError_t.cudaErrorNotPermitted)


FREE = "import flyt; print(int(flyt.cudaMemGetInfo()[1]))"


@pytest.mark.alone
def test_others_have_what_was_freed(
    one_backend: Any, session: flyt.Session, run_client: Callable[..., Any]
) -> None:
    def free_for_others() -> int:
        done = run_client(FREE, one_backend)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    before = free_for_others()
    pointer = ok(cudart.cudaMalloc(4 * LARGE))
    assert free_for_others() <= before - 4 * LARGE
    ok(cudart.cudaFree(pointer))
    assert free_for_others() > before - LARGE


@pytest.mark.emulated_only(reason="injects a fault, to see who asks for what")
def test_the_pool_behind_cudaFree_is_trimmed(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    connect(backend(device_options=f"fault=trim_pool:{TRIM_FAILS}:1"))
    small = ok(cudart.cudaMalloc(MIB))
    ok(cudart.cudaFree(small))  # not for so little
    large = ok(cudart.cudaMalloc(LARGE))
    assert code(cudart.cudaFree(large)) == TRIM_FAILS
    small = ok(cudart.cudaMalloc(MIB))
    ok(cudart.cudaFree(small))


def test_the_question_for_free_memory_waits_for_nothing(session: flyt.Session) -> None:
    ok(cudart.cudaFree(ok(cudart.cudaMalloc(MIB))))
    go, waited = threading.Event(), []
    launch(0, lambda _: waited.append(go.wait(LIMIT)))  # as a long kernel would
    ok(cudart.cudaMemGetInfo())
    go.set()
    ok(cudart.cudaDeviceSynchronize())
    assert waited == [True], "cudaMemGetInfo waited for it"
