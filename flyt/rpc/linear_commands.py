# SPDX-License-Identifier: Apache-2.0
"""Commands about rows of memory, stream-ordered memory, pools, and memory that clients share.

What all commands share is told in `flyt.rpc.messages`. ``pool`` is a number that the frontend
minted, or below `FIRST_STREAM` the default pool of the device with that ordinal.
"""

from __future__ import annotations

from enum import IntEnum

from flyt.rpc.codec import U8, U32, U64, Token, message


class Way(IntEnum):
    """Which side of a `CopyRows` is an index of the window instead of an address."""

    IN = 0
    """The source: from the window to the device."""
    OUT = 1
    """The destination: from the device to the window."""
    ON = 2
    """Neither: on the device."""


@message
class CopyRows:
    """``height`` rows of ``width`` bytes; a pitch is how far one row's start is from the next's."""

    id: U64
    way: U8
    destination: U64
    destination_pitch: U64
    source: U64
    source_pitch: U64
    width: U64
    height: U64
    pid: U32
    stream: U64 = 0


@message
class PushRows:
    """`Push` of rows: packed in the message's second frame."""

    id: U64
    address: U64
    pitch: U64
    width: U64
    height: U64
    stream: U64 = 0


@message
class PullRows:
    """`Pull` of rows: packed in the second frame of the Result."""

    id: U64
    address: U64
    pitch: U64
    width: U64
    height: U64
    stream: U64 = 0


@message
class FillRows:
    id: U64
    address: U64
    pitch: U64
    value: U8
    width: U64
    height: U64
    stream: U64 = 0


@message
class MallocAsync:
    """Values: [device address], at once; ``taken`` as in `Malloc`."""

    id: U64
    pool: U64
    size: U64
    taken: U64
    stream: U64 = 0


@message
class FreeAsync:
    id: U64
    address: U64
    stream: U64 = 0


@message
class PoolCreate:
    """``limit``: bytes that all its blocks together may have; 0 means no limit."""

    id: U64
    pool: U64
    device: U32
    limit: U64


@message
class PoolDestroy:
    """Its blocks stay until they are freed."""

    id: U64
    pool: U64


@message
class PoolTrim:
    id: U64
    pool: U64
    keep: U64


@message
class PoolGet:
    """Values: [the attribute]; a cudaMemPoolAttr from 1 to 8."""

    id: U64
    pool: U64
    attribute: U32


@message
class PoolSet:
    id: U64
    pool: U64
    attribute: U32
    value: U64


@message
class ShareMemory:
    """Values: [the two halves of a token, little-endian], with which other sessions of the worker
    open the block that starts at ``address``."""

    id: U64
    address: U64


@message
class OpenMemory:
    """Values: [address, size, device]."""

    id: U64
    token: Token


@message
class CloseMemory:
    id: U64
    address: U64


@message
class ShareEvent:
    """Values: as `ShareMemory`'s."""

    id: U64
    event: U64


@message
class OpenEvent:
    """Gives the event behind a token this session's number ``event``. Values: [device]."""

    id: U64
    event: U64
    token: Token


@message
class EventQuery:
    """Values: [1 if the event is reached, whoever recorded it, else 0]."""

    id: U64
    event: U64


LINEAR_CODES = {
    64: CopyRows,
    65: PushRows,
    66: PullRows,
    67: FillRows,
    68: MallocAsync,
    69: FreeAsync,
    70: PoolCreate,
    71: PoolDestroy,
    72: PoolTrim,
    73: PoolGet,
    74: PoolSet,
    75: ShareMemory,
    76: OpenMemory,
    77: CloseMemory,
    78: ShareEvent,
    79: OpenEvent,
    80: EventQuery,
}
