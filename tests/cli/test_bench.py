# SPDX-License-Identifier: Apache-2.0
"""``flyt bench`` as a user runs it: what it measures and writes, when it fails, what it leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flyt.shm.native import native

LIMIT = 110.0
"""Seconds; a bound on hangs."""

COMMAND = [sys.executable, "-m", "flyt.cli.main", "bench"]
SMALL = ["--sizes", "4,64K", "--clients", "1,2", "--rounds", "1"]
FORMS = Path(__file__).parent.parent / "bench"
"""Where ``cupy_form`` is: Flyt with CuPy's names."""

BROKEN = """
import itertools, os
import numpy as np
import flyt
from cuda.bindings.runtime import cudaMemcpyKind as K

what, at = os.environ["BREAK"], int(os.environ["BREAK_AT"])
calls = itertools.count(1)

def __getattr__(name):
    return getattr(flyt, name)

def break_device(address):
    byte = np.zeros(1, np.uint8)
    flyt.cudaMemcpy(byte, address, 1, K.cudaMemcpyDeviceToHost)
    byte ^= 1
    flyt.cudaMemcpy(address, byte, 1, K.cudaMemcpyHostToDevice)

def cudaMemcpy(dst, src, count, kind):
    answer = flyt.cudaMemcpy(dst, src, count, kind)
    if what == {K.cudaMemcpyHostToDevice: "h2d", K.cudaMemcpyDeviceToHost: "d2h"}[kind]:
        if next(calls) == at:
            if what == "h2d":
                break_device(dst + count - 1)
            else:
                import ctypes
                ctypes.c_uint8.from_address(dst + count - 1).value ^= 1
    return answer

def cudaMemsetAsync(ptr, value, count, stream):
    answer = flyt.cudaMemsetAsync(ptr, value, count, stream)
    if what == "memset" and next(calls) == at:
        flyt.cudaStreamSynchronize(stream)
        break_device(ptr)
    return answer
"""
"""A runtime one of whose copies gets one byte wrong."""


def bench(
    *arguments: str, path: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **env}
    if path is not None:
        environment["PYTHONPATH"] = f"{path}{os.pathsep}{os.environ['PYTHONPATH']}"
    return subprocess.run(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        env=environment,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A run with every case but the long train; the folder has its JSON and its curves."""
    folder = tmp_path_factory.mktemp("bench")
    cases = ["copy", "latency", "burst", "post", "stream", "mix"]
    done = bench(
        *[word for case in cases for word in ("--case", case)], *SMALL,
        "--device", "emulated", "--native", "cupy_form",
        "--json", str(folder / "found.json"), "--plot", str(folder / "curves"),
        path=FORMS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, json.loads((folder / "found.json").read_text()), done.stdout


def test_json_has_what_it_promises(whole: tuple[Path, dict[str, Any], str]) -> None:
    _, found, _ = whole
    assert set(found) == {
        *("benchmark", "format", "verified", "failure", "compared", "machine", "settings"),
        *("seconds", "against", "figures", "notes", "counters", "results"),
    }
    assert found["verified"] is True
    assert set(found["machine"]) == {
        *("cpu", "cores", "memory_bytes", "kernel", "card", "python", "flyt", "packages"),
        *("settings", "commit", "date", "native_library", "stolen"),
    }
    assert found["machine"]["native_library"] is (native() is not None)
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert found["settings"]["native"] == "cupy_form"
    assert found["against"] == ["native", "memcpy"]
    assert len(found["figures"]) == 14
    for figure in found["figures"]:
        assert set(figure) == {"figure", "bound", "measured", "ok", "parts", "missing"}
    for record in found["results"]:
        assert record["low"] <= record["median"] <= record["high"]
        assert len(record["samples"]) == 1
        assert min(record["samples"]) > 0


def test_every_contender_is_in_every_case_it_enters(
    whole: tuple[Path, dict[str, Any], str],
) -> None:
    _, found, _ = whole
    there = {(r["case"], r["contender"], r["clients"]) for r in found["results"]}
    everybody = {
        *("memcpy", "native pageable", "native pinned"),
        *("flyt pageable", "flyt pinned", "flyt inline"),
    }
    pageable = {"native pageable", "flyt pageable"}
    assert there == {
        *((case, who, 1) for case in ("copy", "latency") for who in everybody),
        *((case, who, 1) for case in ("burst", "post") for who in pageable),
        *(("mix", who, n) for who in pageable for n in (1, 2)),
        *(("stream", "flyt pinned", n) for n in (1, 2)),
        ("stream", "native pinned", 1),
    }
    assert {r["size"] for r in found["results"] if r["case"] == "copy"} == {4, 65_536}


def test_bytes_go_the_way_that_a_contender_names(
    whole: tuple[Path, dict[str, Any], str],
) -> None:
    _, found, _ = whole
    counters = found["counters"]
    assert set(counters) == {"flyt", "flyt 2", "inline"}
    assert counters["inline"]["inline_h2d_bytes"] > 0
    assert counters["inline"]["staged_h2d_bytes"] == counters["inline"]["pinned_h2d_bytes"] == 0
    for name in ("flyt", "flyt 2"):
        assert counters[name]["inline_h2d_bytes"] == counters[name]["inline_d2h_bytes"] == 0
        assert counters[name]["staged_h2d_bytes"] > 0
        assert counters[name]["pinned_h2d_bytes"] > 0
    assert found["notes"] == []


def test_copies_are_counted(whole: tuple[Path, dict[str, Any], str]) -> None:
    """Each job has a round to warm up and one that counts."""
    _, found, _ = whole
    copies = 2 * 6 * 2 * 200 + 2 * 6 * 2 * 500  # copy: 2 sizes; latency: 500; both ways
    copies += 2 * 2 * 112 * 2  # burst, post: one way, half as many as there are credits
    copies += 2 * 2 * 3 * (1 + 1 + 2) + 2 * 2 * 1000 * (1 + 1 + 2 + 2)  # stream, mix
    copies += 2 * 6 * 2 * 200  # the other size of copy
    assert found["compared"]["copies"] == copies


def test_curves_are_png_and_svg(whole: tuple[Path, dict[str, Any], str]) -> None:
    folder, _, output = whole
    for name in ("throughput", "duration", "clients"):
        png, svg = folder / "curves" / f"{name}.png", folder / "curves" / f"{name}.svg"
        assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        text = svg.read_text()
        assert "<svg" in text
        assert "flyt pinned" in text
        assert str(png) in output.replace("\n", "")


def test_the_figures_come_last_with_their_bounds(
    whole: tuple[Path, dict[str, Any], str],
) -> None:
    _, found, output = whole
    table = output[output.index("native: cupy_form") :]
    for figure in found["figures"]:
        assert figure["figure"] in table
        assert figure["bound"] in table
    assert "all right" in table


def test_summary_shows_what_was_measured(whole: tuple[Path, dict[str, Any], str]) -> None:
    folder, _, output = whole
    done = bench("--summary", str(folder / "found.json"))
    assert done.returncode == 0, done.stderr
    start = "cudaMemcpy, host to device"
    shown = done.stdout[done.stdout.index(start) :].strip()
    assert shown in output
    again = bench("--summary", str(folder / "found.json"), "--json", "-")
    assert (
        json.loads(again.stdout)["figures"]
        == json.loads((folder / "found.json").read_text())["figures"]
    )


def test_without_the_compiled_library_it_says_what_that_is_worth(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = bench(
        "--case", "copy", *SMALL, "--device", "emulated", "--json", str(file), FLYT_NATIVE="0"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text())["machine"]["native_library"] is False
    start, end = done.stdout[:300], done.stdout[-600:]
    again = bench("--summary", str(file)).stdout
    for text in (start, end, again):
        assert "without the compiled library" in text, done.stdout
    quiet = bench("--case", "copy", *SMALL, "--device", "emulated", "--json", "-", FLYT_NATIVE="0")
    assert "without the compiled library" in quiet.stderr


@pytest.mark.skipif(native() is None, reason="wants the compiled library")
def test_with_the_compiled_library_nothing_is_said_of_it(
    whole: tuple[Path, dict[str, Any], str],
) -> None:
    assert "compiled library" not in whole[2]


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"benchmark": "flyt bench"}'])
def test_summary_of_something_else(text: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    done = bench("--summary", str(file))
    assert done.returncode == 1
    assert "no result of flyt bench" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("case", "broken", "at"),
    [
        ("copy", "h2d", 300),
        ("post", "memset", 200),
        ("mix", "d2h", 300),
    ],
)
def test_one_wrong_byte_fails_the_run(case: str, broken: str, at: int, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    done = bench(
        "--case", case, *SMALL[2:], "--sizes", "4K", "--device", "emulated",
        "--native", "broken", "--json", "-",
        path=tmp_path, BREAK=broken, BREAK_AT=str(at),
    )  # fmt: skip
    assert done.returncode == 1
    assert "native: " in done.stderr
    assert "1 of" in done.stderr
    assert "bytes are wrong" in done.stderr
    report = json.loads(done.stdout)
    assert report["verified"] is False
    assert "bytes are wrong" in report["failure"]


def test_an_error_of_cuda_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "refusing.py").write_text(
        "import flyt\n"
        "def __getattr__(name):\n    return getattr(flyt, name)\n"
        "def cudaMemcpy(dst, src, count, kind):\n"
        "    return flyt.cudaMemcpy(0, src, count, kind)\n"
    )
    done = bench(
        "--case", "copy", *SMALL, "--device", "emulated", "--native", "refusing", path=tmp_path
    )
    assert done.returncode == 1
    assert "cudaErrorInvalidValue" in done.stderr


def test_a_native_module_that_is_not_there() -> None:
    done = bench("--case", "copy", *SMALL, "--device", "emulated", "--native", "no.such.module")
    assert done.returncode == 1
    assert "no.such.module can't be imported" in done.stderr
    assert "--native" in done.stderr


def test_what_exceeds_the_limit_is_dropped_and_said(device_kind: str) -> None:
    """30 rounds of all cases take minutes; one second is over after the first of them."""
    done = bench("--limit", "1", "--device", device_kind, "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verified"] is True
    assert "limit of 1 s" in " ".join(found["notes"])
    # One note for each job that is not complete, and nothing of it among the results.
    jobs = {(r["case"], r["size"]) for r in found["results"]}
    assert len(found["notes"]) >= 4 + 13 + 2 - len(jobs)
    missing = [figure for figure in found["figures"] if figure["missing"]]
    assert missing
    assert all(figure["ok"] is not True for figure in missing)


def test_a_backend_that_runs_already_is_left_alone(
    backend: Callable[..., Any], tmp_path: Path
) -> None:
    daemon = backend()
    done = bench(
        "--backend", daemon.endpoint, "--case", "copy", *SMALL, "--json", str(tmp_path / "f.json"),
        **{name: str(value) for name, value in daemon.env.items()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["settings"]["backend"] == daemon.endpoint
    assert found["counters"]["flyt"]["inline_h2d_bytes"] == 0
    assert daemon.process.poll() is None


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files of its own; not tmp_path, whose name is too long for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="flyt-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start_bench(temporary: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, "--device", "emulated", "--case", "mix", "--rounds", "1000"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=LIMIT)


def workers(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            line = (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid and b"flyt.bench.worker" in line:
            found.append(int(entry.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_half_way_it_clears_everything_away(
    number: signal.Signals,
    start_bench: subprocess.Popen[str],
    temporary: Path,
    alive: Callable[[int], bool],
) -> None:
    deadline = time.monotonic() + LIMIT
    while len(found := workers(start_bench.pid)) < 3:
        assert start_bench.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)  # bounded by LIMIT
    start_bench.send_signal(number)
    start_bench.send_signal(number)  # impatient users press Ctrl-C twice
    start_bench.communicate(timeout=LIMIT)
    assert start_bench.returncode != 0
    assert not [pid for pid in found if alive(pid)]
    assert os.listdir(temporary) == []
    # The leak fixture looks for the backend and its region.
