# SPDX-License-Identifier: Apache-2.0
"""``flyt demo`` as a user runs it: what it prints, that it fails when it should, what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from flyt.cli import draw
from flyt.cli.demo import MIB, Plan
from flyt.errors import ConfigurationError
from flyt.shm.layout import FrameState
from flyt.shm.table import Entry

LIMIT = 90.0
COMMAND = [sys.executable, "-m", "flyt.cli.main", "demo", "--json", "--mib", "64"]


@pytest.fixture
def start_demo(device_kind: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, "--device", device_kind],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=LIMIT)


def children(pid: int, command: str) -> list[int]:
    """Child processes of `pid` whose command line has `command`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            line = (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid and command.encode() in line:
            found.append(int(entry.name))
    return found


def wait_for_clients(process: subprocess.Popen[str]) -> list[int]:
    deadline = time.monotonic() + LIMIT
    while len(found := children(process.pid, "demo_client")) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)  # bounded by LIMIT
    return found


def test_json_has_exactly_the_promised_keys(start_demo: subprocess.Popen[str]) -> None:
    output, errors = start_demo.communicate(timeout=LIMIT)
    assert start_demo.returncode == 0, errors
    report = json.loads(output)
    assert set(report) == {"verified", "clients", "region", "memcpy_gbps"}
    assert report["verified"] is True
    assert set(report["region"]) == {"size", "page_size", "frames_used_peak"}
    assert len({client["pid"] for client in report["clients"]}) == 3
    for client in report["clients"]:
        assert set(client) == {
            *("pid", "bytes_h2d", "bytes_d2h"),
            *("h2d_gbps", "d2h_gbps", "pinned_h2d_gbps", "pinned_d2h_gbps"),
        }
        assert client["bytes_h2d"] == client["bytes_d2h"] == 2 * 64 * MIB
        assert min(client[key] for key in client if key.endswith("gbps")) > 0
    # At least the control page, a staging page and a pinned page of each client.
    frames = report["region"]["frames_used_peak"]
    assert 9 <= frames <= report["region"]["size"] // report["region"]["page_size"]
    assert report["memcpy_gbps"] > 0


def test_a_client_that_dies_is_a_failure(start_demo: subprocess.Popen[str]) -> None:
    os.kill(wait_for_clients(start_demo)[1], signal.SIGKILL)
    output, errors = start_demo.communicate(timeout=LIMIT)
    assert start_demo.returncode == 1
    assert json.loads(output)["verified"] is False
    assert "ended half-way" in errors


def test_terminated_it_clears_everything_away(start_demo: subprocess.Popen[str]) -> None:
    clients = wait_for_clients(start_demo)
    start_demo.terminate()
    start_demo.communicate(timeout=LIMIT)
    assert start_demo.returncode == 128 + signal.SIGTERM
    assert not [pid for pid in clients if os.path.exists(f"/proc/{pid}")]
    # The leak fixture looks for the backend and its region.


def test_plan_fits_a_container_with_64_mib() -> None:
    plan = Plan.fit(clients=3, total=256 * MIB, free=64 * MIB)
    assert plan.region == 48 * MIB
    assert plan.pinned == 4 * MIB


def test_plan_never_asks_for_more_than_speed_needs() -> None:
    assert Plan.fit(clients=3, total=256 * MIB, free=1 << 40).region == 256 * MIB


def test_plan_says_what_to_do_without_room() -> None:
    with pytest.raises(ConfigurationError, match="--shm-size"):
        Plan.fit(clients=3, total=256 * MIB, free=4 * MIB)


def drawn(entries: list[Entry], page_count: int) -> list[str]:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(draw.page_table(entries, page_count, 65_536))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_page_table_shows_each_frame_of_a_small_region() -> None:
    owned, quarantined = FrameState.OWNED, FrameState.QUARANTINED
    entries = [
        Entry(0, owned, 1, 500, 0),
        Entry(1, owned, 2, 400, 0),
        Entry(2, owned, 1, 500, 1),
        Entry(4, quarantined, 0, 0, 0),
    ]
    lines = drawn(entries, page_count=66)
    assert lines[0] == "       0  BAB·x" + 59 * "·"
    assert lines[1] == "      64  ··"
    assert "       A  pid 400: 1 frames, 0.1 MiB, in 1 run" in lines
    assert "       B  pid 500: 2 frames, 0.1 MiB, in 2 runs" in lines
    assert "       ·  62 of 66 frames of 64 KiB free" in lines


def test_page_table_puts_several_frames_of_a_large_region_in_a_cell() -> None:
    owned = FrameState.OWNED
    pids = {0: 400, 1: 400, 2: 400, 4: 400, 5: 500}
    entries = [Entry(frame, owned, 1, pid, 0) for frame, pid in pids.items()]
    # Two frames a cell: all of one owner, in part, two owners.
    assert drawn(entries, page_count=2 * draw.MOST_CELLS)[0].startswith("       0  Aa+·")


def test_forged_states_do_not_stop_the_drawing() -> None:
    assert drawn([Entry(1, 0xDEAD, 1, 1, 1)], page_count=3)[0] == "       0  ·x·"
