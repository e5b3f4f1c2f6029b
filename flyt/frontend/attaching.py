# SPDX-License-Identifier: Apache-2.0
"""ATTACH: with a window where both sides share memory, else inline with a warning."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from flyt.errors import RegionError
from flyt.frontend.connection import Connection
from flyt.frontend.settings import Settings
from flyt.frontend.staging import StagingSlots
from flyt.frontend.staging_ring import MIN_RING_BYTES, RING_BYTES, SHARE_OF_STAGING, StagingRing
from flyt.frontend.statistics import Statistics
from flyt.frontend.window_memory import WindowMemory
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.handshake import Feature
from flyt.shm import ivshmem, ring
from flyt.shm.locks import FrameLocks
from flyt.shm.region import Region
from flyt.shm.runtime_dir import runtime_dir


class Attached(NamedTuple):
    """What a session works with; all None where payloads travel inline."""

    memory: WindowMemory | None
    slots: StagingSlots | None
    ring: StagingRing | None


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
        region = _region(settings, endpoint, welcome)
        with contextlib.ExitStack() as undo:
            undo.callback(region.close)
            locks = _locks(region, endpoint, welcome)
            undo.pop_all()
        memory = WindowMemory(region, welcome, locks)
        try:
            return Attached(memory, *_stage(memory, settings, welcome, connection, counts))
        except BaseException:
            memory.close({})
            raise
    except RegionError as exc:
        counts.fallback("fallback_inline", f"payloads travel inline, which is slow: {exc}")
    connection.call(lambda number: m.Attach(number, welcome.token, True, 0, 0, (), 0))
    return Attached(None, None, None)


def _region(settings: Settings, endpoint: Endpoint, welcome: m.Welcome) -> Region:
    """The region as this process sees it: a file on the backend's host, a PCI device in a guest."""
    if not welcome.region:
        raise RegionError("the backend serves without a region")
    chosen = settings.region
    if not chosen and endpoint.is_loopback():
        return Region.open(welcome.region)
    if chosen and not chosen.startswith(ivshmem.SCHEME):
        return Region.open(chosen)
    if not chosen and not ivshmem.bars():
        raise RegionError(
            f"{endpoint} is another host, and this machine has no ivshmem device: add one "
            "(docs/deploy-vm.md), or set FLYT_REGION to the region's path here"
        )
    return ivshmem.open_bar(ivshmem.find(chosen or ivshmem.SCHEME, welcome.region_size))


def _locks(region: Region, endpoint: Endpoint, welcome: m.Welcome) -> FrameLocks:
    """The lock file that all processes which map this region share. On the backend's host it is the
    backend's; a guest has one of its own for all its processes."""
    mine = os.path.join(runtime_dir(), os.path.basename(welcome.lock_file))
    if region.path.startswith(ivshmem.SCHEME) or not endpoint.is_loopback():
        return FrameLocks(mine)
    # In a container the runtime folder may be mounted elsewhere.
    path = welcome.lock_file if os.path.exists(welcome.lock_file) else mine
    return FrameLocks(path, welcome.epoch)


def _stage(
    memory: WindowMemory,
    settings: Settings,
    welcome: m.Welcome,
    connection: Connection,
    counts: Statistics,
) -> tuple[StagingSlots, StagingRing]:
    """Attach with a window and cut its staging area into slots and a ring."""
    count, size = settings.staging(welcome.region_size, welcome.page_size)
    small = min(RING_BYTES, max(size, MIN_RING_BYTES))
    pages = max(2, -(-(count * size + small) // welcome.page_size))
    native = ring.usable() if Feature.RING in welcome.features else None
    base = memory.attach(connection, welcome.token, pages, native)
    index, length = memory.staging
    if length < pages * welcome.page_size:
        counts.fallback(
            "fallback_small_staging",
            f"the region is nearly full: {length} bytes of staging instead of {count * size}",
        )
    small = min(small, length // SHARE_OF_STAGING // 4096 * 4096)
    length -= small
    return (
        StagingSlots(base + index, index, length, count, size),
        StagingRing(base + index + length, index + length, small),
    )
