# SPDX-License-Identifier: Apache-2.0
"""A worker: the process that holds the CUDA context and hosts session threads.

It obeys the supervisor over a socket pair, and ends with it. A sticky error ends the worker alone:
each of its clients hears the code as the last word, and the supervisor starts a successor.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import random
import select
import signal
import socket
import sys
import threading
import time

from flyt.backend import prints
from flyt.backend.authentication import WorkerAuthentication
from flyt.backend.channel import Channel, ChannelClosed
from flyt.backend.devices import open_devices, versions
from flyt.backend.devices.base import Device
from flyt.backend.limits import raise_descriptor_limit
from flyt.backend.orders import (
    FROM_WORKER,
    TO_WORKER,
    Broken,
    Closed,
    End,
    Failed,
    Granted,
    Leave,
    Measure,
    Measured,
    Open,
    Opened,
    Paused,
    Ready,
    Reclaimed,
    Resume,
    Suspend,
)
from flyt.backend.reaper import Activity, Reaper
from flyt.backend.registry import Registry
from flyt.backend.services import OwnRegion, Services
from flyt.backend.session import Session
from flyt.errors import DeviceError, FlytError, ProtocolError, RegionError, SessionLost
from flyt.rpc.sockets import open_context
from flyt.shm import private
from flyt.shm.layout import Geometry
from flyt.shm.region import MIN_SIZE
from flyt.shm.window import Window, pick_base

log = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 1.0
"""How long the sessions of a broken worker may take to tell their clients."""

LEAVE_SECONDS = 60.0
"""How long running work may hold up an ordered exit; the supervisor's own limit is shorter."""


class Worker:
    """The main thread of a worker process."""

    def __init__(
        self, channel: Channel, devices: list[Device], arguments: argparse.Namespace
    ) -> None:
        self._channel = channel
        self._sessions: dict[int, Session] = {}
        self._parting: list[Session] = []
        """Closed, but their threads may still hold the socket for the last words."""
        self._lock = threading.Lock()
        self._broken: tuple[int, str] | None = None
        self._paused = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        context = open_context()
        self._authentication = (
            WorkerAuthentication(context, arguments.server_key_fd)
            if arguments.server_key_fd is not None
            else None
        )
        activity = Activity()
        reaper = Reaper(activity)
        reaper.start()
        self._services = Services(
            context=context,
            devices=devices,
            region=_region(arguments),
            registry=Registry(),
            reaper=reaper,
            activity=activity,
            heartbeat_ms=arguments.heartbeat_ms,
            bells=tuple(arguments.bells),
            key=self._authentication.key if self._authentication is not None else None,
            tell=self._tell,
            broken=self._break,
            prints=prints.begin(alone=arguments.prints),
        )

    # --- from session threads ---

    def _tell(self, message: object) -> None:
        try:
            self._channel.send(message)
        except FlytError as exc:
            log.error("the supervisor does not listen: %s", exc)
            self._stop()
        if isinstance(message, Paused):
            self._paused = message.paused
        if isinstance(message, Closed) or (isinstance(message, Opened) and message.error):
            with self._lock:
                session = self._sessions.pop(message.session, None)
                parting = [*self._parting, *([] if session is None else [session])]
                self._parting = [thread for thread in parting if thread.is_alive()]

    def _break(self, code: int, text: str) -> None:
        if self._broken is None:
            self._broken = (code, text)
        self._stop()

    def _stop(self) -> None:
        os.eventfd_write(self._wake, 1)

    # --- the main thread ---

    def serve(self, parent: int) -> int:
        """Obey until told to leave; returns the exit status."""
        poller = select.poll()
        for descriptor in (self._channel.fileno(), parent, self._wake):
            poller.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if self._wake in ready:
                return self._last_words()
            if parent in ready:
                return 1
            try:
                for order in self._channel.messages():
                    if isinstance(order, Leave):
                        return self._leave()
                    self._obey(order)
            except ChannelClosed:
                return 1
            if self._channel.closed:
                return 1

    def _obey(self, order: object) -> None:
        match order:
            case Open():
                self._open(order, self._own_region(order))
            case Granted() | Reclaimed() | End() | Suspend() | Resume():
                with self._lock:
                    target = self._sessions.get(order.session)
                if target is not None:
                    _hand_over(target, order)
            case Measure():
                self._tell(
                    Measured({f"{one.id:016x}": one.holdings.figures() for one in self._all()})
                )

    def _own_region(self, order: Open) -> OwnRegion | None:
        if not order.region_size:
            return None
        if not self._channel.descriptors:
            raise ProtocolError("the supervisor sent no descriptor with a session's region")
        geometry = Geometry.plan(order.region_size, order.page_size)
        return OwnRegion(self._channel.descriptors.popleft(), geometry)

    def _open(self, order: Open, region: OwnRegion | None) -> None:
        if self._broken is not None:
            if region is not None:
                region.close()
            return
        if self._authentication is not None and order.address.startswith("tcp:"):
            self._authentication.expect(order.peer)
        try:
            session = Session(self._services, order, region)
            with self._lock:
                self._sessions[order.session] = session
            session.start()
        except (OSError, RuntimeError) as exc:  # no descriptor or no thread is left
            if region is not None:
                region.close()
            self._tell(Opened(order.session, 0, "", f"no room for another session: {exc}"))

    def _all(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._lock:
            threads = [*self._sessions.values(), *self._parting]
        for session in threads:
            session.join(max(0.0, deadline - time.monotonic()))

    def _leave(self) -> int:
        for session in self._all():
            session.end("the backend is shutting down")
        self._join(LEAVE_SECONDS)
        if self._paused:  # a call to the driver would wait for a resumption
            return 0
        self._services.reaper.leave()
        for device in self._services.devices:
            device.close()
        return 0

    def _last_words(self) -> int:
        code, text = self._broken or (46, "the supervisor is gone")
        try:
            self._channel.send(Broken(code, text[:4096]))
        except FlytError as exc:
            log.error("the supervisor does not listen: %s", exc)
        for session in self._all():
            session.sticky(code, text)
        self._join(LAST_WORDS_SECONDS)
        return 1


def _hand_over(target: Session, order: Granted | Reclaimed | End | Suspend | Resume) -> None:
    """An order for one session, to its thread."""
    match order:
        case Granted() | Reclaimed():
            target.deliver(order)
        case End():
            target.end(order.reason, unless_attached=order.unless_attached)
        case Suspend():
            target.suspend(order.patience)
        case Resume():
            target.resume()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Flyt's worker; started by flyt-backend only.")
    for name in ("channel-fd", "parent-pidfd", "heartbeat-ms"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("region-fd", "region-size", "page-size", "server-key-fd"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument(
        "--bells", type=int, nargs="*", default=[], help="descriptors, from bell 1 on"
    )
    parser.add_argument("--own-regions", action="store_true", help="sessions bring theirs")
    parser.add_argument("--prints", action="store_true", help="keep what kernels print")
    parser.add_argument("--device", required=True)
    parser.add_argument("--device-options", default="")
    parser.add_argument("--sm-limit", type=int, default=0)
    parser.add_argument("--log-level", default="WARNING")
    return parser.parse_args()


def _region(arguments: argparse.Namespace) -> tuple[int, Geometry] | None:
    if arguments.region_fd is None:
        return None
    return arguments.region_fd, Geometry.plan(arguments.region_size, arguments.page_size)


def _try_region(device: Device, region: tuple[int, Geometry] | None) -> None:
    """Register one frame and let it go again: not every file that can be mapped can be pinned.

    Raises
    ------
    RegionError
        The device can't read this kind of file.
    """
    if region is None:
        return
    descriptor, geometry = region
    base = pick_base(geometry.page_size, random.Random())
    window = Window.reserve_at(descriptor, geometry, base, geometry.page_size)
    try:
        device.register(window.map(0, ((0, 1),)), geometry.page_size)
        device.unregister(base)
    except DeviceError as exc:
        raise RegionError(
            f"the device can't register the region for DMA ({exc}): use a POSIX shared-memory "
            "object, or a file on tmpfs or hugetlbfs"
        ) from exc
    finally:
        window.close()


def _try_own_region(device: Device) -> None:
    """The same with a region as clients get them (``--region per-client``)."""
    geometry = Geometry.plan(MIN_SIZE)
    try:
        descriptor = private.create(geometry, 0)
    except OSError as exc:
        raise RegionError(f"no memory for a client's region: {exc.strerror}") from exc
    try:
        _try_region(device, (descriptor, geometry))
    finally:
        os.close(descriptor)


def _snapshot(devices: list[Device]) -> dict[str, object]:
    runtime, driver = versions(devices)
    return {
        "runtime_version": runtime,
        "driver_version": driver,
        "devices": [dataclasses.asdict(device.snapshot()) for device in devices],
    }


def main() -> int:
    """Entry point of ``python -m flyt.backend.worker``."""
    arguments = _arguments()
    logging.basicConfig(
        level=arguments.log_level, format="flyt-worker[%(process)d] %(levelname)s %(message)s"
    )
    raise_descriptor_limit()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the supervisor leads
    channel = Channel(
        socket.socket(fileno=arguments.channel_fd), FROM_WORKER, TO_WORKER, takes_descriptors=True
    )
    try:
        try:
            devices = open_devices(arguments.device, arguments.device_options)
            if not devices:
                raise DeviceError(100, "no device")
            if arguments.sm_limit:
                for device in devices:
                    device.limit_sms(arguments.sm_limit)
            snapshot = _snapshot(devices)
            _try_region(devices[0], _region(arguments))
            if arguments.own_regions:
                _try_own_region(devices[0])
        except FlytError as exc:
            channel.send(Failed(getattr(exc, "code", 100), str(exc)[:4096]))
            return 1
        worker = Worker(channel, devices, arguments)
        channel.send(Ready(snapshot))
        return worker.serve(arguments.parent_pidfd)
    except (SessionLost, ChannelClosed):
        return 1


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    # Threads of the driver and of the device may be stuck in a lost context; nothing is left to do.
    os._exit(status)
