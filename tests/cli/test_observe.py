# SPDX-License-Identifier: Apache-2.0
"""``flyt status``, ``flyt doctor`` and the endpoint for Prometheus, against a real backend."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from flyt.cli.doctor import cache_type
from flyt.cli.status import fetch, table_of
from flyt.cli.top import rates_of
from flyt.frontend.settings import Settings
from flyt.shm.native import LIBRARY
from tests.pair.raw import eventually

LIMIT = 60.0

CLIENT = """
import sys
import termios
import numpy as np
import flyt, flyt as cudart
K = cudart.cudaMemcpyKind
error, device = cudart.cudaMalloc(3 << 20)
data = np.zeros(1 << 20, np.uint8)
for _ in range(5):
    assert cudart.cudaMemcpy(device, data, data.nbytes, K.cudaMemcpyHostToDevice)[0] == 0
assert cudart.cudaDeviceSynchronize()[0] == 0
assert cudart.cudaMalloc(1 << 50)[0] == 2
print("there", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def served(module_backend: Callable[..., Any]) -> Any:
    return module_backend(extra=["--metrics", "127.0.0.1:*"])


def flyt(backend: Any, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flyt.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        env={**os.environ, **backend.env, "FLYT_BACKEND": backend.endpoint, **environment},
    )


@pytest.fixture
def client(served: Any, start_client: Callable[..., Any]) -> Any:
    """A client with 3 MiB of device memory that has copied 5 MiB and met one error."""
    process = start_client(CLIENT, served)
    assert process.stdout.readline() == "there\n"
    return process


def test_status_for_programs(served: Any, client: Any) -> None:
    done = flyt(served, "status", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (session,) = [s for s in report["sessions"] if s["pid"] == client.pid]
    assert session["device_bytes"] == 3 << 20
    assert session["bytes_moved"] == 5 << 20
    assert session["in_flight"] == 0
    assert session["errors"] == 1
    assert session["frames"] > 0
    assert report["pid"] == served.pid


@pytest.mark.parametrize("form", ["{:016x}", "0x{:x}", "{:020d}"], ids=["hex", "0x", "decimal"])
def test_a_session_of_the_status_can_be_suspended(served: Any, client: Any, form: str) -> None:
    """This backend suspends none, but says so only of a session that it has."""
    report = json.loads(flyt(served, "status", "--json").stdout)
    (session,) = [s["session"] for s in report["sessions"] if s["pid"] == client.pid]
    assert session == f"{int(session, 16):016x}"
    done = flyt(served, "suspend", form.format(int(session, 16)))
    assert "--isolation process" in done.stderr


@pytest.mark.parametrize("text", ["1" * 21, "0x" + "1" * 17, str(1 << 64), "-1", "", "1_0", "٤"])
def test_what_is_no_session(served: Any, text: str) -> None:
    done = flyt(served, "suspend", "--", text)
    assert done.returncode == 2
    assert "is no session: flyt status lists them" in done.stderr


@pytest.mark.parametrize("command", [("status",), ("top", "-n", "1")], ids=lambda words: words[0])
def test_a_pipe_gets_whole_rows(served: Any, client: Any, command: tuple[str, ...]) -> None:
    report = json.loads(flyt(served, "status", "--json").stdout)
    (entry,) = [s for s in report["sessions"] if s["pid"] == client.pid]
    done = flyt(served, *command)
    (row,) = [line for line in done.stdout.splitlines() if f" {client.pid} " in line]
    for word in (entry["session"], entry["principal"], "running", "3.0 MiB", "5.0 MiB"):
        assert word in row, done.stdout


def test_ids_are_whole_on_a_narrow_screen(served: Any, client: Any) -> None:
    report = fetch(Settings(served.endpoint))
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(table_of(report, 0.0, {"rate": lambda _: "1023.9 KiB/s"}))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for one in report["sessions"]:
        assert any(f"{one['session']:016x}" in line and str(one["pid"]) in line for line in lines)


def test_status_for_people(served: Any, client: Any) -> None:
    done = flyt(served, "status", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if f" {client.pid} " in line]
    for word in (f"uid {os.getuid()}", "3.0 MiB", "5.0 MiB"):
        assert word in row, row


def test_status_of_a_stuck_worker_is_unknown(served: Any, client: Any) -> None:
    report = json.loads(flyt(served, "status", "--json").stdout)
    worker = next(s["worker"] for s in report["sessions"] if s["pid"] == client.pid)
    os.kill(worker, signal.SIGSTOP)
    try:
        for _ in range(3):
            report = json.loads(flyt(served, "status", "--json").stdout)
            (session,) = [s for s in report["sessions"] if s["pid"] == client.pid]
            assert session["device_bytes"] is None
            assert session["frames"] > 0, "what the daemon itself knows is there"
    finally:
        os.kill(worker, signal.SIGCONT)

    def known() -> bool:
        report = json.loads(flyt(served, "status", "--json").stdout)
        return all(s["device_bytes"] is not None for s in report["sessions"])

    assert eventually(known)


def test_status_without_a_backend(served: Any) -> None:
    done = flyt(served, "status", "--backend", "ipc:///tmp/there-is-none.sock")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "is flyt-backend running?" in done.stderr


def test_who_listens_on_tcp_alone_needs_one_more_endpoint(backend: Callable[..., Any]) -> None:
    one = backend(listen=["tcp://127.0.0.1:*"])
    for words in (("status",), ("top", "-n", "1"), ("suspend", "1"), ("resume", "1")):
        for where in (one.endpoint, f"ipc://{one.runtime_dir}/backend.sock"):
            done = flyt(one, *words, "--backend", where)
            assert done.returncode == 1
            assert "--listen ipc://" in done.stderr, done.stderr


def test_top(served: Any, client: Any) -> None:
    done = flyt(served, "top", "-n", "2", "--interval", "0.1", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if f" {client.pid} " in line]
    assert len(rows) == 2, "where there is no terminal each view is printed"
    for row in rows:
        for word in (f"uid {os.getuid()}", "3.0 MiB", "running"):
            assert word in row, row
    assert "0 B/s" in rows[1]
    assert "0 B/s" not in rows[0], "a rate takes two looks"


def test_top_in_a_terminal(served: Any, client: Any) -> None:
    """One view in the place of the other."""
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal, os.fdopen(ours, "rb", buffering=0) as screen:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 50, 200, 0, 0))
        done = subprocess.run(
            [sys.executable, "-m", "flyt.cli.main", "top", "-n", "2", "--interval", "0.1"],
            stdout=terminal,
            stderr=subprocess.PIPE,
            env={**os.environ, **served.env, "FLYT_BACKEND": served.endpoint, "TERM": "xterm"},
            timeout=LIMIT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        os.set_blocking(ours, False)
        shown = b"".join(iter(lambda: screen.read(1 << 16), None)).decode()
    assert f" {client.pid} " in shown
    assert "\x1b[1A" in shown, "the cursor goes back up"


def test_top_ends_with_the_backend(backend: Callable[..., Any]) -> None:
    one = backend()
    watcher = subprocess.Popen(
        [sys.executable, "-m", "flyt.cli.main", "top", "--interval", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **one.env, "FLYT_BACKEND": one.endpoint},
    )
    assert not eventually(lambda: watcher.poll() is not None, 3.0), "it watches"
    one.stop()
    _, errors = watcher.communicate(timeout=LIMIT)
    assert watcher.returncode == 1
    assert "is flyt-backend running?" in errors


def test_rates() -> None:
    def report(**moved: Any) -> dict[str, Any]:
        return {"sessions": [{"session": n, "bytes_moved": b} for n, b in moved.items()]}

    earlier, later = report(a=100, b=None, c=7), report(a=300, b=5, d=9)
    assert rates_of(earlier, later, 2.0) == {"a": 100.0, "b": None, "d": None}


def test_prometheus(served: Any, client: Any) -> None:
    port = re.search(r"metrics at port (\d+)", served.log)
    assert port is not None, served.log
    with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=LIMIT) as answer:
        text = answer.read().decode()
    values = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")
    )
    assert float(values["flyt_up"]) == 1
    (mine,) = [key for key in values if f'pid="{client.pid}"' in key and "device_bytes" in key]
    assert float(values[mine]) == 3 << 20
    assert float(values[mine.replace("device_bytes", "bytes_moved")]) == 5 << 20
    assert float(values[mine.replace("device_bytes", "errors")]) == 1
    assert float(values["flyt_frames_granted"]) > 0


def test_log_lines_name_the_session(served: Any, client: Any) -> None:
    report = json.loads(flyt(served, "status", "--json").stdout)
    (session,) = [s["session"] for s in report["sessions"] if s["pid"] == client.pid]
    client.kill()
    assert eventually(lambda: f"session {session} of pid {client.pid} is over" in served.log)


# --- doctor --------------------------------------------------------------------------------------


def diagnosis(backend: Any, *words: str, **environment: str) -> tuple[int, dict[str, Any]]:
    done = flyt(backend, "doctor", "--json", *words, **environment)
    assert done.stdout, done.stderr
    return done.returncode, {step["step"]: step for step in json.loads(done.stdout)}


def test_doctor_of_a_sound_set_up(served: Any) -> None:
    code, steps = diagnosis(served)
    if not steps["commands"]["ok"]:
        off = [name for name in ("FLYT_NATIVE", "FLYT_RING") if os.environ.get(name) == "0"]
        reason = off[0] if off else "libflyt.so"
        assert reason in steps["commands"]["text"]
        del steps["commands"]
    else:
        assert code == 0, steps
    assert all(step["ok"] for step in steps.values()), steps
    assert "seen by both sides" in steps["region"]["text"]
    assert "cached" in steps["region"]["text"]
    assert "all bytes right" in steps["probe"]["text"]


def test_doctor_without_a_backend(served: Any) -> None:
    code, steps = diagnosis(served, "--backend", "ipc:///tmp/there-is-none.sock")
    assert code == 1
    assert list(steps) == ["endpoint"]
    assert "start flyt-backend" in steps["endpoint"]["text"]


def test_doctor_of_a_region_that_is_another(served: Any, tmp_path: Any) -> None:
    copy = tmp_path / "copy"
    with open(served.region, "rb") as region:
        data = bytearray(region.read())
    data[40:56] = bytes(16)  # where the epoch is
    copy.write_bytes(data)
    code, steps = diagnosis(served, FLYT_REGION=str(copy))
    assert code == 1
    assert not steps["region"]["ok"]
    assert "another region than the backend's" in steps["region"]["text"]
    assert steps["probe"]["ok"], "inline it works all the same"


def test_doctor_of_a_pci_device_that_is_not_there(served: Any) -> None:
    code, steps = diagnosis(served, FLYT_REGION="pci:0000:ff:1f.7")
    assert code == 1
    assert "has not an ivshmem device at 0000:ff:1f.7" in steps["region"]["text"]
    assert "/dev/shm" not in steps["region"]["text"]
    assert steps["probe"]["ok"], "inline it works all the same"


def test_doctor_of_a_backend_without_a_region(backend: Callable[..., Any]) -> None:
    one = backend(extra=["--no-region"])
    code, steps = diagnosis(one)
    assert code == 1
    assert "--no-region" in steps["region"]["text"]


needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="no C compiler was there")


@needs_library
@pytest.mark.parametrize("switch", ["FLYT_RING", "FLYT_NATIVE"])
def test_doctor_names_the_switch_that_keeps_the_rings_away(served: Any, switch: str) -> None:
    others = {name: "1" for name in ("FLYT_RING", "FLYT_NATIVE") if name != switch}
    code, steps = diagnosis(served, **{**others, switch: "0"})
    assert code == 1
    assert f"{switch}=0" in steps["commands"]["text"]
    assert "compiler" not in steps["commands"]["text"]


@needs_library
@pytest.mark.parametrize("switch", ["FLYT_RING", "FLYT_NATIVE"])
def test_doctor_of_a_backend_without_rings(backend: Callable[..., Any], switch: str) -> None:
    one = backend(env={switch: "0"})
    code, steps = diagnosis(one, FLYT_RING="1", FLYT_NATIVE="1")
    assert code == 1
    assert not steps["commands"]["ok"]
    assert "the backend" in steps["commands"]["text"]


@pytest.mark.parametrize("spec", ["pci:", "pci:0000:00:1f.7", "pci:1M"])
def test_doctor_where_the_pci_device_is_not_to_be_had(served: Any, spec: str) -> None:
    code, steps = diagnosis(served, FLYT_REGION=spec)
    assert code == 1
    text = steps["region"]["text"]
    assert not steps["region"]["ok"]
    assert "ivshmem" in text
    assert "container" not in text, "a guest is none"
    assert steps["probe"]["ok"], "inline it works all the same"


def test_doctor_says_what_the_region_is_here() -> None:
    """Where a device was found, its cache type is told, however it was named."""
    assert "write-combining" in cache_type("pci:0000:00:05.0")
    assert "cached" in cache_type("/dev/shm/flyt")
