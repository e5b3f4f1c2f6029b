# SPDX-License-Identifier: Apache-2.0
"""Question 1, without kernels: time and memory of opening and closing another process's block."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from flyt.ipc.driver import get_driver
from flyt.ipc.study.blocks import LEGACY, VMM, WAY_NAMES, memory_in_use, open_block, timed, ways
from flyt.ipc.study.peer import Peer
from flyt.ipc.study.report import Row

SIZES = (1 << 20, 16 << 20, 256 << 20)
REPEATS = 9
"""Of each step; the median is told, and the extremes. One more comes before and is dropped."""

CONTEXT = "second process"
"""The step that is no block's: the second process gets its context."""

STEPS = ("allocate", "export", "import and map", "unmap the import", "free")


def measure() -> Iterator[Row]:
    """Blocks of each size and kind: shared by a second process, opened and closed here."""
    used = memory_in_use()
    with Peer("blocks") as peer:
        before = used()
        peer.ask("start")
        if before is not None:
            yield _row("", 0, 0, CONTEXT, [], _difference(used(), before))
        for way in ways():
            for size in SIZES:
                yield from _one_size(peer, way, size, used)


def _one_size(peer: Peer, way: str, size: int, used: Callable[[], int | None]) -> Iterator[Row]:
    taken: dict[str, list[float]] = {step: [] for step in STEPS}
    grown: dict[str, int | None] = {}
    mapped = 0
    for repeat in range(REPEATS + 1):
        start = used()
        block = open_block(peer, way, size)
        both = used()
        mapped = block.mapped_size
        timed(block.seconds, "unmap the import", block.close)
        alone = used()
        block.seconds |= peer.ask("free", number=block.number)["seconds"]
        if repeat:
            for step in STEPS:
                taken[step].append(block.seconds[step] * 1e6)
        grown = {
            "allocate": _difference(alone, start),
            "import and map": _difference(both, alone),
            "free": _difference(used(), start),
        }
    for step, values in taken.items():
        yield _row(way, size, mapped, step, values, grown.get(step))


def _difference(now: int | None, then: int | None) -> int | None:
    return None if now is None or then is None else now - then


def _row(
    way: str, size: int, mapped: int, step: str, values: list[float], grown: int | None
) -> Row:
    def rounded(of: Callable[[list[float]], float]) -> float | None:
        return round(of(values), 1) if values else None

    return {
        "driver": get_driver().kind,
        "way": way,
        "size": size,
        "mapped_size": mapped,
        "step": step,
        "median_us": rounded(statistics.median),
        "least_us": rounded(min),
        "most_us": rounded(max),
        "device_bytes": grown,
    }


def verdict(rows: list[Row]) -> str:
    """What the rows say."""
    told = [_of_one(way, rows) for way in (VMM, LEGACY) if any(r["way"] == way for r in rows)]
    if LEGACY not in {row["way"] for row in rows}:
        told.append("legacy IPC and the device's memory need a GPU")
    for row in rows:
        if row["step"] == CONTEXT:
            told.append(f"a second process takes {_mib(row['device_bytes'])} for its context")
    return f"{rows[0]['driver']}: " + "; ".join(told)


def _of_one(way: str, rows: list[Row]) -> str:
    ours = [row for row in rows if row["way"] == way]
    sizes = sorted({row["size"] for row in ours})
    words = []
    for step, done in (("import and map", "opening takes"), ("unmap the import", "closing")):
        times = [row["median_us"] for row in ours if row["step"] == step]
        if times:  # there are none yet where it was broken off
            words.append(f"{done} {min(times):.0f} to {max(times):.0f} µs")
    grown = [r["device_bytes"] for r in ours if r["step"] == "import and map"]
    known: list[Any] = [one for one in grown if one is not None]
    if known:
        words.append(f"opening takes at most {_mib(max(known))} of device memory")
    span = f"{sizes[0] >> 20} to {sizes[-1] >> 20} MiB"
    return f"{WAY_NAMES[way]}, {span}: {', '.join(words)}"


def _mib(octets: int) -> str:
    return f"{octets / (1 << 20):.0f} MiB"
