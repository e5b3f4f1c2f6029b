# SPDX-License-Identifier: Apache-2.0
"""--single-port: sessions of TCP clients pass through the daemon's one port."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pair.raw import RegionView, eventually

COPY = """
import os, sys
import numpy as np
import flyt, flyt as cudart
source = np.arange(3_000_001, dtype=np.uint8)
back = np.zeros_like(source)
err, p = cudart.cudaMalloc(source.nbytes)
assert err == 0, flyt.last_failure()
pinned = flyt.pinned_empty(100_003, np.uint8)
pinned[:] = 9
K = cudart.cudaMemcpyKind
answers = [
    cudart.cudaMemcpy(p, source, source.nbytes, K.cudaMemcpyHostToDevice),
    cudart.cudaMemcpy(back, p, source.nbytes, K.cudaMemcpyDeviceToHost),
    cudart.cudaMemcpy(p, pinned, pinned.nbytes, K.cudaMemcpyHostToDevice),
]
assert not any(a[0] for a in answers), answers
assert (back == source).all()
print(flyt.statistics()["fallback_inline"], flush=True)
"""

STAY = (
    COPY
    + """
sys.stdin.readline()
print(int(cudart.cudaMalloc(4096)[0]), flush=True)
"""
)


@pytest.fixture
def served(backend: Callable[..., Any]) -> Any:
    return backend(listen=["tcp://127.0.0.1:*"], extra=["--single-port"])


def ports_of(pids: list[int]) -> set[int]:
    """TCP ports on which these processes listen."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(link))
            except FileNotFoundError:
                continue
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    return {
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    }


def test_copies_pass_and_no_other_port_is_open(
    served: Any, start_client: Callable[..., subprocess.Popen[str]]
) -> None:
    clients = [start_client(STAY, served) for _ in range(3)]
    for client in clients:
        assert client.stdout is not None
        assert client.stdout.readline() == "0\n"
    port = int(served.endpoint.rpartition(":")[2])
    assert ports_of([served.pid, *served.descendants()]) == {port}
    for client in clients:
        assert client.communicate("\n", timeout=60)[0] == "0\n"


def test_bytes_pass_without_a_region_too(
    backend: Callable[..., Any], run_client: Callable[..., Any]
) -> None:
    served = backend(listen=["tcp://127.0.0.1:*"], extra=["--single-port", "--no-region"])
    done = run_client(COPY, served)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
    assert "inline" in done.stderr


def test_a_killed_client_gives_its_frames_back(
    served: Any, start_client: Callable[..., subprocess.Popen[str]]
) -> None:
    client = start_client(STAY, served)
    assert client.stdout is not None
    client.stdout.readline()
    with RegionView(served.region) as view:
        frames = view.frames_of(client.pid)
        assert frames
        client.kill()
        assert eventually(lambda: view.are_free(frames))


def test_a_client_is_told_when_its_worker_dies(
    served: Any, start_client: Callable[..., subprocess.Popen[str]], run_client: Callable[..., Any]
) -> None:
    client = start_client(STAY, served)
    assert client.stdout is not None
    client.stdout.readline()
    keeper = "flyt.backend.keeper"
    for pid in served.descendants():
        if keeper not in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, 9)
    assert client.communicate("\n", timeout=60)[0] == "46\n"  # cudaErrorDevicesUnavailable
    assert run_client(COPY, served).returncode == 0


def test_it_is_for_tcp(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flyt.cli.backend", "--device", "emulated", "--single-port"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "FLYT_RUNTIME_DIR": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "--single-port is for TCP" in done.stderr
