# SPDX-License-Identifier: Apache-2.0
"""What a worker offers its sessions."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import zmq

from flyt.backend.blocks import Block
from flyt.backend.devices.base import Device, Handle
from flyt.backend.exports import Exports
from flyt.backend.images import ImageStore
from flyt.backend.prints import Prints
from flyt.backend.reaper import Activity, Reaper
from flyt.backend.registry import Registry
from flyt.rpc.keys import KeyPair
from flyt.shm.layout import Geometry


class OwnRegion:
    """A region that one session alone uses; owns the descriptor until `close`."""

    def __init__(self, fd: int, geometry: Geometry) -> None:
        self.region = (fd, geometry)

    def close(self) -> None:
        """Mappings stay."""
        os.close(self.region[0])


@dataclasses.dataclass(frozen=True, slots=True)
class Services:
    """One for all sessions of a worker."""

    context: zmq.Context[zmq.Socket[bytes]]
    devices: list[Device]
    region: tuple[int, Geometry] | None
    """Descriptor and geometry of the region; None when the backend serves without one."""
    registry: Registry
    reaper: Reaper
    activity: Activity
    heartbeat_ms: int
    bells: tuple[int, ...]
    """Eventfds that a guest's doorbell signals, one for each session that has a bell."""
    key: KeyPair | None
    """Of the sockets of TCP sessions; None when clients have no keys."""
    tell: Callable[[object], None]
    """Sends a message to the supervisor."""
    broken: Callable[[int, str], None]
    """The context is gone with this sticky code."""
    blocks: Exports[Block] = dataclasses.field(default_factory=Exports)
    events: Exports[tuple[Device, Handle]] = dataclasses.field(default_factory=Exports)
    """What the sessions share with each other."""
    images: ImageStore = dataclasses.field(default_factory=ImageStore)
    prints: Prints | None = None
    """Of a worker that serves one session alone."""

    def bell(self, number: int) -> int:
        """The eventfd of a session's bell; -1 for number 0, which stands for none."""
        return self.bells[number - 1] if number else -1
