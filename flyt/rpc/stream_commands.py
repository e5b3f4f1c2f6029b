# SPDX-License-Identifier: Apache-2.0
"""Commands about streams and events.

What all commands share is told in `flyt.rpc.messages`.
"""

from __future__ import annotations

from flyt.rpc.codec import U32, U64, message

FIRST_STREAM = 256
"""Numbers below name the legacy default stream of the device with that ordinal."""

MAX_STREAMS = 4096
MAX_EVENTS = 65_536
"""What one session may have of each; programs with more have lost track of theirs. The frontend
keeps to it, so that the call that goes too far is the one that fails."""


@message
class StreamCreate:
    """The frontend mints the number, from `FIRST_STREAM` up, so that creating is a post."""

    id: U64
    stream: U64
    device: U32
    flags: U32
    urgency: U32
    """cudaStreamCreateWithPriority's priority, with the sign turned: 0 is the lowest."""


@message
class StreamDestroy:
    id: U64
    stream: U64


@message
class StreamWait:
    """Work put on ``stream`` from now on waits for the last record of ``event``."""

    id: U64
    stream: U64
    event: U64


@message
class EventCreate:
    id: U64
    event: U64
    device: U32
    flags: U32


@message
class EventDestroy:
    id: U64
    event: U64


@message
class EventRecord:
    """Answered when the event is reached: so a query of it needs no message."""

    id: U64
    event: U64
    stream: U64


@message
class Elapsed:
    """Values: [the bits of a 32-bit float, milliseconds]."""

    id: U64
    start: U64
    end: U64


@message
class HostCall:
    """Answered when the stream has reached it; the stream waits there for `HostReturn`."""

    id: U64
    stream: U64


@message
class HostReturn:
    """The function of `HostCall` number ``call`` has returned: its stream goes on."""

    id: U64
    call: U64


@message
class Passed:
    """Does nothing; answered when the stream has reached it."""

    id: U64
    stream: U64


HOST_CALL_CODES = {81: HostCall, 82: HostReturn, 83: Passed}
