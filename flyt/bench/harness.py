# SPDX-License-Identifier: Apache-2.0
"""The one harness: in each round every contender has its turn, until rounds or time are over.

Whatever changes on the machine during a run, it changes for all contenders of a round alike; so
ratios are fair where figures are not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from flyt.bench.contenders import Process, Processes
from flyt.bench.machine import memory_available
from flyt.bench.plan import CONTENDERS, Entrant, Job, bytes_text
from flyt.bench.results import Key, Results
from flyt.bench.runtimes import NoRoom
from flyt.bench.together import TOGETHER
from flyt.rpc.patience import Deadline

LEAST_ROUNDS = 3
"""Fewer give no median worth the name; a case that can't have them is dropped."""

START_SECONDS = 0.02
"""From the order to start together until the start: every process has read it by then."""

BUFFERS = 2
"""As large as a round's copies that each client holds: host memory, emulated device memory."""

SHARE_OF_MEMORY = 0.8
"""Of what is available; the rest is for whoever else is on the machine."""

ONE_WAY = frozenset({"burst", "train", "post"})
"""Cases that copy one way only; all others go both ways."""

Progress = Callable[[str, int], None]
"""Gets a text for what is going on, and how many rounds are done with."""


@dataclasses.dataclass(frozen=True)
class OpenCase:
    """A case that is open in a process, under a number."""

    process: Process
    number: int

    def send(self, do: str, **fields: object) -> None:
        self.process.send(do, number=self.number, **fields)

    def ask(self, do: str, **fields: object) -> dict[str, Any]:
        return self.process.ask(do, number=self.number, **fields)


@dataclasses.dataclass(frozen=True)
class Side:
    """One entrant of a job, with the case open in each of its processes."""

    entrant: Entrant
    job: Job
    cases: Sequence[OpenCase]

    @property
    def at_once(self) -> int:
        """Clients or threads that copy at the same time."""
        return self.entrant.threads or self.entrant.clients

    @property
    def copies(self) -> int:
        """Copies that a round makes and compares."""
        ways = 1 if self.job.case in ONE_WAY else 2
        return self.job.calls * ways * self.at_once

    def round(self) -> dict[str, float]:
        """One round: seconds of one copy, by metric."""
        if self.job.case not in TOGETHER:
            samples: dict[str, float] = self.cases[0].ask("round")["samples"]
            return samples
        kind = TOGETHER[self.job.case]
        copies = self.at_once * self.job.calls * kind.WAYS
        self._all("begin")
        found = {}
        for part in kind.PARTS:
            self._all("ready", part=part)
            replies = self._all("times", part=part, at=time.perf_counter() + START_SECONDS)
            began = min(reply["times"][0] for reply in replies)
            ended = max(reply["times"][1] for reply in replies)
            found[part] = (ended - began) / copies
        self._all("end")
        return found

    def _all(self, do: str, **fields: object) -> list[dict[str, Any]]:
        for case in self.cases:
            case.send(do, **fields)
        return [case.process.receive() for case in self.cases]


class _TimeOver(Exception):
    """The limit came in the midst of a job."""


class Harness:
    """Runs jobs.

    Parameters
    ----------
    processes : Processes
    deadline : Deadline
        When all has to be over: a contender's turn that has begun is finished.
    limit : float
        Seconds that were given, for messages.
    progress : callable

    Attributes
    ----------
    results : Results
        Also of a run that failed half-way.
    """

    def __init__(
        self, processes: Processes, deadline: Deadline, limit: float, progress: Progress
    ) -> None:
        self.results = Results()
        self._processes = processes
        self._deadline = deadline
        self._limit = limit
        self._progress = progress
        self._numbers = itertools.count(1)
        self._pace: dict[str, float] = {}  # seconds of a round for each byte of a copy, by case

    def run(self, jobs: Sequence[Job]) -> None:
        """Measure all jobs, one after the other, as far as time allows.

        Raises
        ------
        BenchFailed
            A wrong byte, an error, a process that ended or does not answer.
        """
        for job in jobs:
            self._progress(job.title, 0)
            reason = self._hindrance(job)
            if reason:
                self.results.notes.append(f"{job.title}: dropped, {reason}")
            else:
                try:
                    with self._sides(job) as sides:
                        self._rounds(job, sides)
                except _TimeOver:
                    self._drop(job, 0)

    def _hindrance(self, job: Job) -> str:
        """Why a job can't be begun; "" if it can."""
        left = self._deadline.left()
        predicted = self._pace.get(job.case, 0.0) * job.size * (LEAST_ROUNDS + 1)
        if not left or (job.size > 1 << 20 and predicted > left):
            return f"the limit of {self._limit:.0f} s would be exceeded"
        most: dict[str, int] = {}
        for entrant in job.entrants:
            count = max(entrant.clients, entrant.threads)
            most[entrant.contender] = max(count, most.get(entrant.contender, 0))
        clients = sum(most.values())
        references = sum({CONTENDERS[name].process: count for name, count in most.items()}.values())
        needed = job.size * job.calls * (BUFFERS * clients + references)
        there = memory_available()
        if needed > SHARE_OF_MEMORY * there:
            return f"it needs {bytes_text(needed)} of memory, {there >> 20} MiB are available"
        return ""

    @contextlib.contextmanager
    def _sides(self, job: Job) -> Iterator[list[Side]]:
        """All entrants that have room. Those of one contender share its open cases: two clients are
        the first two of four."""
        opened: dict[tuple[str, int, int], OpenCase] = {}
        sides = []
        for entrant in job.entrants:
            keys = [(entrant.contender, entrant.threads, n) for n in range(entrant.clients)]
            try:
                for key in keys:
                    if key not in opened:
                        opened[key] = self._open(job, *key)
            except _TimeOver:
                _close(opened.values())
                raise
            except NoRoom as exc:
                self.results.notes.append(f"{job.title}: {entrant.name} dropped, no room ({exc})")
            else:
                sides.append(Side(entrant, job, [opened[key] for key in keys]))
        yield sides
        _close(opened.values())

    def _open(self, job: Job, name: str, threads: int, client: int) -> OpenCase:
        if not self._deadline.left():
            raise _TimeOver
        contender = CONTENDERS[name]
        process = self._processes.get(contender.process, client + 1)
        case = OpenCase(process, next(self._numbers))
        case.ask(
            "begin_case",
            case=job.case,
            pinned=contender.pinned,
            size=job.size,
            calls=job.calls,
            threads=threads,
        )
        return case

    def _rounds(self, job: Job, sides: Sequence[Side]) -> None:
        found: dict[Key, list[float]] = {}
        done = 0
        for number in range(job.rounds + 1):
            started = time.monotonic()
            try:
                samples = self._round(job, _rotated(sides, number))
            except _TimeOver:
                break
            if number:  # the first round warms up
                for key, seconds in samples.items():
                    found.setdefault(key, []).append(seconds)
            done = number
            self._pace[job.case] = (time.monotonic() - started) / job.size
            self._progress(job.title, 1)
        least = min(LEAST_ROUNDS, job.rounds)
        if done < least:
            self._drop(job, done)
            return
        if done < job.rounds:
            self.results.notes.append(
                f"{job.title}: {done} of {job.rounds} rounds, for lack of time"
            )
        for key, series in found.items():
            self.results.add(key, series)

    def _drop(self, job: Job, done: int) -> None:
        self.results.notes.append(
            f"{job.title}: dropped after {done} of {job.rounds} rounds at the limit of "
            f"{self._limit:.0f} s"
        )

    def _round(self, job: Job, sides: Sequence[Side]) -> dict[Key, float]:
        """Everybody's turn."""
        found = {}
        for side in sides:
            if not self._deadline.left():
                raise _TimeOver
            for metric, seconds in side.round().items():
                key = Key(job.case, job.size, side.entrant.contender, metric, side.at_once)
                found[key] = seconds
            self.results.verified(side.copies, job.size)
        return found


def _close(cases: Iterable[OpenCase]) -> None:
    for case in cases:
        case.ask("close_case")


def _rotated(sides: Sequence[Side], number: int) -> list[Side]:
    """Another one begins each round, so that nobody always follows the same one."""
    if not sides:
        return []
    first = number % len(sides)
    return [*sides[first:], *sides[:first]]
