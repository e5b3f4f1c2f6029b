# SPDX-License-Identifier: Apache-2.0
"""What every test gets: the device option, leak checks, real backends and real clients."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHM = Path("/dev/shm")

LEAK_GRACE = 5.0
"""Seconds that a thread, process, socket or name may take to go away: tear-down is asynchronous."""

START_LIMIT = 60.0
"""Seconds until a backend must be ready; a CUDA context on a busy machine takes a few."""

STOP_LIMIT = 20.0
"""Seconds that a backend gets to end after SIGTERM."""

CLIENT_LIMIT = 90.0
"""Seconds that a client may run; below the suite's own time-out, so that its output shows."""

PR_SET_CHILD_SUBREAPER = 36

KEPT = ("FLYT_TEST_", "FLYT_VM_", "FLYT_NVRTC_")
"""Variables that say how to test; all others of Flyt's say how to run, and go."""


# --- options, markers ------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("emulated", "cupy"),
        default="emulated",
        help="the device that backends and device tests use (default: emulated)",
    )
    parser.addoption(
        "--no-ring",
        action="store_true",
        help="send all commands by ZeroMQ, as without the compiled library (FLYT_RING=0)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # The caller's own settings must not decide what is tested.
    for name in [n for n in os.environ if n.startswith("FLYT_") and not n.startswith(KEPT)]:
        del os.environ[name]
    if config.getoption("--no-ring"):
        os.environ["FLYT_RING"] = "0"
    # Child processes import the tree that is tested, wherever they run.
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)
    os.environ["PYTHONFAULTHANDLER"] = "1"
    # Orphans (a worker that outlives its backend) become ours, so the leak check sees them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # multiprocessing starts this helper once for the process's life; it is no test's leak.
    resource_tracker.ensure_running()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Last, since on cupy they initialise CUDA in this very process: its driver then reserves the
    # addresses of all device memory, and sessions of this process would find them taken.
    items.sort(key=lambda item: "devices" in item.path.parts)
    for item in items:
        marker = item.get_closest_marker("emulated_only")
        if marker is None:
            continue
        reason = marker.kwargs.get("reason") or (marker.args[0] if marker.args else "")
        if not reason:
            raise pytest.UsageError(f"{item.nodeid}: emulated_only needs a reason")
        if config.getoption("--device") != "emulated":
            item.add_marker(pytest.mark.skip(reason=f"emulated only: {reason}"))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    device = config.getoption("--device")
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple) and "emulated only: " in report.longrepr[2]
    ]
    terminalreporter.write_line(
        f"device {device}: {len(skipped)} tests skipped because they are emulated_only"
    )


@pytest.fixture(scope="session")
def device_kind(request: pytest.FixtureRequest) -> str:
    """``emulated`` or ``cupy``."""
    return str(request.config.getoption("--device"))


# --- leaks -----------------------------------------------------------------------------------


def _threads() -> dict[Any, str]:
    return {t.ident: f"thread {t.name}" for t in threading.enumerate()}


def _status_of(pid: int) -> tuple[str, int] | None:
    """State letter and parent of a process; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[1])


def _child_pids() -> list[int]:
    me = os.getpid()
    try:
        lists = [
            Path(f"/proc/self/task/{task}/children").read_text()
            for task in os.listdir("/proc/self/task")
        ]
        return [int(pid) for text in lists for pid in text.split()]
    except (FileNotFoundError, ProcessLookupError):  # a thread ended, or a kernel without the file
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        return [pid for pid in pids if (s := _status_of(pid)) is not None and s[1] == me]


def _children() -> dict[Any, str]:
    found = {}
    for pid in _child_pids():
        status = _status_of(pid)
        if status is None or status[0] in "ZX":
            continue
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[pid] = f"process {pid} ({command.strip()})"
    return found


def _descriptors() -> dict[Any, str]:
    # Once CUDA is initialised in this process, its driver opens and keeps descriptors at will.
    cuda = "cupy" in sys.modules
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing's own descriptor
            continue
        if cuda and (not target.startswith("/") or target.startswith("/dev/nvidia")):
            continue
        found[fd, target] = f"descriptor {fd} -> {target}"
    return found


def _shared_memory() -> dict[Any, str]:
    # The CUDA driver's names (cuda.shm.*) are its own affair.
    return {name: f"/dev/shm/{name}" for name in os.listdir(SHM) if not name.startswith("cuda.")}


def _zmq_contexts() -> dict[Any, str]:
    # A context that ever had a socket owns native threads, named ZMQbg/..., until it is terminated.
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name.startswith("ZMQbg"):
            found[task] = f"ZeroMQ context ({name})"
    return found


PROBES: tuple[Callable[[], dict[Any, str]], ...] = (
    _threads,
    _children,
    _descriptors,
    _shared_memory,
    _zmq_contexts,
)


def others_use(name: str) -> bool:
    """Whether a /dev/shm name is none of ours: another user's, or open in an unrelated process."""
    path = SHM / name
    try:
        if path.stat().st_uid != os.getuid():
            return True
    except FileNotFoundError:
        return True
    ours = {os.getpid(), *_descendants(os.getpid())}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in ours:
            continue
        try:
            folder = f"/proc/{entry}/fd"
            links = [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]
        except OSError:  # it ended meanwhile, or is another user's
            continue
        if str(path) in links:
            return True
    return False


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (status := _status_of(int(entry))) is not None:
            parents.setdefault(status[1], []).append(int(entry))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def _reap_orphans(known: set[int]) -> None:
    """Bury adopted processes that have ended; those that a fixture still waits for are `known`."""
    for pid in _child_pids():
        status = _status_of(pid)
        if pid in known or status is None or status[0] != "Z":
            continue
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # someone else's wait came first
            continue


def _watch_for_leaks() -> Iterator[None]:
    before = [probe() for probe in PROBES]
    known = set(_child_pids())  # the dead too: a fixture still asks how they ended
    yield
    deadline = time.monotonic() + LEAK_GRACE
    collected = False
    while True:
        left = [
            (probe, key, text)
            for probe, old in zip(PROBES, before, strict=True)
            for key, text in probe().items()
            if key not in old
        ]
        if collected:  # the second look: few names are left, and asking whose they are is slow
            left = [
                entry
                for entry in left
                if entry[0] is not _shared_memory or not others_use(entry[1])
            ]
        if not left or time.monotonic() > deadline:
            break
        if not collected:
            gc.collect()  # what only a reference cycle keeps is no leak
            collected = True
        time.sleep(0.02)  # bounded by LEAK_GRACE: tear-down ends on other threads
    _reap_orphans(known)
    if left:
        pytest.fail("left behind: " + "; ".join(text for *_, text in left), pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def no_leaks_of_module() -> Iterator[None]:
    """Fail a module whose wider fixtures leave something behind."""
    yield from _watch_for_leaks()


@pytest.fixture(autouse=True)
def no_leaks(no_leaks_of_module: None) -> Iterator[None]:
    """Fail a test that leaves a thread, process, descriptor, /dev/shm name or ZeroMQ context."""
    yield from _watch_for_leaks()


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Whether a process still runs; a zombie doesn't."""

    def running(pid: int) -> bool:
        status = _status_of(pid)
        return status is not None and status[0] not in "ZX"

    return running


# --- real backends ---------------------------------------------------------------------------


def _environment(extra: Mapping[str, str | os.PathLike[str]] | None = None) -> dict[str, str]:
    return {**os.environ, **{name: os.fspath(value) for name, value in (extra or {}).items()}}


_numbers = itertools.count()


class Backend:
    """A running ``flyt-backend`` process.

    Attributes
    ----------
    process : subprocess.Popen
    endpoints : list of str
        Where it listens, as its ready line says.
    region : str
        Path of its region ("" if it has none).
    folder : Path
        Private; holds the ipc socket, the runtime folder and the log.
    """

    def __init__(
        self,
        device: str,
        *,
        size: str = "48M",
        page_size: str | int | None = None,
        listen: Sequence[str] | None = None,
        region: str | None = None,
        device_options: str = "",
        extra: Sequence[str] = (),
        env: Mapping[str, str | os.PathLike[str]] | None = None,
    ) -> None:
        # Not tmp_path: its name may exceed the 107 bytes that a socket's path can have.
        self.folder = Path(tempfile.mkdtemp(prefix="flyt-"))
        self.runtime_dir = self.folder / "run"
        self.log_file = self.folder / "backend.log"
        self.env = {"FLYT_RUNTIME_DIR": str(self.runtime_dir), **(env or {})}
        self.region_name = region or f"flyt-test-{os.getpid()}-{next(_numbers)}"
        self.keeps_region = "--keep-region" in extra
        self.endpoints: list[str] = []
        self.region = ""
        self._ended = False
        command = [sys.executable, "-m", "flyt.cli.backend", "--device", device]
        command += ["--region", self.region_name, "--size", size]
        if page_size is not None:
            command += ["--page-size", str(page_size)]
        for endpoint in listen or [f"ipc://{self.folder}/b.sock"]:
            command += ["--listen", endpoint]
        if device_options:
            command += ["--device-options", device_options]
        ready, ready_end = os.pipe()
        try:
            with open(self.log_file, "wb") as log:
                self.process = subprocess.Popen(
                    [*command, *extra, "--ready-fd", str(ready_end)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(ready_end,),
                    env=_environment(self.env),
                )
            os.close(ready_end)
            ready_end = -1
            self._await_ready(ready)
        except BaseException:
            self.dispose()
            raise
        finally:
            os.close(ready)
            if ready_end >= 0:
                os.close(ready_end)

    @property
    def endpoint(self) -> str:
        """The first endpoint."""
        return self.endpoints[0]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def descendants(self) -> list[int]:
        """Every process below the backend: its workers."""
        return _descendants(self.pid)

    def _await_ready(self, ready: int) -> None:
        deadline = time.monotonic() + START_LIMIT
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([ready], [], [], max(0.0, deadline - time.monotonic()))[0]:
                pytest.fail(f"the backend is not ready after {START_LIMIT} s:\n{self.log}")
            if not (chunk := os.read(ready, 65_536)):
                code = self.process.wait(STOP_LIMIT)
                pytest.fail(f"the backend ended with {code} before it was ready:\n{self.log}")
            line += chunk
        report = json.loads(line)
        self.endpoints, self.region = report["endpoints"], report["region"]

    def stop(self) -> None:
        """End it with SIGTERM and check that it leaves in order. Idempotent."""
        if self._ended:
            return
        self._ended = True
        workers = self.descendants()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_LIMIT)
            pytest.fail(f"the backend still runs {STOP_LIMIT} s after SIGTERM:\n{self.log}")
        assert code == 0, f"the backend ended with {code}:\n{self.log}"
        left = [pid for pid in workers if (s := _status_of(pid)) is not None and s[0] not in "ZX"]
        assert not left, f"the backend ended before its workers {left}:\n{self.log}"
        for endpoint in self.endpoints:
            if endpoint.startswith("ipc://"):
                path = Path(endpoint.removeprefix("ipc://"))
                assert not path.exists(), f"the backend left its socket {path}"
        if self.region and not self.keeps_region:
            assert not os.path.exists(self.region), f"the backend left its region {self.region}"

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it abruptly; the fixture clears away what it could not."""
        self._ended = True
        self.process.send_signal(number)
        self.process.wait(STOP_LIMIT)

    def dispose(self) -> None:
        """Remove every trace, whatever happened."""
        process = getattr(self, "process", None)
        if process is not None and process.poll() is None:
            process.kill()
            process.wait(STOP_LIMIT)
        (SHM / self.region_name.lstrip("/")).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def _backends(device_kind: str) -> Iterator[Callable[..., Backend]]:
    started: list[Backend] = []

    def start(**arguments: Any) -> Backend:
        arguments.setdefault("device", device_kind)
        started.append(Backend(**arguments))
        return started[-1]

    yield start
    faults = []
    for one in reversed(started):
        try:
            one.stop()
        except (AssertionError, pytest.fail.Exception) as fault:
            faults.append(str(fault))
        finally:
            one.dispose()
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


@pytest.fixture
def backend(device_kind: str) -> Iterator[Callable[..., Backend]]:
    """Start real backends: ``backend(size="48M", page_size=None, listen=None, ...)``.

    See `Backend` for the arguments. Those still running at the test's end are stopped with SIGTERM
    and must exit with 0 and leave neither region nor sockets.
    """
    yield from _backends(device_kind)


@pytest.fixture(scope="module")
def module_backend(device_kind: str, no_leaks_of_module: None) -> Iterator[Callable[..., Backend]]:
    """The same for a whole module: for backends that many tests share."""
    yield from _backends(device_kind)


# --- real clients ----------------------------------------------------------------------------


def _client_environment(
    backend: Backend | str, env: Mapping[str, str | os.PathLike[str]] | None
) -> dict[str, str]:
    if isinstance(backend, Backend):
        return _environment({**backend.env, "FLYT_BACKEND": backend.endpoint, **(env or {})})
    return _environment({"FLYT_BACKEND": backend, **(env or {})})


@pytest.fixture
def run_client() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a snippet in a client process: ``run_client(code, backend, env=None, timeout=…)``.

    `backend` is a `Backend` or an endpoint. The result's exit code, output and errors are the
    test's to check; a client that outlives its bound fails the test.
    """

    def run(
        code: str,
        backend: Backend | str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        timeout: float = CLIENT_LIMIT,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env=_client_environment(backend, env),
        )

    return run


@pytest.fixture
def start_client() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a snippet in a client process with pipes for input and output; killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(
        code: str, backend: Backend | str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None,
                text=True,
                env=_client_environment(backend, env),
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()  # also ends one that is stopped
        process.wait(STOP_LIMIT)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # unread input of a client that is gone
                    continue
