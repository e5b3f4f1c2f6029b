# SPDX-License-Identifier: Apache-2.0
"""One whole run: a private backend or one that runs, the contenders' processes, the harness."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from flyt.bench.contenders import Processes
from flyt.bench.harness import Harness, Progress
from flyt.bench.machine import Ticks, describe
from flyt.bench.plan import LARGE, MIB, STREAM_CALLS, Job, Plan
from flyt.bench.report import Report
from flyt.bench.results import Results
from flyt.errors import ConfigurationError, FlytError
from flyt.frontend.launcher import Launched, start
from flyt.rpc.patience import Deadline
from flyt.shm.region import free_space, resolve

START_LIMIT = 60.0
"""Seconds until the backend is ready; a CUDA context takes a few."""

STAGING_ROOM = 256 * MIB
"""Of a region, for the staging areas of ten sessions at full size."""

SMALLEST_REGION = 8 * MIB
"""Below this, sessions have no room to stage."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """Whom to measure.

    Attributes
    ----------
    device : str
        The private backend's ``--device``.
    native : str or None
        Module that stands for native CUDA; None leaves it out.
    backend : str or None
        Endpoint of a backend that runs; None starts a private one.
    """

    device: str
    native: str | None = None
    backend: str | None = None

    @property
    def modules(self) -> dict[str, str]:
        """Kind of process → the module that it measures."""
        modules = {"memcpy": "memcpy"}
        if self.native is not None:
            modules["native"] = self.native
        return {**modules, "flyt": "flyt", "inline": "flyt"}

    @property
    def against(self) -> list[str]:
        """Which promises apply."""
        promises = ["native"] if self.native is not None else []
        if self.backend is None and self.device == "emulated":
            promises.append("memcpy")
        return promises


def region_size(plan: Plan, free: int) -> int:
    """Bytes for a private region: room for the largest pinned copy beside those of all clients,
    since frames are zeroed before they serve again. At most three quarters of what is `free`."""
    largest = max(plan.sizes)
    streams = min(LARGE, largest) * STREAM_CALLS * max(plan.clients)
    wanted = -(-(largest + streams) // MIB) * MIB + STAGING_ROOM
    size = min(wanted, free * 3 // 4 // MIB * MIB)
    if size < SMALLEST_REGION:
        raise ConfigurationError(
            f"/dev/shm has {free >> 10} KiB free: free some, or give the container more "
            "(docker run --shm-size=1g)"
        )
    return size


STOLEN = 0.02
"""What a hypervisor may give to others before the figures say more of them than of this machine: a
thread that stops for milliseconds holds up a whole copy."""


def run(setup: Setup, plan: Plan, limit: float, progress: Progress) -> Report:
    """Measure; whatever goes wrong is in the report's `failure`, with all that was found before.

    Raises
    ------
    ConfigurationError
        There is no room for any region.
    """
    report = Report(
        describe(),
        {
            **dataclasses.asdict(setup),
            "limit": limit,
            "quick": plan.quick,
            "sizes": list(plan.sizes),
            "clients": list(plan.clients),
            "cases": list(plan.cases),
            "rounds": plan.rounds,
            "region": None,
        },
        setup.against,
        Results(),
    )
    started, deadline, ticks = time.monotonic(), Deadline.after(limit), Ticks.now()
    size = region_size(plan, free_space(resolve("flyt-bench"))) if setup.backend is None else 0
    folder = Path(tempfile.mkdtemp(prefix="flyt-bench-"))
    try:
        with (
            _backend(setup, size, folder) as (backend, environment),
            contextlib.ExitStack() as stack,
        ):
            processes = Processes(setup.modules, environment, folder)
            stack.callback(processes.close)
            harness = Harness(processes, deadline, limit, progress)
            report.results = harness.results
            harness.run(plan.jobs(processes.kinds))
            report.counters = processes.notes()
            report.results.notes += _detours(report.counters)
            processes.leave()
            if backend is not None:
                report.settings = {**report.settings, "region": size}
                backend.leave()
    except FlytError as failure:
        report.failure = str(failure)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.seconds = round(time.monotonic() - started, 1)
    stolen = Ticks.now().stolen_since(ticks)
    report.machine = {**report.machine, "stolen": round(stolen, 4)}
    if stolen > STOLEN:
        report.results.notes.append(
            f"others on this host took {stolen:.0%} of the processors' time: measure again"
        )
    return report


@contextlib.contextmanager
def _backend(
    setup: Setup, size: int, folder: Path
) -> Iterator[tuple[Launched | None, dict[str, str]]]:
    """The backend if it is ours, and the environment of its clients."""
    if setup.backend is not None:
        # The runtime folder and the region stay as the caller has them: they belong to it.
        yield None, {**os.environ, "FLYT_BACKEND": setup.backend}
        return
    with contextlib.ExitStack() as stack:
        log = folder / "backend.log"
        backend = start(setup.device, size, Deadline.after(START_LIMIT), log=log)
        stack.callback(backend.end)
        yield backend, backend.environment


def _detours(counters: dict[str, dict[str, int]]) -> list[str]:
    """Notes on bytes that went another way than their contender's name says."""
    notes = []
    for name, counts in counters.items():
        if "fallback_inline" not in counts:
            continue
        if name.startswith("inline"):
            if not counts["fallback_inline"]:
                notes.append("flyt inline: the session had a region; its figures are not inline")
        elif counts["fallback_inline"]:
            notes.append(f"{name}: no memory is shared with the backend; all its data went inline")
        if counts["fallback_small_staging"]:
            notes.append(f"{name}: the region was nearly full, so it staged with less")
    return notes


def jobs_of(setup: Setup, plan: Plan) -> list[Job]:
    """What a run will measure, for a progress bar."""
    return plan.jobs(setup.modules)
