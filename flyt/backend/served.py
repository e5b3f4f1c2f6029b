# SPDX-License-Identifier: Apache-2.0
"""`ServedRegion`: the region as the supervisor has it: open, locked, allocated, never mapped."""

from __future__ import annotations

import logging
import os
import secrets
import zlib
from collections.abc import Sequence
from typing import Any

from flyt.backend.options import Options
from flyt.errors import RegionError
from flyt.shm import locks
from flyt.shm.layout import MIN_PAGE_SIZE, Geometry, Superblock
from flyt.shm.locks import epoch_mark
from flyt.shm.region import MIN_SIZE, Region, free_space, resolve
from flyt.shm.runs import Run
from flyt.shm.runtime_dir import runtime_dir

log = logging.getLogger(__name__)

DEFAULT_SIZE = 1 << 30
"""What a region is given where no size was asked for and there is room for it."""

MAGIC_SIZE = 8
"""Bytes of the superblock's first field."""

MARGIN = 8
"""Without --size, one part in so many of the free space is left to others in /dev/shm."""

NO_REGION: dict[str, Any] = {
    "epoch": 0,
    "region": "",
    "region_size": 0,
    "page_size": 0,
    "lock_file": "",
}
"""What WELCOME says of the region to a session without one."""


class ServedRegion:
    """The one region of a daemon.

    Parameters
    ----------
    options : Options
        With a region.

    Raises
    ------
    RegionError, ConfigurationError
        When it can't be had: no folder, no space, another size, another daemon.

    Attributes
    ----------
    epoch : int
        Random; tells this daemon's formatting of the region from all others.
    lock_file : str
        Where the frontends lock frames.
    """

    def __init__(self, options: Options) -> None:
        self.region = _open(options)
        self.lock_file = ""
        self._lock_fd = -1
        self._made_lock_file = False
        self._keep = options.keep_region
        self._lost = False
        try:
            self.region.lock_exclusive()
            self.geometry = Geometry.plan(self.region.size, options.page_size)
            self.epoch = secrets.randbits(64)
            self._make_lock_file()
        except BaseException:
            self.close()
            raise

    def _make_lock_file(self) -> None:
        # Two regions of the same name in different folders must not share one.
        mark = f"{zlib.crc32(os.fsencode(self.region.path)):08x}"
        name = f"{os.path.basename(self.region.path)}.{mark}.lock"
        self.lock_file = os.path.join(runtime_dir(), name)
        try:
            # One of an earlier daemon is used again: its clients may still hold frames there.
            self._made_lock_file = not os.path.exists(self.lock_file)
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
            self._lock_fd = os.open(self.lock_file, flags, 0o600)
            os.pwrite(self._lock_fd, epoch_mark(self.epoch), 0)
        except OSError as exc:
            raise RegionError(f"can't make the lock file {self.lock_file}: {exc.strerror}") from exc

    @property
    def survives(self) -> bool:
        """Whether the region will be there after this daemon."""
        return self._keep or not self.region.created

    def welcome(self) -> dict[str, Any]:
        """What WELCOME says of it."""
        return {
            "epoch": self.epoch,
            "region": self.region.path,
            "region_size": self.region.size,
            "page_size": self.geometry.page_size,
            "lock_file": self.lock_file,
        }

    def child_arguments(self) -> list[str]:
        """What tells a child about the region; `Region.fd` goes with it."""
        return [
            *("--region-fd", str(self.region.fd)),
            *("--region-size", str(self.region.size)),
            *("--page-size", str(self.geometry.page_size)),
        ]

    def split(self, runs: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
        """Divide frames into those that no process of this host has locked, and the others."""
        return locks.split(self._lock_fd, runs)

    def is_whole(self) -> bool:
        """Whether the file still has its size. A shorter one kills whoever touches its end."""
        if not self._lost and os.fstat(self.region.fd).st_size < self.region.size:
            self.give_up("somebody truncated it")
        return not self._lost

    def mend(self) -> None:
        """Write the superblock again if a client has overwritten it: new ones would see no region.

        Not through a mapping, so that a file truncated meanwhile is no SIGBUS.
        """
        if not self.is_whole():
            return
        right = Superblock(self.geometry, self.epoch).pack()
        if os.pread(self.region.fd, len(right), 0) != right:
            log.warning("a client has overwritten the superblock of %s", self.region.path)
            # The magic comes last, as at the format.
            os.pwrite(self.region.fd, right[MAGIC_SIZE:], MAGIC_SIZE)
            os.pwrite(self.region.fd, right[:MAGIC_SIZE], 0)

    def give_up(self, reason: str) -> None:
        """Serve without the region from now on; new sessions get all bytes inline."""
        if not self._lost:
            self._lost = True
            log.error(
                "the region %s is unusable: %s. New sessions go without it (slower); "
                "restart flyt-backend to get it back",
                self.region.path,
                reason,
            )

    def close(self) -> None:
        """Close, and remove what this daemon made unless it is to be kept."""
        if not self.survives:
            self.region.unlink()
            if self._made_lock_file:
                _unlink(self.lock_file)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        self.region.close()


def _open(options: Options) -> Region:
    spec = str(options.region)
    path = resolve(spec)
    if options.size is not None or os.path.exists(path):
        region = Region.create_or_adopt(spec, options.size)
        if not region.created:
            log.info("adopted the region %s of %d bytes as it is", path, region.size)
        return region
    free = free_space(path)
    size = min(DEFAULT_SIZE, (free - free // MARGIN) // MIN_PAGE_SIZE * MIN_PAGE_SIZE)
    if size < MIN_SIZE:
        raise RegionError(
            f"{os.path.dirname(path)} has {free} bytes free, too few for the region {path}: "
            "enlarge it (docker run --shm-size) or choose another --region"
        )
    log.info("no --size: the region %s gets %d of %d free bytes", path, size, free)
    return Region.create_or_adopt(spec, size)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        log.debug("%s was removed by somebody else", path)
