# SPDX-License-Identifier: Apache-2.0
"""Question 1, with kernels: another process's memory against the process's own.

One process holds four blocks of a size: two of its own, two that it opened. Kernels read them all,
write them all, or follow a chain of addresses through them, in turns; times are of this process's
events. The second process holds its blocks and does nothing meanwhile.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from flyt.ipc.memory import VirtualMemoryResource
from flyt.ipc.study.blocks import LEGACY, VMM, open_block
from flyt.ipc.study.gpu import Gpu
from flyt.ipc.study.peer import Peer
from flyt.ipc.study.report import READ_BOUND, Row

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30)
LARGE = 256 << 20
"""From here on a GPU's second-level cache does not hold the block."""

ROUNDS = 15
"""Of which each gives one time of each block; one more comes before and is dropped."""

MOST_LAUNCHES = 20
LAUNCHED_BYTES = 2 << 30
"""A time is of so many launches in a row, or of as many as use so many bytes."""

HOPS = 2048
LINE = 128
"""Bytes of a cache line: each hop is to another one."""

THREADS = 512
BLOCKS_OF_A_PROCESSOR = 4

LOCAL, LOCAL_VMM = "local", "local vmm"
IMPORTED, IMPORTED_LEGACY = "imported vmm", "imported legacy"
MEMORIES = (LOCAL, LOCAL_VMM, IMPORTED, IMPORTED_LEGACY)
OPERATIONS = ("read", "write", "chase")

WARM_UP = 200
"""Launches over a large block before the first time: clocks of an idle GPU are low."""

SOURCE = r"""
typedef unsigned long long u64;

extern "C" __global__ void read_all(const uint4 *from, u64 count, unsigned *never)
{
    u64 step = (u64)gridDim.x * blockDim.x, i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    unsigned sum = 0;
    for (; i + 3 * step < count; i += 4 * step) {
        uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
        sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
        sum ^= c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < count; i += step) {
        uint4 a = from[i];
        sum ^= a.x ^ a.y ^ a.z ^ a.w;
    }
    if (sum == 0x9E3779B9u) /* or the compiler would drop the loads */
        *never = sum;
}

extern "C" __global__ void write_all(uint4 *to, u64 count)
{
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += step)
        to[i] = make_uint4(1, 2, 3, 4);
}

/* Lines (a power of two of them) that name each other in one circle: any odd hop makes one. */
extern "C" __global__ void link_all(u64 *lines, u64 count, u64 words, u64 hop)
{
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += step)
        lines[i * words] = (i + hop) % count * words;
}

extern "C" __global__ void chase(const u64 *lines, u64 hops, u64 *never)
{
    u64 at = 0;
    for (u64 i = 0; i < hops; i++)
        at = lines[at];
    if (at == ~0ull)
        *never = at;
}
"""


def measure() -> Iterator[Row]:
    """All sizes that fit, all operations, all four blocks."""
    gpu = Gpu(SOURCE)
    never, stream = gpu.allocate(8), gpu.stream()
    _warm_up(gpu, never, stream)
    with Peer("blocks") as peer:
        peer.ask("start")
        for size in SIZES:
            if (len(MEMORIES) + 1) * size > gpu.free_memory():
                continue
            with contextlib.ExitStack() as undo:
                blocks = _blocks(gpu, peer, size, undo)
                for operation in OPERATIONS:
                    yield from _one(gpu, operation, size, blocks, never, stream)


def _warm_up(gpu: Gpu, never: int, stream: Any) -> None:
    block = gpu.allocate(LARGE)
    try:
        launch, _ = _launcher(gpu, "write", block, LARGE, never)
        gpu.timed(launch, WARM_UP, stream)
    finally:
        gpu.free(block)


def _blocks(gpu: Gpu, peer: Peer, size: int, undo: contextlib.ExitStack) -> dict[str, int]:
    blocks = {LOCAL: gpu.allocate(size)}
    undo.callback(gpu.free, blocks[LOCAL])
    own = VirtualMemoryResource().allocate(size)
    undo.callback(own.close)
    blocks[LOCAL_VMM] = own.handle
    for way, name in ((VMM, IMPORTED), (LEGACY, IMPORTED_LEGACY)):
        block = open_block(peer, way, size)
        undo.callback(peer.ask, "free", number=block.number)
        undo.callback(block.close)
        blocks[name] = block.address
    return blocks


def _launcher(
    gpu: Gpu, operation: str, address: int, size: int, never: int
) -> tuple[Callable[[Any], None], int]:
    """What launches an operation once, and how often a time should."""
    count = size // 16
    grid = min(-(-count // THREADS), gpu.processors * BLOCKS_OF_A_PROCESSOR)
    launches = max(2, min(MOST_LAUNCHES, LAUNCHED_BYTES // size))
    if operation == "read":
        return lambda stream: gpu.launch(
            "read_all", grid, THREADS, (address, count, never), stream
        ), launches
    if operation == "write":
        return lambda stream: gpu.launch(
            "write_all", grid, THREADS, (address, count), stream
        ), launches
    return lambda stream: gpu.launch("chase", 1, 1, (address, HOPS, never), stream), 1


def _one(
    gpu: Gpu, operation: str, size: int, blocks: dict[str, int], never: int, stream: Any
) -> Iterator[Row]:
    if operation == "chase":
        lines = size // LINE
        hop = int(lines * 0.618) | 1  # far from the last few lines, so that nothing is fetched yet
        for address in blocks.values():
            gpu.launch("link_all", gpu.processors, THREADS, (address, lines, LINE // 8, hop))
        gpu.synchronize()
    taken: dict[str, list[float]] = {name: [] for name in blocks}
    for round_ in range(ROUNDS + 1):
        names = list(blocks)
        turn = round_ % len(names)  # nobody is always the first
        for name in names[turn:] + names[:turn]:
            launch, count = _launcher(gpu, operation, blocks[name], size, never)
            duration = gpu.timed(launch, count, stream)
            if round_:
                taken[name].append(duration)
    for name, durations in taken.items():
        yield _row(operation, size, name, durations, taken[LOCAL])


def _row(operation: str, size: int, memory: str, durations: list[float], local: list[float]) -> Row:
    low, median, high = statistics.quantiles(durations, n=4, method="inclusive")
    ratios = [mine / other for mine, other in zip(local, durations, strict=True)]
    moved = operation != "chase"
    return {
        "driver": "cuda",
        "operation": operation,
        "size": size,
        "memory": memory,
        "median_us": round(median, 3),
        "low_us": round(low, 3),
        "high_us": round(high, 3),
        "gb_per_s": round(size / median / 1e3, 1) if moved else None,
        "ns_per_load": None if moved else round(median * 1e3 / HOPS, 1),
        "of_local": round(statistics.median(ratios), 4),
    }


def verdict(rows: list[Row]) -> str:
    """What the rows say."""
    told = []
    for memory in (IMPORTED, IMPORTED_LEGACY):
        words = [
            f"{done} at {row['of_local']:.3f} ({row['gb_per_s']:,.0f} GB/s)"
            for operation, done in (("read", "read"), ("write", "written"))
            if (row := _worst(rows, operation, memory)) is not None
        ]
        if words:
            told.append(f"{memory} memory is {' and '.join(words)} of the local speed")
    read = _worst(rows, "read", IMPORTED)
    if read is not None:
        kept = "kept" if read["of_local"] >= READ_BOUND else "MISSED"
        told.append(f"the bound of {READ_BOUND} for reading it from {LARGE >> 20} MiB on is {kept}")
    loads = [_largest(rows, "chase", memory) for memory in (LOCAL, IMPORTED, IMPORTED_LEGACY)]
    if len({row["size"] if row else None for row in loads}) == 1 and all(loads):
        times = ", ".join(f"{row['memory']} {row['ns_per_load']:.1f} ns" for row in loads if row)
        told.append(f"a load that waits for the one before: {times}")
    return "cuda: " + ("; ".join(told) or f"no block of {LARGE >> 20} MiB was measured")


def _large(rows: list[Row], operation: str, memory: str) -> list[Row]:
    return [
        row
        for row in rows
        if (row["operation"], row["memory"]) == (operation, memory) and row["size"] >= LARGE
    ]


def _worst(rows: list[Row], operation: str, memory: str) -> Row | None:
    """Of the large blocks."""
    found = _large(rows, operation, memory)
    return min(found, key=lambda row: float(row["of_local"])) if found else None


def _largest(rows: list[Row], operation: str, memory: str) -> Row | None:
    """The largest block's: what is told of two memories has to be of one size."""
    return max(_large(rows, operation, memory), key=lambda row: int(row["size"]), default=None)
