# SPDX-License-Identifier: Apache-2.0
"""Streams. Handles 0 and 1 are the legacy default stream, 2 the calling thread's own."""

from __future__ import annotations

from typing import Any

from cuda.bindings.runtime import cudaStream_t, cudaStreamCaptureStatus

from flyt.errors import DeviceError
from flyt.frontend import current
from flyt.frontend.api.convention import INVALID_VALUE, Answer, cuda
from flyt.frontend.api.handles import event_of, number_of, plain_number, stream_of
from flyt.frontend.current import thread
from flyt.frontend.hostmem import c_uint
from flyt.frontend.session import Session
from flyt.frontend.streams import NON_BLOCKING


def _range(session: Session, device: int) -> tuple[int, int]:
    least, greatest = session.devices[device]["stream_priorities"]
    return int(least), int(greatest)


def _create(flags: int, priority: int) -> Answer:
    session = current.current()
    session.connection.raise_deferred()
    if flags not in (0, NON_BLOCKING):
        raise DeviceError(INVALID_VALUE, f"cudaStreamCreate knows no flags {flags:#x}")
    least, greatest = _range(session, thread.device)
    clamped = max(greatest, min(least, priority))
    return (cudaStream_t(session.scheduler.create(thread.device, flags, clamped).number),)


@cuda(1)
def cudaStreamCreate() -> Answer:
    """A new stream on the current device, ordered with the legacy default stream."""
    return _create(0, 0)


@cuda(1)
def cudaStreamCreateWithFlags(flags: int) -> Answer:
    """A new stream; cudaStreamNonBlocking takes it out of the legacy stream's order."""
    return _create(c_uint(flags), 0)


@cuda(1)
def cudaStreamCreateWithPriority(flags: int, priority: int) -> Answer:
    """A new stream; a priority outside the device's range is clamped to it."""
    return _create(c_uint(flags), priority)


@cuda(2)
def cudaDeviceGetStreamPriorityRange() -> Answer:
    """The least and the greatest priority of the current device; greater is more negative."""
    return _range(current.current(), thread.device)


@cuda(0)
def cudaStreamDestroy(stream: Any) -> Answer:
    """Destroy a stream: returns at once, its work is finished all the same."""
    current.current().scheduler.destroy(number_of(stream))
    return ()


@cuda(0)
def cudaStreamSynchronize(stream: Any) -> Answer:
    """Wait for a stream; for the legacy stream, also for those that it waits for."""
    express = current.express()
    if express is not None and express.synchronize(plain_number(stream), thread.device):
        return ()
    session = current.current()
    session.scheduler.synchronize(stream_of(session, stream))
    return ()


@cuda(0)
def cudaStreamQuery(stream: Any) -> Answer:
    """cudaErrorNotReady while the stream is busy; that is no last error. Sends nothing."""
    session = current.current()
    session.scheduler.query(stream_of(session, stream))
    return ()


@cuda(0)
def cudaStreamWaitEvent(stream: Any, event: Any, flags: int) -> Answer:
    """Make later work on a stream wait for the last record of an event."""
    flags, session = c_uint(flags), current.current()
    session.connection.raise_deferred()
    if flags:
        raise DeviceError(INVALID_VALUE, "cudaStreamWaitEvent takes flags 0 outside of graphs")
    session.scheduler.wait_event(stream_of(session, stream), event_of(session, event))
    return ()


@cuda(1)
def cudaStreamGetFlags(hStream: Any) -> Answer:
    """The flags a stream was made with; 0 for the default streams."""
    return (stream_of(current.current(), hStream).flags,)


@cuda(1)
def cudaStreamGetPriority(hStream: Any) -> Answer:
    """The priority of a stream, after clamping; 0 for the default streams."""
    return (stream_of(current.current(), hStream).priority,)


@cuda(1)
def cudaStreamIsCapturing(stream: Any) -> Answer:
    """No stream is ever captured: cudaStreamCaptureStatusNone."""
    stream_of(current.current(), stream)
    return (cudaStreamCaptureStatus.cudaStreamCaptureStatusNone,)
