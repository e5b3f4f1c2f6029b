# SPDX-License-Identifier: Apache-2.0
"""Who can talk to whom: versions and features, agreed on by one pure function."""

from __future__ import annotations

import dataclasses
from enum import IntEnum

import msgpack

from flyt.errors import HandshakeError
from flyt.rpc.messages import PROTOCOL_VERSION, Hello

LONGEST_HELLO = 4096
"""Bytes; no version of the protocol will say more before it knows the other's."""


class Feature(IntEnum):
    """What a side may add within one protocol version. A side ignores numbers it doesn't know."""

    REGION = 1
    """Payloads through the shared-memory region."""
    INLINE = 2
    """Payloads inline on the session's socket."""
    RING = 3
    """Commands and replies through rings in the session's control page."""
    STAYS = 4
    """The client keeps the connection of its HELLO until its ATTACH was answered, so that its death
    in between is seen."""
    DOORBELL = 5
    """The backend is woken by an ivshmem doorbell (with `RING`)."""
    KERNELS = 16
    """Modules, launches, compilation (`flyt.rpc.kernel_commands`)."""


_WAYS = frozenset({Feature.REGION, Feature.INLINE})


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """What one side speaks. ``who`` is for the error message: "frontend" or "backend"."""

    who: str
    version: int
    features: frozenset[int]


def offer(who: str, *, ring: bool, doorbell: bool = False) -> Offer:
    """What this version speaks; ``ring``: whether this installation has what rings need;
    ``doorbell``: whether there is one."""
    has = {Feature.RING: ring, Feature.DOORBELL: ring and doorbell}
    features = frozenset(f for f in Feature if has.get(f, True))
    return Offer(who, PROTOCOL_VERSION, features)


def negotiate(local: Offer, remote: Offer) -> frozenset[Feature]:
    """The features both sides have.

    Raises
    ------
    HandshakeError
        When the versions differ; names both and which side to upgrade.
    """
    if local.version != remote.version:
        old, new = sorted((local, remote), key=lambda offer: offer.version)
        raise HandshakeError(
            f"the {local.who} speaks Flyt protocol {local.version}, "
            f"the {remote.who} protocol {remote.version}: "
            f"upgrade the {old.who} to the version of the {new.who}"
        )
    shared = frozenset(f for f in Feature if f in local.features and f in remote.features)
    if not shared & _WAYS:
        raise HandshakeError(
            f"{local.who} and {remote.who} share no way to move bytes; upgrade the older one"
        )
    return shared


def offer_of(hello: Hello) -> Offer:
    """The offer in a decoded HELLO."""
    return Offer("frontend", hello.version, frozenset(hello.features))


def foreign_version(data: bytes) -> int | None:
    """The version of a HELLO that this version can't decode; None if it is no HELLO at all.

    Every version of the protocol starts a HELLO with [1, version, …].
    """
    if len(data) > LONGEST_HELLO:
        return None
    try:
        items = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, MemoryError):
        return None
    match items:
        case [1, int(version), *_] if version != PROTOCOL_VERSION:
            return version
    return None
