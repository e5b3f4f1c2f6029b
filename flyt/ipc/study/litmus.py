# SPDX-License-Identifier: Apache-2.0
"""Question 2: does the reader of a flag see the data that was written before it?

Message passing, the litmus test "MP": a writer stores data, then a flag; a reader loads the flag
until it has changed, then the data. Data that is still the old one is a *stale* outcome; a flag
that plain loads miss for long, though a strong load has it, is an *unseen* one. Between two
processes, and as the control between two streams of one process. Kernels: `litmus_kernels`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flyt.ipc.buffer import Buffer
from flyt.ipc.memory import VirtualMemoryResource
from flyt.ipc.study import blocks
from flyt.ipc.study.litmus_kernels import (
    BLOCK_BYTES,
    COUNTERS,
    MOST_PAIRS,
    SOURCE,
    VARIANTS,
    Outcome,
)
from flyt.ipc.study.peer import Peer
from flyt.ipc.study.report import Row

if TYPE_CHECKING:
    from flyt.ipc.study.gpu import Gpu

APART, TOGETHER = "two processes", "one process, two streams"

ROUNDS = {TOGETHER: 10_000, APART: 200}
"""At most: where contexts take turns, a round waits for two turns, of milliseconds each."""

LIMIT_NS = {TOGETHER: 300_000_000, APART: 1_500_000_000}
"""A kernel ends by itself after so long, whatever the other does."""

UNSEEN_NS = {TOGETHER: 5_000_000, APART: 100_000_000}
"""How long plain loads may miss a flag; far above what a round takes."""

TURNS_US = 100.0
"""A round that takes longer has waited for its process's turn on the GPU: writing and reading
alone take a few microseconds."""

ANSWER_LIMIT = 20.0
"""Seconds for the second process's kernel."""


class _Side:
    """The kernels of one process and what they count."""

    def __init__(self) -> None:
        from flyt.ipc.study.gpu import Gpu

        self.gpu: Gpu = Gpu(SOURCE)
        self.pairs = max(1, min(MOST_PAIRS, self.gpu.processors // 4))
        self._bytes = 8 * COUNTERS * self.pairs
        self.counters = {role: self.gpu.allocate(self._bytes) for role in ("write", "read")}
        self.streams = {role: self.gpu.stream() for role in ("write", "read")}
        for variant in VARIANTS:  # each is loaded, and has run, before two are to run at once
            for role in self.counters:
                self.launch(role, variant, self.counters[role], 0, APART)
        self.gpu.synchronize()

    def clear(self) -> None:
        """Begin to count anew; it waits for the device."""
        for counters in self.counters.values():
            self.gpu.fill(counters, 0, self._bytes)

    def launch(self, role: str, variant: str, block: int, rounds: int, where: str) -> None:
        arguments = (block, rounds, LIMIT_NS[where], UNSEEN_NS[where], self.counters[role])
        self.gpu.launch(f"{role}_{variant}", self.pairs, 32, arguments, self.streams[role])

    def outcome(self, role: str) -> Outcome:
        self.gpu.synchronize()
        return Outcome.of(self.gpu.words(self.counters[role], COUNTERS * self.pairs))


def measure() -> Iterator[Row]:
    """Every variant, within one process and between two."""
    here = _Side()
    mps = bool(here.gpu.attribute("MPS_ENABLED"))
    with Peer("litmus") as peer, contextlib.ExitStack() as undo:
        own = VirtualMemoryResource().allocate(BLOCK_BYTES)
        undo.callback(own.close)
        for variant in VARIANTS:
            yield _together(here, own, variant, mps)
        peer.ask("start")
        block = blocks.open_block(peer, blocks.VMM, BLOCK_BYTES)
        undo.callback(block.close)
        for variant in VARIANTS:
            yield _apart(here, peer, block, variant, mps)


def _together(here: _Side, block: Buffer, variant: str, mps: bool) -> Row:
    here.gpu.fill(block.handle, 0, BLOCK_BYTES)
    here.clear()
    for role in ("read", "write"):
        here.launch(role, variant, block.handle, ROUNDS[TOGETHER], TOGETHER)
    seen, written = here.outcome("read"), here.outcome("write")
    return _row(variant, TOGETHER, here.pairs, seen, written, mps)


def _apart(here: _Side, peer: Peer, block: blocks.Opened, variant: str, mps: bool) -> Row:
    here.gpu.fill(block.address, 0, BLOCK_BYTES)
    here.clear()
    peer.begin("write", number=block.number, variant=variant, rounds=ROUNDS[APART])
    here.launch("read", variant, block.address, ROUNDS[APART], APART)
    seen = here.outcome("read")
    answer, _ = peer.finish(ANSWER_LIMIT)
    return _row(variant, APART, here.pairs, seen, Outcome(**answer), mps)


def _row(variant: str, where: str, pairs: int, seen: Outcome, written: Outcome, mps: bool) -> Row:
    what = VARIANTS[variant]
    return {
        "driver": "cuda",
        "where": where,
        "variant": variant,
        "writer": what.writer,
        "reader": what.reader,
        "ordered": what.ordered,
        "pairs": pairs,
        "rounds": seen.rounds,
        "stale": seen.stale,
        "unseen": seen.unseen,
        "broken_off": seen.broken_off,
        "written": written.rounds,
        "round_us": round(seen.nanoseconds / seen.rounds / 1e3, 2) if seen.rounds else None,
        "same_processor": sum(
            a == b != 0 for a, b in zip(seen.places, written.places, strict=True)
        ),
        "mps": mps,
    }


def verdict(rows: list[Row]) -> str:
    """What the rows say, and what they can't."""
    told = [_of_one(where, rows) for where in (TOGETHER, APART)]
    apart = [row for row in rows if row["where"] == APART]
    slow = [row["round_us"] for row in apart if row["round_us"] is not None]
    if slow and min(slow) > TURNS_US:
        told.append(
            f"a round between processes takes {min(slow):,.0f} µs or more: without MPS their "
            "contexts take turns on the GPU, so writer and reader never run at the same time, and "
            "a stale outcome that is absent there is no promise"
        )
    elif apart and apart[0]["mps"]:
        told.append("the processes ran under MPS, at the same time")
    broken = [row for row in rows if row["ordered"] and (row["stale"] or row["unseen"])]
    if broken:
        told.append(f"ORDER WAS BROKEN in {', '.join(sorted({r['variant'] for r in broken}))}")
    told.append("what orders two processes by contract is an event, or waiting for the device")
    return "cuda: " + "; ".join(one for one in told if one)


def _of_one(where: str, rows: list[Row]) -> str:
    here = [row for row in rows if row["where"] == where]
    if not here:
        return ""
    weak = [
        f"{row['variant']} ({row['stale']:,} stale, {row['unseen']:,} unseen)"
        for row in here
        if row["stale"] or row["unseen"]
    ]
    sound = [row["variant"] for row in here if row["ordered"] and not row["stale"]]
    text = f"{where}: old data or a flag unseen with {', '.join(weak) or 'no variant'}"
    if sound:
        rounds = sum(row["rounds"] for row in here if row["variant"] in sound)
        text += f", never in {rounds:,} rounds with {', '.join(sound)}"
    idle = [row["variant"] for row in here if not row["rounds"]]
    return text + (f"; no round was finished with {', '.join(idle)}" if idle else "")


class _Writer:
    """In the second process."""

    def __init__(self) -> None:
        self._side: _Side | None = None

    def start(self, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        del request, fds
        self._side = _Side()
        return {}, []

    def write(self, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        del fds
        if self._side is None:
            raise RuntimeError("start comes first")
        block = blocks.address_of(request["number"])
        self._side.clear()
        self._side.launch("write", request["variant"], block, request["rounds"], APART)
        return self._side.outcome("write").as_json(), []


_writer = _Writer()

JOBS = {**blocks.JOBS, "start": _writer.start, "write": _writer.write}
"""What the second process does of this."""
