# SPDX-License-Identifier: Apache-2.0
"""The keeper: the process that formats the region and zeroes the frames of the dead.

It maps the whole region and touches every byte, so a truncated file kills it (SIGBUS) and not the
supervisor. It holds no CUDA context and knows nothing of sessions.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import mmap
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

from flyt.backend.channel import Channel, ChannelClosed
from flyt.backend.orders import (
    FROM_KEEPER,
    TO_KEEPER,
    Format,
    Formatted,
    Free,
    Leave,
    Owned,
    Reclaim,
    Reclaimed,
    Spare,
    Sweep,
)
from flyt.errors import FlytError, RegionError
from flyt.shm import memory, runs as frame_runs
from flyt.shm.layout import FrameState, Geometry
from flyt.shm.runs import Run
from flyt.shm.table import FrameTable

log = logging.getLogger(__name__)

REPORT_LIMIT = 200_000
"""Frames in one report: 14 bytes each stay below the 4 MiB of a message."""


class Orphaned(FlytError):
    """The supervisor is gone."""


class Keeper:
    """The region, mapped.

    Parameters
    ----------
    fd : int
        The region; stays the caller's.
    geometry : Geometry
        How the supervisor cut it.
    parent : int
        A pidfd: when its process ends, so does any work here.
    """

    def __init__(self, fd: int, geometry: Geometry, parent: int) -> None:
        self._geometry = geometry
        self._table = FrameTable(fd, geometry.size, geometry)
        self._map = mmap.mmap(fd, geometry.size)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self._base = ctypes.addressof(self._anchor)
        self._parent = select.poll()
        self._parent.register(parent, select.POLLIN)
        self._spared: set[int] = set()

    def spare(self, runs: Sequence[Run]) -> None:
        """Leave these frames as they are at the format."""
        frame_runs.check(runs, self._geometry.page_count)
        self._spared.update(frame_runs.frames_of(runs))

    def format(self, epoch: int, zeroed: bool) -> None:
        """Zero all frames (unless the file is new, so that they are), then free them at once."""
        if not zeroed:
            for frame in range(self._geometry.page_count):
                if frame not in self._spared:
                    self._zero(frame)
        self._table.format(self._geometry, epoch, self._spared)

    def reclaim(self, runs: Sequence[Run]) -> None:
        """Quarantine and zero these frames, whatever the table says about them."""
        frame_runs.check(runs, self._geometry.page_count)
        for frame in frame_runs.frames_of(runs):
            self._table.set_state(frame, FrameState.QUARANTINED)
            self._zero(frame)

    def free(self, runs: Sequence[Run]) -> None:
        """Set frames FREE that were reclaimed, and that the ledger has let go of."""
        frame_runs.check(runs, self._geometry.page_count)
        for frame in frame_runs.frames_of(runs):
            if self._table.state(frame) == FrameState.QUARANTINED:
                self._table.set_state(frame, FrameState.FREE)

    def report(self) -> Owned:
        """The first `REPORT_LIMIT` frames that are not FREE, forged states among them."""
        entries = self._table.snapshot()[:REPORT_LIMIT]
        return Owned(tuple(e.frame for e in entries), tuple(e.session for e in entries))

    def _zero(self, frame: int) -> None:
        if self._parent.poll(0):
            raise Orphaned("the supervisor is gone")
        memory.fill(self._base + self._geometry.offset(frame), 0, self._geometry.page_size)


def serve(keeper: Keeper, channel: Channel, parent: int, zeroed: bool) -> int:
    """Obey until told to leave; returns the exit status."""
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    poller.register(parent, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        if parent in ready:
            return 1
        for order in channel.messages():
            match order:
                case Spare():
                    keeper.spare(order.frames)
                case Format():
                    channel.send(Formatted(_format(keeper, order.epoch, zeroed)))
                case Reclaim():
                    keeper.reclaim(order.frames)
                    channel.send(Reclaimed(0, order.request))
                case Free():
                    keeper.free(order.frames)
                case Sweep():
                    channel.send(keeper.report())
                case Leave():
                    return 0
        if channel.closed:
            return 1


def _format(keeper: Keeper, epoch: int, zeroed: bool) -> str:
    try:
        keeper.format(epoch, zeroed)
    except RegionError as exc:
        return str(exc)
    return ""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Flyt's keeper; started by flyt-backend only.")
    for name in ("channel-fd", "parent-pidfd", "region-fd", "region-size", "page-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--zeroed", action="store_true", help="the region is new: all bytes are 0")
    parser.add_argument("--log-level", default="WARNING")
    return parser.parse_args()


def main() -> int:
    """Entry point of ``python -m flyt.backend.keeper``."""
    arguments = _arguments()
    logging.basicConfig(
        level=arguments.log_level, format="flyt-keeper[%(process)d] %(levelname)s %(message)s"
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor leads
    channel = Channel(socket.socket(fileno=arguments.channel_fd), FROM_KEEPER, TO_KEEPER)
    geometry = Geometry.plan(arguments.region_size, arguments.page_size)
    try:
        keeper = Keeper(arguments.region_fd, geometry, arguments.parent_pidfd)
        return serve(keeper, channel, arguments.parent_pidfd, arguments.zeroed)
    except (Orphaned, ChannelClosed):
        return 1
    except (FlytError, OSError, ValueError) as exc:
        # mmap answers ValueError for a file that is shorter than the mapping.
        log.error("can't keep the region: %s", exc)
        return 1


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)  # the mapping may be of a truncated file: nothing touches it again
