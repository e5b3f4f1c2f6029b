# SPDX-License-Identifier: Apache-2.0
"""One lock per page frame: the byte of that number in the region's lock file.

They are open-file-description locks: the kernel drops them when their holder dies, and keeps them
while it is merely stopped, so a frame that somebody may still map is never handed on. They belong
to the description, which a forked child shares; a hook closes it there, else a killed parent's
locks would live on in its child.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import weakref
from collections.abc import Iterable
from errno import EACCES, EAGAIN
from pathlib import Path

from flyt.errors import RegionError
from flyt.shm.runs import Run

_FLOCK = struct.Struct("@hhqqi4x")
"""``struct flock`` of 64-bit Linux: type, whence, start, length, pid (zero for these locks)."""


_MARK = struct.Struct("<8sQ")
"""What a backend writes at the file's beginning: whose locks these are."""


def epoch_mark(epoch: int) -> bytes:
    """The bytes that tell a region's lock file from others."""
    return _MARK.pack(b"flytlock", epoch)


def split(fd: int, runs: Iterable[Run]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Divide frames into those that nobody has locked, and those that somebody has.

    Parameters
    ----------
    fd : int
        The lock file, opened by itself: the locks of its own description don't count.
    runs : iterable of Run

    Raises
    ------
    RegionError
        The file has no such locks.
    """
    unlocked: list[Run] = []
    locked: list[Run] = []
    todo = list(runs)[::-1]
    while todo:
        first, count = todo.pop()
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
        try:
            answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
        except OSError as exc:
            raise RegionError(f"can't look at the locks of frames: {exc.strerror}") from exc
        kind, _, start, length, _ = _FLOCK.unpack(answer)
        if kind == fcntl.F_UNLCK:
            unlocked.append((first, count))
            continue
        # The kernel names one of the locks in the way, and not the lowest; length 0 has no end.
        end = first + count
        begin = max(first, start)
        behind = min(end, start + length) if length else end
        locked.append((begin, behind - begin))
        todo += [(low, high - low) for low, high in ((behind, end), (first, begin)) if low < high]
    return tuple(unlocked), tuple(locked)


class FrameLocks:
    """What this process holds of one region's frames. Methods may be called from any thread.

    Parameters
    ----------
    path : path-like
        The lock file of the region.
    epoch : int, optional
        On the backend's own host: the file must be the one that the backend made for the region
        of this epoch. Without it, as in a guest, the file is made if it is not there.

    Raises
    ------
    RegionError
        It can't be opened, or is another region's: locks in it would protect nothing.
    """

    private = False
    """Others take frames of this region as well; see `flyt.shm.private.OwnFrames`."""

    def __init__(self, path: str | os.PathLike[str], epoch: int | None = None) -> None:
        self.path = Path(path)
        self._mutex = threading.Lock()
        # The kernel lets a description take its own lock again; we don't.
        self._held: set[int] = set()
        self._fd = -1
        try:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            if epoch is None:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _make(self.path)
            self._fd = os.open(self.path, flags)
            mark = os.pread(self._fd, _MARK.size, 0)
        except OSError as exc:
            raise RegionError(
                f"can't open the lock file {self.path}: {exc.strerror}; every process that uses "
                "the region must be able to open it (see FLYT_RUNTIME_DIR)"
            ) from exc
        if epoch is not None and mark != epoch_mark(epoch):
            self.close()
            raise RegionError(
                f"the lock file {self.path} belongs to another region than the backend's: share "
                "the backend's own runtime folder with this process (FLYT_RUNTIME_DIR)"
            )
        _all.add(self)

    def lock(self, first: int, count: int) -> bool:
        """Take ``count`` frames from ``first``, all or none, without waiting.

        Returns
        -------
        bool
            False when anyone, this object included, holds one of them.
        """
        frames = _range(first, count)
        with self._mutex:
            if not self._held.isdisjoint(frames):
                return False
            try:
                self._set(fcntl.F_WRLCK, first, count)
            except OSError as exc:
                if exc.errno in (EAGAIN, EACCES):
                    return False
                raise RegionError(f"can't lock in {self.path}: {exc.strerror}") from exc
            self._held.update(frames)
            return True

    def unlock(self, first: int, count: int) -> None:
        """Let ``count`` frames from ``first`` go; those that aren't held are passed over."""
        frames = _range(first, count)
        with self._mutex:
            if self._fd < 0:
                return
            try:
                self._set(fcntl.F_UNLCK, first, count)
            except OSError as exc:
                raise RegionError(f"can't unlock in {self.path}: {exc.strerror}") from exc
            self._held.difference_update(frames)

    def close(self) -> None:
        """Let every frame go. May be called again."""
        with self._mutex:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
            self._held.clear()

    def _set(self, kind: int, first: int, count: int) -> None:
        if self._fd < 0:
            raise RegionError(
                f"the lock file {self.path} is closed here; a forked child has no session"
            )
        # Never waits; Python repeats the call after a signal (EINTR).
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, first, count, 0))

    def leave_to_parent(self) -> None:
        """In a forked child: closing our copy of the descriptor unlocks nothing of the parent's."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._held = set()
        self._mutex = threading.Lock()  # Another thread of the parent may have held the old one.


def _make(path: Path) -> None:
    """Make a guest's lock file, if it is not there. The folder tells which users share it: its own,
    or, where its group may write, that group's."""
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, path.parent.stat().st_mode & 0o660)
        finally:
            os.close(fd)


def _range(first: int, count: int) -> range:
    # A length of 0 would mean "to the end of the file and beyond".
    if first < 0 or count <= 0:
        raise RegionError(f"{count} frames from frame {first} can't be locked")
    return range(first, first + count)


_all: weakref.WeakSet[FrameLocks] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for locks in _all:
        locks.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
