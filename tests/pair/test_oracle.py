# SPDX-License-Identifier: Apache-2.0
"""Every answer that was read off a real GPU is Flyt's answer: no entry of a recording is left out.

Times are not compared. Where an entry tells how long a call took and what a stream's query answered
after it, the query is: 600 says that the call did not wait.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.frontend import current
from flyt.testing._lab import Lab, Work

DATA = Path(__file__).parent.parent / "data"
ORACLE: dict[str, Any] = json.loads((DATA / "cudart-h100-13.0.json").read_text())
STREAMS: dict[str, Any] = json.loads((DATA / "cudart-h100-13.0-streams.json").read_text())

K = cudart.cudaMemcpyKind
H2H, H2D, D2H, D2D = (
    K.cudaMemcpyHostToHost, K.cudaMemcpyHostToDevice,
    K.cudaMemcpyDeviceToHost, K.cudaMemcpyDeviceToDevice,
)  # fmt: skip
ANY = K.cudaMemcpyDefault
N = 4096
GRANULE = 2 << 20
GARBAGE = 0xDEAD_BEEF_0000
NOT_READY = 600

DEVIATIONS: dict[str, Any] = {
    "mallocManaged_0": {"rc": 801, "name": "cudaErrorNotSupported"},
    "h2d_pageable_waits_blocking": NOT_READY,
}
"""What Flyt answers instead; docs/semantics.md says why."""

ALSO_ALLOWED = {("async_pageable_H2D", "query_after"): NOT_READY}
"""CUDA's documentation: the copy may be unfinished when the call returns."""

Answer = tuple[Any, ...]
Answers = dict[str, Any]


def code(answer: Answer) -> int:
    cudart.cudaGetLastError()
    return int(answer[0])


def entry(answer: Answer, **more: Any) -> Answers:
    return {"rc": code(answer), "name": answer[0].name, **more}


@pytest.fixture
def lab(session: flyt.Session) -> Iterator[Lab]:
    work = Work()
    lab = Lab(flyt, work)
    yield lab
    assert lab.clean_up() == 0
    work.free(flyt)
    after = current.existing()
    if after is not None and after is not session:  # a reset made it
        after.close()


def compare(seen: Answers, recorded: Answers) -> None:
    assert set(seen) == set(recorded), "every entry has its check, and every check its entry"
    wrong = []
    for name, wanted in recorded.items():
        wanted = DEVIATIONS.get(name, wanted)  # noqa: PLW2901 - what this implementation owes
        if not isinstance(wanted, dict):
            wrong += [] if seen[name] == wanted else [f"{name}: {seen[name]}, recorded {wanted}"]
            continue
        for field, value in wanted.items():
            if field.endswith("_s"):
                continue
            found = seen[name].get(field, "nothing")
            if found not in (value, ALSO_ALLOWED.get((name, field), value)):
                wrong.append(f"{name}.{field}: {found}, recorded {value}")
    assert not wrong, "\n".join(wrong)


# --- cudart-h100-13.0.json ---


def devices_and_allocation(lab: Lab) -> Answers:
    version, count = cudart.cudaRuntimeGetVersion(), cudart.cudaGetDeviceCount()
    block = cudart.cudaMalloc(N)
    nothing, host_nothing = cudart.cudaMalloc(0), cudart.cudaHostAlloc(0, 0)
    address = block[1]
    answers = {
        "runtimeGetVersion": entry(version, value=version[1]),
        "getDeviceCount": entry(count, value=count[1]),
        "setDevice_bad": entry(cudart.cudaSetDevice(99)),
        "malloc_4096": entry(block, aligned256=not address % 256, aligned512=not address % 512),
        "malloc_0": entry(nothing, ptr=nothing[1]),
        "malloc_huge_1<<60": entry(cudart.cudaMalloc(1 << 60)),
        "malloc_sizemax": entry(cudart.cudaMalloc((1 << 64) - 1)),
        "mallocManaged_0": entry(cudart.cudaMallocManaged(0, 1)),
        "hostAlloc_0": entry(host_nothing, ptr=host_nothing[1]),
        "free_null": entry(cudart.cudaFree(0)),
        "freeHost_null": entry(cudart.cudaFreeHost(0)),
    }
    return answers | {"free": entry(cudart.cudaFree(address))}


def copies(lab: Lab) -> Answers:
    device, copy, memset = lab.device(N), cudart.cudaMemcpy, cudart.cudaMemset
    data, back = lab.pattern(N + 1), lab.pageable(N + 1)
    host, to = data.ctypes.data, back.ctypes.data
    answers = {
        "memcpy_size0_H2D": copy(device, host, 0, H2D),
        "memcpy_size0_null_null": copy(0, 0, 0, H2D),
        "memcpy_size0_null_dst_H2D": copy(0, host, 0, H2D),
        "memcpy_size0_bad_ptrs_H2D": copy(GARBAGE, GARBAGE, 0, H2D),
        "memset_size0_null": memset(0, 0, 0),
        "memcpy_H2D": copy(device, host, N, H2D),
        "memcpy_D2H": copy(to, device, N, D2H),
    }
    equal = bool((back[:N] == data[:N]).all())
    answers |= {f"memcpy_kind_{kind}": copy(device, host, N, kind) for kind in (-1, 5, 99)}
    answers |= {
        "memcpy_default_h2d": copy(device, host, N, ANY),
        "memcpy_default_d2h": copy(to, device, N, ANY),
        "memcpy_default_h2h": copy(to, host, N, ANY),
        "memcpy_null_src": copy(device, 0, N, H2D),
        "memcpy_null_dst": copy(0, host, N, H2D),
        "memcpy_interior_odd": copy(device + 1, host + 3, 1001, H2D),
        "memcpy_last_byte": copy(device + N - 1, host, 1, H2D),
        "memcpy_H2D_oob_by_1": copy(device, host, N + 1, H2D),
        "memcpy_D2H_oob_by_1": copy(to, device, N + 1, D2H),
        "sync_after_oob": cudart.cudaDeviceSynchronize(),
        "memcpy_D2D_overlap": copy(device + 1, device, N - 1, D2D),
        "memcpy_D2D_same": copy(device, device, N, D2D),
    }
    sizes = (N + 1, 2 << 20, (2 << 20) + 1, 1 << 30)
    answers |= {f"memset_oob_len{size}": memset(device, 0, size) for size in sizes}
    entries = {name: entry(answer) for name, answer in answers.items()}
    entries["memcpy_D2H"]["equal"] = equal
    return entries


def wrong_kinds(lab: Lab) -> Answers:
    """The recording ran each in a process of its own and noted how that ended."""
    first, second = lab.device(N), lab.device(N)
    one, two = lab.pageable(N), lab.pageable(N)
    host, other = one.ctypes.data, two.ctypes.data
    copy = cudart.cudaMemcpy
    answers = {
        "D2H_but_h2d": copy(first, host, N, D2H),
        "H2D_but_d2h": copy(host, first, N, H2D),
        "D2D_two_hosts": copy(host, other, N, D2D),
        "H2H_src_device": copy(host, first, N, H2H),
        "H2H_dst_device": copy(first, host, N, H2H),
        "H2D_two_hosts": copy(host, other, N, H2D),
        "D2H_two_devices": copy(first, second, N, D2H),
    }
    return {f"wrongkind_{k}": {"exit": 0, "rc": str(code(v))} for k, v in answers.items()}


def attributes(lab: Lab) -> Answers:
    device = lab.device(GRANULE)  # ends on a granule, as the recorded block did
    pinned, host = lab.ok(cudart.cudaHostAlloc(64, 0)), lab.pageable(64).ctypes.data

    def ask(address: int) -> Answers:
        answer = cudart.cudaPointerGetAttributes(address)
        found = answer[1]
        device_pointer, host_pointer = int(found.devicePointer), int(found.hostPointer)
        return entry(
            answer,
            type=int(found.type),
            device=found.device,
            dptr_is_p=device_pointer == address and address != 0,
            hptr_is_p=host_pointer == address and address != 0,
            dptr_null=not device_pointer,
            hptr_null=not host_pointer,
        )

    shown = cudart.cudaHostGetFlags(pinned)
    return {
        "attrs_device_base": ask(device),
        "attrs_device_interior": ask(device + 100),
        "attrs_device_end": ask(device + GRANULE),
        "attrs_host_unregistered": ask(host),
        "attrs_null": ask(0),
        "attrs_garbage": ask(GARBAGE),
        "hostAlloc_64": entry((cudart.cudaError_t.cudaSuccess, pinned)),
        "attrs_pinned": ask(pinned),
        "attrs_pinned_interior": ask(pinned + 17),
        "hostGetFlags_of_0": entry(shown, flags=shown[1]),
        "free_of_pinned": entry(cudart.cudaFree(pinned)),
        "hostUnregister_of_hostAlloc": entry(cudart.cudaHostUnregister(pinned)),
        "freeHost_interior": entry(cudart.cudaFreeHost(pinned + 1)),
        "freeHost": entry(cudart.cudaFreeHost(pinned)),
        "freeHost_twice": entry(cudart.cudaFreeHost(pinned)),
    }


def registration(lab: Lab) -> Answers:
    whole = np.zeros(1 << 18, np.uint8)
    host = whole.ctypes.data + 123
    return {
        "hostRegister_unaligned": entry(cudart.cudaHostRegister(host, 100_000, 0)),
        "hostRegister_overlap": entry(cudart.cudaHostRegister(host, 100_000, 0)),
        "hostUnregister_interior": entry(cudart.cudaHostUnregister(host + 4096)),
        "hostUnregister": entry(cudart.cudaHostUnregister(host)),
        "hostUnregister_twice": entry(cudart.cudaHostUnregister(host)),
        "hostRegister_size0": entry(cudart.cudaHostRegister(host, 0, 0)),
    }


def frees(lab: Lab) -> Answers:
    device, host = lab.ok(cudart.cudaMalloc(N)), lab.pageable(N).ctypes.data
    answers = {
        "free_interior": entry(cudart.cudaFree(device + 256)),
        "free_host_ptr": entry(cudart.cudaFree(host)),
        "free_garbage": entry(cudart.cudaFree(GARBAGE)),
    }
    lab.ok(cudart.cudaFree(device))
    return answers | {
        "free_twice": entry(cudart.cudaFree(device)),
        "memcpy_D2H_after_free": entry(cudart.cudaMemcpy(host, device, N, D2H)),
        "memcpy_H2D_after_free": entry(cudart.cudaMemcpy(device, host, N, H2D)),
        "sync_after_uaf": entry(cudart.cudaDeviceSynchronize()),
    }


def last_errors(lab: Lab) -> Answers:
    def get() -> int:
        return int(cudart.cudaGetLastError()[0])

    cudart.cudaMemcpy(0, 0, 1, H2D)
    peek = int(cudart.cudaPeekAtLastError()[0])
    answers: Answers = {"last_error_protocol": {"peek": peek, "get1": get(), "get2": get()}}
    cudart.cudaMalloc(1 << 60)
    answers["last_error_after_oom"] = get()
    lab.ok(cudart.cudaStreamQuery(0))
    return answers | {"last_error_after_streamQuery_ok": get()}


def streams_and_events(lab: Lab) -> Answers:
    stream = cudart.cudaStreamCreate()
    start, end = lab.event(), lab.event()
    answers = {
        "streamCreate": entry(stream, value=ORACLE["streamCreate"]["value"]),  # any address
        "eventQuery_unrecorded": entry(cudart.cudaEventQuery(start)),
        "eventElapsed_unrecorded": entry(cudart.cudaEventElapsedTime(start, end)),
    }
    assert int(stream[1]) > 2
    for event in (start, end):
        lab.ok(cudart.cudaEventRecord(event, stream[1]))
    lab.ok(cudart.cudaStreamSynchronize(stream[1]))
    elapsed = cudart.cudaEventElapsedTime(start, end)
    answers["eventElapsed"] = entry(elapsed, ge0=elapsed[1] >= 0)
    lab.ok(cudart.cudaStreamDestroy(stream[1]))
    for handle in (0, 1, 2):
        answers[f"streamQuery_special_{handle}"] = entry(cudart.cudaStreamQuery(handle))
        answers[f"streamDestroy_special_{handle}"] = entry(cudart.cudaStreamDestroy(handle))
    return answers


def asynchronous_copies(lab: Lab) -> Answers:
    """The recorded copies were large enough to be still running; here they come behind work."""
    device, stream = lab.device(N), lab.stream()
    pageable, pinned = lab.pageable(N).ctypes.data, lab.pinned(N).ctypes.data

    def query_after(to: int, source: int, kind: Any) -> int:
        lab.ok(cudart.cudaMemcpyAsync(to, source, N, kind, stream))
        return lab.query(stream)

    seen = {
        "async_pageable_H2D": query_after(device, pageable, H2D),
        "async_pageable_D2H": query_after(pageable, device, D2H),
    }
    for name, to, source, kind in (
        ("async_pinned_H2D", device, pinned, H2D),
        ("async_pinned_D2H", pinned, device, D2H),
    ):
        seen[name] = lab.while_busy(stream, lambda a=to, b=source, k=kind: query_after(a, b, k))
    return {name: {"query_after": query} for name, query in seen.items()}


def test_every_entry_of_the_oracle(lab: Lab) -> None:
    seen: Answers = {}
    for group in (
        devices_and_allocation,
        copies,
        wrong_kinds,
        attributes,
        registration,
        frees,
        last_errors,
        streams_and_events,
        asynchronous_copies,
    ):
        answers = group(lab)
        assert not seen.keys() & answers.keys()
        seen |= answers
    seen["getDeviceCount"]["value"] = min(seen["getDeviceCount"]["value"], 1)  # one at least
    # A backend's CUDA may be newer than the one that was recorded; 13 is what the names are of.
    version = seen["runtimeGetVersion"]["value"]
    seen["runtimeGetVersion"]["value"] = version // 1000 * 1000
    compare(seen, ORACLE)


# --- cudart-h100-13.0-streams.json ---

LEGACY, LEGACY_BY_NAME, PER_THREAD, NON_BLOCKING = 0, 1, 2, 1


def queries(lab: Lab) -> Answers:
    blocking, other, free = lab.stream(), lab.stream(), lab.stream(NON_BLOCKING)
    special = (LEGACY, LEGACY_BY_NAME, PER_THREAD)

    def while_busy(busy: Any, asked: tuple[Any, ...]) -> list[int]:
        return [0, *lab.while_busy(busy, lambda: [lab.query(stream) for stream in asked])]

    return {
        "query0_while_blocking_busy": while_busy(blocking, (*special, blocking, other, free)),
        "query_while_legacy_busy": while_busy(LEGACY, (*special, blocking, free)),
        "query_while_perthread_busy": while_busy(PER_THREAD, (*special, blocking, free)),
        "query_while_nonblocking_busy": while_busy(free, (LEGACY, blocking, free)),
    }


def waits(lab: Lab) -> Answers:
    blocking, free = lab.stream(), lab.stream(NON_BLOCKING)
    device, source, back = lab.device(N), lab.pageable(N), lab.pageable(N)
    pinned, other = lab.pinned(N).ctypes.data, lab.pinned(N).ctypes.data
    host, to = source.ctypes.data, back.ctypes.data
    copy, copy_async = cudart.cudaMemcpy, cudart.cudaMemcpyAsync

    def query_after(busy: Any, call: Callable[[], Answer]) -> int:
        """0 when the call has waited for the busy stream, 600 when not."""
        wanted: list[Answer] = []
        waited = lab.waits(busy, lambda: wanted.append(call()))
        assert {code(answer) for answer in wanted} == {0}
        return 0 if waited else NOT_READY

    def free_new() -> Answer:
        return tuple(cudart.cudaFree(lab.device(N)))

    def free_host_new() -> Answer:
        return tuple(cudart.cudaFreeHost(lab.pinned(N).ctypes.data))

    def passes(busy: Any, call: Callable[[], Answer]) -> int:
        """As query_after; only for calls that must not wait, whatever the work's length."""
        assert lab.while_busy(busy, lambda: code(call())) == 0
        return NOT_READY

    cases: dict[str, tuple[Any, Callable[[], Answer]]] = {
        "sync0_waits_for_blocking": (blocking, lambda: cudart.cudaStreamSynchronize(LEGACY)),
        "sync0_waits_for_nonblocking": (free, lambda: cudart.cudaStreamSynchronize(LEGACY)),
        "syncb_waits_for_legacy": (LEGACY, lambda: cudart.cudaStreamSynchronize(blocking)),
        "memcpy_waits_for_blocking": (blocking, lambda: copy(device, pinned, N, H2D)),
        "memcpy_waits_for_nonblocking": (free, lambda: copy(device, pinned, N, H2D)),
        "free_waits_for_nonblocking": (free, free_new),
        "freehost_waits_for_nonblocking": (free, free_host_new),
        "memset_pinned_waits_blocking": (blocking, lambda: cudart.cudaMemset(pinned, 0, N)),
        "h2h_pageable_waits_blocking": (blocking, lambda: copy(to, host, N, H2H)),
        "h2h_pinned_waits_blocking": (blocking, lambda: copy(pinned, host, N, H2H)),
        "h2d_pageable_waits_blocking": (blocking, lambda: copy(device, host, N, H2D)),
        "h2h_async_waits_stream": (
            blocking,
            lambda: copy_async(other, host, N, H2H, blocking),
        ),
        "h2d_async_pageable_waits_stream": (
            blocking,
            lambda: copy_async(device, host, N, H2D, blocking),
        ),
    }
    seen: Answers = {}
    for name, (busy, call) in cases.items():
        must_wait = DEVIATIONS.get(name, STREAMS[name][-1]) == 0
        seen[name] = (query_after if must_wait else passes)(busy, call)

    def memset() -> int:
        lab.ok(cudart.cudaMemset(device, 0, N))
        lab.ok(cudart.cudaStreamSynchronize(LEGACY))
        return lab.query(LEGACY)

    seen["memset_device"] = lab.while_busy(free, memset)
    return seen


def stream_destruction(lab: Lab) -> Answers:
    stream = lab.ok(cudart.cudaStreamCreate())
    lab.while_busy(stream, lambda: None)
    lab.ok(cudart.cudaStreamDestroy(stream))

    def destroy() -> int:
        doomed = lab.ok(cudart.cudaStreamCreate())
        lab.ok(cudart.cudaStreamWaitEvent(doomed, gate, 0))
        return code(cudart.cudaStreamDestroy(doomed))

    gate, busy = lab.event(), lab.stream()

    def gated() -> int:
        lab.ok(cudart.cudaEventRecord(gate, busy))
        return destroy()

    return {"streamDestroy_busy": lab.while_busy(busy, gated)}


def event_corners(lab: Lab) -> Answers:
    start, end, untimed, stream = lab.event(), lab.event(), lab.event(2), lab.stream()
    elapsed = cudart.cudaEventElapsedTime
    for event in (start, untimed):
        lab.ok(cudart.cudaEventRecord(event, LEGACY))
    lab.ok(cudart.cudaDeviceSynchronize())
    answers: Answers = {"event_elapsed_disabled": code(elapsed(start, untimed))}

    def not_ready() -> int:
        lab.ok(cudart.cudaEventRecord(end, stream))
        return code(elapsed(start, end))

    answers["event_elapsed_notready"] = lab.while_busy(stream, not_ready)

    def busy_event() -> list[Any]:
        record = [code(cudart.cudaEventRecord(start, stream))]
        return [0, record, code(cudart.cudaEventQuery(start))]

    seen = lab.while_busy(stream, busy_event)
    seen += [code(cudart.cudaEventSynchronize(start)), code(cudart.cudaEventQuery(start))]
    answers["event_query_busy"] = seen

    def last_error() -> list[int]:
        query = int(cudart.cudaStreamQuery(stream)[0])
        return [0, query, int(cudart.cudaPeekAtLastError()[0]), int(cudart.cudaGetLastError()[0])]

    answers["lasterror_after_notready"] = lab.while_busy(stream, last_error)
    answers |= {
        "event_sync_unrecorded": code(cudart.cudaEventSynchronize(lab.event())),
        "wait_unrecorded": code(cudart.cudaStreamWaitEvent(stream, lab.event(), 0)),
        "wait_flags_7": code(cudart.cudaStreamWaitEvent(stream, start, 7)),
        "record_other_flags": code(cudart.cudaEventRecordWithFlags(start, stream, 0)),
    }
    lab.ok(cudart.cudaDeviceSynchronize())
    return answers | {"elapsed_same": str(elapsed(start, start))}


def creation(lab: Lab) -> Answers:
    def stream(flags: int) -> int:
        answer = cudart.cudaStreamCreateWithFlags(flags)
        if not int(answer[0]):
            lab.ok(cudart.cudaStreamDestroy(answer[1]))
        return code(answer)

    def event(flags: int) -> int:
        answer = cudart.cudaEventCreateWithFlags(flags)
        if not int(answer[0]):
            lab.ok(cudart.cudaEventDestroy(answer[1]))
        return code(answer)

    def priority(value: int) -> list[int]:
        answer = cudart.cudaStreamCreateWithPriority(1, value)
        shown = int(lab.ok(cudart.cudaStreamGetPriority(answer[1])))
        lab.ok(cudart.cudaStreamDestroy(answer[1]))
        return [code(answer), shown]

    blocking, free = lab.stream(), lab.stream(NON_BLOCKING)
    every = (blocking, free, LEGACY, LEGACY_BY_NAME, PER_THREAD)
    return {
        "eventCreate_flags": {f: event(int(f)) for f in STREAMS["eventCreate_flags"]},
        "streamCreate_flags": {f: stream(int(f)) for f in STREAMS["streamCreate_flags"]},
        "streamPrio_range": [str(value) for value in _range()],
        "streamCreate_prio": {p: priority(int(p)) for p in STREAMS["streamCreate_prio"]},
        "getFlags": [int(lab.ok(cudart.cudaStreamGetFlags(stream))) for stream in every],
        "getPriority": [int(lab.ok(cudart.cudaStreamGetPriority(stream))) for stream in every],
        "streamCreate_type": f"{type(blocking)}{type(lab.event())}",
    }


def _range() -> list[str]:
    error, least, greatest = cudart.cudaDeviceGetStreamPriorityRange()
    return [repr(error), str(least), str(greatest)]


def registrations(lab: Lab) -> Answers:
    memory, device = lab.registered(1 << 17), lab.device(N)
    host, pinned = memory.ctypes.data, lab.pinned(N).ctypes.data
    lab.ok(cudart.cudaHostUnregister(host))

    def flags(value: int) -> list[int]:
        registered = code(cudart.cudaHostRegister(host, 65_536, value))
        return [registered, code(cudart.cudaHostUnregister(host))]

    answers: Answers = {
        "hostRegister_flags": {f: flags(int(f)) for f in STREAMS["hostRegister_flags"]},
        "hostRegister_null": code(cudart.cudaHostRegister(0, 4096, 0)),
        "hostUnregister_null": code(cudart.cudaHostUnregister(0)),
        "hostRegister_of_hostAlloc": code(cudart.cudaHostRegister(pinned, 4096, 0)),
        "hostRegister_of_device": code(cudart.cudaHostRegister(device, 4096, 0)),
    }
    for value in (5, 6):
        error, address = cudart.cudaHostAlloc(64, value)
        shown = int(lab.ok(cudart.cudaHostGetFlags(address)))
        lab.ok(cudart.cudaFreeHost(address))
        answers[f"hostAlloc_flags_{value}"] = [int(error), shown]
    lab.ok(cudart.cudaHostRegister(host, 65_536, 0))
    found = lab.ok(cudart.cudaPointerGetAttributes(host + 5))
    shown = cudart.cudaHostGetFlags(host)
    same = [int(found.devicePointer) == host + 5, int(found.hostPointer) == host + 5]
    answers["registered"] = [
        [repr(found.type), found.device, *same],
        [repr(shown[0]), str(shown[1])],
        code(cudart.cudaFreeHost(host)),
        code(cudart.cudaMemset(host, 1, 16)),
        code(cudart.cudaMemcpy(device, host + 65_530, 4096, H2D)),
        code(cudart.cudaMemcpy(device, host + 65_530, 2048, ANY)),
        code(cudart.cudaMemcpy(device, host + 70_000, 2048, ANY)),
    ]
    lab.ok(cudart.cudaHostUnregister(host))
    return answers


def device_questions(lab: Lab) -> Answers:
    count = lab.ok(cudart.cudaGetDeviceCount())
    warp = cudart.cudaDeviceAttr.cudaDevAttrWarpSize
    good, short = cudart.cudaDeviceGetPCIBusId(32, 0), cudart.cudaDeviceGetPCIBusId(5, 0)
    return {
        "pci": [_without_address(str(good)), str(short)],
        "pci_bad": [str(cudart.cudaDeviceGetPCIBusId(32, count + 8))],
        "attr_bad": [
            str(cudart.cudaDeviceGetAttribute(warp, count + 8)),
            str(cudart.cudaDeviceGetAttribute(9999, 0)),
        ],
        "canaccess": [
            str(cudart.cudaDeviceCanAccessPeer(0, 0)),
            str(cudart.cudaDeviceCanAccessPeer(0, count + 4)),
        ],
        "props_bad": [repr(value) for value in cudart.cudaGetDeviceProperties(count + 6)],
    }


def _without_address(text: str) -> str:
    """A bus id's own digits are the machine's; their number and the padding are CUDA's."""
    return re.sub(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", "BUS", text)


def nothing(lab: Lab) -> Answers:
    return {
        "async_size0_badstream": code(cudart.cudaMemcpyAsync(0, 0, 0, H2D, 0)),
        "memsetasync_size0": code(cudart.cudaMemsetAsync(0, 0, 0, 0)),
    }


def reset(lab: Lab) -> Answers:
    block = lab.ok(cudart.cudaMalloc(N))
    lab.ok(cudart.cudaStreamCreate())
    answers = (cudart.cudaDeviceReset(), cudart.cudaFree(block), cudart.cudaMalloc(N))
    return {"reset": [code(answer) for answer in answers]}


def recorded_streams() -> Answers:
    """The recording, with times dropped and what is the machine's own made comparable."""
    recorded = {name: value for name, value in STREAMS.items() if name != "machine"}
    for name, value in recorded.items():
        if isinstance(value, list) and value and isinstance(value[0], float):
            recorded[name] = value[-1]
    text, *codes = recorded["registered"]
    fields = dict(re.findall(r"(\w+) : (.+)", text))
    same = fields["devicePointer"] == fields["hostPointer"]
    recorded["registered"] = [[fields["type"], int(fields["device"]), same, same], *codes]
    recorded["pci"] = [_without_address(text) for text in recorded["pci"]]
    return recorded


def test_every_entry_about_streams(lab: Lab) -> None:
    seen: Answers = {}
    for group in (
        queries,
        waits,
        stream_destruction,
        event_corners,
        creation,
        registrations,
        device_questions,
        nothing,
    ):
        seen |= group(lab)
    lab.clean_up()
    # A reset ends all of the above; the lab's own blocks are gone with it.
    seen |= reset(lab)
    compare(seen, recorded_streams())
