# SPDX-License-Identifier: Apache-2.0
"""`Doorbell`: the UNIX socket at which QEMU gets the region, and an eventfd for each session.

This is the server's part of the ivshmem protocol: messages of eight bytes, little-endian, some with
a descriptor (SCM_RIGHTS). QEMU's device ``ivshmem-doorbell`` connects once, when it starts. It
learns the protocol's version, its own number, the region, and one *peer* for each bell. A process
in the guest that writes a peer's number to the device's register makes QEMU (or KVM) signal that
eventfd, which wakes a session's thread in a worker. Nothing goes the other way: QEMU gets no
eventfd of its own.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterable

from flyt.backend.listening import PathLock
from flyt.backend.loop import EventLoop
from flyt.errors import ConfigurationError
from flyt.shm.region import Region

log = logging.getLogger(__name__)

VERSION = 0
"""Of the ivshmem protocol; there was never another."""

REGION = -1
"""The message that brings the region's descriptor."""

GUEST = 0
"""QEMU's own number; the bells count from 1."""

BELLS = 64
"""Each is a descriptor in QEMU and in every worker. Sessions beyond get wake-ups by ZeroMQ."""

AGAIN_SECONDS = 1.0
"""After a connection that could not be taken, for want of descriptors say."""

_MESSAGE = struct.Struct("<q")
_FOREIGN = 4096
"""Bytes of what QEMU never says, read at once."""


class Doorbell:
    """The socket, its one guest, and the bells.

    Parameters
    ----------
    loop : EventLoop
    path : str
        Of the socket; nobody but this daemon's user may connect, unless somebody changes its mode.
    region : Region
        Stays the caller's.

    Raises
    ------
    ConfigurationError
        Another daemon has the path, it can't be bound, or QEMU can't have a region of this size.

    Attributes
    ----------
    bells : list of int
        Eventfds, from bell 1 on; workers inherit them.
    """

    def __init__(self, loop: EventLoop, path: str, region: Region) -> None:
        if region.size & (region.size - 1):
            raise ConfigurationError(
                "--doorbell: QEMU takes regions whose size is a power of two only, "
                f"not {region.size} bytes: choose another --size"
            )
        self._loop = loop
        self._region = region.fd
        self._guest: socket.socket | None = None
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            lock = PathLock(f"{path}.lock", path, "--doorbell")
            undo.callback(lock.close)
            self._door = undo.enter_context(_listen(path))
            undo.callback(_unlink, path)
            self.bells = [_eventfd(undo) for _ in range(BELLS)]
            self._stack = undo.pop_all()
        self._open()

    def _open(self) -> None:
        if self._door.fileno() >= 0:
            self._loop.watch(self._door.fileno(), self._arrived)

    def _arrived(self) -> None:
        try:
            guest, _ = self._door.accept()
        except OSError as exc:  # it has gone already, or there is no descriptor left
            log.warning("--doorbell: nobody let in: %s", exc.strerror)
            self._loop.unwatch(self._door.fileno())  # whoever waits there would be news at once
            self._loop.call_later(AGAIN_SECONDS, self._open)
            return
        guest.setblocking(False)
        if self._guest is not None:
            log.warning("--doorbell: a second QEMU was turned away; one region is for one guest")
            guest.close()
            return
        self._guest = guest
        self._loop.watch(guest.fileno(), self._heard)
        try:
            for number, descriptor in self._welcome():
                _say(guest, number, descriptor)
        except OSError as exc:  # BlockingIOError as well: all of it fits into an empty socket
            log.warning("--doorbell: QEMU does not take its descriptors: %s", exc.strerror)
            self._part()
        else:
            log.info("--doorbell: a guest has the region and %d bells", BELLS)

    def _welcome(self) -> list[tuple[int, int | None]]:
        opening = [(VERSION, None), (GUEST, None), (REGION, self._region)]
        return [*opening, *enumerate(self.bells, 1)]

    def _heard(self) -> None:
        """QEMU never says anything: this is its end."""
        guest = self._guest
        if guest is None:
            return
        try:
            said = guest.recv(_FOREIGN)
        except BlockingIOError:
            return
        except OSError:  # it died with messages unread
            said = b""
        if said:
            log.warning("--doorbell: whoever connected speaks, so it is no QEMU")
        self._part()

    def _part(self) -> None:
        guest, self._guest = self._guest, None
        if guest is not None:
            self._loop.unwatch(guest.fileno())
            guest.close()

    def close(self) -> None:
        """Remove the socket. Workers keep their bells as long as they run."""
        self._loop.unwatch(self._door.fileno())
        self._part()
        self._stack.close()


def free_bell(taken: Iterable[int]) -> int:
    """The lowest number that is not taken; 0 when all are. Who still rings for the session that had
    it before wakes its heir for nothing."""
    return min(set(range(1, BELLS + 1)).difference(taken), default=0)


def _listen(path: str) -> socket.socket:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(door.fileno(), 0o600)  # bind gives the file this mode, so nobody slips in before
        _unlink(path)  # a killed daemon's: the lock says that none lives
        door.bind(path)
        door.listen(1)
        door.setblocking(False)
    except OSError as exc:
        door.close()
        raise ConfigurationError(f"--doorbell {path}: {exc.strerror or exc}") from exc
    return door


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)


def _eventfd(undo: contextlib.ExitStack) -> int:
    descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    undo.callback(os.close, descriptor)
    return descriptor


def _say(guest: socket.socket, number: int, descriptor: int | None) -> None:
    rights = [] if descriptor is None else [array.array("i", [descriptor])]
    data = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds) for fds in rights]
    if guest.sendmsg([_MESSAGE.pack(number)], data) != _MESSAGE.size:
        raise BlockingIOError(0, "its socket is full")
