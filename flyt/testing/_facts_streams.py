# SPDX-License-Identifier: Apache-2.0
"""Facts about streams: what they are, what they answer, and when asynchronous calls return."""

from __future__ import annotations

from cuda.bindings.runtime import cudaError_t, cudaStream_t

from flyt.testing._facts import Facts
from flyt.testing._lab import (
    D2D,
    D2H,
    H2D,
    H2H,
    INVALID_HANDLE,
    INVALID_VALUE,
    LEGACY,
    LEGACY_BY_NAME,
    NON_BLOCKING,
    NOT_READY,
    PER_THREAD,
    Lab,
)

FACTS = Facts("streams")

SPECIAL = (LEGACY, LEGACY_BY_NAME, PER_THREAD)
N = 65_536
STAGED = 20 << 20
"""More than goes through one staging buffer."""

INVALID_DIRECTION = int(cudaError_t.cudaErrorInvalidMemcpyDirection)


@FACTS.fact("cudaStreamCreateWithFlags: cudaStreamDefault and cudaStreamNonBlocking, no others")
def flags(lab: Lab) -> None:
    plain = lab.ok(lab.rt.cudaStreamCreate())
    lab.same(int(lab.ok(lab.rt.cudaStreamGetFlags(plain))), 0, "flags of cudaStreamCreate's")
    lab.ok(lab.rt.cudaStreamDestroy(plain))
    for value in (0, NON_BLOCKING):
        shown = lab.ok(lab.rt.cudaStreamGetFlags(lab.stream(value)))
        lab.same(int(shown), value, "cudaStreamGetFlags")
    for value in (2, 3):
        lab.refused(lab.rt.cudaStreamCreateWithFlags(value), INVALID_VALUE, f"flags {value}")
    for handle in SPECIAL:
        shown = lab.ok(lab.rt.cudaStreamGetFlags(handle))
        lab.same(int(shown), 0, f"cudaStreamGetFlags({handle})")


@FACTS.fact("cudaStreamCreateWithPriority: priorities outside the range are clamped to it")
def priorities(lab: Lab) -> None:
    least, greatest = (int(v) for v in lab.ok(lab.rt.cudaDeviceGetStreamPriorityRange()))
    if least < greatest:
        lab.same((least, greatest), "numbers that fall as the priority rises", "the range")
    for asked in (least, greatest, least + 5, greatest - 1, greatest - 100):
        stream = lab.ok(lab.rt.cudaStreamCreateWithPriority(NON_BLOCKING, asked))
        shown = lab.rt.cudaStreamGetPriority(stream)
        lab.ok(lab.rt.cudaStreamDestroy(stream))
        wanted = max(greatest, min(least, asked))
        lab.same(int(lab.ok(shown)), wanted, f"priority {asked}")
    for handle in (lab.stream(), *SPECIAL):
        lab.same(int(lab.ok(lab.rt.cudaStreamGetPriority(handle))), 0, "the default priority")


@FACTS.fact("cudaStreamCreate: every stream has a handle of its own")
def handles_are_distinct(lab: Lab) -> None:
    handles = [int(lab.stream()) for _ in range(4)]
    lab.same(len(set(handles) - set(SPECIAL)), 4, "different handles")


@FACTS.fact("stream handles 0, cudaStreamLegacy and cudaStreamPerThread always exist")
def special_streams_exist(lab: Lab) -> None:
    for handle in (*SPECIAL, cudaStream_t(0)):
        lab.ok(lab.rt.cudaStreamQuery(handle))
        lab.ok(lab.rt.cudaStreamSynchronize(handle))


@FACTS.fact("recorded: the streams that always exist can't be destroyed")
def special_streams_stay(lab: Lab) -> None:
    for handle in SPECIAL:
        lab.refused(lab.rt.cudaStreamDestroy(handle), INVALID_HANDLE, f"destroying {handle}")
        lab.ok(lab.rt.cudaStreamQuery(handle))


@FACTS.fact("stream arguments are cudaStream_t or their integers")
def handles_are_integers_too(lab: Lab) -> None:
    device, stream = lab.device(N, 0), lab.stream()
    lab.ok(lab.rt.cudaMemsetAsync(device, 4, N, int(stream)))
    lab.ok(lab.rt.cudaStreamSynchronize(int(stream)))
    lab.ok(lab.rt.cudaStreamQuery(int(stream)))
    lab.same_bytes(lab.get(device, N), 4, "the bytes")


@FACTS.fact("cudaStreamQuery: cudaErrorNotReady until all work is done, then success")
def query_tells_whether_work_is_done(lab: Lab) -> None:
    stream = lab.stream()
    lab.same(lab.query(stream), 0, "a new stream")
    seen = lab.while_busy(stream, lambda: (lab.query(stream), lab.query(stream)))
    lab.same(seen, (NOT_READY, NOT_READY), "a busy stream, asked twice")
    lab.same(lab.query(stream), 0, "after cudaDeviceSynchronize")


@FACTS.fact("cudaStreamSynchronize: returns when the stream's work is done")
def synchronize_waits(lab: Lab) -> None:
    for stream in (lab.stream(), lab.stream(NON_BLOCKING), *SPECIAL):
        waited = lab.waits(stream, lambda s=stream: lab.rt.cudaStreamSynchronize(s))  # type: ignore[misc]
        lab.same(waited, True, f"waiting for {stream!r}")


@FACTS.fact("cudaDeviceSynchronize: waits for every stream")
def device_synchronize_waits_for_all(lab: Lab) -> None:
    for stream in (lab.stream(), lab.stream(NON_BLOCKING), PER_THREAD):
        waited = lab.waits(stream, lab.rt.cudaDeviceSynchronize)
        lab.same(waited, True, f"waiting for {stream!r}")


@FACTS.fact("cudaStreamDestroy: returns at once, and the work is still done")
def destroying_a_busy_stream(lab: Lab) -> None:
    device = lab.device(N)

    def observe() -> int:
        lab.ok(lab.rt.cudaMemset(device, 1, N))
        stream = lab.ok(lab.rt.cudaStreamCreateWithFlags(NON_BLOCKING))
        lab.ok(lab.rt.cudaStreamWaitEvent(stream, gate, 0))
        lab.ok(lab.rt.cudaMemsetAsync(device, 2, N, stream))
        return int(lab.rt.cudaStreamDestroy(stream)[0])

    busy, gate = lab.stream(NON_BLOCKING), lab.event()

    def gated() -> int:
        lab.ok(lab.rt.cudaEventRecord(gate, busy))
        return observe()

    lab.same(lab.while_busy(busy, gated), 0, "cudaStreamDestroy")
    lab.same_bytes(lab.get(device, N), 2, "what the destroyed stream had to do")


@FACTS.fact("cudaMemcpyAsync, pinned memory to the device: returns before it is done")
def pinned_to_device_is_asynchronous(lab: Lab) -> None:
    device, source, stream = lab.device(N), lab.pinned(N, 3), lab.stream()
    address = source.ctypes.data
    code = lab.while_busy(
        stream, lambda: int(lab.rt.cudaMemcpyAsync(device, address, N, H2D, stream)[0])
    )
    lab.same(code, 0, "the code")
    lab.same_bytes(lab.get(device, N), 3, "the bytes, after all")


@FACTS.fact("cudaMemcpyAsync, the device to pinned memory: returns before it is done")
def device_to_pinned_is_asynchronous(lab: Lab) -> None:
    device, back, stream = lab.device(N, 3), lab.pinned(N), lab.stream()
    address = back.ctypes.data

    def observe() -> tuple[int, int, int]:
        back[:] = 0
        code = int(lab.rt.cudaMemcpyAsync(address, device, N, D2H, stream)[0])
        return code, int(back[0]), int(back[-1])

    lab.same(lab.while_busy(stream, observe), (0, 0, 0), "the code and bytes not yet there")
    lab.same_bytes(back, 3, "the bytes, after all")


@FACTS.fact("cudaMemcpyAsync on the device and cudaMemsetAsync: return before they are done")
def device_work_is_asynchronous(lab: Lab) -> None:
    device, other, stream = lab.device(N, 0), lab.device(N, 0), lab.stream()

    def observe() -> tuple[int, int]:
        fill = lab.rt.cudaMemsetAsync(device, 9, N, stream)
        copy = lab.rt.cudaMemcpyAsync(other, device, N, D2D, stream)
        return int(fill[0]), int(copy[0])

    lab.same(lab.while_busy(stream, observe), (0, 0), "the codes")
    lab.same_bytes(lab.get(other, N), 9, "the bytes, after all")


@FACTS.fact("cudaMemcpyAsync, the device to pageable memory: complete at return")
def device_to_pageable_is_complete_at_return(lab: Lab) -> None:
    for size in (N, STAGED):
        device, back, stream = lab.device(size, 1), lab.pageable(size), lab.stream()
        address = back.ctypes.data

        def behind_the_work(
            device: int = device, address: int = address, size: int = size, stream: object = stream
        ) -> None:
            lab.ok(lab.rt.cudaMemsetAsync(device, 6, size, stream))
            lab.ok(lab.rt.cudaMemcpyAsync(address, device, size, D2H, stream))

        lab.same(lab.waits(stream, behind_the_work), True, "waiting for the stream")
        lab.same_bytes(back, 6, f"{size} bytes at return")


@FACTS.fact("cudaMemcpyAsync from pageable memory: when it returns, the source may be changed")
def pageable_source_may_be_changed_after_return(lab: Lab) -> None:
    for size in (N, STAGED):
        device, source, stream = lab.device(size), lab.pattern(size), lab.stream()
        before = source.copy()
        lab.ok(lab.rt.cudaMemcpyAsync(device, source.ctypes.data, size, H2D, stream))
        source[:] = 0
        lab.ok(lab.rt.cudaStreamSynchronize(stream))
        lab.same_bytes(lab.get(device, size), before, f"{size} bytes on the device")


@FACTS.fact("cudaMemcpyAsync, host to host: synchronous with respect to the host")
def host_to_host_is_complete_at_return(lab: Lab) -> None:
    source, back, stream = lab.pageable(N, 5), lab.pageable(N), lab.stream()
    waited = lab.waits(
        stream,
        lambda: lab.ok(
            lab.rt.cudaMemcpyAsync(back.ctypes.data, source.ctypes.data, N, H2H, stream)
        ),
    )
    lab.same_bytes(back, 5, "the bytes at return")
    lab.same(waited, True, "waiting for the stream")


@FACTS.fact("cudaMemcpyAsync, cudaMemsetAsync: arguments are checked at the call")
def arguments_are_checked_at_the_call(lab: Lab) -> None:
    device, host, stream = lab.device(N, 1), lab.pageable(N + 1, 2), lab.stream()
    copy, address = lab.rt.cudaMemcpyAsync, host.ctypes.data
    for name, code, answer in (
        ("one past the end, H2D", INVALID_VALUE, copy(device, address, N + 1, H2D, stream)),
        ("one past the end, D2H", INVALID_VALUE, copy(address, device, N + 1, D2H, stream)),
        ("source NULL", INVALID_VALUE, copy(device, 0, N, H2D, stream)),
        ("destination NULL", INVALID_VALUE, copy(0, device, N, D2H, stream)),
        ("kind 99", INVALID_DIRECTION, copy(device, address, N, 99, stream)),
        ("D2D from pageable memory", INVALID_VALUE, copy(device, address, N, D2D, stream)),
        ("memset", INVALID_VALUE, lab.rt.cudaMemsetAsync(device, 0, N + 1, stream)),
        ("memset, pageable", INVALID_VALUE, lab.rt.cudaMemsetAsync(address, 0, N, stream)),
    ):
        lab.refused(answer, code, name)
    lab.ok(lab.rt.cudaStreamSynchronize(stream))
    lab.same_bytes(lab.get(device, N), 1, "the device's block")
    lab.same_bytes(host, 2, "the host's memory")


@FACTS.fact("recorded: 0 bytes are success before anything is looked at")
def nothing_is_copied_asynchronously(lab: Lab) -> None:
    stream = lab.stream()
    for handle in (stream, LEGACY):
        lab.ok(lab.rt.cudaMemcpyAsync(0, 0, 0, H2D, handle))
        lab.ok(lab.rt.cudaMemsetAsync(0, 0, 0, handle))
    lab.same(lab.query(stream), 0, "the stream")


@FACTS.fact("cudaStreamPerThread: every host thread has its own")
def the_per_thread_stream_is_the_threads(lab: Lab) -> None:
    seen = lab.while_busy(
        PER_THREAD,
        lambda: (lab.query(PER_THREAD), lab.in_thread(lambda: lab.query(PER_THREAD))),
    )
    lab.same(seen, (NOT_READY, 0), "queries here and in another thread")
