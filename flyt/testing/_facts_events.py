# SPDX-License-Identifier: Apache-2.0
"""Facts about events: what they capture, when they are ready, and the time between two."""

from __future__ import annotations

from cuda.bindings.runtime import cudaEvent_t

from flyt.testing._facts import Facts
from flyt.testing._lab import INVALID_HANDLE, INVALID_VALUE, LEGACY, NON_BLOCKING, NOT_READY, Lab

FACTS = Facts("events")

DISABLE_TIMING = 2
GOOD_FLAGS = (0, 1, 2, 3)
"""cudaEventBlockingSync and DisableTiming; Interprocess depends on the system."""

BAD_FLAGS = (4, 8, 16)
"""Interprocess without DisableTiming, and flags that there are not."""

N = 4096


def _query(lab: Lab, event: object) -> int:
    return int(lab.rt.cudaEventQuery(event)[0])


@FACTS.fact("cudaEventCreateWithFlags: the flags that there are, and no others")
def flags(lab: Lab) -> None:
    plain = lab.ok(lab.rt.cudaEventCreate())
    lab.same(isinstance(plain, cudaEvent_t), True, "a cudaEvent_t from cudaEventCreate")
    lab.ok(lab.rt.cudaEventDestroy(plain))
    for value in GOOD_FLAGS:
        lab.event(value)
    for value in BAD_FLAGS:
        lab.refused(lab.rt.cudaEventCreateWithFlags(value), INVALID_VALUE, f"flags {value}")


@FACTS.fact("cudaEventQuery: an event that was never recorded is ready")
def unrecorded_events_are_ready(lab: Lab) -> None:
    event, stream = lab.event(), lab.stream()
    lab.same(_query(lab, event), 0, "cudaEventQuery")
    lab.ok(lab.rt.cudaEventSynchronize(event))
    lab.ok(lab.rt.cudaStreamWaitEvent(stream, event, 0))
    lab.same(lab.query(stream), 0, "a stream that waits for it")


@FACTS.fact("cudaEventQuery: cudaErrorNotReady until the captured work is done, then success")
def query_tells_whether_work_is_done(lab: Lab) -> None:
    event, stream = lab.event(), lab.stream()

    def observe() -> tuple[int, int]:
        return int(lab.rt.cudaEventRecord(event, stream)[0]), _query(lab, event)

    lab.same(lab.while_busy(stream, observe), (0, NOT_READY), "record, query")
    lab.same(_query(lab, event), 0, "after cudaDeviceSynchronize")


@FACTS.fact("cudaEventSynchronize: waits for the captured work")
def synchronize_waits(lab: Lab) -> None:
    for flag in GOOD_FLAGS:
        event, stream = lab.event(flag), lab.stream()

        def record_and_wait(event: object = event, stream: object = stream) -> None:
            lab.ok(lab.rt.cudaEventRecord(event, stream))
            lab.ok(lab.rt.cudaEventSynchronize(event))

        lab.same(lab.waits(stream, record_and_wait), True, f"waiting, flags {flag}")
        lab.same(_query(lab, event), 0, "the event")


@FACTS.fact("cudaEventRecord: captures the work before it, not what comes after")
def later_work_is_not_captured(lab: Lab) -> None:
    event, stream = lab.event(), lab.stream()
    lab.ok(lab.rt.cudaEventRecord(event, stream))
    lab.ok(lab.rt.cudaStreamSynchronize(stream))

    def observe() -> tuple[int, int, int]:
        return _query(lab, event), int(lab.rt.cudaEventSynchronize(event)[0]), lab.query(stream)

    lab.same(lab.while_busy(stream, observe), (0, 0, NOT_READY), "query, synchronize, the stream")


@FACTS.fact("cudaEventRecord: recording again replaces what was captured")
def recording_again_replaces(lab: Lab) -> None:
    event, busy, idle = lab.event(), lab.stream(NON_BLOCKING), lab.stream(NON_BLOCKING)

    def observe() -> tuple[int, int]:
        lab.ok(lab.rt.cudaEventRecord(event, busy))
        first = _query(lab, event)
        lab.ok(lab.rt.cudaEventRecord(event, idle))
        lab.ok(lab.rt.cudaEventSynchronize(event))
        return first, _query(lab, event)

    lab.same(lab.while_busy(busy, observe), (NOT_READY, 0), "on the busy, then on the idle stream")


@FACTS.fact("cudaStreamWaitEvent: what was captured when it is called, whatever is recorded later")
def a_wait_keeps_what_was_captured(lab: Lab) -> None:
    event, busy, idle = lab.event(), lab.stream(NON_BLOCKING), lab.stream(NON_BLOCKING)
    waiting = lab.stream(NON_BLOCKING)

    def observe() -> int:
        lab.ok(lab.rt.cudaEventRecord(event, idle))
        lab.ok(lab.rt.cudaEventSynchronize(event))
        lab.ok(lab.rt.cudaStreamWaitEvent(waiting, event, 0))
        lab.ok(lab.rt.cudaEventRecord(event, busy))
        return int(lab.rt.cudaStreamSynchronize(waiting)[0])

    lab.same(lab.while_busy(busy, observe), 0, "the stream that waited for the first record")


@FACTS.fact("recorded: cudaStreamWaitEvent takes no unknown flags")
def flags_of_a_wait(lab: Lab) -> None:
    event, stream = lab.event(), lab.stream()
    lab.refused(lab.rt.cudaStreamWaitEvent(stream, event, 7), INVALID_VALUE, "flags 7")
    lab.ok(lab.rt.cudaStreamWaitEvent(stream, event, 0))


@FACTS.fact("cudaEventRecordWithFlags: cudaEventRecordDefault is cudaEventRecord")
def recording_with_flags(lab: Lab) -> None:
    event, stream = lab.event(), lab.stream()
    lab.ok(lab.rt.cudaEventRecordWithFlags(event, stream, 0))
    lab.ok(lab.rt.cudaEventSynchronize(event))
    lab.same(_query(lab, event), 0, "the event")


@FACTS.fact("cudaEventRecord: on the legacy stream it captures the blocking streams' work")
def recording_on_the_legacy_stream(lab: Lab) -> None:
    event, stream = lab.event(), lab.stream()

    def observe() -> int:
        lab.ok(lab.rt.cudaEventRecord(event, LEGACY))
        return _query(lab, event)

    lab.same(lab.while_busy(stream, observe), NOT_READY, "the event")


@FACTS.fact("cudaEventElapsedTime: cudaErrorInvalidResourceHandle unless both were recorded")
def elapsed_needs_two_records(lab: Lab) -> None:
    start, end = lab.event(), lab.event()
    elapsed = lab.rt.cudaEventElapsedTime
    lab.refused(elapsed(start, end), INVALID_HANDLE, "neither recorded")
    lab.ok(lab.rt.cudaEventRecord(start, LEGACY))
    lab.refused(elapsed(start, end), INVALID_HANDLE, "the end not recorded")
    lab.refused(elapsed(end, start), INVALID_HANDLE, "the start not recorded")


@FACTS.fact("cudaEventElapsedTime: cudaErrorInvalidResourceHandle where timing is disabled")
def elapsed_needs_timing(lab: Lab) -> None:
    start, end = lab.event(), lab.event(DISABLE_TIMING)
    for event in (start, end):
        lab.ok(lab.rt.cudaEventRecord(event, LEGACY))
    lab.ok(lab.rt.cudaDeviceSynchronize())
    lab.refused(lab.rt.cudaEventElapsedTime(start, end), INVALID_HANDLE, "end without timing")
    lab.refused(lab.rt.cudaEventElapsedTime(end, start), INVALID_HANDLE, "start without timing")


@FACTS.fact("cudaEventElapsedTime: cudaErrorNotReady before both events are done")
def elapsed_needs_done_events(lab: Lab) -> None:
    start, end, stream = lab.event(), lab.event(), lab.stream()
    lab.ok(lab.rt.cudaEventRecord(start, stream))

    def observe() -> int:
        lab.ok(lab.rt.cudaEventRecord(end, stream))
        return int(lab.rt.cudaEventElapsedTime(start, end)[0])

    lab.same(lab.while_busy(stream, observe), NOT_READY, "the code while the stream is busy")
    elapsed = float(lab.ok(lab.rt.cudaEventElapsedTime(start, end)))
    lab.same(elapsed > 0, True, "milliseconds that the work took, above 0")


@FACTS.fact("recorded: no time passes between an event and itself")
def elapsed_of_one_event(lab: Lab) -> None:
    event = lab.event()
    lab.ok(lab.rt.cudaEventRecord(event, LEGACY))
    lab.ok(lab.rt.cudaDeviceSynchronize())
    lab.same(float(lab.ok(lab.rt.cudaEventElapsedTime(event, event))), 0.0, "milliseconds")


@FACTS.fact("cudaEventElapsedTime: longer work between two events takes longer, whatever the unit")
def elapsed_is_between_the_records(lab: Lab) -> None:
    stream = lab.stream()
    first, second, third = (lab.event() for _ in range(3))
    device = lab.device(N)
    for event in (first, second, third):
        lab.ok(lab.rt.cudaEventRecord(event, stream))
        lab.ok(lab.rt.cudaMemsetAsync(device, 1, N, stream))
    lab.ok(lab.rt.cudaStreamSynchronize(stream))
    between = lab.ok(lab.rt.cudaEventElapsedTime(first, second))
    whole = lab.ok(lab.rt.cudaEventElapsedTime(first, third))
    lab.same(0 <= between <= whole, True, f"0 <= {between} <= {whole}")


@FACTS.fact("cudaEventDestroy: an event that is not ready yet may be destroyed")
def destroying_a_pending_event(lab: Lab) -> None:
    stream = lab.stream()

    def observe() -> int:
        event = lab.ok(lab.rt.cudaEventCreate())
        lab.ok(lab.rt.cudaEventRecord(event, stream))
        return int(lab.rt.cudaEventDestroy(event)[0])

    lab.same(lab.while_busy(stream, observe), 0, "cudaEventDestroy")


@FACTS.fact("event arguments are cudaEvent_t or their integers")
def handles_are_integers_too(lab: Lab) -> None:
    event, stream = lab.event(), lab.stream()
    lab.ok(lab.rt.cudaEventRecord(int(event), int(stream)))
    lab.ok(lab.rt.cudaEventSynchronize(int(event)))
    lab.same(_query(lab, int(event)), 0, "the event")
