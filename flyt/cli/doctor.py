# SPDX-License-Identifier: Apache-2.0
"""``flyt doctor``: checks a set-up from the client's side, step by step, and says what to do.

Each step is a function that returns what it found, or raises a FlytError that says how to mend it;
what comes after a failed step would only fail again, so the rest is not tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import click
import numpy as np

import flyt
from flyt._version import __version__
from flyt.environment import NATIVE, RING
from flyt.errors import ConfigurationError, FlytError, RegionError
from flyt.frontend.session import Session
from flyt.frontend.settings import Settings
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.messages import PROTOCOL_VERSION
from flyt.shm.ivshmem import SCHEME, WRITE_COMBINING
from flyt.shm.native import native
from flyt.shm.private import PRIVATE
from flyt.shm.region import Region
from flyt.shm.table import FrameTable

SMALL, LARGE = 4096, 64 << 20
"""Bytes of the two probes: one shows what a command takes, the other what the link carries."""

SMALL_ROUNDS = 200
LARGE_ROUNDS = 3


class Unsound(FlytError):
    """A step found something that keeps Flyt from working as it should."""


@dataclasses.dataclass(slots=True)
class Visit:
    """What the steps so far have found out."""

    settings: Settings
    endpoint: Endpoint
    session: Session | None = None
    warnings: list[str] = dataclasses.field(default_factory=list)

    def connected(self) -> Session:
        if self.session is None:
            raise Unsound("there is no session")
        return self.session


def endpoint_step(visit: Visit) -> str:
    """Where the backend is looked for, and whether something is there."""
    where = visit.endpoint
    source = "FLYT_BACKEND" if os.environ.get("FLYT_BACKEND") else "the default"
    if where.scheme == "ipc" and not os.path.exists(where.path):
        raise Unsound(
            f"{where} ({source}) does not exist: start flyt-backend, mount its folder into this "
            "container, or set FLYT_BACKEND"
        )
    return f"{where} ({source})"


def session_step(visit: Visit) -> str:
    """HELLO, WELCOME, ATTACH."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", flyt.FlytWarning)
        visit.session = flyt.connect(visit.settings.endpoint)
    visit.warnings = [str(one.message) for one in caught]
    return f"session {visit.session.welcome.session:016x}"


def versions_step(visit: Visit) -> str:
    """They fit, or there would be no session."""
    snapshot = visit.connected().welcome.snapshot
    return (
        f"Flyt {__version__}, protocol {PROTOCOL_VERSION} on both sides; CUDA runtime "
        f"{snapshot['runtime_version']}, driver {snapshot['driver_version']}"
    )


def region_step(visit: Visit) -> str:
    """Whether both sides see the same memory: each has read the other's random word at ATTACH."""
    session = visit.connected()
    welcome = session.welcome
    if session.memory is not None:
        path = session.memory.path
        return f"{path}, {welcome.region_size >> 20} MiB, seen by both sides; {cache_type(path)}"
    if not welcome.region:
        raise Unsound(
            "the backend serves without a region, so all bytes go inline: start it without "
            "--no-region, and look into its log"
        )
    raise Unsound(why_inline(visit, welcome.region, welcome.epoch))


def why_inline(visit: Visit, theirs: str, epoch: int) -> str:
    """Why a session has no window although the backend has a region."""
    chosen = visit.settings.region
    path = chosen or theirs
    in_guest = chosen.startswith(SCHEME) or not (chosen or visit.endpoint.is_loopback())
    if theirs.startswith(PRIVATE) or in_guest:  # no file to look at; the session knows why
        return "; ".join(visit.warnings)
    try:
        with (
            contextlib.closing(Region.open(path)) as region,
            contextlib.closing(FrameTable(region.fd, region.size)) as table,
        ):
            found = table.superblock().epoch
    except RegionError as exc:
        return f"{exc}; in a container mount the host's /dev/shm (or the file) at the same path"
    if found != epoch:
        return (
            f"{path} is another region than the backend's (epoch {found:x}, not {epoch:x}): mount "
            "the host's file, not a copy; a container has a /dev/shm of its own (docker run --ipc)"
        )
    return (
        f"{path} is the right region, but: {'; '.join(visit.warnings)} (QEMU's "
        "memory-backend-file needs share=on, and the region room for one more session)"
    )


def cache_type(path: str) -> str:
    """How the CPU caches the mapping, as far as its path tells."""
    name = os.path.basename(os.path.realpath(path))
    if path.startswith(SCHEME) or name == WRITE_COMBINING:
        return "write-combining (a PCI device): where the host's CPU is AMD's, reading is slow"
    if name.startswith("resource"):
        return "the cache type of a PCI device depends on guest and KVM; see the probe below"
    return "cached (ordinary shared memory)"


def commands_step(visit: Visit) -> str:
    """Which way the commands take."""
    for switch in (NATIVE, RING):
        if not switch.read():
            raise Unsound(f"{switch.name}=0 turns the fast way of commands off: unset it")
    if native() is None:
        raise Unsound(
            "libflyt.so is not built, so each command takes a ZeroMQ round trip: install a C "
            "compiler, then Flyt again"
        )
    session = visit.connected()
    if session.memory is None:
        return "ZeroMQ"
    if session.connection.link is None:
        raise Unsound(
            "the backend has no rings, so each command takes a ZeroMQ round trip: on its host "
            "install a C compiler, then Flyt again, or start it without FLYT_RING=0 and "
            "FLYT_NATIVE=0"
        )
    return "rings in shared memory"


def devices_step(visit: Visit) -> str:
    """The GPUs."""
    devices = visit.connected().devices
    if not devices:
        raise Unsound("the backend has no device: run nvidia-smi on its host")
    return "; ".join(f"{d['name']}, {d['total_memory'] >> 20} MiB" for d in devices)


def probe_step(visit: Visit) -> str:
    """Copies there and back; every byte is compared."""
    visit.connected()
    small, large = _probe(SMALL, SMALL_ROUNDS), _probe(LARGE, LARGE_ROUNDS)
    return (
        f"{SMALL >> 10} KiB: H2D {small[0] * 1e6:.1f} µs, D2H {small[1] * 1e6:.1f} µs; "
        f"{LARGE >> 20} MiB: H2D {LARGE / large[0] / 1e9:.2f} GB/s, "
        f"D2H {LARGE / large[1] / 1e9:.2f} GB/s; all bytes right"
    )


def _probe(size: int, rounds: int) -> tuple[float, float]:
    """Median seconds of a copy to the device and of one back."""
    kinds = flyt.cudaMemcpyKind
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    there, back = [], []
    address = _must(*flyt.cudaMalloc(size))
    try:
        for _ in range(rounds):
            target = np.zeros(size, np.uint8)
            start = time.perf_counter()
            _must(*flyt.cudaMemcpy(address, source, size, kinds.cudaMemcpyHostToDevice))
            _must(*flyt.cudaDeviceSynchronize())
            middle = time.perf_counter()
            _must(*flyt.cudaMemcpy(target, address, size, kinds.cudaMemcpyDeviceToHost))
            there.append(middle - start)
            back.append(time.perf_counter() - middle)
            if not np.array_equal(source, target):
                raise Unsound(f"bytes of a copy of {size} bytes came back wrong")
    finally:
        _must(*flyt.cudaFree(address))
    return statistics.median(there), statistics.median(back)


def _must(error: object, value: int = 0) -> int:
    if error != flyt.cudaError_t.cudaSuccess:
        raise Unsound(f"{error}: {flyt.last_failure()}")
    return value


STEPS: dict[str, Callable[[Visit], str]] = {
    "endpoint": endpoint_step,
    "session": session_step,
    "versions": versions_step,
    "devices": devices_step,
    "region": region_step,
    "commands": commands_step,
    "probe": probe_step,
}

ENDS = frozenset({"endpoint", "session"})
"""Steps without which no other can work."""


@click.command()
@click.option("--backend", metavar="ENDPOINT", help="Default: FLYT_BACKEND, else the local one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def doctor(backend: str | None, as_json: bool) -> None:
    """Check this client's set-up and say what to do; exit with 1 if something is wrong."""
    found: list[dict[str, object]] = []
    try:
        settings = Settings.read(endpoint=backend)
        visit = Visit(settings, Endpoint.parse(settings.endpoint))
    except ConfigurationError as exc:
        click.echo(f"flyt doctor: {exc}", err=True)
        sys.exit(1)
    try:
        for name, step in STEPS.items():
            try:
                text, sound = step(visit), True
            except FlytError as exc:
                text, sound = str(exc), False
            found.append({"step": name, "ok": sound, "text": text})
            if not as_json:
                print(f"{'ok  ' if sound else 'FAIL'} {name}: {text}", flush=True)
            if not sound and name in ENDS:
                break
    finally:
        if visit.session is not None:
            visit.session.close()
    if as_json:
        print(json.dumps(found, indent=2))
    sys.exit(0 if all(step["ok"] for step in found) else 1)
