# SPDX-License-Identifier: Apache-2.0
"""Question 1, the part that needs no kernels: time and memory of opening and closing a block."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from flyt.ipc.buffer import Buffer
from flyt.ipc.memory import VirtualMemoryResource
from flyt.ipc.study.report import Answer

SIZES = (1 << 20, 16 << 20, 256 << 20)
REPEATS = 9
"""Of each step; the median is told, and the extremes."""


def measure(sizes: tuple[int, ...] = SIZES, repeats: int = REPEATS) -> Answer:
    """Allocate, export, import and close blocks of each size in this process."""
    resource = VirtualMemoryResource()
    rows = [row for size in sizes for row in _one_size(resource, size, repeats)]
    imports = [row["median_us"] for row in rows if row["step"] == "import and map"]
    kind = resource.driver.kind
    verdict = (
        f"{kind}: importing and mapping takes {min(imports):.0f} to {max(imports):.0f} µs from "
        f"{sizes[0] >> 20} to {sizes[-1] >> 20} MiB; blocks are rounded up to "
        f"{resource.recommended_granularity >> 10} KiB"
    )
    return Answer("costs", verdict, rows)


def _one_size(resource: VirtualMemoryResource, size: int, repeats: int) -> list[dict[str, Any]]:
    taken: dict[str, list[float]] = {}
    mapped = 0

    def timed(step: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        taken.setdefault(step, []).append((time.perf_counter() - start) * 1e6)
        return result

    for _ in range(repeats):
        block = timed("allocate", lambda: resource.allocate(size))
        mapped = block.mapped_size
        descriptor = timed("export", lambda: block.ipc_descriptor)  # noqa: B023 - called at once
        other = timed(
            "import and map",
            lambda: Buffer.from_ipc_descriptor(resource, descriptor),  # noqa: B023 - likewise
        )
        timed("unmap the import", other.close)
        timed("free", block.close)
    return [
        {
            "driver": resource.driver.kind,
            "size": size,
            "mapped_size": mapped,
            "step": step,
            "median_us": round(statistics.median(values), 1),
            "least_us": round(min(values), 1),
            "most_us": round(max(values), 1),
        }
        for step, values in taken.items()
    ]
