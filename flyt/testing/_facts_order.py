# SPDX-License-Identifier: Apache-2.0
"""Facts about order: within a stream, between streams by events, and the legacy stream's rules."""

from __future__ import annotations

from typing import Any

from flyt.testing._facts import Facts
from flyt.testing._lab import (
    D2D,
    D2H,
    H2D,
    H2H,
    LEGACY,
    LEGACY_BY_NAME,
    NON_BLOCKING,
    NOT_READY,
    PER_THREAD,
    Lab,
)

FACTS = Facts("order")

N = 65_536
STEPS = 32


def _queries(lab: Lab, busy: Any, asked: tuple[Any, ...]) -> tuple[int, ...]:
    return lab.while_busy(busy, lambda: tuple(lab.query(stream) for stream in asked))


@FACTS.fact("a stream's work is done in the order in which it was issued")
def one_stream_is_a_queue(lab: Lab) -> None:
    for stream in (lab.stream(), lab.stream(NON_BLOCKING), LEGACY, PER_THREAD):
        device, other, back = lab.device(N, 0), lab.device(N, 0), lab.pinned(N)
        for step in range(STEPS):
            lab.ok(lab.rt.cudaMemsetAsync(device, step, N, stream))
        lab.ok(lab.rt.cudaMemcpyAsync(other, device, N, D2D, stream))
        lab.ok(lab.rt.cudaMemsetAsync(device, 0xEE, N, stream))
        lab.ok(lab.rt.cudaMemcpyAsync(back.ctypes.data, other, N, D2H, stream))
        lab.ok(lab.rt.cudaMemsetAsync(other, 0xEE, N, stream))
        lab.ok(lab.rt.cudaStreamSynchronize(stream))
        lab.same_bytes(back, STEPS - 1, f"the last value set before the copy, {stream!r}")


@FACTS.fact("copies of all kinds of memory are in the stream's order")
def copies_keep_the_order(lab: Lab) -> None:
    stream, device = lab.stream(), lab.device(N)
    pinned, pageable, back = lab.pinned(N, 1), lab.pageable(N, 2), lab.pinned(N)

    def issue() -> None:
        copy = lab.rt.cudaMemcpyAsync
        lab.ok(copy(device, pageable.ctypes.data, N, H2D, stream))
        lab.ok(copy(device, pinned.ctypes.data, N // 2, H2D, stream))
        lab.ok(copy(back.ctypes.data, device, N, D2H, stream))
        lab.ok(lab.rt.cudaMemsetAsync(device, 3, N, stream))

    lab.waits(stream, issue)  # whether it does is not the question here
    lab.same_bytes(back[: N // 2], 1, "from pinned memory, which came second")
    lab.same_bytes(back[N // 2 :], 2, "from pageable memory, which came first")
    lab.same_bytes(lab.get(device, N), 3, "what was set last")


@FACTS.fact("streams do not wait for each other: work of one is done while another is busy")
def two_streams_overlap(lab: Lab) -> None:
    device = lab.device(N)
    for flag in (0, NON_BLOCKING):
        busy, other = lab.stream(flag), lab.stream(flag)

        def observe(other: Any = other) -> int:
            lab.ok(lab.rt.cudaMemsetAsync(device, 5, N, other))
            return int(lab.rt.cudaStreamSynchronize(other)[0])

        lab.same(lab.while_busy(busy, observe), 0, f"synchronizing the other stream, flags {flag}")


@FACTS.fact("cudaStreamWaitEvent: work after it waits for what the event captured")
def events_order_two_streams(lab: Lab) -> None:
    device, back, event = lab.device(N, 0), lab.device(N, 0), lab.event(2)
    first, second = lab.stream(NON_BLOCKING), lab.stream(NON_BLOCKING)

    def observe() -> int:
        lab.ok(lab.rt.cudaMemsetAsync(device, 7, N, first))
        lab.ok(lab.rt.cudaEventRecord(event, first))
        lab.ok(lab.rt.cudaStreamWaitEvent(second, event, 0))
        lab.ok(lab.rt.cudaMemcpyAsync(back, device, N, D2D, second))
        return lab.query(second)

    lab.same(lab.while_busy(first, observe), NOT_READY, "the stream that waits")
    lab.same_bytes(lab.get(back, N), 7, "what the first stream set before the second copied")


@FACTS.fact("a chain of events through three streams keeps the order")
def events_chain(lab: Lab) -> None:
    device = lab.device(N, 0)
    streams = [lab.stream(NON_BLOCKING) for _ in range(3)]
    events = [lab.event(2) for _ in streams]

    def observe() -> None:
        for step in range(2 * len(streams)):
            at = step % len(streams)
            lab.ok(lab.rt.cudaMemsetAsync(device, step + 1, N - step, streams[at]))
            lab.ok(lab.rt.cudaEventRecord(events[at], streams[at]))
            following = streams[(at + 1) % len(streams)]
            lab.ok(lab.rt.cudaStreamWaitEvent(following, events[at], 0))

    lab.while_busy(streams[0], observe)
    wanted = lab.pageable(N, 6)
    for step in range(5):
        wanted[N - step - 1] = step + 1
    lab.same_bytes(lab.get(device, N), wanted, "each step over the one before")


@FACTS.fact("recorded: which streams the legacy stream's query sees while a blocking one is busy")
def a_blocking_stream_is_seen_by_the_legacy(lab: Lab) -> None:
    busy, blocking, free = lab.stream(), lab.stream(), lab.stream(NON_BLOCKING)
    asked = (LEGACY, LEGACY_BY_NAME, PER_THREAD, busy, blocking, free)
    wanted = (NOT_READY, NOT_READY, 0, NOT_READY, 0, 0)
    lab.same(_queries(lab, busy, asked), wanted, "legacy ×2, per thread, itself, blocking, free")


@FACTS.fact("recorded: the legacy stream's work shows on no other stream's query")
def the_legacy_stream_is_seen_by_itself(lab: Lab) -> None:
    asked = (LEGACY, LEGACY_BY_NAME, PER_THREAD, lab.stream(), lab.stream(NON_BLOCKING))
    wanted = (NOT_READY, NOT_READY, 0, 0, 0)
    for busy in (LEGACY, LEGACY_BY_NAME):
        lab.same(_queries(lab, busy, asked), wanted, "legacy ×2, per thread, blocking, free")


@FACTS.fact("recorded: the per-thread stream is a blocking stream")
def the_per_thread_stream_is_blocking(lab: Lab) -> None:
    asked = (LEGACY, LEGACY_BY_NAME, PER_THREAD, lab.stream(), lab.stream(NON_BLOCKING))
    wanted = (NOT_READY, NOT_READY, NOT_READY, 0, 0)
    lab.same(_queries(lab, PER_THREAD, asked), wanted, "legacy ×2, per thread, blocking, free")


@FACTS.fact("recorded: a non-blocking stream's work shows on no other stream's query")
def a_non_blocking_stream_is_seen_by_itself(lab: Lab) -> None:
    busy = lab.stream(NON_BLOCKING)
    asked = (LEGACY, PER_THREAD, lab.stream(), busy)
    lab.same(_queries(lab, busy, asked), (0, 0, 0, NOT_READY), "legacy, per thread, blocking, it")


@FACTS.fact("legacy default stream: its work waits for the work of blocking streams")
def legacy_work_waits_for_blocking(lab: Lab) -> None:
    for blocking in (lab.stream(), PER_THREAD):
        device, back = lab.device(N, 0), lab.device(N, 0)

        def observe(blocking: Any = blocking, device: int = device, back: int = back) -> None:
            lab.ok(lab.rt.cudaMemsetAsync(device, 7, N, blocking))
            lab.ok(lab.rt.cudaMemcpyAsync(back, device, N, D2D, LEGACY))

        lab.while_busy(blocking, observe)
        lab.same_bytes(
            lab.get(back, N), 7, f"what {blocking!r} set before the legacy stream copied"
        )


@FACTS.fact("legacy default stream: work of blocking streams waits for its work")
def blocking_work_waits_for_legacy(lab: Lab) -> None:
    for blocking in (lab.stream(), PER_THREAD):
        device, back = lab.device(N, 0), lab.device(N, 0)

        def observe(blocking: Any = blocking, device: int = device, back: int = back) -> int:
            lab.ok(lab.rt.cudaMemsetAsync(device, 7, N, LEGACY))
            lab.ok(lab.rt.cudaMemcpyAsync(back, device, N, D2D, blocking))
            return lab.query(blocking)

        lab.same(lab.while_busy(LEGACY, observe), NOT_READY, f"{blocking!r}, held back")
        lab.same_bytes(
            lab.get(back, N), 7, f"what the legacy stream set before {blocking!r} copied"
        )


@FACTS.fact("legacy default stream: it joins two blocking streams, as a barrier does")
def legacy_work_is_a_barrier(lab: Lab) -> None:
    device, other, back = (lab.device(N, 0) for _ in range(3))
    first, second = lab.stream(), lab.stream()

    def observe() -> None:
        lab.ok(lab.rt.cudaMemsetAsync(device, 7, N, first))
        lab.ok(lab.rt.cudaMemcpyAsync(other, device, N, D2D, LEGACY))
        lab.ok(lab.rt.cudaMemcpyAsync(back, other, N, D2D, second))

    lab.while_busy(first, observe)
    lab.same_bytes(lab.get(back, N), 7, "what came through the legacy stream")


@FACTS.fact("cudaStreamNonBlocking: neither waits for the legacy stream")
def non_blocking_passes_the_legacy(lab: Lab) -> None:
    device, free = lab.device(N), lab.stream(NON_BLOCKING)

    def observe() -> int:
        lab.ok(lab.rt.cudaMemsetAsync(device, 5, N, free))
        return int(lab.rt.cudaStreamSynchronize(free)[0])

    lab.same(lab.while_busy(LEGACY, observe), 0, "synchronizing the non-blocking stream")


@FACTS.fact("cudaStreamNonBlocking: nor does the legacy stream wait for it")
def legacy_passes_the_non_blocking(lab: Lab) -> None:
    device, pinned, free = lab.device(N, 0), lab.pinned(N, 5), lab.stream(NON_BLOCKING)

    def observe() -> int:
        lab.ok(lab.rt.cudaMemcpy(device, pinned.ctypes.data, N, H2D))
        lab.ok(lab.rt.cudaMemcpy(pinned.ctypes.data, device, N, D2H))
        return int(lab.rt.cudaStreamSynchronize(LEGACY)[0])

    lab.same(lab.while_busy(free, observe), 0, "cudaMemcpy and cudaStreamSynchronize(0)")


@FACTS.fact("recorded: cudaStreamSynchronize(0) waits for blocking streams")
def synchronizing_the_legacy_waits_for_blocking(lab: Lab) -> None:
    for blocking in (lab.stream(), PER_THREAD):
        waited = lab.waits(blocking, lambda: lab.ok(lab.rt.cudaStreamSynchronize(LEGACY)))
        lab.same(waited, True, f"waiting for {blocking!r}")


@FACTS.fact("recorded: synchronizing an idle blocking stream does not wait for the legacy stream")
def synchronizing_a_blocking_passes_the_legacy(lab: Lab) -> None:
    blocking = lab.stream()
    code = lab.while_busy(LEGACY, lambda: int(lab.rt.cudaStreamSynchronize(blocking)[0]))
    lab.same(code, 0, "cudaStreamSynchronize")


@FACTS.fact("recorded: cudaMemcpy waits for blocking streams, pinned memory and to the host")
def memcpy_waits_for_blocking(lab: Lab) -> None:
    device, pinned, pageable = lab.device(N, 0), lab.pinned(N), lab.pageable(N)
    blocking = lab.stream()

    def to_the_host() -> None:
        lab.ok(lab.rt.cudaMemsetAsync(device, 7, N, blocking))
        lab.ok(lab.rt.cudaMemcpy(pageable.ctypes.data, device, N, D2H))

    def to_the_device() -> None:
        lab.ok(lab.rt.cudaMemcpy(device, pinned.ctypes.data, N, H2D))

    lab.same(lab.waits(blocking, to_the_host), True, "waiting, to pageable memory")
    lab.same_bytes(pageable, 7, "what the blocking stream set")
    lab.same(lab.waits(blocking, to_the_device), True, "waiting, from pinned memory")


@FACTS.fact("recorded: cudaMemcpy from host to host waits for blocking streams")
def host_to_host_waits_for_blocking(lab: Lab) -> None:
    blocking, source, back = lab.stream(), lab.pageable(N, 3), lab.pageable(N)
    waited = lab.waits(
        blocking,
        lambda: lab.ok(lab.rt.cudaMemcpy(back.ctypes.data, source.ctypes.data, N, H2H)),
    )
    lab.same_bytes(back, 3, "the bytes")
    lab.same(waited, True, "waiting")


@FACTS.fact("cudaMemcpy from pageable memory comes behind the work of blocking streams")
def pageable_copies_keep_the_legacy_order(lab: Lab) -> None:
    device, source, blocking = lab.device(N, 0), lab.pageable(N, 9), lab.stream()
    lab.waits(
        blocking,
        lambda: (
            lab.ok(lab.rt.cudaMemsetAsync(device, 7, N, blocking)),
            lab.ok(lab.rt.cudaMemcpy(device, source.ctypes.data, N, H2D)),
        ),
    )
    lab.same_bytes(lab.get(device, N), 9, "the copy, issued after the memset")


@FACTS.fact("cudaMemset: asynchronous with respect to the host, in the legacy stream's order")
def memset_does_not_wait(lab: Lab) -> None:
    device, blocking = lab.device(N, 0), lab.stream()

    def observe() -> int:
        lab.ok(lab.rt.cudaMemsetAsync(device, 1, N, blocking))
        return int(lab.rt.cudaMemset(device, 2, N)[0])

    lab.same(lab.while_busy(blocking, observe), 0, "cudaMemset")
    lab.same_bytes(lab.get(device, N), 2, "what was set last")


@FACTS.fact("cudaMemset: synchronous when the target is pinned host memory")
def memset_of_pinned_memory_waits(lab: Lab) -> None:
    pinned, blocking = lab.pinned(N), lab.stream()
    waited = lab.waits(blocking, lambda: lab.ok(lab.rt.cudaMemset(pinned.ctypes.data, 4, N)))
    lab.same_bytes(pinned, 4, "the bytes")
    lab.same(waited, True, "waiting for the blocking stream")


@FACTS.fact("recorded: cudaFree waits for all streams, non-blocking ones too")
def free_waits_for_all(lab: Lab) -> None:
    free = lab.stream(NON_BLOCKING)
    waited = lab.waits(free, lambda: lab.ok(lab.rt.cudaFree(lab.device(N))))
    lab.same(waited, True, "waiting")


@FACTS.fact("recorded: cudaFreeHost waits for all streams, non-blocking ones too")
def free_host_waits_for_all(lab: Lab) -> None:
    free, device = lab.stream(NON_BLOCKING), lab.device(N)

    def release() -> None:
        block = lab.pinned(N, 6)
        lab.ok(lab.rt.cudaMemcpyAsync(device, block.ctypes.data, N, H2D, free))
        lab.ok(lab.rt.cudaFreeHost(block.ctypes.data))

    lab.same(lab.waits(free, release), True, "waiting")
    lab.same_bytes(lab.get(device, N), 6, "what was copied from memory that was freed then")
