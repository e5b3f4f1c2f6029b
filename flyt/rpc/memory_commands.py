# SPDX-License-Identifier: Apache-2.0
"""Commands about device memory: allocations and copies.

Sizes, offsets and addresses are in bytes; what all commands share is told in `flyt.rpc.messages`.
"""

from __future__ import annotations

from flyt.rpc.codec import U8, U32, U64, message


@message
class Malloc:
    """Values: [device address]. ``taken`` names the block of the answer before, whose address the
    frontend could not reserve: it is kept aside; 0 otherwise."""

    id: U64
    device: U32
    size: U64
    taken: U64


@message
class Free:
    id: U64
    address: U64


@message
class CopyIn:
    """Window to device."""

    id: U64
    address: U64
    index: U64
    size: U64
    pid: U32
    stream: U64 = 0


@message
class CopyOut:
    """Device to window."""

    id: U64
    address: U64
    index: U64
    size: U64
    pid: U32
    stream: U64 = 0


@message
class CopyOn:
    """Device to device."""

    id: U64
    destination: U64
    source: U64
    size: U64
    stream: U64 = 0


@message
class Push:
    """Inline host to device: the bytes are the message's second frame."""

    id: U64
    address: U64
    size: U64
    stream: U64 = 0


@message
class Pull:
    """Inline device to host: the bytes are the second frame of the Result."""

    id: U64
    address: U64
    size: U64
    stream: U64 = 0


@message
class Memset:
    id: U64
    address: U64
    value: U8
    size: U64
    stream: U64 = 0


@message
class MemInfo:
    """Values: [free, total]."""

    id: U64
    device: U32
