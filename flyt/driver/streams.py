# SPDX-License-Identifier: Apache-2.0
"""Streams and events."""

from __future__ import annotations

from typing import Any

from cuda.bindings.driver import CUdevice, CUevent, CUstream

from flyt.driver.contexts import handle_of, in_context
from flyt.driver.convention import Answer, core, driver
from flyt.frontend.api import events, streams
from flyt.frontend.api.handles import stream_of


@driver
def cuStreamCreate(Flags: int) -> Answer:
    """A new stream; CU_STREAM_NON_BLOCKING takes it out of the legacy stream's order."""
    in_context()
    return (CUstream(int(core(streams.cudaStreamCreateWithFlags)(Flags)[0])),)


@driver
def cuStreamCreateWithPriority(flags: int, priority: int) -> Answer:
    """A new stream; a priority outside the device's range is clamped to it."""
    in_context()
    made = core(streams.cudaStreamCreateWithPriority)(flags, priority)[0]
    return (CUstream(int(made)),)


@driver
def cuStreamDestroy(hStream: Any) -> Answer:
    """Destroy a stream; its work is finished all the same."""
    in_context()
    return core(streams.cudaStreamDestroy)(hStream)


@driver
def cuStreamSynchronize(hStream: Any) -> Answer:
    """Wait for a stream."""
    in_context()
    return core(streams.cudaStreamSynchronize)(hStream)


@driver
def cuStreamQuery(hStream: Any) -> Answer:
    """CUDA_ERROR_NOT_READY while the stream is busy."""
    in_context()
    return core(streams.cudaStreamQuery)(hStream)


@driver
def cuStreamWaitEvent(hStream: Any, hEvent: Any, Flags: int) -> Answer:
    """Make later work wait for the last record of an event."""
    in_context()
    return core(streams.cudaStreamWaitEvent)(hStream, hEvent, Flags)


@driver
def cuStreamGetFlags(hStream: Any) -> Answer:
    """The flags a stream was made with."""
    in_context()
    return core(streams.cudaStreamGetFlags)(hStream)


@driver
def cuStreamGetPriority(hStream: Any) -> Answer:
    """The priority of a stream, after clamping."""
    in_context()
    return core(streams.cudaStreamGetPriority)(hStream)


@driver
def cuStreamGetCtx(hStream: Any) -> Answer:
    """The context of a stream."""
    return (handle_of(stream_of(in_context(), hStream).device),)


@driver
def cuStreamGetDevice(hStream: Any) -> Answer:
    """The device of a stream."""
    return (CUdevice(stream_of(in_context(), hStream).device),)


@driver
def cuStreamGetId(hStream: Any) -> Answer:
    """A number of the stream's own."""
    return (stream_of(in_context(), hStream).number,)


@driver
def cuEventCreate(Flags: int) -> Answer:
    """A new event."""
    in_context()
    return (CUevent(int(core(events.cudaEventCreateWithFlags)(Flags)[0])),)


@driver
def cuEventDestroy(hEvent: Any) -> Answer:
    """Destroy an event; what waits for it goes on waiting."""
    in_context()
    return core(events.cudaEventDestroy)(hEvent)


@driver
def cuEventRecord(hEvent: Any, hStream: Any) -> Answer:
    """Record an event behind what is on a stream now."""
    in_context()
    return core(events.cudaEventRecord)(hEvent, hStream)


@driver
def cuEventRecordWithFlags(hEvent: Any, hStream: Any, flags: int) -> Answer:
    """`cuEventRecord`; flags have a meaning in graphs only."""
    in_context()
    return core(events.cudaEventRecordWithFlags)(hEvent, hStream, flags)


@driver
def cuEventQuery(hEvent: Any) -> Answer:
    """CUDA_ERROR_NOT_READY until the last record is reached."""
    in_context()
    return core(events.cudaEventQuery)(hEvent)


@driver
def cuEventSynchronize(hEvent: Any) -> Answer:
    """Wait until the last record is reached."""
    in_context()
    return core(events.cudaEventSynchronize)(hEvent)


@driver
def cuEventElapsedTime(hStart: Any, hEnd: Any) -> Answer:
    """Milliseconds between the last records of two events."""
    in_context()
    return core(events.cudaEventElapsedTime)(hStart, hEnd)
