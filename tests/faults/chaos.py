# SPDX-License-Identifier: Apache-2.0
"""Kills clients in the midst of every operation and compares what is left with what was before."""

from __future__ import annotations

import dataclasses
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from flyt.rpc import messages as m
from tests.faults.load import NAMES, SLOTS, STOP
from tests.pair.raw import RawClient, status

PROMISE = 2.0
"""Seconds until everything that a dead client held is back."""

REACH_SECONDS = 30.0
"""How long to wait until the victims are in the operations that they are to die in."""

LATEST = 0.003
"""Seconds from the beginning of an operation until its client dies, at most."""

START_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Census:
    """What a daemon and its processes have; equal before a client came and after it died."""

    sessions: int
    free_device_bytes: int
    granted_frames: int
    reclaiming_frames: int
    processes: frozenset[int]
    threads: int
    descriptors: int
    shm_names: frozenset[str]

    def difference(self, other: Census) -> str:
        """In words."""
        return ", ".join(
            f"{field.name}: {getattr(self, field.name)} -> {getattr(other, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        )


class Chaos:
    """A daemon, clients that live, and clients that die. A context manager.

    Parameters
    ----------
    backend : Backend
    folder : Path
    seed : int
        Everything that is chosen follows from it.
    survivors : int
    grain : int
        Bytes of device memory that count as nothing; 0 on the emulated device.
    """

    def __init__(
        self, backend: Any, folder: Path, seed: int, survivors: int, grain: int = 0
    ) -> None:
        self.backend = backend
        self.baseline: Census | None = None
        self._grain = grain
        self.random = random.Random(seed)
        self.kills: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.slowest = 0.0
        self._free = list(range(SLOTS))
        self._living: list[int] = []
        progress, self._report = folder / "progress", folder / "report"
        progress.write_bytes(bytes(2 * SLOTS))
        self._report.write_bytes(b"")
        with open(progress, "r+b") as file:
            self._progress = mmap.mmap(file.fileno(), 2 * SLOTS)
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.load", str(progress), str(self._report)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, **backend.env, "FLYT_BACKEND": backend.endpoint},
        )
        self._watcher: RawClient | None = None
        try:
            self._watcher = RawClient(backend.endpoint)
            assert self._watcher.attach_inline().status == 0
            for _ in range(survivors):
                slot, _ = self._spawn("steady")
                self._living.append(slot)
                self._until(slot, set(range(1, len(NAMES))), START_SECONDS)
            self.baseline = self.settled()
        except BaseException:
            self.close()
            raise

    # --- what is there ---

    def census(self) -> Census:
        report = status(self.backend)
        assert self._watcher is not None
        processes = [self.backend.pid, *self.backend.descendants()]
        return Census(
            sessions=len(report["sessions"]),
            free_device_bytes=self._free_bytes(),
            granted_frames=report["frames"]["granted"],
            reclaiming_frames=report["frames"]["reclaiming"],
            processes=frozenset(processes),
            threads=sum(_count(pid, "task") for pid in processes),
            descriptors=sum(_count(pid, "fd") for pid in processes),
            # Of this backend: other tests come and go beside this one.
            shm_names=frozenset(
                name
                for name in os.listdir("/dev/shm")
                if name.startswith(Path(self.backend.region).name)
            ),
        )

    def _free_bytes(self) -> int:
        assert self._watcher is not None
        free = self._watcher.value(m.MemInfo, 0)
        # A GPU's driver takes and gives for itself too, and its pools do so by 32 MiB.
        if self.baseline is not None and abs(free - self.baseline.free_device_bytes) <= self._grain:
            return self.baseline.free_device_bytes
        return free

    def settled(self) -> Census:
        """The census once it stands still."""
        last = self.census()
        for _ in range(100):
            time.sleep(0.1)
            now = self.census()
            if now == last:
                return now
            last = now
        raise AssertionError(f"it never stands still: {last}")

    def comes_back(self) -> None:
        """Everything is as at the beginning, within `PROMISE`."""
        start = time.monotonic()
        while (now := self.census()) != self.baseline:
            if time.monotonic() - start > PROMISE:
                raise AssertionError(f"after {PROMISE} s: {self.baseline.difference(now)}")
            time.sleep(0.02)
        self.slowest = max(self.slowest, time.monotonic() - start)
        assert not (words := self._report.read_text()), words

    # --- who dies ---

    def kill(self, count: int) -> None:
        """Let so many clients die at once, each in an operation of its own."""
        victims = []
        for _ in range(count):
            least = min(self.kills.values())
            target = self.random.choice([n for n, k in self.kills.items() if k == least])
            self.kills[target] += 1
            victims.append((target, *self._spawn(target)))
        deadline = time.monotonic() + REACH_SECONDS
        while victims:
            for victim in list(victims):
                target, slot, pid = victim
                if self._progress[slot] != NAMES.index(target):
                    continue
                time.sleep(self.random.random() * LATEST)
                os.kill(pid, signal.SIGKILL)
                self._free.append(slot)
                victims.remove(victim)
            words = self._report.read_text()
            assert time.monotonic() < deadline, f"{victims} do not get there: {words}"
            time.sleep(0.0002)

    def _spawn(self, target: str) -> tuple[int, int]:
        slot, seed = self._free.pop(0), self.random.randrange(1 << 32)
        self._progress[slot], self._progress[SLOTS + slot] = 255, 0
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(f"{slot} {seed} {target}\n")
        self._zygote.stdin.flush()
        return slot, int(self._zygote.stdout.readline())

    def _until(self, slot: int, operations: set[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._progress[slot] not in operations:
            if time.monotonic() > deadline:
                words = self._report.read_text()
                raise AssertionError(f"client {slot} does not get there: {words}")
            time.sleep(0.0002)

    # --- the end ---

    def finish(self) -> list[str]:
        """End the survivors; what they report."""
        for slot in self._living:
            self._progress[SLOTS + slot] = STOP
        deadline = time.monotonic() + START_SECONDS
        while len(lines := self._report.read_text().splitlines()) < len(self._living):
            assert time.monotonic() < deadline, f"only {lines}"
            time.sleep(0.02)
        assert not [line for line in lines if "WRONG" in line], lines
        return lines

    def __enter__(self) -> Chaos:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for slot in range(SLOTS):
            self._progress[SLOTS + slot] = STOP
        try:
            self._zygote.communicate(timeout=START_SECONDS)  # ends with the last client, too
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.communicate()
        if self._watcher is not None:
            self._watcher.close()
        self._progress.close()


def _count(pid: int, what: str) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/{what}"))
    except (FileNotFoundError, ProcessLookupError):
        return 0
