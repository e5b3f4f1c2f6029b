# SPDX-License-Identifier: Apache-2.0
"""ATTACH: with a window where both sides share memory, else inline with a warning."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from flyt.errors import RegionError
from flyt.frontend.connection import Connection
from flyt.frontend.express_link import Area
from flyt.frontend.settings import Settings
from flyt.frontend.staging import StagingSlots
from flyt.frontend.staging_ring import (
    MIN_RING_BYTES,
    RING_BYTES,
    SHARE_OF_RING,
    SHARE_OF_STAGING,
    StagingRing,
)
from flyt.frontend.statistics import Statistics
from flyt.frontend.window_memory import WindowMemory
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.handshake import Feature
from flyt.shm import ivshmem, ring
from flyt.shm.doorbell import Doorbell
from flyt.shm.locks import FrameLocks
from flyt.shm.private import PRIVATE, OwnFrames, fetch
from flyt.shm.region import Region
from flyt.shm.runtime_dir import runtime_dir

WOKEN_BY_ZMQ = "a sleeping backend is woken over the network, which is slower"
"""What is lost without a doorbell, for the warning."""


class Attached(NamedTuple):
    """What a session works with; all None where payloads travel inline."""

    memory: WindowMemory | None = None
    slots: StagingSlots | None = None
    ring: StagingRing | None = None
    area: Area | None = None
    """The short way's, where there are rings."""
    doorbell: Doorbell | None = None
    """The connection's; to see how often it was rung."""


def attach(
    settings: Settings,
    endpoint: Endpoint,
    welcome: m.Welcome,
    connection: Connection,
    counts: Statistics,
) -> Attached:
    """Bind the connection to the session that WELCOME offers.

    Parameters
    ----------
    endpoint : Endpoint
        The daemon's, as it was dialled.
    counts : Statistics
        Counts and warns of each fallback.
    """
    try:
        region, bar = _region(settings, endpoint, welcome)
        with contextlib.ExitStack() as undo:
            undo.callback(region.close)
            locks = _locks(region, endpoint, welcome)
            undo.pop_all()
        memory = WindowMemory(region, welcome, locks)
        try:
            return _stage(memory, bar, settings, welcome, connection, counts)
        except BaseException:
            memory.close()
            raise
    except (RegionError, MemoryError) as exc:  # the latter: no addresses are left (RLIMIT_AS)
        counts.fallback("fallback_inline", f"payloads travel inline, which is slow: {exc}")
    connection.call(lambda number: m.Attach(number, welcome.token, True, 0, 0, (), 0))
    return Attached()


def _region(
    settings: Settings, endpoint: Endpoint, welcome: m.Welcome
) -> tuple[Region, ivshmem.Bar | None]:
    """The region as this process sees it: a file on the backend's host, a PCI device in a guest."""
    if not welcome.region:
        raise RegionError("the backend serves without a region")
    chosen = settings.region
    if welcome.region.startswith(PRIVATE):
        return _own_region(chosen, endpoint, welcome), None
    if not chosen and endpoint.is_loopback():
        return Region.open(welcome.region), None
    if chosen and not chosen.startswith(ivshmem.SCHEME):
        return Region.open(chosen), None
    if not chosen and not ivshmem.bars():
        raise RegionError(
            f"{endpoint} is another host, and this machine has no ivshmem device: add one "
            "(docs/deploy-vm.md), or set FLYT_REGION to the region's path here"
        )
    bar = ivshmem.find(chosen or ivshmem.SCHEME, welcome.region_size)
    return ivshmem.open_bar(bar), bar


def _own_region(chosen: str, endpoint: Endpoint, welcome: m.Welcome) -> Region:
    """The one that the backend has made for this client alone."""
    if chosen or endpoint.scheme != "ipc":
        raise RegionError(
            "this backend gives each client on its host a region of its own: unset FLYT_REGION, "
            "and use the ipc endpoint"
        )
    socket = os.path.basename(welcome.region.removeprefix(PRIVATE))
    path = os.path.join(os.path.dirname(endpoint.path), socket)
    fd = fetch(path, welcome.token, welcome.region_size)
    return Region(fd, welcome.region, welcome.region_size, created=False)


def _locks(region: Region, endpoint: Endpoint, welcome: m.Welcome) -> FrameLocks | OwnFrames:
    """The lock file that all processes which map this region share. On the backend's host it is the
    backend's; a guest has one of its own for all its processes."""
    if welcome.region.startswith(PRIVATE):
        return OwnFrames()
    mine = os.path.join(runtime_dir(), os.path.basename(welcome.lock_file))
    if region.path.startswith(ivshmem.SCHEME) or not endpoint.is_loopback():
        return FrameLocks(mine)
    # In a container the runtime folder may be mounted elsewhere.
    path = welcome.lock_file if os.path.exists(welcome.lock_file) else mine
    return FrameLocks(path, welcome.epoch)


def _doorbell(bar: ivshmem.Bar | None, welcome: m.Welcome, counts: Statistics) -> Doorbell | None:
    """The session's doorbell, where guest and backend have one."""
    if bar is None or not welcome.bell:
        return None
    try:
        return Doorbell(bar, welcome.bell)
    except RegionError as exc:
        counts.fallback("fallback_doorbell", f"{WOKEN_BY_ZMQ}: {exc}")
        return None


def _stage(
    memory: WindowMemory,
    bar: ivshmem.Bar | None,
    settings: Settings,
    welcome: m.Welcome,
    connection: Connection,
    counts: Statistics,
) -> Attached:
    """Attach with a window and cut its staging area into slots and a ring."""
    count, size = settings.staging(welcome.region_size, welcome.page_size)
    small = min(RING_BYTES, max(size, MIN_RING_BYTES))
    pages = max(2, -(-(count * size + small) // welcome.page_size))
    native = ring.usable() if Feature.RING in welcome.features else None
    doorbell = _doorbell(bar, welcome, counts) if native is not None else None
    with contextlib.ExitStack() as undo:
        if doorbell is not None:
            undo.callback(doorbell.close)
        base = memory.attach(connection, welcome.token, pages, native, doorbell)
        if memory.is_heard:
            undo.pop_all()  # it is the connection's
        elif doorbell is not None:
            doorbell = None
            counts.fallback(
                "fallback_doorbell",
                f"{WOKEN_BY_ZMQ}: it does not hear the doorbell. Has it been restarted since this "
                "guest's QEMU was started? QEMU connects once",
            )
    index, length = memory.staging
    if length < pages * welcome.page_size:
        counts.fallback(
            "fallback_small_staging",
            f"the region is nearly full: {length} bytes of staging instead of {count * size}",
        )
    small = min(small, length // SHARE_OF_STAGING // 4096 * 4096)
    length -= small
    slots = StagingSlots(base + index, index, length, count, size)
    index, length = index + length, small
    area = None
    if native is not None:
        length = small // SHARE_OF_RING // 4096 * 4096
        area = Area.over(base + index + length, index + length, small - length)
    return Attached(memory, slots, StagingRing(base + index, index, length), area, doorbell)
