# SPDX-License-Identifier: Apache-2.0
"""``flyt demo``: a private backend and several clients at once, each byte checked.

Everything runs as it would in earnest: the backend is a ``flyt-backend`` process, the clients are
processes that know nothing but ``FLYT_BACKEND``. This module starts them, watches the region's
page table while they run, and judges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import selectors
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from flyt.cli import draw
from flyt.cli.processes import Client, DemoFailed, running_backend
from flyt.errors import ConfigurationError, FlytError
from flyt.frontend.launcher import Launched
from flyt.shm.region import Region, free_space, resolve
from flyt.shm.table import Entry, FrameTable

MIB = 1 << 20

PIECE = 64 * MIB
"""Bytes that a client holds at a time: three clients then fit a machine with 1 GiB of memory."""

LARGEST_REGION = 256 * MIB
"""Enough for full speed; more would only take memory."""

SMALLEST_REGION = 8 * MIB
"""Below this, three clients have no room to stage."""

LEAST_FREE = SMALLEST_REGION * 4 // 3 + MIB
"""A region takes three quarters of what is free, in whole MiB."""

LARGEST_PINNED = 16 * MIB
"""Beyond this, larger pinned copies are no faster."""

SILENCE_LIMIT = 60.0
"""Seconds without any news from any client before the demo gives up."""

SAMPLE_SECONDS = 0.1

RESULT_KEYS = (
    "pid",
    "bytes_h2d",
    "bytes_d2h",
    "h2d_gbps",
    "d2h_gbps",
    "pinned_h2d_gbps",
    "pinned_d2h_gbps",
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes in bytes that fit the shared memory which is free."""

    clients: int
    total: int
    region: int
    pinned: int

    @property
    def client_arguments(self) -> tuple[str, ...]:
        return ("--total", str(self.total), "--piece", str(PIECE), "--pinned", str(self.pinned))

    @classmethod
    def fit(cls, clients: int, total: int, free: int) -> Plan:
        """Take at most three quarters of what is free; pinned buffers get a quarter of that."""
        region = min(LARGEST_REGION, free * 3 // 4 // MIB * MIB)
        if region < SMALLEST_REGION:
            raise ConfigurationError(
                f"/dev/shm has {free >> 10} KiB free; the demo needs {LEAST_FREE >> 10} KiB: free "
                "some, or give the container more (docker run --shm-size=64m)"
            )
        share = region // (4 * clients)
        return cls(clients, total, region, min(LARGEST_PINNED, 1 << (share.bit_length() - 1)))


class Watcher:
    """Looks at a region's page table from outside and keeps the fullest view of it."""

    def __init__(self, path: str) -> None:
        self.region = Region.open(path)
        try:
            self.table = FrameTable(self.region.fd, self.region.size, None)
        except BaseException:
            self.region.close()
            raise
        self.page_size = self.table.geometry.page_size
        self.page_count = self.table.geometry.page_count
        self.peak: list[Entry] = []

    @property
    def frames_used_peak(self) -> int:
        return draw.owned_frames(self.peak)

    def sample(self) -> None:
        entries = self.table.snapshot()
        if draw.owned_frames(entries) > self.frames_used_peak:
            self.peak = entries

    def close(self) -> None:
        self.table.close()
        self.region.close()


def _ignore(_size: int) -> None:
    """Clients that are starting move nothing yet."""


def _follow(
    clients: list[Client], until: str, watcher: Watcher, progress: Callable[[int], None]
) -> None:
    """Read events until every client has said `until`, sampling the page table meanwhile."""
    waiting = set(clients)
    last_news = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.output, selectors.EVENT_READ, client)
        while waiting:
            watcher.sample()
            ready = selector.select(SAMPLE_SECONDS)
            if ready:
                last_news = time.monotonic()
            elif time.monotonic() - last_news > SILENCE_LIMIT:
                pids = ", ".join(str(client.process.pid) for client in waiting)
                raise DemoFailed(f"no news for {SILENCE_LIMIT:.0f} s; still waiting for {pids}")
            for key, _ in ready:
                client = key.data
                for event in client.events():
                    if event["event"] == "progress":
                        progress(event["bytes"])
                    elif event["event"] == until:
                        client.result = event
                        waiting.discard(client)
    watcher.sample()


@dataclasses.dataclass
class Outcome:
    """All that the demo found; `report` is its public form."""

    plan: Plan
    verified: bool = False
    failure: str = ""
    clients: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    memcpy_gbps: float = 0.0
    page_size: int = 0
    page_count: int = 0
    peak: list[Entry] = dataclasses.field(default_factory=list)

    def report(self) -> dict[str, Any]:
        return {
            "verified": self.verified,
            "clients": [{key: client[key] for key in RESULT_KEYS} for client in self.clients],
            "region": {
                "size": self.plan.region,
                "page_size": self.page_size,
                "frames_used_peak": draw.owned_frames(self.peak),
            },
            "memcpy_gbps": self.memcpy_gbps,
        }


def _measure(outcome: Outcome, backend: Launched, folder: Path, console: Console) -> None:
    plan = outcome.plan
    with contextlib.ExitStack() as stack:
        watcher = Watcher(backend.region)
        stack.callback(watcher.close)
        outcome.page_size, outcome.page_count = watcher.page_size, watcher.page_count
        clients: list[Client] = []
        for number in range(plan.clients):
            clients.append(
                Client(plan.client_arguments, backend.environment, folder / f"client{number}.log")
            )
            stack.callback(clients[-1].close)
        bar = stack.enter_context(
            Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                console=console,
            )
        )
        # Pageable and pinned, each there and back.
        task = bar.add_task(f"{plan.clients} clients", total=4 * plan.total * plan.clients)
        _follow(clients, "ready", watcher, _ignore)
        for client in clients:
            client.tell(b"go\n")
        _follow(clients, "result", watcher, lambda size: bar.advance(task, size))
        outcome.peak = watcher.peak
        without = {c.process.pid for c in clients} - {entry.pid for entry in watcher.peak}
        if without:
            raise DemoFailed(f"clients {sorted(without)} own no frame: their data went another way")
        for client in clients:
            client.leave()
    outcome.clients = [client.result for client in clients if client.result is not None]
    outcome.memcpy_gbps = round(
        statistics.median(client["memcpy_gbps"] for client in outcome.clients), 3
    )


def run(plan: Plan, device: str, console: Console) -> Outcome:
    """Run the demo; whatever goes wrong is in the outcome's `failure`."""
    outcome = Outcome(plan)
    folder = Path(tempfile.mkdtemp(prefix="flyt-demo-"))
    try:
        with running_backend(folder, device, plan.region) as backend:
            _measure(outcome, backend, folder, console)
            backend.leave()
        outcome.verified = True
    except FlytError as failure:
        outcome.failure = str(failure)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _show(outcome: Outcome, console: Console) -> None:
    if outcome.peak:
        console.print("\nPage table of the region at its fullest: which frames belong to whom\n")
        console.print(draw.page_table(outcome.peak, outcome.page_count, outcome.page_size))
        console.print()
    if outcome.clients:
        console.print(draw.speeds(outcome.clients, outcome.memcpy_gbps))


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option("--clients", default=3, show_default=True, type=click.IntRange(1, 26))
@click.option(
    "--mib",
    default=256,
    show_default=True,
    type=click.IntRange(64),
    help="MiB that each client moves, each way, pageable and pinned; a multiple of 64.",
)
@click.option(
    "--device",
    default="emulated",
    show_default=True,
    type=click.Choice(["emulated", "cupy", "auto"]),
    help="The backend's device; the emulated one needs no GPU.",
)
def demo(as_json: bool, clients: int, mib: int, device: str) -> None:
    """Move data of several processes through one region at once and check every byte."""
    signal.signal(signal.SIGTERM, _leave)  # so that everything is cleared away
    console = Console(stderr=as_json)
    if mib * MIB % PIECE:
        raise click.BadParameter(f"{mib} is no multiple of {PIECE // MIB}", param_hint="--mib")
    try:
        plan = Plan.fit(clients, mib * MIB, free_space(resolve("flyt-demo")))
    except ConfigurationError as fault:
        raise click.ClickException(str(fault)) from None
    outcome = run(plan, device, console)
    if as_json:
        print(json.dumps(outcome.report()))
    else:
        _show(outcome, console)
    if not outcome.verified:
        raise click.ClickException(f"not verified: {outcome.failure}")
    if not as_json:
        console.print("verified", style="bold green")
