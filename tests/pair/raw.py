# SPDX-License-Identifier: Apache-2.0
"""Clients for tests about other clients: one that says what it likes, one that copies on and on.

`RawClient` speaks the protocol word by word from the test's own process, so that it can lie.
`Honest` is a real client process that moves bytes all the time and verifies each of them.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import pytest

from flyt.errors import SessionLost
from flyt.frontend.greeting import ask
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.patience import Deadline
from flyt.rpc.sockets import Dialer, open_context
from flyt.shm import layout, memory, runs
from flyt.shm.frames import FrameTaker
from flyt.shm.layout import FrameState
from flyt.shm.locks import FrameLocks
from flyt.shm.private import PRIVATE, OwnFrames, fetch
from flyt.shm.region import Region
from flyt.shm.runs import Run
from flyt.shm.table import FrameTable
from flyt.shm.window import Window, pick_base, reserve_length

LIMIT = 10.0
"""Seconds in which everything that is to happen has happened; far more than it takes."""

SOON = 2.0
"""Seconds: what the project promises for the clean-up after a death."""

SILENCE = 0.3
"""Seconds of hearing nothing that count as "no answer"; an answer takes a millisecond."""

STEP = 0.005
"""Seconds between two looks at what another process changes without telling us."""


def eventually(condition: Callable[[], bool], seconds: float = LIMIT) -> bool:
    """Whether ``condition`` comes true within some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(STEP)
    return True


# --- what the daemon says of itself, what the region looks like -------------------------------


def say(endpoint: str, message: m.Hello | m.AskStatus) -> Any:
    """One message to a daemon's main endpoint, and its answer."""
    context = open_context()
    try:
        return ask(context, Endpoint.parse(endpoint), message, Deadline.after(LIMIT))
    finally:
        context.term()


def status(backend: Any) -> dict[str, Any]:
    """The daemon's report."""
    answer = say(backend.endpoint, m.AskStatus())
    assert isinstance(answer, m.StatusReport), answer
    return dict(answer.report)


def session_of(backend: Any, pid: int) -> dict[str, Any] | None:
    """The daemon's entry for a client process; None if it has none."""
    return next((s for s in status(backend)["sessions"] if s["pid"] == pid), None)


def worker_of(backend: Any, pid: int) -> int:
    """The pid of the worker that serves a client process."""
    entry = session_of(backend, pid)
    assert entry is not None, f"pid {pid} has no session"
    return int(entry["worker"])


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


class RegionView:
    """A backend's region, read from its file; a context manager."""

    def __init__(self, path: str) -> None:
        self._region = Region.open(path)
        self.table = FrameTable(self._region.fd, self._region.size)

    def frames_of(self, pid: int) -> list[int]:
        """The frames that a process took."""
        return [e.frame for e in self.table.snapshot() if e.pid == pid]

    def free(self) -> list[int]:
        return [f for f, state in enumerate(self.table.states()) if state == FrameState.FREE]

    def are_free(self, frames: Iterable[int]) -> bool:
        return all(self.table.state(frame) == FrameState.FREE for frame in frames)

    def dirty(self, frames: Iterable[int]) -> list[int]:
        """Those of the frames that have a byte other than 0."""
        geometry = self.table.geometry
        zeros = bytes(geometry.page_size)
        return [
            frame
            for frame in frames
            if os.pread(self._region.fd, geometry.page_size, geometry.offset(frame)) != zeros
        ]

    def holds(self, frame: int, value: int) -> bool:
        """Whether each of the frame's bytes is this."""
        geometry = self.table.geometry
        data = os.pread(self._region.fd, geometry.page_size, geometry.offset(frame))
        return data == bytes([value]) * geometry.page_size

    def __enter__(self) -> RegionView:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.table.close()
        self._region.close()


# --- a client that says what it likes ----------------------------------------------------------


class RawClient:
    """One session, from HELLO on; nothing is done unless a test asks for it. A context manager.

    Parameters
    ----------
    endpoint : str
        Of the daemon.
    features : tuple of int
        What it says it knows.

    Attributes
    ----------
    table : tuple of Run
        The frames of the window: control page, then staging.
    window : Window or None
        The window as this process has it mapped; never zeroed by us.
    """

    def __init__(self, endpoint: str, features: tuple[int, ...] = (1, 2)) -> None:
        self.pid = os.getpid()
        self._context = open_context()
        self._dialers: list[Dialer] = []
        self._windows: list[Window] = []
        self._last = 0
        self._done: list[m.Result] = []
        self.table: tuple[Run, ...] = ()
        self.window: Window | None = None
        self._region: Region | None = None
        try:
            dialled = Endpoint.parse(endpoint)
            hello = m.Hello(m.PROTOCOL_VERSION, features, self.pid, "raw")
            answer = ask(self._context, dialled, hello, Deadline.after(LIMIT))
            assert isinstance(answer, m.Welcome), answer
            self.welcome = answer
            self.where = dialled.session(answer.port, answer.path)
            self.dialer = self.dial(self.where)
            self._open_region()
        except BaseException:
            self.close()
            raise

    def _open_region(self) -> None:
        name, size = self.welcome.region, self.welcome.region_size
        self._locks: FrameLocks | OwnFrames
        if name.startswith(PRIVATE):
            path = os.path.join(os.path.dirname(self.where.path), name.removeprefix(PRIVATE))
            self._region = Region(fetch(path, self.welcome.token, size), name, size, created=False)
            self._locks = OwnFrames()
        else:
            self._region = Region.open(name)
            self._locks = FrameLocks(self.welcome.lock_file)
        self._words = FrameTable(self._region.fd, self._region.size)
        self.geometry = self._words.geometry
        self._taker = FrameTaker(self._words, self._locks, self.welcome.session, self.pid)

    # --- words ---

    def dial(self, where: Endpoint) -> Dialer:
        """One more connection to any socket; closed with this client."""
        self._dialers.append(Dialer(self._context, where))
        return self._dialers[-1]

    def hang_up(self, dialer: Dialer) -> None:
        """End a connection of `dial`."""
        self._dialers.remove(dialer)
        dialer.close()

    def post(self, kind: Callable[..., Any], *fields: Any, payload: bytes | None = None) -> int:
        """Send a command with the next id, which is returned."""
        self._last += 1
        frames = [m.COMMANDS.encode(kind(self._last, *fields))]
        assert self.dialer.send(frames if payload is None else [*frames, payload])
        return self._last

    def answer(self, number: int) -> m.Result:
        """The Result of a command; SessionLost if the connection ends before. Those of other
        commands, which may come first, wait until they are asked for."""
        kept = []
        while (result := self.next_result()).id != number:
            kept.append(result)
        self._done = [*kept, *self._done]
        return result

    def next_result(self) -> m.Result:
        """The next Result, whichever command's; `payload` is what came with it. A Done counts as
        the Results that it stands for."""
        if self._done:
            return self._done.pop(0)
        while (frames := hear(self.dialer)) is not None:
            reply = m.REPLIES.decode(frames[0])
            self.payload = frames[1] if len(frames) > 1 else None
            if isinstance(reply, m.Result):
                return reply
            if isinstance(reply, m.Done):
                numbers = range(reply.first, reply.first + reply.count)
                self._done = [m.Result(number, 0, reply.taken, (), "") for number in numbers]
                return self._done.pop(0)
        if self.dialer.lost is None:
            pytest.fail(f"no answer within {LIMIT} s")
        raise SessionLost(self.dialer.lost)

    def call(self, kind: Callable[..., Any], *fields: Any, payload: bytes | None = None) -> Any:
        """`post` and `answer`."""
        return self.answer(self.post(kind, *fields, payload=payload))

    def value(self, kind: Callable[..., Any], *fields: Any) -> int:
        """The first value of a command that succeeds."""
        result = self.call(kind, *fields)
        assert result.status == 0, result
        return int(result.values[0])

    def malloc(self, size: int) -> int:
        return self.value(m.Malloc, 0, size, 0)

    def lives(self) -> bool:
        """Whether the session still answers."""
        try:
            return bool(self.call(m.Ping).status == 0)
        except SessionLost:
            return False

    def ends(self) -> bool:
        """Whether the backend ends the connection soon."""
        return eventually(lambda: self.dialer.check() or self.dialer.lost is not None, SOON)

    # --- the window ---

    def take(self, pages: int, vpn: int = 0) -> tuple[Run, ...]:
        """Take frames as an honest client does."""
        return self._taker.take(pages, vpn)

    def give_up(self, table: tuple[Run, ...]) -> None:
        self._taker.give_up(table)

    def attach(self, **lies: Any) -> m.Result:
        """ATTACH with three frames of its own; any field may be replaced by a lie."""
        return self.answer(self.post_attach(**lies))

    def attach_as_clients_do(self) -> m.Result:
        """`attach`, with other addresses while those that were picked are taken over there."""
        answer = self.attach()
        while answer.status == m.Status.ADDRESS_TAKEN:
            self.window = None
            answer = self.attach()
        return answer

    def post_attach(self, **lies: Any) -> int:
        if not self.table:
            self.table = self.take(3)
        if self.window is None:
            reserve = reserve_length(self.geometry)
            self.window = self._reserve(reserve)
            frames = list(runs.frames_of(self.table))
            self.window.map(0, runs.from_frames(frames[:1]))
            self.window.map(1, runs.from_frames(frames[1:]))
        proof = int.from_bytes(os.urandom(8), "little") | 1
        memory.store_word(self.window.base + layout.FRONTEND_PROOF, proof)
        honest = {
            "token": self.welcome.token,
            "inline": False,
            "base": self.window.base,
            "reserve": self.window.reserve,
            "table": self.table,
            "proof": proof,
        }
        return self.post(m.Attach, *{**honest, **lies}.values())

    def _reserve(self, reserve: int) -> Window:
        fd = self._region.fd if self._region is not None else -1
        window = Window.reserve_at(fd, self.geometry, pick_base(reserve, random.Random()), reserve)
        self._windows.append(window)
        return window

    def attach_inline(self) -> m.Result:
        return self.answer(self.post(m.Attach, self.welcome.token, True, 0, 0, (), 0))

    def grow(self, pages: int, vpn: int) -> None:
        """GROW, in order."""
        table = self.take(pages, vpn)
        assert self.window is not None
        self.window.map(vpn, table)
        result = self.call(m.Grow, vpn, table)
        assert result.status == 0, result

    def bytes_at(self, index: int, size: int) -> memoryview:
        """Bytes of the window."""
        assert self.window is not None
        return memory.view(self.window.base + index, size)

    # --- the end ---

    def __enter__(self) -> RawClient:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Go without a word. May be called again."""
        for dialer in self._dialers:
            dialer.close()
        self._dialers.clear()
        self._context.term()
        for window in self._windows:
            window.close()
        self._windows.clear()
        if self._region is not None:
            self._locks.close()
            self._words.close()
            self._region.close()
            self._region = None


def hear(dialer: Dialer, seconds: float = LIMIT) -> list[bytes] | None:
    """The next message; None when the connection has ended or nothing comes in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        dialer.check()
        lost = dialer.lost is not None
        if (frames := dialer.receive()) is not None:
            return frames
        if lost:
            return None
        time.sleep(STEP / 5)
    return None


# --- a client that copies on and on ------------------------------------------------------------

_HONEST = """
import sys, threading
import numpy as np
import flyt, flyt as cudart
K = cudart.cudaMemcpyKind
SIZE = int(sys.argv[1])
rounds, faults, stop = 0, [], threading.Event()

def must(answer):
    if answer[0] != 0:
        raise RuntimeError(f"{answer[0]!r}: {flyt.last_failure()}")
    return answer[-1]

device = must(cudart.cudaMalloc(SIZE))
pinned = flyt.pinned_empty(SIZE, np.uint8)
back = np.empty(SIZE, np.uint8)

def work():
    global rounds
    generator = np.random.default_rng(SIZE)
    try:
        while not stop.wait(0.01):
            data = generator.integers(0, 256, SIZE, dtype=np.uint8)
            must(cudart.cudaMemcpy(device, data, SIZE, K.cudaMemcpyHostToDevice))
            back[:] = 0
            must(cudart.cudaMemcpy(back, device, SIZE, K.cudaMemcpyDeviceToHost))
            if not np.array_equal(back, data):
                faults.append(f"round {rounds}: pageable bytes differ")
            pinned[:] = 255 - data
            must(cudart.cudaMemcpy(device, pinned, SIZE, K.cudaMemcpyHostToDevice))
            pinned[:] = 0
            must(cudart.cudaMemcpy(pinned, device, SIZE, K.cudaMemcpyDeviceToHost))
            if not np.array_equal(pinned, 255 - data):
                faults.append(f"round {rounds}: pinned bytes differ")
            rounds += 1
    except RuntimeError as exc:
        faults.append(str(exc))

thread = threading.Thread(target=work)
thread.start()
print(hex(device), flush=True)
for line in sys.stdin:
    if line == "memory\\n":
        print(cudart.cudaMemGetInfo()[1], flush=True)
    else:
        print(rounds, "; ".join(faults), flush=True)
stop.set()
thread.join()
"""


class Honest:
    """A running client that verifies what it copies.

    Parameters
    ----------
    backend : Backend
    size : int
        Bytes of each of its copies.

    Attributes
    ----------
    device : int
        Its block of device memory.
    """

    def __init__(self, backend: Any, size: int = 200_000) -> None:
        environment = {**os.environ, **backend.env, "FLYT_BACKEND": backend.endpoint}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HONEST, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.pid = self._process.pid
        try:
            line = self._line()
            assert line.startswith("0x"), f"the honest client did not start: {line!r}"
            self.device = int(line, 16)
        except BaseException:
            self.close()
            raise

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _ask(self, word: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        line = self._line()
        assert line, f"the honest client {self.pid} is gone"
        return line

    def rounds(self) -> int:
        """How often all its copies came back right; fails the test if one did not."""
        number, _, faults = self._ask("rounds").strip().partition(" ")
        assert not faults, f"another client noticed: {faults}"
        return int(number)

    def carries_on(self, rounds: int = 2) -> bool:
        """Whether it completes more rounds from now on, all of them right."""
        goal = self.rounds() + rounds
        return eventually(lambda: self.rounds() >= goal)

    def free_memory(self) -> int:
        """The first value of its cudaMemGetInfo."""
        return int(self._ask("memory"))

    def close(self) -> None:
        """End it in order; by force if that takes long."""
        try:
            self._process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


class Evaluator:
    """A client that says "ready" when it is, and then evaluates what it is told, line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

    def says(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()
