# SPDX-License-Identifier: Apache-2.0
"""What a session does with streams and events."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flyt.errors import DeviceError
from flyt.rpc import messages as m

if TYPE_CHECKING:
    from flyt.backend.session import Session

MAX_GATES = 256
"""Host functions of one session that have begun or are to begin; each holds a word of memory."""

EVENT_FLAGS = 0b11
"""cudaEventBlockingSync and DisableTiming reach the device; Interprocess means nothing to it."""


def stream_create(session: Session, command: m.StreamCreate, _: list[bytes]) -> None:
    streams = session.holdings.streams
    device = streams.device(command.device)
    streams.create(command.stream, device, command.flags, -command.urgency)
    session.answer(command.id)


def stream_destroy(session: Session, command: m.StreamDestroy, _: list[bytes]) -> None:
    stream = session.holdings.streams.remove(command.stream)

    def done(code: int) -> None:
        try:
            session.holdings.streams.part(stream)
        except DeviceError as exc:
            session.fail(command.id, exc)
            return
        if code:
            session.fail(command.id, DeviceError(code, "work of a destroyed stream failed"))
        else:
            session.answer(command.id)

    session.holdings.when_done([stream], done)


def stream_wait(session: Session, command: m.StreamWait, _: list[bytes]) -> None:
    streams = session.holdings.streams
    stream = streams.get(command.stream)
    streams.wait_event(stream, command.event)
    session.complete(command.id, [stream])


def event_create(session: Session, command: m.EventCreate, _: list[bytes]) -> None:
    streams = session.holdings.streams
    device = streams.device(command.device)
    streams.create_event(command.event, device, command.flags & EVENT_FLAGS)
    session.answer(command.id)


def event_destroy(session: Session, command: m.EventDestroy, _: list[bytes]) -> None:
    session.holdings.streams.destroy_event(command.event)
    session.answer(command.id)


def event_record(session: Session, command: m.EventRecord, _: list[bytes]) -> None:
    streams = session.holdings.streams
    stream = streams.get(command.stream)
    device, event = streams.event(command.event)
    if device is not stream.device:
        raise DeviceError(400, "an event can only be recorded on a stream of its own device")
    device.record(event, streams.use(stream))
    session.complete(command.id, [stream])
    streams.recorded(command.event, stream)


def elapsed(session: Session, command: m.Elapsed, _: list[bytes]) -> None:
    streams = session.holdings.streams
    (device, start), (other, end) = streams.event(command.start), streams.event(command.end)
    if device is not other:
        raise DeviceError(400, "the two events belong to different devices")
    milliseconds = struct.pack("<f", device.elapsed(start, end))
    session.answer(command.id, 0, [int.from_bytes(milliseconds, "little")])


def host_call(session: Session, command: m.HostCall, _: list[bytes]) -> None:
    holdings = session.holdings
    stream = holdings.streams.get(command.stream)
    if len(holdings.gates) >= MAX_GATES:
        raise DeviceError(2, f"{MAX_GATES} host functions of the session wait for their return")
    failed = 0

    def reached(code: int) -> None:
        if code or failed:
            session.fail(command.id, DeviceError(code or failed, "work before a host function"))
        else:
            session.answer(command.id)

    handle = holdings.streams.use(stream)
    holdings.when_done([stream], reached)  # the mark comes before the gate
    try:
        holdings.gates[command.id] = (stream.device, stream.device.gate(handle))
    except DeviceError as exc:
        failed = exc.code


def host_return(session: Session, command: m.HostReturn, _: list[bytes]) -> None:
    gate = session.holdings.gates.pop(command.call, None)
    if gate is not None:  # else there was none to be had, and the call has said so
        device, handle = gate
        device.open_gate(handle)
    session.answer(command.id)


def passed(session: Session, command: m.Passed, _: list[bytes]) -> None:
    session.complete(command.id, [session.holdings.streams.get(command.stream)])


HANDLERS: dict[type, Callable[[Any, Any, list[bytes]], None]] = {
    m.StreamCreate: stream_create,
    m.StreamDestroy: stream_destroy,
    m.StreamWait: stream_wait,
    m.EventCreate: event_create,
    m.EventDestroy: event_destroy,
    m.EventRecord: event_record,
    m.Elapsed: elapsed,
    m.HostCall: host_call,
    m.HostReturn: host_return,
    m.Passed: passed,
}
