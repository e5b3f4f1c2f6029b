# SPDX-License-Identifier: Apache-2.0
"""`WorkerProcess` and `WorkerPool`: one worker per principal, and its successor after its death."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from flyt.backend.loop import EventLoop, Timer
from flyt.backend.orders import FROM_WORKER, TO_WORKER, End, Failed, Leave, Open, Ready
from flyt.backend.principals import Principal
from flyt.backend.processes import KILL_LIMIT, Child
from flyt.errors import DeviceError
from flyt.rpc.endpoints import Endpoint

log = logging.getLogger(__name__)

START_LIMIT = 60.0
"""Seconds until a worker must have its devices: a context takes 0.2 s, a cold driver tens."""

MAX_WORKERS = 64
"""Each holds a CUDA context of some 500 MB, so more principals than these fill any GPU."""

DEVICES_UNAVAILABLE = 46
"""cudaErrorDevicesUnavailable."""


@dataclasses.dataclass(frozen=True, slots=True)
class SessionRecord:
    """What the supervisor remembers of a session: its client, and where its socket is."""

    session: int
    pid: int
    program: str
    address: str
    since: float
    """Seconds since 1970."""


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
    """

    def __init__(self, loop: EventLoop, owner: PoolOwner, launch: Launch) -> None:
        self.principal: Principal | None = None
        self.snapshot: dict[str, Any] | None = None
        self.failure: DeviceError | None = None
        self.leaving = False
        self.sessions: dict[int, SessionRecord] = {}
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

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether the process exists."""
        return self._child.running

    def open(self, record: SessionRecord, token: bytes, memory_limit: int) -> None:
        """Have it serve one more session; it answers with Opened."""
        peer = self.principal.uid if self.principal is not None else ""
        self.sessions[record.session] = record
        self._child.send(
            Open(record.session, token, record.pid, record.address, peer, memory_limit)
        )

    def end_session(self, session: int, reason: str) -> None:
        """Have it end a session; it answers with Closed."""
        if session in self.sessions:
            self._child.send(End(session, reason))

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

    def kill(self) -> None:
        """SIGKILL."""
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
        self._start_limit.cancel()
        self.leaving = True
        for record in self.sessions.values():
            _unlink_socket(record.address)
        self._owner.worker_ended(self, reason)


def _unlink_socket(address: str) -> None:
    """A dead worker could not remove the sockets of its sessions."""
    scheme, _, path = address.partition("://")
    if scheme == "ipc":
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


class WorkerPool:
    """All workers.

    Parameters
    ----------
    loop : EventLoop
    owner : PoolOwner
    launch : Launch
    """

    def __init__(self, loop: EventLoop, owner: PoolOwner, launch: Launch) -> None:
        self._loop = loop
        self._owner = owner
        self._launch = launch
        self._workers: list[WorkerProcess] = []

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(list(self._workers))

    @property
    def session_count(self) -> int:
        """Sessions of all workers."""
        return sum(len(worker.sessions) for worker in self._workers)

    def start_spare(self) -> WorkerProcess:
        """Start a worker that the next new principal gets."""
        worker = WorkerProcess(self._loop, self._owner, self._launch)
        self._workers.append(worker)
        return worker

    def assign(self, principal: Principal) -> WorkerProcess:
        """The principal's worker: the one it has, a spare one, or a new one that is starting.

        Raises
        ------
        DeviceError
            When there are too many workers, or the system has no room for one more process.
        """
        fit = [w for w in self._workers if not w.leaving and w.running]
        for wanted in (principal, None):
            for worker in fit:
                if worker.principal == wanted:
                    worker.principal = principal
                    return worker
        if len(self._workers) >= MAX_WORKERS:
            raise DeviceError(
                DEVICES_UNAVAILABLE,
                f"this backend serves {MAX_WORKERS} users already, each with a process of its own; "
                "try again when one has left",
            )
        try:
            worker = self.start_spare()
        except OSError as exc:
            raise DeviceError(
                DEVICES_UNAVAILABLE, f"can't start another process: {exc.strerror}"
            ) from exc
        worker.principal = principal
        return worker

    def forget(self, worker: WorkerProcess) -> None:
        """A worker that has ended."""
        self._workers.remove(worker)

    def leave(self, seconds: float, hurry: Callable[[], bool]) -> None:
        """End all workers: in order for ``seconds`` (or until ``hurry()``), then by SIGKILL."""
        for worker in self:
            worker.leave()
        self._loop.turn_until(lambda: not self._workers or hurry(), seconds)
        for worker in self:
            if worker.sessions:
                log.warning("worker %d still works; killing it", worker.pid)
            worker.kill()
        if not self._loop.turn_until(lambda: not self._workers, KILL_LIMIT):
            log.error("workers %s do not end, not even by SIGKILL", [w.pid for w in self])


def session_address(endpoint: Endpoint, ports: str, session: int) -> str:
    """Where a session of a client of ``endpoint`` gets its socket."""
    if endpoint.scheme == "ipc":
        return f"ipc://{endpoint.path}.{session:016x}"
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"tcp://{host}:{ports}"
