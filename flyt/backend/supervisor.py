# SPDX-License-Identifier: Apache-2.0
"""`Supervisor`: the daemon. It wires the others together, starts them, and ends them in order.

One thread, one event loop, no CUDA, no mapping of the region: no client, worker or truncated file
can end it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import Any

from flyt.backend.authentication import Authentication
from flyt.backend.doorbell import Doorbell
from flyt.backend.grants import FrameDesk
from flyt.backend.handshakes import Handshakes
from flyt.backend.ledger import Ledger
from flyt.backend.limits import raise_descriptor_limit
from flyt.backend.listening import Doors
from flyt.backend.loop import EventLoop
from flyt.backend.metrics import Metrics
from flyt.backend.operators import Operators
from flyt.backend.options import PER_CLIENT, Options
from flyt.backend.orders import Broken, Closed, Measured, Opened, Paused, Request, Returned
from flyt.backend.pool import WorkerPool
from flyt.backend.private import PRIVATE_SIZE, PrivateRegions
from flyt.backend.processes import IN_ORDER
from flyt.backend.reclaim import Reclaimer
from flyt.backend.relay import Relay
from flyt.backend.served import ServedRegion
from flyt.backend.signals import StopSignals
from flyt.backend.status import status_report
from flyt.backend.survey import Figures, Survey
from flyt.backend.suspensions import Suspensions
from flyt.backend.terms import Terms
from flyt.backend.visitors import Visitors
from flyt.backend.workers import START_LIMIT, Launch, WorkerProcess
from flyt.errors import ConfigurationError
from flyt.rpc.sockets import Listener, open_context
from flyt.shm.layout import Geometry

log = logging.getLogger(__name__)


class _Stopped(Exception):
    """Told to stop before there was anything to drain."""


class Supervisor:
    """The daemon of one region and its endpoints.

    Parameters
    ----------
    options : Options
    log_level : str
        For the children.
    """

    def __init__(self, options: Options, log_level: str = "WARNING") -> None:
        self._options = options
        self._log_level = log_level
        self._loop = EventLoop()
        self._context = open_context()
        self._pool = WorkerPool(
            self._loop,
            self,
            Launch(self._worker_arguments, self._worker_descriptors),
            per_session=options.isolation == "process",
            limit=options.max_workers,
            idle_seconds=options.idle_worker,
        )
        self._relay = Relay(self._loop, self._context) if options.single_port else None
        self._suspensions = Suspensions(
            self._loop, self._pool, per_session=options.isolation == "process"
        )
        operators = Operators(self.survey, self._suspensions)
        self._terms = Terms(options, self._pool)
        self._handshakes = Handshakes(self._loop, self._pool, self._terms, operators, self._relay)
        self._survey = Survey(self._loop, self._pool)
        self._visitors = Visitors(
            self._loop,
            lambda: self._doors or (),
            self._handshakes.waits,
            lambda: self._relay.most_bytes if self._relay is not None else 0,
        )
        self._authentication: Authentication | None = None
        self._served: ServedRegion | None = None
        self._desk: FrameDesk | PrivateRegions | None = None
        self._reclaimer: Reclaimer | None = None
        self._doors: Doors | None = None
        self._metrics: Metrics | None = None
        self._serving = self._ending = False
        self._stops = 0

    # --- life ---

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or the end of the parent (`Options.parent_fd`).

        Raises
        ------
        FlytError
            When the daemon can't start; nothing is left behind.
        """
        raise_descriptor_limit()
        signals = StopSignals(self._loop, self._stop)
        try:
            self._start()
            while not self._stops:
                self._loop.turn()
        except _Stopped:
            log.info("stopped before serving")
        finally:
            self._end()
            signals.close()

    def _start(self) -> None:
        options = self._options
        if options.parent_fd is not None:
            self._loop.watch(options.parent_fd, self._parent_ended)
        if options.region is not None and not options.is_private:
            self._served = self._terms.served = served = ServedRegion(options)
            ledger = Ledger(served.geometry.page_count)
            reclaimer = Reclaimer(self._loop, served, ledger, self._log_level)
            self._desk, self._reclaimer = FrameDesk(ledger, reclaimer), reclaimer
            reclaimer.start()
            self._loop.call_later(options.sweep, self._sweep)
            if options.doorbell is not None:
                self._terms.doorbell = Doorbell(self._loop, options.doorbell, served.region)
        if options.keys is not None:
            self._authentication = Authentication(self._context, *options.keys)
        self._start_first_worker()
        self._doors = Doors(
            self._context,
            options.listen,
            options.heartbeat_ms,
            relays=self._relay is not None,
            key=self._authentication.key if self._authentication is not None else None,
        )
        if options.is_private:
            geometry = Geometry.plan(options.size or PRIVATE_SIZE, options.page_size)
            endpoints = [listener.endpoint for listener in self._doors]
            self._terms.private = PrivateRegions(self._loop, geometry, endpoints)
            self._desk = self._terms.private
        for listener in self._doors:
            self._watch(listener)
        if options.metrics is not None:
            self._metrics = Metrics(self._loop, self.survey, options.metrics)
            log.info("metrics at port %d", self._metrics.port)
        self._serving = True
        self._announce(self._doors.endpoints)

    def _start_first_worker(self) -> None:
        worker = self._pool.start()
        self._loop.turn_until(
            lambda: worker.snapshot is not None or not worker.running, START_LIMIT + 1
        )
        if worker.failure is not None:
            raise ConfigurationError(worker.failure.detail)
        if worker.snapshot is None:
            raise ConfigurationError(
                f"the worker process for --device {self._options.device} did not get ready; "
                "its own messages are above"
            )

    def _watch(self, listener: Listener) -> None:
        for source in listener.pollables:
            self._loop.watch(source, lambda: self._serve(listener))

    def _serve(self, listener: Listener) -> None:
        self._handshakes.serve(listener)
        self._visitors.came(listener)

    def _announce(self, endpoints: list[str]) -> None:
        region, _ = self._region
        log.info(
            "serving device %s, region %s, at %s",
            self._options.device,
            region or "none (all payloads inline)",
            ", ".join(endpoints),
        )
        if self._options.ready_fd is not None:
            line = json.dumps({"endpoints": endpoints, "region": region, "pid": os.getpid()})
            try:
                os.write(self._options.ready_fd, line.encode() + b"\n")
                os.close(self._options.ready_fd)
            except OSError as exc:
                raise ConfigurationError(f"--ready-fd: nobody reads it: {exc.strerror}") from exc

    def _parent_ended(self) -> None:
        if self._options.parent_fd is not None:
            self._loop.unwatch(self._options.parent_fd)
        self._stop("the end of the process that started this daemon")

    def _stop(self, cause: str) -> None:
        log.info("stopping: %s", cause)
        self._stops += 1
        if not self._serving and not self._ending:
            raise _Stopped

    def _end(self) -> None:
        """Leave nothing behind, however far `_start` came. A second signal skips the waiting."""
        drain = self._options.drain if self._serving else 0.0
        self._ending = True
        self._survey.close()
        self._suspensions.close()
        if self._metrics is not None:
            self._metrics.close()
        self._handshakes.refuse_all("this backend is shutting down")
        if self._relay is not None:
            self._relay.close()
        if self._doors is not None:
            for listener in self._doors:
                for source in listener.pollables:
                    self._loop.unwatch(source)
            self._doors.close()
        if self._terms.doorbell is not None:
            self._terms.doorbell.close()
        hurried = self._stops + 1
        self._pool.leave(drain, lambda: self._stops >= hurried)
        if self._reclaimer is not None and self._served is not None:
            finish = self._served.survives and self._stops < hurried
            self._reclaimer.leave(drain if finish else 0.0)
        if self._terms.private is not None:
            self._terms.private.close()
        if self._served is not None:
            self._served.close()
        if self._authentication is not None:
            self._authentication.close()
        self._context.term()

    def _sweep(self) -> None:
        if self._served is not None:
            self._served.mend()
        if self._reclaimer is not None:
            self._reclaimer.sweep()
        self._loop.call_later(self._options.sweep, self._sweep)

    @property
    def _region(self) -> tuple[str, int]:
        """Its path and epoch, for people."""
        if self._served is not None:
            return self._served.region.path, self._served.epoch
        return (PER_CLIENT if self._options.is_private else ""), 0

    # --- what a worker is started with ---

    def _worker_arguments(self) -> list[str]:
        options, served, authentication = self._options, self._served, self._authentication
        return [
            *("--device", options.device),
            *("--device-options", options.device_options),
            *("--sm-limit", str(options.sm_limit)),
            *("--heartbeat-ms", str(options.heartbeat_ms)),
            *("--log-level", self._log_level),
            *(authentication.worker_arguments() if authentication is not None else ()),
            *(served.child_arguments() if served is not None and served.is_whole() else ()),
            *(("--own-regions",) if options.is_private else ()),
            *(("--prints",) if options.isolation == "process" else ()),
            *(("--bells", *map(str, self._bells)) if self._bells else ()),
        ]

    def _worker_descriptors(self) -> list[int]:
        region = [self._served.region.fd] if self._served is not None else []
        secret = [self._authentication.descriptor] if self._authentication is not None else []
        return [*region, *secret, *self._bells]

    @property
    def _bells(self) -> list[int]:
        return self._terms.doorbell.bells if self._terms.doorbell is not None else []

    # --- what happens to workers (PoolOwner) ---

    def worker_ready(self, worker: WorkerProcess) -> None:
        """Its devices work."""
        self._handshakes.worker_ready(worker)

    def worker_said(self, worker: WorkerProcess, message: Any) -> None:
        """Anything but Ready and Failed."""
        match message:
            case Opened():
                self._handshakes.opened(worker, message)
            case Request() if self._desk is not None:
                self._desk.request(worker, message)
            case Returned() if self._desk is not None:
                self._desk.returned(worker, message)
            case Measured():
                self._survey.heard(worker, message)
            case Paused():
                self._suspensions.heard(worker, message)
            case Closed():
                self._session_over(worker, message.session, message.reason)
            case Broken():
                log.error(
                    "worker %d lost its context: CUDA error %d: %s",
                    worker.pid,
                    message.code,
                    message.text,
                )
                worker.expect_end()
                self._handshakes.worker_lost(worker, f"CUDA error {message.code}")

    def _session_over(self, worker: WorkerProcess, session: int, reason: str) -> None:
        record = worker.sessions.pop(session, None)
        if record is None:
            return
        log.info("session %016x of pid %d is over: %s", session, record.pid, reason)
        self._suspensions.over(session)
        if self._desk is not None:
            self._desk.release(session)
        self._pool.settle(worker)

    def worker_ended(self, worker: WorkerProcess, reason: str) -> None:
        """It is gone, and so are its sessions."""
        if self._serving and not self._ending:  # else it is no news
            level = logging.INFO if reason == IN_ORDER else logging.WARNING
            log.log(level, "worker %d ended: %s", worker.pid, reason)
        self._pool.forget(worker)
        self._survey.forget(worker)
        for session in list(worker.sessions):
            self._session_over(worker, session, f"its worker ended: {reason}")
        self._handshakes.worker_lost(worker, reason)

    # --- what is told of it ---

    def survey(self, then: Callable[[dict[str, Any]], object]) -> None:
        """Call ``then`` with what `flyt status` shows."""

        def report(figures: Figures) -> None:
            then(
                status_report(
                    self._options.device,
                    self._options.isolation,
                    self._pool,
                    self._region,
                    self._desk,
                    self._handshakes.garbage,
                    self._suspensions.sessions,
                    figures,
                )
            )

        self._survey.take(report)
