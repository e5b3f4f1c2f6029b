# SPDX-License-Identifier: Apache-2.0
"""`Options`: everything a user can say to ``flyt-backend``, checked once."""

from __future__ import annotations

import dataclasses
import math
import os

from flyt.errors import ConfigurationError
from flyt.rpc.endpoints import SUN_PATH_LIMIT, Endpoint, port_range

DEVICES = ("auto", "cupy", "emulated")

ISOLATIONS = ("shared", "process")
"""Who shares a worker process: the sessions of one principal, or none."""

PER_CLIENT = "per-client"
"""The --region that stands for one of each client's own."""

MAX_WORKERS = 64
"""Default of ``--max-workers``: each holds a CUDA context of some 500 MB, so these fill any GPU."""

MAX_SESSIONS = 1000
"""Of all users together. Each is a thread, a socket and tens of descriptors in a worker."""

SESSIONS_PER_USER = 250
"""Default of ``--sessions-per-user``: no two or three users together can shut out the others."""

IDLE_WORKER_SECONDS = 60.0
"""Default of ``--idle-worker``: a context of 500 MB is a lot to keep for a user who has gone, and
0.2 s to start one is little once a minute."""

SESSION_SUFFIX = len(".0123456789abcdef")
"""Session sockets lie beside the ipc endpoint, under its name and 16 more hex digits."""

LONGEST_SECONDS = 86_400.0
"""A day: longer heartbeats, sweeps or drains are slips of the pen."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What the daemon does. Sizes are in bytes, times in seconds.

    Attributes
    ----------
    region : str or None
        Name or path of the region, or ``"per-client"``; None serves without one, all payloads
        inline.
    size : int or None
        None: the size of the existing region, else what fits (see `flyt.backend.served`).
    listen : tuple of str
        Endpoints, at least one.
    isolation : str
        ``"shared"``: a worker process for each principal; ``"process"``: one for each session.
    max_workers : int
        Worker processes that may serve at once.
    sessions_per_user : int
        Sessions that one principal may have.
    idle_worker : float
        How long a worker whose user has no session any more waits for the next one.
    session_ports : str
        ``A-B`` for the sockets of TCP sessions, or ``*`` for any.
    single_port : bool
        Sessions of TCP clients go through the port of the endpoint.
    doorbell : str or None
        Path of a UNIX socket at which QEMU's ivshmem-doorbell gets the region.
    memory_limit : int
        Device memory per session; 0 for no limit.
    sm_limit : int
        SMs that a session's kernels may have at once; 0 for all.
    server_key, authorized_keys : str or None
        The daemon's secret CURVE key, and the folder of its clients' public ones; both or none.
    metrics : str or None
        ``HOST:PORT`` for Prometheus.
    ready_fd, parent_fd : int or None
        Where the ready line goes; a pidfd whose process's end is ours, too.
    """

    listen: tuple[str, ...]
    device: str = "auto"
    device_options: str = ""
    region: str | None = "flyt"
    size: int | None = None
    page_size: int | None = None
    session_ports: str = "*"
    single_port: bool = False
    doorbell: str | None = None
    isolation: str = "shared"
    max_workers: int = MAX_WORKERS
    sessions_per_user: int = SESSIONS_PER_USER
    idle_worker: float = IDLE_WORKER_SECONDS
    memory_limit: int = 0
    sm_limit: int = 0
    keep_region: bool = False
    heartbeat: float = 30.0
    sweep: float = 5.0
    drain: float = 5.0
    insecure: bool = False
    server_key: str | None = None
    authorized_keys: str | None = None
    metrics: str | None = None
    ready_fd: int | None = None
    parent_fd: int | None = None

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigurationError(f"--device {self.device}: choose one of {', '.join(DEVICES)}")
        if self.isolation not in ISOLATIONS:
            raise ConfigurationError(
                f"--isolation {self.isolation}: choose one of {', '.join(ISOLATIONS)}"
            )
        if not 1 <= self.max_workers <= MAX_SESSIONS:
            raise ConfigurationError(
                f"--max-workers {self.max_workers}: wants a number from 1 to {MAX_SESSIONS}"
            )
        if not 1 <= self.sessions_per_user <= MAX_SESSIONS:
            raise ConfigurationError(
                f"--sessions-per-user {self.sessions_per_user}: wants a number from 1 to "
                f"{MAX_SESSIONS}"
            )
        if self.sm_limit < 0:
            raise ConfigurationError(
                f"--sm-limit {self.sm_limit}: wants a number, or 0 for no limit"
            )
        if self.sm_limit and self.isolation != "process":
            raise ConfigurationError(
                "--sm-limit caps processes, and sessions of a user share one: add --isolation "
                "process"
            )
        if self.session_ports != "*":
            port_range(self.session_ports)
        if self.single_port and not any(text.startswith("tcp:") for text in self.listen):
            raise ConfigurationError("--single-port is for TCP: add --listen tcp://127.0.0.1:5555")
        if not self.listen:
            raise ConfigurationError("--listen: at least one endpoint is needed")
        if (self.server_key is None) != (self.authorized_keys is None):
            raise ConfigurationError(
                "--server-key and --authorized-keys belong together: the daemon's own key, and the "
                "folder with those of its clients (flyt keygen server makes both)"
            )
        if self.keys is not None and not any(text.startswith("tcp:") for text in self.listen):
            raise ConfigurationError("--server-key is for TCP: add --listen tcp://0.0.0.0:5555")
        for text in self.listen:
            _check_listen(text, self.insecure or self.keys is not None)
        for name, low in (
            ("heartbeat", 0.0),
            ("sweep", 0.01),
            ("drain", 0.0),
            ("idle_worker", 0.0),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= LONGEST_SECONDS):
                option = name.replace("_", "-")
                raise ConfigurationError(
                    f"--{option} {value}: wants seconds from {low} to {LONGEST_SECONDS:.0f}"
                )
        if self.metrics is not None:
            _check_metrics(self.metrics, self.insecure)
        if self.is_private:
            self._check_private()
        if self.doorbell is not None:
            _check_doorbell(self.doorbell, self.region)
        _check_descriptor("--ready-fd", self.ready_fd)
        _check_descriptor("--with-parent-fd", self.parent_fd)

    @property
    def is_private(self) -> bool:
        """Whether each client gets a region of its own."""
        return self.region == PER_CLIENT

    def _check_private(self) -> None:
        if not any(text.startswith("ipc:") for text in self.listen):
            raise ConfigurationError(
                "--region per-client: regions are handed out over UNIX sockets, so add --listen "
                "ipc:///path"
            )
        if self.keep_region:
            raise ConfigurationError(
                "--keep-region: with --region per-client there is none to keep"
            )
        if self.doorbell is not None:
            raise ConfigurationError("--doorbell is for the region of a guest, not for per-client")

    @property
    def keys(self) -> tuple[str, str] | None:
        """Where the daemon's key and those of its clients are; None to do without."""
        if self.server_key is None or self.authorized_keys is None:
            return None
        return self.server_key, self.authorized_keys

    @property
    def heartbeat_ms(self) -> int:
        """The heartbeat as ZeroMQ and WELCOME want it; 0 means none."""
        return math.ceil(self.heartbeat * 1000)


def _check_listen(text: str, may_be_remote: bool) -> None:
    endpoint = Endpoint.parse(text)
    if endpoint.scheme == "emulated":
        raise ConfigurationError(f"--listen {text}: 'emulated:' is for clients; use ipc or tcp")
    if endpoint.scheme == "ipc":
        if not os.path.isabs(endpoint.path):
            raise ConfigurationError(f"--listen {text}: the path must be absolute")
        if len(os.fsencode(endpoint.path)) + SESSION_SUFFIX > SUN_PATH_LIMIT:
            raise ConfigurationError(
                f"--listen {text}: the path is too long: the session sockets beside it need "
                f"{SESSION_SUFFIX} more of the {SUN_PATH_LIMIT} bytes that Linux allows"
            )
    elif not endpoint.is_loopback() and not may_be_remote:
        raise ConfigurationError(
            f"--listen {text}: without authentication, whoever reaches this port has the GPU; give "
            "--server-key and --authorized-keys (flyt keygen server makes them), listen on "
            "127.0.0.1 or on ipc, or say --insecure on a network that you trust"
        )


def _check_metrics(text: str, insecure: bool) -> None:
    try:
        where = Endpoint.parse(f"tcp://{text}")
    except ConfigurationError as exc:
        raise ConfigurationError(f"--metrics {text}: wants HOST:PORT, like 127.0.0.1:9400") from exc
    if not where.is_loopback() and not insecure:
        raise ConfigurationError(
            f"--metrics {text}: whoever reaches this port sees the names of all clients; "
            "listen on 127.0.0.1, or say --insecure on a network that you trust"
        )


def _check_doorbell(path: str, region: str | None) -> None:
    if region is None:
        raise ConfigurationError("--doorbell is for a region that a guest maps: drop --no-region")
    if not os.path.isabs(path) or len(os.fsencode(path)) > SUN_PATH_LIMIT:
        raise ConfigurationError(
            f"--doorbell {path}: wants an absolute path of at most {SUN_PATH_LIMIT} bytes"
        )


def _check_descriptor(option: str, descriptor: int | None) -> None:
    if descriptor is None:
        return
    try:
        os.fstat(descriptor)
    except (OSError, OverflowError) as exc:
        raise ConfigurationError(f"{option} {descriptor}: no such open descriptor") from exc
