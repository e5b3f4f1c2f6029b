# SPDX-License-Identifier: Apache-2.0
"""Events. Queries and waits send nothing: the answer to a record says that it is reached."""

from __future__ import annotations

from typing import Any

from cuda.bindings.runtime import cudaEvent_t

from flyt.errors import DeviceError
from flyt.frontend import current
from flyt.frontend.api.convention import INVALID_VALUE, Answer, cuda
from flyt.frontend.api.handles import event_of, number_of, stream_of
from flyt.frontend.current import thread
from flyt.frontend.hostmem import c_uint

_FLAGS = frozenset({0, 1, 2, 3, 6, 7})
"""BlockingSync 1, DisableTiming 2, Interprocess 4 only with 2 (read off an H100)."""


def _create(flags: int) -> Answer:
    session = current.current()
    session.connection.raise_deferred()
    if flags not in _FLAGS:
        raise DeviceError(INVALID_VALUE, f"cudaEventCreate knows no flags {flags:#x}")
    return (cudaEvent_t(session.scheduler.create_event(thread.device, flags).number),)


@cuda(1)
def cudaEventCreate() -> Answer:
    """A new event with timing on the current device."""
    return _create(0)


@cuda(1)
def cudaEventCreateWithFlags(flags: int) -> Answer:
    """A new event; cudaEventDisableTiming makes it unfit for cudaEventElapsedTime."""
    return _create(c_uint(flags))


@cuda(0)
def cudaEventDestroy(event: Any) -> Answer:
    """Destroy an event; what waits for it goes on waiting."""
    current.current().scheduler.destroy_event(number_of(event))
    return ()


@cuda(0)
def cudaEventRecord(event: Any, stream: Any) -> Answer:
    """Record an event behind what is on a stream now."""
    session = current.current()
    session.connection.raise_deferred()
    session.scheduler.record(event_of(session, event), stream_of(session, stream))
    return ()


@cuda(0)
def cudaEventRecordWithFlags(event: Any, stream: Any, flags: int) -> Answer:
    """`cudaEventRecord`; flags other than 0 have a meaning in graphs only."""
    flags, session = c_uint(flags), current.current()
    session.connection.raise_deferred()
    if flags:
        raise DeviceError(INVALID_VALUE, "cudaEventRecordWithFlags takes flags 0 outside of graphs")
    session.scheduler.record(event_of(session, event), stream_of(session, stream))
    return ()


@cuda(0)
def cudaEventQuery(event: Any) -> Answer:
    """cudaErrorNotReady until the last record is reached; success if there is none."""
    session = current.current()
    session.scheduler.query_event(event_of(session, event))
    return ()


@cuda(0)
def cudaEventSynchronize(event: Any) -> Answer:
    """Wait until the last record is reached."""
    session = current.current()
    session.scheduler.synchronize_event(event_of(session, event))
    return ()


@cuda(1)
def cudaEventElapsedTime(start: Any, end: Any) -> Answer:
    """Milliseconds between the last records of two events."""
    session = current.current()
    session.connection.raise_deferred()
    return (session.scheduler.elapsed(event_of(session, start), event_of(session, end)),)
