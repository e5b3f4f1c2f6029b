# SPDX-License-Identifier: Apache-2.0
"""The tables: who is measured, in which cases, and how often."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from flyt.rpc.messages import CREDITS

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SIZES = (
    4, 64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB,
    MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB,
)  # fmt: skip
QUICK_SIZES = (4, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)

LIMIT, QUICK_LIMIT = 600.0, 120.0
"""Seconds; what does not fit is dropped, and said."""

BATCH_BYTES = 16 * MIB
"""Small copies are timed in batches of about so many bytes, at most `MOST_A_BATCH` of them."""

MOST_A_BATCH = 200

SMALL = 4 * KIB
"""The small copy that people know the native cost of."""

LARGE = 64 * MIB
"""A copy that reaches the link's limit."""

BURST_CALLS = CREDITS // 2
"""Safely below the credit limit, so that none waits for a credit."""

TRAIN_CALLS = 10_000
LATENCY_CALLS = 500
MIX_CALLS = 1_000

STREAM_CALLS = 3
"""Copies of a client in a row: long against the clients' differences in starting."""

CLIENTS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Contender:
    """One who is measured.

    Attributes
    ----------
    name : str
    process : str
        Those of one name share a process: native CUDA reserves the addresses of all device memory
        for itself, so it can't share one with Flyt.
    pinned : bool
        Kind of its host memory.
    """

    name: str
    process: str
    pinned: bool = False


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("memcpy", "memcpy"),
        Contender("native pageable", "native"),
        Contender("native pinned", "native", pinned=True),
        Contender("flyt pageable", "flyt"),
        Contender("flyt pinned", "flyt", pinned=True),
        Contender("flyt inline", "inline"),
    )
}


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A contender in a case: as so many client processes, or as threads of one."""

    contender: str
    clients: int = 1
    threads: int = 0

    @property
    def name(self) -> str:
        if self.threads > 1:
            return f"{self.contender}, {self.threads} threads"
        return f"{self.contender}, {self.clients} clients" if self.clients > 1 else self.contender


@dataclasses.dataclass(frozen=True)
class Job:
    """A case with all who take part; they take turns in each of its rounds.

    Attributes
    ----------
    size, calls : int
        Bytes of a copy; copies in a round.
    rounds : int
        Those that count; one more warms up.
    """

    case: str
    size: int
    calls: int
    rounds: int
    entrants: tuple[Entrant, ...]

    @property
    def title(self) -> str:
        return f"{self.case}, {bytes_text(self.size)}"


@dataclasses.dataclass(frozen=True)
class Case:
    """A case that is measured at one size: a row of `SMALL_CASES`."""

    name: str
    calls: int
    rounds: int
    quick_rounds: int
    contenders: tuple[str, ...]


SMALL_CASES = (
    Case("latency", LATENCY_CALLS, 9, 3, tuple(CONTENDERS)),
    Case("burst", BURST_CALLS, 25, 9, ("native pageable", "flyt pageable")),
    Case("post", BURST_CALLS, 25, 9, ("native pageable", "flyt pageable")),
    Case("train", TRAIN_CALLS, 5, 3, ("native pageable", "flyt pageable")),
)
COPY_ROUNDS, QUICK_COPY_ROUNDS = 9, 5
LARGE_ROUNDS, QUICK_LARGE_ROUNDS = 5, 3
"""From 256 MiB on: a round takes seconds."""

TOGETHER_ROUNDS, QUICK_TOGETHER_ROUNDS = 7, 3
CASES = (*(case.name for case in SMALL_CASES), "copy", "loop", "stream", "mix")
LOOPED = ("native pageable", "native pinned", "flyt pageable", "flyt pinned")
"""Who copies in a loop, too: a promise beside native CUDA."""

FIRST_SIZES = (256 * MIB, LARGE, GIB)
"""Promises are made for these: when time runs out, the rest of the curve goes."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run consists of.

    Attributes
    ----------
    sizes : sequence of int
        Of the cases "copy" and "loop"; the largest bounds "stream" too.
    clients : sequence of int
    cases : collection of str
    rounds : int
        At most so many of each job; 0: as the table says.
    """

    sizes: Sequence[int] = SIZES
    clients: Sequence[int] = CLIENTS
    cases: Sequence[str] = CASES
    rounds: int = 0
    quick: bool = False

    def jobs(self, processes: Iterable[str]) -> list[Job]:
        """All jobs, the most wanted first, for whose `processes` there are."""
        there = set(processes)
        found = [
            job
            for job in (*self._small(), *self._large(), *self._together(), *self._copies())
            if job.case in self.cases
        ]
        jobs = []
        for job in found:
            if job.case == "loop" and "native" not in there:
                continue
            entrants = tuple(e for e in job.entrants if CONTENDERS[e.contender].process in there)
            rounds = min(job.rounds, self.rounds or job.rounds)
            if entrants:
                jobs.append(dataclasses.replace(job, entrants=entrants, rounds=rounds))
        return jobs

    def _small(self) -> list[Job]:
        return [
            Job(
                case.name,
                SMALL,
                case.calls,
                case.quick_rounds if self.quick else case.rounds,
                tuple(Entrant(name) for name in case.contenders),
            )
            for case in SMALL_CASES
        ]

    def _copy(self, size: int) -> Job:
        few = (LARGE_ROUNDS, QUICK_LARGE_ROUNDS)[self.quick]
        many = (COPY_ROUNDS, QUICK_COPY_ROUNDS)[self.quick]
        calls = max(1, min(MOST_A_BATCH, BATCH_BYTES // size))
        rounds = few if size >= 256 * MIB else many
        return Job("copy", size, calls, rounds, tuple(Entrant(name) for name in CONTENDERS))

    def _large(self) -> list[Job]:
        sizes = [size for size in FIRST_SIZES if size in self.sizes]
        looped = tuple(Entrant(name) for name in LOOPED)
        return [
            job
            for copy in map(self._copy, sizes)
            for job in (copy, dataclasses.replace(copy, case="loop", entrants=looped))
        ]

    def _copies(self) -> list[Job]:
        return [self._copy(size) for size in self.sizes if size not in FIRST_SIZES]

    def _together(self) -> list[Job]:
        rounds = (TOGETHER_ROUNDS, QUICK_TOGETHER_ROUNDS)[self.quick]
        stream = [Entrant("native pinned"), *(Entrant("flyt pinned", n) for n in self.clients)]
        mix = [
            entrant
            for n in self.clients
            for entrant in (Entrant("native pageable", threads=n), Entrant("flyt pageable", n))
        ]
        return [
            Job("stream", min(LARGE, max(self.sizes)), STREAM_CALLS, rounds, tuple(stream)),
            Job("mix", SMALL, MIX_CALLS, rounds, tuple(mix)),
        ]


def bytes_text(size: int) -> str:
    """``4 KiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
