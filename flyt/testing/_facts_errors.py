# SPDX-License-Identifier: Apache-2.0
"""Facts about errors: the last error of a thread, codes and names, and what an error spoils."""

from __future__ import annotations

from cuda.bindings.runtime import cudaError_t

from flyt.testing._facts import Facts
from flyt.testing._lab import D2H, H2D, INVALID_VALUE, NOT_READY, OUT_OF_MEMORY, Lab

FACTS = Facts("errors")

INVALID_DEVICE = int(cudaError_t.cudaErrorInvalidDevice)


def _last(lab: Lab) -> int:
    return int(lab.rt.cudaGetLastError()[0])


def _peek(lab: Lab) -> int:
    return int(lab.rt.cudaPeekAtLastError()[0])


def _fail(lab: Lab) -> None:
    lab.same(int(lab.rt.cudaMemcpy(0, 0, 1, H2D)[0]), INVALID_VALUE, "a copy from NULL to NULL")


@FACTS.fact("cudaGetLastError resets the error, cudaPeekAtLastError does not")
def peek_leaves_and_get_takes(lab: Lab) -> None:
    _fail(lab)
    seen = (_peek(lab), _peek(lab), _last(lab), _last(lab), _peek(lab))
    lab.same(
        seen, (INVALID_VALUE, INVALID_VALUE, INVALID_VALUE, 0, 0), "peek, peek, get, get, peek"
    )


@FACTS.fact("cudaGetLastError: a later success does not clear the error")
def success_keeps_the_last_error(lab: Lab) -> None:
    device = lab.device(16)
    _fail(lab)
    lab.ok(lab.rt.cudaMemset(device, 0, 16))
    lab.ok(lab.rt.cudaDeviceSynchronize())
    lab.same(_last(lab), INVALID_VALUE, "the last error after a success")


@FACTS.fact("cudaGetLastError: the last of several errors")
def the_last_error_counts(lab: Lab) -> None:
    _fail(lab)
    lab.rt.cudaMalloc(1 << 60)
    lab.same((_last(lab), _last(lab)), (OUT_OF_MEMORY, 0), "the last error, twice")


@FACTS.fact("recorded: cudaErrorNotReady is an answer, not an error that is kept")
def not_ready_is_not_kept(lab: Lab) -> None:
    stream, event = lab.stream(), lab.event()
    lab.rt.cudaGetLastError()

    def observe() -> tuple[int, ...]:
        lab.ok(lab.rt.cudaEventRecord(event, stream))
        queries = (lab.query(stream), int(lab.rt.cudaEventQuery(event)[0]))
        return *queries, _peek(lab), _last(lab)

    seen = lab.while_busy(stream, observe)
    lab.same(seen, (NOT_READY, NOT_READY, 0, 0), "query stream, query event, peek, get")


@FACTS.fact("cudaGetLastError: an error is of the host thread that caused it")
def each_thread_has_its_own(lab: Lab) -> None:
    _fail(lab)

    def elsewhere() -> tuple[int, int]:
        before = _last(lab)
        lab.rt.cudaMalloc(1 << 60)
        return before, _peek(lab)

    lab.same(lab.in_thread(elsewhere), (0, OUT_OF_MEMORY), "before and after in another thread")
    lab.same(_last(lab), INVALID_VALUE, "the first thread's")


@FACTS.fact("recorded: a refused copy spoils nothing, what follows works")
def refused_calls_leave_the_device_usable(lab: Lab) -> None:
    device, data = lab.device(4096, 0), lab.pattern(4096)
    lab.refused(lab.rt.cudaMemcpy(device, data.ctypes.data, 4097, H2D), INVALID_VALUE)
    lab.ok(lab.rt.cudaDeviceSynchronize())
    lab.put(device, data)
    lab.same_bytes(lab.get(device, 4096), data, "the bytes copied next")


@FACTS.fact("cudaGetErrorName, cudaGetErrorString: the enumeration's name, and a text")
def codes_have_names(lab: Lab) -> None:
    for error in (cudaError_t.cudaSuccess, cudaError_t.cudaErrorInvalidValue):
        name = lab.ok(lab.rt.cudaGetErrorName(error))
        lab.same(bytes(name), error.name.encode(), f"the name of {int(error)}")
    text = lab.ok(lab.rt.cudaGetErrorString(cudaError_t.cudaErrorInvalidValue))
    lab.same(bytes(text), b"invalid argument", "the text of cudaErrorInvalidValue")


@FACTS.fact("cudaSetDevice: cudaErrorInvalidDevice for a device that is not there")
def devices_are_counted_from_0(lab: Lab) -> None:
    count, current = (int(lab.ok(f())) for f in (lab.rt.cudaGetDeviceCount, lab.rt.cudaGetDevice))
    for device in (-1, count, count + 98):
        lab.refused(lab.rt.cudaSetDevice(device), INVALID_DEVICE, f"cudaSetDevice({device})")
    lab.same(int(lab.ok(lab.rt.cudaGetDevice())), current, "the current device after refusals")
    lab.ok(lab.rt.cudaSetDevice(current))


@FACTS.fact("on failure the values beside the code are None (cuda.bindings)")
def failures_carry_no_values(lab: Lab) -> None:
    for answer in (
        lab.rt.cudaMalloc(1 << 60),
        lab.rt.cudaHostGetFlags(0),
        lab.rt.cudaStreamCreateWithFlags(2),
        lab.rt.cudaEventCreateWithFlags(4),
    ):
        lab.same(answer[1:], (None,), f"the values beside {answer[0]!r}")
    lab.same(len(lab.rt.cudaMemcpy(0, 0, 1, D2H)), 1, "the length of cudaMemcpy's answer")
    lab.rt.cudaGetLastError()
