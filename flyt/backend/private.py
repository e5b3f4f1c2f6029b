# SPDX-License-Identifier: Apache-2.0
"""`PrivateRegions`: a region for each client of its own (``--region per-client``).

Each is a sealed memfd (`flyt.shm.private`). The worker gets its descriptor with the order to open
the session, the client from a UNIX socket beside the endpoint, once, for the session's token and
only as the user who said HELLO. Then the daemon has none any more: it keeps the ledger.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import logging
import os
import secrets
import socket
import stat
import struct
from collections.abc import Sequence
from typing import Any

from flyt.backend.ledger import Ledger
from flyt.backend.loop import EventLoop, Timer
from flyt.backend.orders import Granted, Reclaimed, Request, Returned
from flyt.backend.served import NO_REGION
from flyt.backend.workers import WorkerProcess
from flyt.errors import ConfigurationError, RegionError
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.sockets import UNACCEPTED
from flyt.shm import private
from flyt.shm.layout import Geometry

log = logging.getLogger(__name__)

SUFFIX = ".memory"
"""Of the socket beside an ipc endpoint; shorter than those of sessions, so its path is not too long
where theirs are not."""

PRIVATE_SIZE = 256 << 20
"""Default of ``--size`` for one client's region. What it does not touch costs nothing."""

CALLERS = 64
"""Connections at a time; each client has one for a moment. Beyond, the oldest is cut: strangers of
the same host may hold them, but not for long."""

CALL_SECONDS = 5.0
"""How long one may take to say its token."""

AGAIN_SECONDS = 0.5
"""After a connection that could not be taken, for want of descriptors say."""

_CREDENTIALS = struct.Struct("3i")


@dataclasses.dataclass(slots=True)
class _Own:
    """What a session has."""

    ledger: Ledger
    epoch: int
    token: bytes
    uid: str
    fd: int
    """-1 once the client has it."""
    socket: str
    """File name of the socket that hands it out."""


class PrivateRegions:
    """All of a daemon.

    Parameters
    ----------
    loop : EventLoop
    geometry : Geometry
        Of each region.
    endpoints : sequence of Endpoint
        The daemon's; this one has taken their paths, so nobody else uses those beside them.

    Raises
    ------
    ConfigurationError
        A socket can't be bound.

    Attributes
    ----------
    keeper : int
        There is none: no frame goes from one client to another.
    """

    keeper = 0

    def __init__(self, loop: EventLoop, geometry: Geometry, endpoints: Sequence[Endpoint]) -> None:
        self.geometry = geometry
        self._loop = loop
        self._owned: dict[int, _Own] = {}
        self._callers: dict[int, tuple[socket.socket, Timer]] = {}
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            for endpoint in endpoints:
                if endpoint.scheme == "ipc":
                    door = undo.enter_context(_listen(endpoint.path + SUFFIX, undo))
                    self._open(door)
                    undo.callback(self._loop.unwatch, door.fileno())
            self._stack = undo.pop_all()

    # --- regions ---

    def make(self, session: int, token: bytes, uid: str, endpoint: Endpoint) -> int:
        """A region for a session; its descriptor stays ours, and is for the worker to copy. -1 if
        there is none to be had: then the session's bytes go inline."""
        epoch = secrets.randbits(64)
        try:
            fd = private.create(self.geometry, epoch)
        except OSError as exc:
            log.warning("session %016x gets no region: %s", session, exc.strerror)
            return -1
        name = os.path.basename(endpoint.path) + SUFFIX
        ledger = Ledger(self.geometry.page_count)
        self._owned[session] = _Own(ledger, epoch, token, uid, fd, name)
        return fd

    def welcome(self, session: int) -> dict[str, Any]:
        """What WELCOME says of it."""
        own = self._owned.get(session)
        if own is None:
            return NO_REGION
        return {
            "epoch": own.epoch,
            "region": private.PRIVATE + own.socket,
            "region_size": self.geometry.size,
            "page_size": self.geometry.page_size,
            "lock_file": "",
        }

    # --- what workers ask about frames (as `flyt.backend.grants.FrameDesk`) ---

    def request(self, worker: WorkerProcess, order: Request) -> None:
        """All of the frames or none."""
        own = self._owned.get(order.session)
        if own is None or order.session not in worker.sessions:
            refused: tuple[int, ...] = Ledger(self.geometry.page_count).nameable(order.frames)
        else:
            try:
                refused = own.ledger.grant(order.session, order.frames)
            except RegionError as exc:
                log.warning("session %016x asks for impossible frames: %s", order.session, exc)
                refused = own.ledger.nameable(order.frames)
        worker.send(Granted(order.session, order.request, refused))

    def returned(self, worker: WorkerProcess, order: Returned) -> None:
        """They may be asked for again at once: nobody but this client ever sees what is in them."""
        own = self._owned.get(order.session)
        if own is None or order.session not in worker.sessions:
            return
        try:
            own.ledger.reclaimed(own.ledger.release(order.session, order.frames))
        except RegionError as exc:
            log.error("worker %d returns impossible frames: %s", worker.pid, exc)
            return
        worker.send(Reclaimed(order.session, order.request))

    def release(self, session: int) -> None:
        """The session is over. The kernel keeps its region while the client maps it."""
        own = self._owned.pop(session, None)
        if own is not None and own.fd >= 0:
            os.close(own.fd)

    def frames_of(self, session: int) -> int:
        """How many frames a session holds."""
        own = self._owned.get(session)
        return own.ledger.granted if own is not None else 0

    def figures(self) -> dict[str, int]:
        """For displays: frames of all regions."""
        return {
            "total": len(self._owned) * self.geometry.page_count,
            "granted": sum(own.ledger.granted for own in self._owned.values()),
            "reclaiming": 0,
        }

    # --- the sockets ---

    def _open(self, door: socket.socket) -> None:
        if door.fileno() >= 0:
            self._loop.watch(door.fileno(), lambda: self._arrived(door))

    def _arrived(self, door: socket.socket) -> None:
        try:
            caller, _ = door.accept()
        except OSError as exc:  # it has gone already, or there is no descriptor left
            log.warning("a client that wants its region was not let in: %s", exc.strerror)
            self._loop.unwatch(door.fileno())  # whoever waits there would be news at once
            self._loop.call_later(AGAIN_SECONDS, lambda: self._open(door))
            return
        caller.setblocking(False)
        if len(self._callers) >= CALLERS:
            self._part(next(iter(self._callers)))
        number = caller.fileno()
        limit = self._loop.call_later(CALL_SECONDS, lambda: self._part(number))
        self._callers[number] = caller, limit
        self._loop.watch(number, lambda: self._heard(number))

    def _heard(self, number: int) -> None:
        caller = self._callers[number][0]
        try:
            token = caller.recv(private.TOKEN_BYTES + 1)
            self._serve(caller, token)
        except BlockingIOError:
            return
        except OSError as exc:  # it has gone
            log.debug("a client left before it had its region: %s", exc.strerror)
        self._part(number)

    def _serve(self, caller: socket.socket, token: bytes) -> None:
        raw = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        uid = str(_CREDENTIALS.unpack(raw)[1])
        # The youngest first: a session that replaces one of a dead worker has its token.
        for own in reversed(self._owned.values()):
            if own.fd >= 0 and hmac.compare_digest(own.token, token) and own.uid == uid:
                private.hand_over(caller, own.fd)
                os.close(own.fd)
                own.fd = -1
                return
        log.warning("uid %s asks for a region that it has not been promised", uid)

    def _part(self, number: int) -> None:
        caller, limit = self._callers.pop(number)
        limit.cancel()
        self._loop.unwatch(number)
        caller.close()

    def close(self) -> None:
        """Remove the sockets. May be called again."""
        for number in list(self._callers):
            self._part(number)
        for session in list(self._owned):
            self.release(session)
        self._stack.close()


def _listen(path: str, undo: contextlib.ExitStack) -> socket.socket:
    """As libzmq does it: the umask says who may connect, as at the endpoint itself."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        _unlink(path)  # a killed daemon's: the lock of the endpoint says that none lives
        door.bind(path)
        undo.callback(_unlink, path)
        door.listen(UNACCEPTED)
        door.setblocking(False)
    except OSError as exc:
        door.close()
        raise ConfigurationError(
            f"--region per-client: can't listen on {path}: {exc.strerror or exc}"
        ) from exc
    return door


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
