# SPDX-License-Identifier: Apache-2.0
"""Two processes really share one region: seen from the kernel and from the inverted page table."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.shm.layout import FrameState
from flyt.shm.region import Region
from flyt.shm.table import Entry, FrameTable
from tests.pair.raw import eventually

K = cudart.cudaMemcpyKind

CLIENT = """
import json, os, sys
import numpy as np
import flyt
from flyt.frontend.current import current
pinned = flyt.pinned_empty(int(sys.argv[1]), np.uint8)
window = current().memory.window
print(json.dumps({"pid": os.getpid(), "session": current().welcome.session, "base": window.base,
                  "pinned": pinned.ctypes.data}), flush=True)
for line in sys.stdin:
    command, value = line.split()
    if command == "fill":
        pinned[:] = int(value)
    print(json.dumps([int(pinned.min()), int(pinned.max())]), flush=True)
"""


def entries(region: str) -> list[Entry]:
    opened = Region.open(region)
    table = FrameTable(opened.fd, opened.size)
    try:
        return table.snapshot()
    finally:
        table.close()
        opened.close()


def mappings(pid: int, region: str) -> dict[int, tuple[int, int]]:
    """Address to (length, offset in the region), from the kernel; only the window's."""
    found = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) rw.. ([0-9a-f]+) \S+ \d+ +(\S+)$", line):
            start, end, offset, path = match.groups()
            address = int(start, 16)
            if path == region and 0x1000_0000_0000 <= address < 0x2000_0000_0000:
                found[address] = (int(end, 16) - address, int(offset, 16))
    return found


def pages(mapped: dict[int, tuple[int, int]], page: int) -> dict[int, int]:
    """Address of each page to its offset in the region."""
    return {
        address + at: offset + at
        for address, (length, offset) in mapped.items()
        for at in range(0, length, page)
    }


def hello(process: subprocess.Popen[str]) -> dict[str, int]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def tell(process: subprocess.Popen[str], line: str) -> list[int]:
    assert process.stdin is not None
    assert process.stdout is not None
    print(line, file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


def test_two_processes_share_one_region_at_equal_addresses(
    backend: Callable[..., Any], start_client: Callable[..., subprocess.Popen[str]]
) -> None:
    daemon = backend()
    one, two = start_client(CLIENT, daemon, "1000000"), start_client(CLIENT, daemon, "1000000")
    facts = [hello(one), hello(two)]
    workers = daemon.descendants()

    held = [{e.frame for e in entries(daemon.region) if e.session == f["session"]} for f in facts]
    assert held[0]
    assert held[1]
    assert not held[0] & held[1]
    for fact, frames in zip(facts, held, strict=True):
        mine = [e for e in entries(daemon.region) if e.frame in frames]
        assert {e.pid for e in mine} == {fact["pid"]}
        assert {e.state for e in mine} == {FrameState.OWNED}
        assert sorted(e.vpn for e in mine)[0] == 0  # the control page is virtual page 0

    page = 65_536
    for fact, frames in zip(facts, held, strict=True):
        client = pages(mappings(fact["pid"], daemon.region), page)
        assert len(client) == len(frames)
        assert min(client) == fact["base"]
        in_workers = [pages(mappings(pid, daemon.region), page) for pid in workers]
        # The very same address shows the very same page of the region on the other side.
        assert any(client.items() <= worker.items() for worker in in_workers)

    assert tell(one, "fill 1") == [1, 1]
    assert tell(two, "fill 2") == [2, 2]
    assert tell(one, "show 0") == [1, 1]


def test_scattered_frames_look_contiguous(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    session = connect(backend(size="8M"))
    page = session.welcome.page_size
    # Small blocks with holes between them: a large one then has to be scattered.
    blocks = []
    while True:
        error, block = cudart.cudaHostAlloc(page, 0)
        if error:
            break
        blocks.append(block)
    assert error == cudart.cudaError_t.cudaErrorMemoryAllocation
    for block in blocks[::2]:
        assert cudart.cudaFreeHost(block) == (0,)
    count = len(blocks[::2]) - 1
    pinned = flyt.pinned_empty(count * page, np.uint8)
    memory = session.memory
    assert memory is not None
    assert memory.window is not None
    vpn = (pinned.ctypes.data - memory.window.base) // page
    table = memory.window.table(vpn)
    assert table is not None
    assert len(table) > count // 2

    data = np.random.default_rng(3).integers(0, 256, pinned.nbytes, dtype=np.uint8)
    device = cudart.cudaMalloc(pinned.nbytes)[1]
    pinned[:] = data
    assert cudart.cudaMemcpy(device, pinned, pinned.nbytes, K.cudaMemcpyHostToDevice) == (0,)
    back = np.zeros_like(data)
    assert cudart.cudaMemcpy(back, device, data.nbytes, K.cudaMemcpyDeviceToHost) == (0,)
    assert (back == data).all()
    pinned[:] = 0
    assert cudart.cudaMemcpy(pinned, device, data.nbytes, K.cudaMemcpyDeviceToHost) == (0,)
    assert (pinned == data).all()


@pytest.mark.parametrize("page_size", ["64K", "256K", "2M"])
def test_page_sizes(
    page_size: str, backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    session = connect(backend(size="40M", page_size=page_size))
    assert session.welcome.page_size == {"64K": 65_536, "256K": 262_144, "2M": 2 << 20}[page_size]
    data = np.random.default_rng(4).integers(0, 256, 9_000_001, dtype=np.uint8)
    device, back = cudart.cudaMalloc(data.nbytes)[1], np.zeros_like(data)
    assert cudart.cudaMemcpy(device, data, data.nbytes, K.cudaMemcpyHostToDevice) == (0,)
    assert cudart.cudaMemcpy(back, device, data.nbytes, K.cudaMemcpyDeviceToHost) == (0,)
    assert (back == data).all()


def test_a_region_in_any_mappable_file(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session], device_kind: str
) -> None:
    # CUDA registers pages of tmpfs, not of a disk's file system.
    folder = tempfile.mkdtemp(dir="/dev/shm" if device_kind == "cupy" else None)
    file = Path(folder) / "region"
    file.write_bytes(bytes(16 << 20))
    daemon = backend(region=str(file), size="16M")
    session = connect(daemon)
    assert session.memory is not None
    pinned = flyt.pinned_empty(100_000, np.uint8)
    pinned[:] = 9
    device, back = cudart.cudaMalloc(pinned.nbytes)[1], bytearray(pinned.nbytes)
    assert cudart.cudaMemcpy(device, pinned, pinned.nbytes, K.cudaMemcpyHostToDevice) == (0,)
    assert cudart.cudaMemcpy(back, device, pinned.nbytes, K.cudaMemcpyDeviceToHost) == (0,)
    assert back == bytes([9]) * pinned.nbytes
    session.close()
    daemon.region = ""  # adopted: it stays
    daemon.stop()
    assert file.exists()
    shutil.rmtree(folder)


def test_a_file_that_cuda_cannot_register_is_refused_at_start(
    device_kind: str, tmp_path: Path
) -> None:
    if device_kind != "cupy":
        pytest.skip("the emulated device reads any mapping")
    file = tmp_path / "region"
    file.write_bytes(bytes(16 << 20))
    command = [sys.executable, "-m", "flyt.cli.backend", "--device", "cupy", "--region", str(file)]
    done = subprocess.run(
        [*command, "--listen", f"ipc://{tmp_path}/b.sock"],
        env={**os.environ, "FLYT_RUNTIME_DIR": str(tmp_path / "run")},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert "tmpfs" in done.stderr


def test_windows_grow_and_shrink(session: flyt.Session, one_backend: Any) -> None:
    def frames() -> int:
        return sum(e.session == session.welcome.session for e in entries(one_backend.region))

    before = frames()
    pinned = cudart.cudaHostAlloc(10 * 65_536, 0)[1]
    assert frames() == before + 10
    assert cudart.cudaFreeHost(pinned) == (0,)
    # The keeper zeroes them before they are free, and cudaFreeHost does not wait for that.
    assert eventually(lambda: frames() == before)
    assert {e.session for e in entries(one_backend.region)} <= {session.welcome.session}


def test_many_sessions_come_and_go(
    one_backend: Any, run_client: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """No leak in the worker: descriptors, threads, mappings (rpclib#125: a crash after 1000)."""
    rounds = (
        "import flyt, sys, gc\n"
        "for n in range(int(sys.argv[1])):\n"
        "    with flyt.connect():\n"
        "        p = flyt.pinned_empty(70_000, 'u1'); p[:] = n & 255\n"
        "        d = flyt.cudaMalloc(p.nbytes)[1]\n"
        "        assert flyt.cudaMemcpy(d, p, p.nbytes, 1) == (0,), flyt.last_failure()\n"
        "        back = bytearray(p.nbytes)\n"
        "        assert flyt.cudaMemcpy(back, d, p.nbytes, 2) == (0,), flyt.last_failure()\n"
        "        assert back == bytes([n & 255]) * p.nbytes\n"
    )

    def warm_and_count() -> dict[int, tuple[int, int, int]]:
        done = run_client(rounds, one_backend, "30")
        assert done.returncode == 0, done.stderr
        return {
            pid: (
                len(list(Path(f"/proc/{pid}/fd").iterdir())),
                len(list(Path(f"/proc/{pid}/task").iterdir())),
                Path(f"/proc/{pid}/maps").read_text().count("\n"),
            )
            for pid in one_backend.descendants()
        }

    first, second = warm_and_count(), warm_and_count()
    assert first.keys() == second.keys()
    for pid, counts in first.items():
        for was, now in zip(counts, second[pid], strict=True):
            assert now <= was + 8
