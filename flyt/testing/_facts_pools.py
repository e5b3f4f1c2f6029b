# SPDX-License-Identifier: Apache-2.0
"""Facts about memory in the order of streams, and the pools that it comes from."""

from __future__ import annotations

from typing import Any

from cuda.bindings.driver import cuuint64_t
from cuda.bindings.runtime import (
    cudaError_t,
    cudaMemAllocationType,
    cudaMemLocationType,
    cudaMemPoolAttr,
    cudaMemPoolProps,
)

from flyt.testing._facts import Facts
from flyt.testing._lab import (
    D2D,
    INVALID_VALUE,
    LEGACY,
    NON_BLOCKING,
    OUT_OF_MEMORY,
    PER_THREAD,
    Lab,
)

FACTS = Facts("pools")

N = 65_536
NO_DEVICE = 1000
INVALID_DEVICE = int(cudaError_t.cudaErrorInvalidDevice)

SWITCHES = (
    cudaMemPoolAttr.cudaMemPoolReuseFollowEventDependencies,
    cudaMemPoolAttr.cudaMemPoolReuseAllowOpportunistic,
    cudaMemPoolAttr.cudaMemPoolReuseAllowInternalDependencies,
)
THRESHOLD = cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
RESERVED = cudaMemPoolAttr.cudaMemPoolAttrReservedMemCurrent
USED = cudaMemPoolAttr.cudaMemPoolAttrUsedMemCurrent
USED_HIGH = cudaMemPoolAttr.cudaMemPoolAttrUsedMemHigh


def _properties(lab: Lab) -> Any:
    properties = cudaMemPoolProps()
    properties.allocType = cudaMemAllocationType.cudaMemAllocationTypePinned
    location = properties.location
    location.type = cudaMemLocationType.cudaMemLocationTypeDevice
    location.id = int(lab.ok(lab.rt.cudaGetDevice()))
    properties.location = location
    return properties


def _pool(lab: Lab) -> Any:
    pool = lab.ok(lab.rt.cudaMemPoolCreate(_properties(lab)))
    lab.later(lambda: lab.rt.cudaMemPoolDestroy(pool))
    return pool


def _ask(lab: Lab, pool: Any, attribute: Any) -> int:
    return int(lab.ok(lab.rt.cudaMemPoolGetAttribute(pool, attribute)))


@FACTS.fact("cudaMallocAsync: the address comes at once; work of the stream may use the memory")
def memory_in_the_order_of_a_stream(lab: Lab) -> None:
    for stream in (lab.stream(), lab.stream(NON_BLOCKING), LEGACY, PER_THREAD):
        back = lab.device(N, 0)

        def observe(stream: Any = stream, back: int = back) -> int:
            address = lab.ok(lab.rt.cudaMallocAsync(N, stream))
            lab.ok(lab.rt.cudaMemsetAsync(address, 7, N, stream))
            lab.ok(lab.rt.cudaMemcpyAsync(back, address, N, D2D, stream))
            lab.ok(lab.rt.cudaFreeAsync(address, stream))
            return lab.query(stream)

        code = lab.while_busy(stream, observe)
        lab.same(code, int(cudaError_t.cudaErrorNotReady), "the stream, after four calls")
        lab.same_bytes(lab.get(back, N), 7, "what was set and copied before the free")


@FACTS.fact("cudaFreeAsync: the same stream may have the memory again before it gets there")
def memory_is_reused_in_the_order_of_a_stream(lab: Lab) -> None:
    stream, back = lab.stream(NON_BLOCKING), lab.device(4 * N, 0)

    def observe() -> None:
        for turn in range(4):
            address = lab.ok(lab.rt.cudaMallocAsync(N, stream))
            lab.ok(lab.rt.cudaMemsetAsync(address, turn + 1, N, stream))
            lab.ok(lab.rt.cudaMemcpyAsync(back + turn * N, address, N, D2D, stream))
            lab.ok(lab.rt.cudaFreeAsync(address, stream))

    lab.while_busy(stream, observe)
    seen = lab.get(back, 4 * N)
    for turn in range(4):
        lab.same_bytes(seen[turn * N : (turn + 1) * N], turn + 1, f"block {turn}")


@FACTS.fact("cudaMallocAsync: another stream may use the memory once it is ordered behind this one")
def memory_for_another_stream(lab: Lab) -> None:
    first, second, event = lab.stream(NON_BLOCKING), lab.stream(NON_BLOCKING), lab.event(2)
    back = lab.device(N, 0)

    def observe() -> None:
        address = lab.ok(lab.rt.cudaMallocAsync(N, first))
        lab.ok(lab.rt.cudaMemsetAsync(address, 9, N, first))
        lab.ok(lab.rt.cudaEventRecord(event, first))
        lab.ok(lab.rt.cudaStreamWaitEvent(second, event, 0))
        lab.ok(lab.rt.cudaMemcpyAsync(back, address, N, D2D, second))
        lab.ok(lab.rt.cudaFreeAsync(address, second))

    lab.while_busy(first, observe)
    lab.same_bytes(lab.get(back, N), 9, "what the first stream set")


@FACTS.fact("cudaFree: takes memory of cudaMallocAsync")
def pool_memory_may_be_freed_plainly(lab: Lab) -> None:
    stream = lab.stream()
    address = lab.ok(lab.rt.cudaMallocAsync(N, stream))
    lab.ok(lab.rt.cudaStreamSynchronize(stream))
    lab.ok(lab.rt.cudaFree(address))
    lab.refused(lab.rt.cudaFree(address), INVALID_VALUE, "the second cudaFree")


@FACTS.fact("cudaMallocAsync: cudaErrorMemoryAllocation when memory is short; nothing is harmed")
def too_much_is_refused(lab: Lab) -> None:
    stream = lab.stream()
    answer = lab.rt.cudaMallocAsync(1 << 50, stream)
    lab.refused(answer, OUT_OF_MEMORY, "1 PiB")
    lab.same(answer[1:], (None,), "the value beside an error")
    address = lab.ok(lab.rt.cudaMallocAsync(N, stream))
    lab.ok(lab.rt.cudaFreeAsync(address, stream))
    lab.ok(lab.rt.cudaStreamSynchronize(stream))


@FACTS.fact("cudaMemPoolCreate, cudaMallocFromPoolAsync: blocks count in their own pool")
def a_pool_counts(lab: Lab) -> None:
    pool, stream = _pool(lab), lab.stream()
    lab.same(_ask(lab, pool, USED), 0, "used, at first")
    address = lab.ok(lab.rt.cudaMallocFromPoolAsync(3 * N, pool, stream))
    lab.ok(lab.rt.cudaStreamSynchronize(stream))
    used, reserved = _ask(lab, pool, USED), _ask(lab, pool, RESERVED)
    lab.same((used >= 3 * N, reserved >= used), (True, True), f"used {used} of {reserved}")
    lab.ok(lab.rt.cudaFreeAsync(address, stream))
    lab.ok(lab.rt.cudaStreamSynchronize(stream))
    lab.same(_ask(lab, pool, USED), 0, "used, after the free")
    lab.same(_ask(lab, pool, USED_HIGH) >= 3 * N, True, "the high-water mark")
    lab.ok(lab.rt.cudaMemPoolSetAttribute(pool, USED_HIGH, cuuint64_t(0)))
    lab.same(_ask(lab, pool, USED_HIGH), 0, "the high-water mark, reset")
    lab.ok(lab.rt.cudaMemPoolTrimTo(pool, 0))
    lab.same(_ask(lab, pool, RESERVED), 0, "reserved, after a trim")


@FACTS.fact("cudaMemPoolSetAttribute: defaults, what can be set, and what can't")
def attributes_of_pools(lab: Lab) -> None:
    pool = _pool(lab)
    lab.same([_ask(lab, pool, a) for a in SWITCHES], [1, 1, 1], "the switches, at first")
    lab.same(_ask(lab, pool, THRESHOLD), 0, "the release threshold, at first")
    for switch in SWITCHES:
        lab.ok(lab.rt.cudaMemPoolSetAttribute(pool, switch, 0))
        lab.same(_ask(lab, pool, switch), 0, switch.name)
    lab.ok(lab.rt.cudaMemPoolSetAttribute(pool, THRESHOLD, cuuint64_t(1 << 20)))
    lab.same(_ask(lab, pool, THRESHOLD), 1 << 20, "the release threshold")
    answer = lab.rt.cudaMemPoolSetAttribute(pool, USED_HIGH, cuuint64_t(1))
    lab.refused(answer, INVALID_VALUE, "a high-water mark of 1")


@FACTS.fact("cudaMemPoolDestroy: blocks stay until they are freed")
def blocks_outlive_their_pool(lab: Lab) -> None:
    stream = lab.stream()
    pool = lab.ok(lab.rt.cudaMemPoolCreate(_properties(lab)))
    address = lab.ok(lab.rt.cudaMallocFromPoolAsync(N, pool, stream))
    lab.ok(lab.rt.cudaMemPoolDestroy(pool))
    lab.ok(lab.rt.cudaMemsetAsync(address, 5, N, stream))
    lab.ok(lab.rt.cudaStreamSynchronize(stream))
    lab.same_bytes(lab.get(address, N), 5, "the block")
    lab.ok(lab.rt.cudaFreeAsync(address, stream))
    lab.ok(lab.rt.cudaStreamSynchronize(stream))


@FACTS.fact("cudaDeviceSetMemPool: what cudaMallocAsync takes from; the default pool at first")
def the_current_pool(lab: Lab) -> None:
    device, stream = int(lab.ok(lab.rt.cudaGetDevice())), lab.stream()
    default = lab.ok(lab.rt.cudaDeviceGetDefaultMemPool(device))
    lab.same(int(lab.ok(lab.rt.cudaDeviceGetMemPool(device))), int(default), "the current pool")
    pool = lab.ok(lab.rt.cudaMemPoolCreate(_properties(lab)))
    lab.ok(lab.rt.cudaDeviceSetMemPool(device, pool))
    lab.later(lambda: lab.rt.cudaDeviceSetMemPool(device, default))
    lab.same(int(lab.ok(lab.rt.cudaDeviceGetMemPool(device))), int(pool), "the one that was set")
    address = lab.ok(lab.rt.cudaMallocAsync(N, stream))
    lab.same(_ask(lab, pool, USED) >= N, True, "whether it serves cudaMallocAsync")
    lab.ok(lab.rt.cudaFreeAsync(address, stream))
    lab.ok(lab.rt.cudaStreamSynchronize(stream))
    lab.ok(lab.rt.cudaMemPoolDestroy(pool))
    current = int(lab.ok(lab.rt.cudaDeviceGetMemPool(device)))
    lab.same(current, int(default), "the current pool, after the other was destroyed")


@FACTS.fact("cudaMemPoolDestroy: a device's default pool can't be destroyed")
def the_default_pool_stays(lab: Lab) -> None:
    device = int(lab.ok(lab.rt.cudaGetDevice()))
    default = lab.ok(lab.rt.cudaDeviceGetDefaultMemPool(device))
    lab.refused(lab.rt.cudaMemPoolDestroy(default), INVALID_VALUE, "destroying it")
    # Recorded on an H200: one says cudaErrorInvalidDevice, the other does not.
    answer = lab.rt.cudaDeviceGetDefaultMemPool(NO_DEVICE)
    lab.refused(answer, INVALID_DEVICE, "the default pool of a device that there is not")
    answer = lab.rt.cudaDeviceGetMemPool(NO_DEVICE)
    lab.refused(answer, INVALID_VALUE, "the pool of a device that there is not")
    answer = lab.rt.cudaDeviceSetMemPool(NO_DEVICE, default)
    lab.refused(answer, INVALID_VALUE, "a pool for a device that there is not")
