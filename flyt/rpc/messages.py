# SPDX-License-Identifier: Apache-2.0
"""Every message between a frontend and a backend: its code, and what all have in common.

Every command carries an ``id`` that the frontend counts up from 1 and gets exactly one `Result`
with that id. Sizes, offsets and addresses are in bytes. ``index`` is an offset into the session's
window: window address = base + index, on both sides. ``stream`` is a number that the frontend
minted, or below `FIRST_STREAM` the legacy default stream of a device. A command with a stream is
answered when the stream has reached it.
"""

from __future__ import annotations

from dataclasses import field
from enum import IntEnum

from flyt.rpc.answers import Credit as Credit, Done as Done, Result as Result, Sticky as Sticky
from flyt.rpc.codec import U64, Flag, Runs, Token, Vocabulary, message
from flyt.rpc.greetings import (
    HELLOS as HELLOS,
    WELCOMES as WELCOMES,
    AskStatus as AskStatus,
    Hello as Hello,
    Refused as Refused,
    StatusReport as StatusReport,
    Welcome as Welcome,
)
from flyt.rpc.kernel_commands import (
    KERNEL_CODES as KERNEL_CODES,
    Compile as Compile,
    FunctionGet as FunctionGet,
    FunctionSet as FunctionSet,
    GlobalGet as GlobalGet,
    ImagePart as ImagePart,
    Launch as Launch,
    ModuleLoad as ModuleLoad,
    ModuleUnload as ModuleUnload,
    Occupancy as Occupancy,
    Printed as Printed,
    Reach as Reach,
)
from flyt.rpc.linear_commands import (
    LINEAR_CODES as LINEAR_CODES,
    CloseMemory as CloseMemory,
    CopyRows as CopyRows,
    EventQuery as EventQuery,
    FillRows as FillRows,
    FreeAsync as FreeAsync,
    MallocAsync as MallocAsync,
    OpenEvent as OpenEvent,
    OpenMemory as OpenMemory,
    PoolCreate as PoolCreate,
    PoolDestroy as PoolDestroy,
    PoolGet as PoolGet,
    PoolSet as PoolSet,
    PoolTrim as PoolTrim,
    PullRows as PullRows,
    PushRows as PushRows,
    ShareEvent as ShareEvent,
    ShareMemory as ShareMemory,
    Way as Way,
)
from flyt.rpc.memory_commands import (
    CopyIn as CopyIn,
    CopyOn as CopyOn,
    CopyOut as CopyOut,
    Free as Free,
    Malloc as Malloc,
    MemInfo as MemInfo,
    Memset as Memset,
    Pull as Pull,
    Push as Push,
)
from flyt.rpc.stream_commands import (
    FIRST_STREAM as FIRST_STREAM,
    HOST_CALL_CODES as HOST_CALL_CODES,
    MAX_EVENTS as MAX_EVENTS,
    MAX_STREAMS as MAX_STREAMS,
    Elapsed as Elapsed,
    EventCreate as EventCreate,
    EventDestroy as EventDestroy,
    EventRecord as EventRecord,
    HostCall as HostCall,
    HostReturn as HostReturn,
    Passed as Passed,
    StreamCreate as StreamCreate,
    StreamDestroy as StreamDestroy,
    StreamWait as StreamWait,
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
    UNKNOWN_IMAGE = 0x1_0005
    """The worker does not have the image; the frontend sends its parts and says it again."""


# --- commands of a session, on its own socket ----------------------------------------------


@message
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


@message
class Grow:
    """Maps frames at virtual page ``vpn`` as one segment and registers it as a whole."""

    id: U64
    vpn: U64
    table: Runs


@message
class Shrink:
    """Gives back the segment that starts at virtual page ``vpn``."""

    id: U64
    vpn: U64


@message
class Ping:
    id: U64


@message
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
    **LINEAR_CODES,
    **HOST_CALL_CODES,
    **KERNEL_CODES,
}


REPLY_CODES = {1: Result, 2: Credit, 3: Sticky, 4: Done}

COMMANDS = Vocabulary("the client", COMMAND_CODES)
REPLIES = Vocabulary("the backend", REPLY_CODES)

CREDITS = 224
"""Commands a client may have on their way and not yet taken: bounds what one client can queue.
Fewer than the places of a ring: a ping costs none."""

INLINE_CHUNK = 1 << 20
"""Bytes of one inline payload; below it per-message costs show, above it latency of others."""
