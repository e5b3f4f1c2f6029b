# SPDX-License-Identifier: Apache-2.0
"""A region of one client's own: a sealed memfd, which no path leads to.

The kernel gives it to whoever is handed its descriptor, and to nobody else; the seals keep every
holder from changing its size, so no mapping of it can become a SIGBUS. Its pages come into being
when they are first touched: a memfd has no file system that could be full, and what a client
touches first is charged to the client's own cgroup.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import time

from flyt.errors import RegionError
from flyt.shm.layout import Geometry, Superblock

PRIVATE = "private:"
"""How WELCOME tells of such a region: this, and the file name of the socket that hands it out."""

TOKEN_BYTES = 16
"""What a client says there."""

FETCH_SECONDS = 5.0
"""How long the daemon's event loop may take to hand it out."""

STEP = 0.005
"""Seconds between two tries to connect."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_GIVEN = b"\1"


def create(geometry: Geometry, epoch: int) -> int:
    """A fresh, formatted, sealed region; all its frames are FREE. The descriptor is the caller's.

    Raises
    ------
    OSError
        There is no descriptor left, or no memory.
    """
    fd = os.memfd_create("flyt-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        os.ftruncate(fd, geometry.size)
        os.pwrite(fd, Superblock(geometry, epoch).pack(), 0)  # the table is zero: all FREE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        undo.pop_all()
    return fd


def hand_over(sock: socket.socket, fd: int) -> None:
    """Give a region to whoever is at the other end; OSError when that can't be done at once."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
    sock.sendmsg([_GIVEN], [rights], socket.MSG_NOSIGNAL)


def fetch(path: str, token: bytes, size: int) -> int:
    """The region of this client; the descriptor is the caller's.

    Parameters
    ----------
    path : str
        Of the daemon's socket.
    token : bytes
        The session's.
    size : int
        Bytes that it has to have.

    Raises
    ------
    RegionError
        It is not to be had; the message says why.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(FETCH_SECONDS)
            _connect(sock, path)
            sock.send(token, socket.MSG_NOSIGNAL)
            space = socket.CMSG_SPACE(array.array("i").itemsize)
            data, ancillary, _, _ = sock.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    except OSError as exc:
        raise RegionError(f"no region of its own for this client from {path}: {exc}") from exc
    found = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) // found.itemsize * found.itemsize])
    with contextlib.ExitStack() as undo:
        for fd in found:
            undo.callback(os.close, fd)
        if data != _GIVEN or len(found) != 1:
            raise RegionError(
                f"the daemon at {path} has no region for this client: it was fetched already, or "
                "another user asks, or this process has no descriptor left (ulimit -n)"
            )
        if os.fstat(found[0]).st_size != size:
            raise RegionError(f"the region from {path} has not the {size} bytes that were told")
        undo.pop_all()
    return found[0]


def _connect(sock: socket.socket, path: str) -> None:
    deadline = time.monotonic() + FETCH_SECONDS
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:  # others wait there as well, and it can't be polled for that
            if time.monotonic() > deadline:
                raise
            time.sleep(STEP)


class OwnFrames:
    """What `flyt.shm.locks.FrameLocks` is for a region that other processes share: here this
    process alone takes frames, so a set in its memory does. Methods may be called from any thread.
    """

    private = True

    def __init__(self) -> None:
        self._held: set[int] = set()

    def lock(self, first: int, count: int) -> bool:
        """Take ``count`` frames from ``first``, all or none."""
        # The one FrameTaker that uses this takes under its mutex; who lets go only removes others.
        frames = range(first, first + count)
        if not self._held.isdisjoint(frames):
            return False
        self._held.update(frames)
        return True

    def unlock(self, first: int, count: int) -> None:
        """Let frames go; those that aren't held are passed over."""
        self._held.difference_update(range(first, first + count))

    def close(self) -> None:
        """Let every frame go."""
        self._held.clear()
