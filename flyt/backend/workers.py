# SPDX-License-Identifier: Apache-2.0
"""`WorkerProcess`: a worker as the supervisor sees it, its sessions, its start and its end."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flyt.backend.loop import EventLoop, Timer
from flyt.backend.orders import FROM_WORKER, TO_WORKER, End, Failed, Leave, Open, Ready
from flyt.backend.principals import Principal
from flyt.backend.processes import Child
from flyt.errors import DeviceError
from flyt.rpc.endpoints import Endpoint, unlink_socket
from flyt.shm.layout import Geometry

log = logging.getLogger(__name__)

START_LIMIT = 60.0
"""Seconds until a worker must have its devices: a context takes 0.2 s, a cold driver tens."""

FAREWELL_SECONDS = 1.0
"""Between a session's end and its worker's: the session's thread keeps its socket for half of this,
since a client's libzmq drops the last words that it has not read when a connection ends."""

EXIT_LIMIT = 10.0
"""Seconds a worker without sessions may take to exit, its driver's tear-down included."""

DEVICES_UNAVAILABLE = 46
"""cudaErrorDevicesUnavailable."""


@dataclasses.dataclass(frozen=True, slots=True)
class SessionRecord:
    """What the supervisor remembers of a session: its client, and where its socket is."""

    session: int
    pid: int
    program: str
    address: str
    peer: str
    """Who alone may attach, see `flyt.backend.orders.Open`."""
    since: float
    """Seconds since 1970."""
    bell: int = 0
    """Its number at the daemon's doorbell; 0: it has none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """How to start a worker: its command line's end, and descriptors to inherit."""

    arguments: Callable[[], Sequence[str]]
    inherit: Callable[[], Sequence[int]]


class PoolOwner(Protocol):
    """Who hears what happens to the workers."""

    def worker_ready(self, worker: WorkerProcess) -> None:
        """Its devices work; `WorkerProcess.open` may be called."""

    def worker_said(self, worker: WorkerProcess, message: Any) -> None:
        """A message other than Ready and Failed."""

    def worker_ended(self, worker: WorkerProcess, reason: str) -> None:
        """The process is gone, and all its sessions (still listed) with it."""


class WorkerProcess:
    """One worker and its sessions.

    Attributes
    ----------
    principal : Principal or None
        Whose sessions it hosts; None for a spare one.
    snapshot : dict or None
        Of its devices, once it is ready.
    failure : DeviceError or None
        What it said of its devices before it gave up.
    leaving : bool
        Whether it gets no more sessions.
    used : bool
        Whether it was ever asked for a session.
    """

    def __init__(self, loop: EventLoop, owner: PoolOwner, launch: Launch) -> None:
        self.principal: Principal | None = None
        self.snapshot: dict[str, Any] | None = None
        self.failure: DeviceError | None = None
        self.leaving = False
        self.used = False
        self.sessions: dict[int, SessionRecord] = {}
        self._loop = loop
        self._owner = owner
        self._child = Child(
            loop,
            self,
            "flyt.backend.worker",
            launch.arguments(),
            sends=TO_WORKER,
            receives=FROM_WORKER,
            inherit=launch.inherit(),
        )
        self._start_limit: Timer = loop.call_later(START_LIMIT, self._too_slow)
        self._farewell: Timer | None = None
        self._exit_limit: Timer | None = None

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether the process exists."""
        return self._child.running

    @property
    def state(self) -> str:
        """For displays."""
        if self.leaving:
            return "leaving"
        return "starting" if self.snapshot is None else "ready"

    def open(
        self,
        record: SessionRecord,
        token: bytes,
        memory_limit: int,
        region: tuple[int, Geometry] | None = None,
    ) -> None:
        """Have it serve one more session, with a ``region`` of its own if there is one (the
        descriptor stays the caller's); it answers with Opened."""
        self.used = True
        self.sessions[record.session] = record
        self._child.send(
            Open(
                record.session,
                token,
                record.pid,
                record.address,
                record.peer,
                memory_limit,
                record.bell,
                *((region[1].size, region[1].page_size) if region is not None else ()),
            ),
            region[0] if region is not None else -1,
        )

    def end_session(self, session: int, reason: str, *, unless_attached: bool = False) -> None:
        """Have it end a session; it answers with Closed."""
        if session in self.sessions:
            self._child.send(End(session, reason, unless_attached))

    def hear(self) -> None:
        """Take note of all that it has said."""
        self._child.hear()

    def send(self, message: Any) -> None:
        """Any other order."""
        self._child.send(message)

    def leave(self) -> None:
        """Have it end all sessions and exit."""
        self.leaving = True
        if self.snapshot is None:
            self._child.kill()  # it would not read the order before it has its context
        else:
            self._child.send(Leave())

    def retire(self) -> None:
        """Have it exit, once its last session's client has had time to read the last words."""
        self.expect_end(FAREWELL_SECONDS + EXIT_LIMIT)
        self._farewell = self._loop.call_later(FAREWELL_SECONDS, self.leave)

    def expect_end(self, seconds: float = EXIT_LIMIT) -> None:
        """It gets no more sessions, and is killed if it has not exited in time."""
        self.leaving = True
        if self._exit_limit is None:
            self._exit_limit = self._loop.call_later(seconds, self._stuck)

    def kill(self) -> None:
        """SIGKILL."""
        self._child.kill()

    def _stuck(self) -> None:
        log.error("worker %d should have exited %.0f s ago; killing it", self.pid, EXIT_LIMIT)
        self._child.kill()

    def _too_slow(self) -> None:
        log.error("worker %d has no device after %.0f s; killing it", self.pid, START_LIMIT)
        self._child.kill()

    def heard(self, message: Any) -> None:
        """A word of the process."""
        match message:
            case Ready():
                self._start_limit.cancel()
                self.snapshot = message.snapshot
                self._owner.worker_ready(self)
            case Failed():
                self.failure = DeviceError(message.code, message.text)
            case _:
                self._owner.worker_said(self, message)

    def ended(self, reason: str) -> None:
        """The process is gone."""
        for timer in (self._start_limit, self._farewell, self._exit_limit):
            if timer is not None:
                timer.cancel()
        self.leaving = True
        for record in self.sessions.values():
            _remove_socket(record.address)
        self._owner.worker_ended(self, reason)


def _remove_socket(address: str) -> None:
    """A dead worker could not remove the sockets of its sessions."""
    scheme, _, path = address.partition("://")
    if scheme == "ipc":
        unlink_socket(path)


def session_address(endpoint: Endpoint, ports: str, session: int) -> str:
    """Where a session of a client of ``endpoint`` gets its socket."""
    if endpoint.scheme == "ipc":
        return f"ipc://{endpoint.path}.{session:016x}"
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"tcp://{host}:{ports}"
