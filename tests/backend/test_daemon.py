# SPDX-License-Identifier: Apache-2.0
"""flyt-backend as a process: it starts whole or not at all, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from flyt.shm.region import Region
from flyt.shm.table import FrameTable

SHM = Path("/dev/shm")

LIMIT = 30.0
"""Seconds: a hang, not a measure of speed."""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def name() -> Iterator[str]:
    """A region name of our own; nobody may have left it there."""
    yield (region := f"flyt-test-daemon-{os.getpid()}")
    (SHM / region).unlink(missing_ok=True)


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    (folder := tmp_path / "run").mkdir(mode=0o700)
    return folder


@pytest.fixture
def run(name: str, runtime: Path) -> Run:
    """Run the command to its end, which these tests expect soon."""

    def call(*arguments: str, region: bool = True, **options: Any) -> Any:
        command = [sys.executable, "-m", "flyt.cli.backend"]
        command += ["--region", name, "--size", "4M"] if region else []
        return subprocess.run(
            [*command, *arguments],
            env={**os.environ, "FLYT_RUNTIME_DIR": str(runtime)},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
            **options,
        )

    return call


def refusal(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Non-zero, and one line of the command's own that says why."""
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("flyt-backend: ")
    for word in words:
        assert word in lines[0]


# --- what must not start -----------------------------------------------------------------------


@pytest.mark.emulated_only(reason="shows what a machine without a driver gets")
@pytest.mark.parametrize("device", ["auto", "cupy"])
def test_no_driver(run: Run, runtime: Path, name: str, device: str) -> None:
    refusal(run("--device", device), "--device emulated")
    assert not (SHM / name).exists()
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device-options", "nonsense=1"], ["nonsense"]),
        (["--listen", "ipc:///no/such/folder/b.sock"], ["/no/such/folder"]),
        (["--region", "/no/such/folder/region"], ["/no/such/folder/region"]),
        (["--size", "1000G"], ["--size"]),
        (["--page-size", "3K"], ["page size"]),
        (["--ready-fd", "77"], ["--ready-fd"]),
        (["--isolation", "process", "--sm-limit", "32"], ["no SMs to limit"]),
    ],
)
def test_what_can_not_be_had(
    run: Run, runtime: Path, name: str, arguments: list[str], words: list[str]
) -> None:
    refusal(run("--device", "emulated", *arguments), *words)
    assert not (SHM / name).exists()
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize("variable", ["FLYT_RING", "FLYT_NATIVE", "FLYT_SPIN_US"])
def test_a_variable_that_is_not_understood(
    run: Run, runtime: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "maybe")
    refusal(run("--device", "emulated"), f"{variable}='maybe': takes ")
    assert list(runtime.iterdir()) == []


def test_a_port_in_use(run: Run, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listen = f"tcp://127.0.0.1:{port}"
        refusal(run("--device", "emulated", "--listen", listen), str(port), "in use")
    assert not (SHM / name).exists()


def test_a_region_of_another_size(run: Run, name: str) -> None:
    (SHM / name).write_bytes(bytes(1 << 20))
    refusal(run("--device", "emulated"), str(1 << 20), str(4 << 20))
    assert (SHM / name).stat().st_size == 1 << 20, "what it did not make it leaves alone"


def test_a_second_daemon_on_one_region(run: Run, backend: Callable[..., Any]) -> None:
    first = backend(size="4M")
    spec = ["--region", first.region_name, "--size", "4M"]
    refusal(run("--device", "emulated", *spec, region=False), "another flyt-backend", first.region)
    assert os.path.exists(first.region)


def test_a_socket_in_no_folder(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    refusal(
        run("--device", "emulated", "--listen", f"ipc://{folder}/b.sock"),
        f"there is no folder {folder}",
    )


def test_a_second_daemon_at_one_socket(
    run: Run, backend: Callable[..., Any], raw: Callable[[str], Any]
) -> None:
    first = backend(size="4M")
    refusal(
        run("--device", "emulated", "--listen", first.endpoint), "another flyt-backend", "b.sock"
    )
    assert raw(first.endpoint).greet().region == first.region, "the first one still serves"


def test_a_socket_that_a_dead_daemon_left(backend: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "b.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    (tmp_path / "b.sock.lock").write_bytes(b"")
    backend(size="4M", listen=[f"ipc://{path}"])
    assert path.is_socket()


def test_session_sockets_that_a_dead_daemon_left(
    backend: Callable[..., Any], raw: Callable[[str], Any], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/b.sock"
    first = backend(size="4M", listen=[endpoint])
    client = raw(endpoint)
    left = tmp_path / client.greet().path
    second = raw(endpoint)
    second.greet()
    assert left.is_socket()
    first.kill()
    client.close()
    second.close()
    # Nobody's session of this endpoint, whatever they look like.
    others = [tmp_path / name for name in ("a.sock.0123456789abcdef", "b.sock.mine", "b.sock.123")]
    for path in others:
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
    others.append(tmp_path / "b.sock.fedcba9876543210")
    others[-1].write_text("a file")
    successor = backend(size="4M", listen=[endpoint])
    raw(endpoint).greet()
    assert not left.exists()
    successor.stop()
    assert set(tmp_path.glob("?.sock*")) == set(others)


def test_who_does_not_get_the_endpoint_leaves_its_sessions_alone(
    backend: Callable[..., Any], raw: Callable[[str], Any], run: Run, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/b.sock"
    backend(size="4M", listen=[endpoint])
    theirs = tmp_path / raw(endpoint).greet().path
    refusal(run("--device", "emulated", "--listen", endpoint), "another flyt-backend")
    assert theirs.is_socket()


# --- what it starts with ------------------------------------------------------------------------


def test_the_region_is_formatted_when_the_ready_line_comes(
    backend: Callable[..., Any], raw: Callable[[str], Any]
) -> None:
    one = backend(size="4M", page_size="128K")
    with closing(Region.open(one.region)) as region:
        table = FrameTable(region.fd, region.size)
        block = table.superblock()
        table.close()
    welcome = raw(one.endpoint).greet()
    assert (welcome.region, welcome.region_size) == (one.region, 4 << 20)
    assert welcome.page_size == block.geometry.page_size == 128 << 10
    assert welcome.epoch == block.epoch


def test_several_endpoints_with_ports_of_the_kernels_choice(
    backend: Callable[..., Any], raw: Callable[[str], Any], tmp_path: Path
) -> None:
    one = backend(size="4M", listen=[f"ipc://{tmp_path}/b.sock", "tcp://127.0.0.1:*"])
    ipc, tcp = one.endpoints
    assert ipc == f"ipc://{tmp_path}/b.sock"
    assert int(tcp.rpartition(":")[2]) > 0
    local, remote = raw(ipc).greet(), raw(tcp).greet()
    assert local.path.startswith("b.sock.")
    assert local.port == 0
    assert (tmp_path / local.path).is_socket()
    assert remote.path == ""
    with socket.create_connection(("127.0.0.1", remote.port), LIMIT):
        pass


def test_session_ports_are_kept_to(backend: Callable[..., Any], raw: Callable[[str], Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    one = backend(
        size="4M",
        listen=["tcp://127.0.0.1:*"],
        extra=["--session-ports", f"{port}-{port}"],
    )
    assert raw(one.endpoint).greet().port == port
    refused = raw(one.endpoint).greet()
    assert refused.code == 46
    assert str(port) in refused.text


def test_without_a_region(raw: Callable[[str], Any], runtime: Path, device_kind: str) -> None:
    with closing(Daemon(runtime, device_kind, "--no-region")) as daemon:
        assert daemon.ready["region"] == ""
        welcome = raw(daemon.ready["endpoints"][0]).greet()
        assert (welcome.region, welcome.region_size, welcome.lock_file) == ("", 0, "")
        for pid in (daemon.process.pid, *children(daemon.process.pid)):
            opened = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
            assert not [path for path in opened if path.startswith("/dev/shm/")]
        assert daemon.stop() == 0


# --- how it ends --------------------------------------------------------------------------------


class Daemon:
    """A daemon whose end is the test's affair."""

    def __init__(self, runtime: Path, device: str, *arguments: str, fds: tuple[int, ...] = ()):
        read, write = os.pipe()
        try:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "flyt.cli.backend", "--device", device),
                    *("--ready-fd", str(write), *arguments),
                ],
                env={**os.environ, "FLYT_RUNTIME_DIR": str(runtime)},
                pass_fds=(write, *fds),
            )
            os.close(write)
            assert select.select([read], [], [], LIMIT)[0], "it does not get ready"
            self.ready: dict[str, Any] = json.loads(os.read(read, 65_536) or b"{}")
        finally:
            os.close(read)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(LIMIT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_nothing_stays(
    runtime: Path, name: str, device_kind: str, raw: Callable[[str], Any], number: int
) -> None:
    with closing(Daemon(runtime, device_kind, "--region", name, "--size", "4M")) as daemon:
        assert raw(daemon.ready["endpoints"][0]).greet().session
        assert len(list(runtime.iterdir())) >= 3  # socket, its lock, a session's socket
        assert daemon.stop(number) == 0
    assert list(runtime.iterdir()) == []
    assert not (SHM / name).exists()


def test_a_region_may_be_kept(runtime: Path, name: str, device_kind: str) -> None:
    arguments = ["--region", name, "--size", "4M", "--keep-region"]
    with closing(Daemon(runtime, device_kind, *arguments)) as daemon:
        assert daemon.stop() == 0
    assert (SHM / name).stat().st_size == 4 << 20
    with closing(Daemon(runtime, device_kind, *arguments[:2])) as daemon:
        assert daemon.stop() == 0
    assert (SHM / name).exists(), "adopted, so it is not the second one's to remove"


def test_it_ends_with_its_parent(runtime: Path, name: str, device_kind: str) -> None:
    parent = subprocess.Popen(["sleep", "1000"])
    pidfd = os.pidfd_open(parent.pid)
    arguments = ["--region", name, "--size", "4M", "--with-parent-fd", str(pidfd)]
    try:
        with closing(Daemon(runtime, device_kind, *arguments, fds=(pidfd,))) as daemon:
            parent.kill()
            assert daemon.process.wait(LIMIT) == 0
    finally:
        os.close(pidfd)
        parent.kill()
        parent.wait(LIMIT)
    assert not (SHM / name).exists()


def children(pid: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
    return found


def test_its_processes_end_with_it_even_if_it_is_killed(
    runtime: Path, name: str, device_kind: str, alive: Callable[[int], bool]
) -> None:
    with closing(Daemon(runtime, device_kind, "--region", name, "--size", "4M")) as daemon:
        pids = children(daemon.process.pid)
        assert len(pids) == 2  # keeper and worker
        daemon.process.kill()
        deadline = time.monotonic() + LIMIT
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < deadline, "a child outlives the daemon"
            time.sleep(0.01)  # bounded by LIMIT


def test_a_stopped_worker_does_not_hold_up_the_end(
    runtime: Path, name: str, device_kind: str, raw: Callable[[str], Any]
) -> None:
    with closing(
        Daemon(runtime, device_kind, "--region", name, "--size", "4M", "--drain", "0.2")
    ) as daemon:
        raw(daemon.ready["endpoints"][0]).greet()
        for pid in children(daemon.process.pid):
            os.kill(pid, signal.SIGSTOP)
        assert daemon.stop() == 0
    assert list(runtime.iterdir()) == [], "it removes a killed worker's sockets, too"


def test_a_second_signal_ends_the_waiting(
    runtime: Path, name: str, device_kind: str, raw: Callable[[str], Any]
) -> None:
    with closing(
        Daemon(runtime, device_kind, "--region", name, "--size", "4M", "--drain", "3600")
    ) as daemon:
        raw(daemon.ready["endpoints"][0]).greet()
        for pid in children(daemon.process.pid):
            os.kill(pid, signal.SIGSTOP)
        daemon.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.process.wait(0.5)
        assert daemon.stop() == 0
    assert not (SHM / name).exists()
