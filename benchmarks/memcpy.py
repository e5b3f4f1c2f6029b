# SPDX-License-Identifier: Apache-2.0
"""How fast are copies? Flyt beside a plain memcpy and, with a GPU, beside CUDA itself.

Only ratios within one run mean anything, so each run measures all of them, one process after the
other, with the same code: `measure` gets either ``flyt`` or ``cuda.bindings.runtime``, since both
speak the same API. Figures are medians over the repeats.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime as dt
import functools
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flyt.cli.processes import running_backend
from flyt.shm.region import free_space, resolve

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
REPEATS = 7

BATCH_BYTES = 16 * MIB
"""Small copies are timed in batches of about so many bytes, at most `MOST_A_BATCH` of them."""

MOST_A_BATCH = 200
LARGEST_REGION = 1 << 30
WORKER_LIMIT = 300.0
"""Seconds for one contender."""

KINDS = ("pageable_h2d", "pageable_d2h", "pinned_h2d", "pinned_d2h")
Speeds = dict[str, dict[str, float | None]]
"""GB/s by kind and size; None where the memory could not be had."""


def batches(operation: Callable[[], object], finish: Callable[[], object], size: int) -> float:
    """Median GB/s of `operation`, which moves `size` bytes; `finish` waits for the last of them."""
    count = max(1, min(MOST_A_BATCH, BATCH_BYTES // size))
    speeds = []
    for repeat in range(REPEATS + 1):
        started = time.perf_counter()
        for _ in range(count):
            operation()
        finish()
        if repeat:  # the first one warms up
            speeds.append(count * size / (time.perf_counter() - started) / 1e9)
    return statistics.median(speeds)


def pageable_buffer(size: int) -> tuple[mmap.mmap, int]:
    """Private memory that is really there, and its address."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 0x5A, size)
    return memory, address


def measure(cudart: Any, sizes: list[int], staged: Callable[[], int]) -> tuple[Speeds, int]:
    """Time cudaMemcpy of whatever speaks the runtime API.

    Also tells by how much `staged` grew while pinned memory was copied: it should not.
    """
    staged_by_pinned = 0
    to_device = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
    to_host = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost

    def checked(answer: tuple[Any, ...]) -> Any:
        if answer[0] != cudart.cudaError_t.cudaSuccess:
            raise SystemExit(f"benchmark: {answer[0]!r}")
        return answer[1] if len(answer) > 1 else None

    def both_ways(host: int, size: int) -> tuple[float, float]:
        def finish() -> None:
            checked(cudart.cudaDeviceSynchronize())

        return (
            batches(
                lambda: checked(cudart.cudaMemcpy(device, host, size, to_device)), finish, size
            ),
            batches(lambda: checked(cudart.cudaMemcpy(host, device, size, to_host)), finish, size),
        )

    speeds: Speeds = {kind: {} for kind in KINDS}
    for size in sizes:
        device = checked(cudart.cudaMalloc(size))
        _memory, host = pageable_buffer(size)
        there, back = both_ways(host, size)
        speeds["pageable_h2d"][str(size)], speeds["pageable_d2h"][str(size)] = there, back
        error, pinned = cudart.cudaHostAlloc(size, 0)
        if error == cudart.cudaError_t.cudaErrorMemoryAllocation:
            speeds["pinned_h2d"][str(size)] = speeds["pinned_d2h"][str(size)] = None
        else:
            checked((error,))
            ctypes.memset(pinned, 0xA5, size)
            before = staged()
            there, back = both_ways(pinned, size)
            staged_by_pinned += staged() - before
            speeds["pinned_h2d"][str(size)], speeds["pinned_d2h"][str(size)] = there, back
            checked(cudart.cudaFreeHost(pinned))
        checked(cudart.cudaFree(device))
    return speeds, staged_by_pinned


def measure_memcpy(sizes: list[int]) -> Speeds:
    """Time one thread's memmove of the same bytes."""
    speeds: Speeds = {"memcpy": {}}
    for size in sizes:
        (_a, source), (_b, target) = pageable_buffer(size), pageable_buffer(size)
        copy = functools.partial(ctypes.memmove, target, source, size)
        speeds["memcpy"][str(size)] = batches(copy, lambda: None, size)
    return speeds


def work(contender: str, sizes: list[int]) -> dict[str, Any]:
    """What one contender's process reports."""
    if contender == "memcpy":
        return {"speeds": measure_memcpy(sizes)}
    if contender == "native":
        from cuda.bindings import runtime

        return {"speeds": measure(runtime, sizes, lambda: 0)[0]}
    import flyt

    def staged() -> int:
        counts = flyt.statistics()
        return counts["staged_h2d_bytes"] + counts["staged_d2h_bytes"]

    speeds, staged_by_pinned = measure(flyt, sizes, staged)
    return {
        "speeds": speeds,
        "staged_by_pinned_bytes": staged_by_pinned,
        "statistics": flyt.statistics(),
    }


def run_contender(contender: str, sizes: list[int], environment: dict[str, str]) -> dict[str, Any]:
    """Measure in a process of its own, so that no contender warms another's memory."""
    command = [sys.executable, __file__, "--contender", contender]
    command += ["--sizes", ",".join(map(str, sizes)), "--repeats", str(REPEATS)]
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        check=False,
        timeout=WORKER_LIMIT,
    )
    if done.returncode != 0:
        raise SystemExit(f"benchmark: {contender} ended with code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def output_of(*command: str) -> str:
    """First line that a command prints; "unknown" if it can't be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().split("\n")[0]


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    query = "--query-gpu=name,driver_version"
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "card_and_driver": output_of("nvidia-smi", query, "--format=csv,noheader"),
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "commit": output_of("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
    }


def run(device: str, sizes: list[int]) -> dict[str, Any]:
    """One whole run: every contender, then all that was found."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("FLYT_")}
    own["PYTHONPATH"] = os.pathsep.join(
        p for p in (str(Path(__file__).parent.parent), own.get("PYTHONPATH", "")) if p
    )
    size = min(LARGEST_REGION, free_space(resolve("flyt-bench")) * 3 // 4 // MIB * MIB)
    contenders = {"memcpy": run_contender("memcpy", sizes, own)}
    if device == "cupy":
        contenders["native"] = run_contender("native", sizes, own)
    folder = Path(tempfile.mkdtemp(prefix="flyt-bench-"))
    try:
        with running_backend(folder, device, size) as backend:
            contenders["flyt"] = run_contender("flyt", sizes, backend.environment)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "benchmark": "memcpy",
        "device": device,
        "region": size,
        "repeats": REPEATS,
        "machine": machine(),
        "contenders": contenders,
    }


def figure(speed: float, size: int) -> str:
    """A speed as people compare it: time for a small copy, throughput for a large one."""
    return f"{size / speed / 1e3:.1f} µs" if size < MIB else f"{speed:.2f} GB/s"


def show(found: dict[str, Any], console: Console) -> None:
    """Print Flyt's figures with their ratios to memcpy and, if it ran, to native CUDA."""
    flyt, contenders = found["contenders"]["flyt"], found["contenders"]
    plain = contenders["memcpy"]["speeds"]["memcpy"]
    native = contenders["native"]["speeds"] if "native" in contenders else None
    table = Table(title=f"cudaMemcpy, device {found['device']}", title_justify="left")
    for title in ("size", "memcpy", *KINDS):
        table.add_column(title.replace("_", " "), justify="right")
    for size, memcpy in plain.items():
        cells = [figure(memcpy, int(size))]
        for kind in KINDS:
            speed = flyt["speeds"][kind].get(size)
            if speed is None:
                cells.append("no room")
                continue
            cell = f"{figure(speed, int(size))}\n{speed / memcpy:.2f} m"
            if native and native[kind].get(size):
                cell += f"  {speed / native[kind][size]:.2f} n"
            cells.append(cell)
        table.add_row(f"{int(size) // KIB} KiB", *cells)
    console.print(table)
    console.print(
        "m: speed as a multiple of a plain memcpy's" + ("; n: of native CUDA's" * bool(native))
    )
    console.print(f"bytes staged by pinned copies: {flyt['staged_by_pinned_bytes']}")


def main() -> None:
    global REPEATS  # noqa: PLW0603  a process measures with one number of repeats
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("emulated", "cupy"), default="emulated")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, by comma")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", type=Path, help="where to write all that was found")
    parser.add_argument("--summary", type=Path, help="only show what an earlier run wrote")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    REPEATS = options.repeats
    sizes = [int(size) for size in options.sizes.split(",")]
    if options.contender:
        print(json.dumps(work(options.contender, sizes)))
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    if options.summary:
        show(json.loads(options.summary.read_text()), console)
        return
    found = run(options.device, sizes)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    show(found, console)


if __name__ == "__main__":
    main()
