# SPDX-License-Identifier: Apache-2.0
"""Every message between a frontend and a backend, declared once.

Every command carries an ``id`` that the frontend counts up from 1 and gets exactly one `Result`
with that id. Sizes, offsets and addresses are in bytes. ``index`` is an offset into the session's
window: window address = base + index, on both sides. ``stream`` is a number that the frontend
minted, or below `FIRST_STREAM` the legacy default stream of a device. A command with a stream is
answered when the stream has reached it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from flyt.rpc.codec import (
    U8,
    U32,
    U64,
    Flag,
    Numbers,
    Runs,
    Text,
    Token,
    Vocabulary,
)
from flyt.rpc.greetings import (
    HELLOS as HELLOS,
)
from flyt.rpc.greetings import (
    WELCOMES as WELCOMES,
)
from flyt.rpc.greetings import (
    AskStatus as AskStatus,
)
from flyt.rpc.greetings import (
    Hello as Hello,
)
from flyt.rpc.greetings import (
    Refused as Refused,
)
from flyt.rpc.greetings import (
    StatusReport as StatusReport,
)
from flyt.rpc.greetings import (
    Welcome as Welcome,
)

PROTOCOL_VERSION = 1

KICK = b""
"""A message without content, either way: the ring has something for a side that went to sleep."""


class Status(IntEnum):
    """Answers that are no cudaError_t (those are below 10,000); never shown to applications."""

    ADDRESS_TAKEN = 0x1_0001
    """The worker has something else at that address; the frontend picks another."""
    FRAMES_REFUSED = 0x1_0002
    """Values: the frames that belong to another session or don't exist."""
    PROOF_FAILED = 0x1_0003
    """The word in the control page is not the one sent: no memory is shared."""
    PROTOCOL = 0x1_0004
    """The command breaks the protocol; the session ends. The text says how."""


# --- commands of a session, on its own socket ----------------------------------------------


@dataclass(slots=True)
class Attach:
    """Binds the connection to the session. With ``inline`` there is no window, all else is 0."""

    id: U64
    token: Token = field(repr=False)
    inline: Flag
    base: U64
    reserve: U64
    """Length of the address range reserved at ``base``; the window lives inside it."""
    table: Runs
    """Page table: frame runs for virtual pages 0, 1, 2, …; page 0 is the control page, the
    rest is the staging area (one registration)."""
    proof: U64
    """The word that the frontend wrote to the control page. Result values: [the backend's word,
    whether the session's doorbell has rung]."""
    ring: Flag = False
    """After the answer, which says success, all commands and replies go by the rings in the control
    page (`Feature.RING`)."""


@dataclass(slots=True)
class Grow:
    """Maps frames at virtual page ``vpn`` as one segment and registers it as a whole."""

    id: U64
    vpn: U64
    table: Runs


@dataclass(slots=True)
class Shrink:
    """Gives back the segment that starts at virtual page ``vpn``."""

    id: U64
    vpn: U64


@dataclass(slots=True)
class Malloc:
    """Values: [device address]. ``taken`` names the block of the answer before, whose address the
    frontend could not reserve: it is kept aside; 0 otherwise."""

    id: U64
    device: U32
    size: U64
    taken: U64


@dataclass(slots=True)
class Free:
    id: U64
    address: U64


@dataclass(slots=True)
class CopyIn:
    """Window to device."""

    id: U64
    address: U64
    index: U64
    size: U64
    pid: U32
    stream: U64 = 0


@dataclass(slots=True)
class CopyOut:
    """Device to window."""

    id: U64
    address: U64
    index: U64
    size: U64
    pid: U32
    stream: U64 = 0


@dataclass(slots=True)
class CopyOn:
    """Device to device."""

    id: U64
    destination: U64
    source: U64
    size: U64
    stream: U64 = 0


@dataclass(slots=True)
class Push:
    """Inline host to device: the bytes are the message's second frame."""

    id: U64
    address: U64
    size: U64
    stream: U64 = 0


@dataclass(slots=True)
class Pull:
    """Inline device to host: the bytes are the second frame of the Result."""

    id: U64
    address: U64
    size: U64
    stream: U64 = 0


@dataclass(slots=True)
class Memset:
    id: U64
    address: U64
    value: U8
    size: U64
    stream: U64 = 0


@dataclass(slots=True)
class StreamCreate:
    """The frontend mints the number, from `FIRST_STREAM` up, so that creating is a post."""

    id: U64
    stream: U64
    device: U32
    flags: U32
    urgency: U32
    """cudaStreamCreateWithPriority's priority, with the sign turned: 0 is the lowest."""


@dataclass(slots=True)
class StreamDestroy:
    id: U64
    stream: U64


@dataclass(slots=True)
class StreamWait:
    """Work put on ``stream`` from now on waits for the last record of ``event``."""

    id: U64
    stream: U64
    event: U64


@dataclass(slots=True)
class EventCreate:
    id: U64
    event: U64
    device: U32
    flags: U32


@dataclass(slots=True)
class EventDestroy:
    id: U64
    event: U64


@dataclass(slots=True)
class EventRecord:
    """Answered when the event is reached: so a query of it needs no message."""

    id: U64
    event: U64
    stream: U64


@dataclass(slots=True)
class Elapsed:
    """Values: [the bits of a 32-bit float, milliseconds]."""

    id: U64
    start: U64
    end: U64


@dataclass(slots=True)
class MemInfo:
    """Values: [free, total]."""

    id: U64
    device: U32


@dataclass(slots=True)
class Ping:
    id: U64


@dataclass(slots=True)
class Bye:
    """The last word of a client that leaves in order."""

    id: U64


COMMAND_CODES = {
    1: Attach,
    2: Grow,
    3: Shrink,
    4: Malloc,
    5: Free,
    6: CopyIn,
    7: CopyOut,
    8: CopyOn,
    9: Push,
    10: Pull,
    11: Memset,
    12: MemInfo,
    13: StreamCreate,
    14: Ping,
    15: Bye,
    16: StreamDestroy,
    17: StreamWait,
    18: EventCreate,
    19: EventDestroy,
    20: EventRecord,
    21: Elapsed,
}


# --- answers of a session ------------------------------------------------------------------


@dataclass(slots=True)
class Result:
    """The one answer to command ``id``."""

    id: U64
    status: U32
    """A cudaError_t, or a `Status`."""
    taken: U64
    """How many commands of the session were taken so far: each gives its credit back."""
    values: Numbers
    text: Text
    """For people: why it failed."""


@dataclass(slots=True)
class Done:
    """Answers the commands from ``first`` on, ``count`` of them: success, with no values."""

    taken: U64
    first: U64
    count: U32


@dataclass(slots=True)
class Credit:
    """Gives credits back when many commands were taken and none has finished."""

    taken: U64


@dataclass(slots=True)
class Sticky:
    """The worker's last word: its context is gone with this cudaError_t."""

    code: U32
    text: Text


REPLY_CODES = {1: Result, 2: Credit, 3: Sticky, 4: Done}

COMMANDS = Vocabulary("the client", COMMAND_CODES)
REPLIES = Vocabulary("the backend", REPLY_CODES)

FIRST_STREAM = 256
"""Numbers below name the legacy default stream of the device with that ordinal."""

CREDITS = 224
"""Commands a client may have on their way and not yet taken: bounds what one client can queue.
Fewer than the places of a ring: a ping costs none."""

INLINE_CHUNK = 1 << 20
"""Bytes of one inline payload; below it per-message costs show, above it latency of others."""
