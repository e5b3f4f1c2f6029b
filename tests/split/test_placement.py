# SPDX-License-Identifier: Apache-2.0
"""Each half lies in its window, now and later; what doesn't fit is refused before it is mapped."""

from __future__ import annotations

import errno
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flyt.errors import ConfigurationError
from flyt.split import layout, maps
from flyt.split.cost import measure
from flyt.split.launch import prepare
from flyt.split.layout import GIB, TIB, Window, default_windows

WINDOWS = {**default_windows(["one", "two"])}


HALF = struct.Struct("<16s11Q")
REGION = struct.Struct("<QQIi")
REGIONS = 1024
RECORD = struct.Struct("<QIIQQQQ4096s7Q8Q")
"""As abi.h declares them."""


def record_of(pid: int, bench) -> dict[str, dict[str, object]]:
    """What the record in the process's memory says of each lower half."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        at = maps.address_of_record(pid)
        memory.seek(at)
        magic, version, count, *_ = RECORD.unpack(memory.read(RECORD.size))
        assert (magic.to_bytes(8, "little"), version, count) == (b"FLYTPLIT", 2, 3)
        found = {}
        for index in range(count):
            memory.seek(at + RECORD.size + index * (HALF.size + REGIONS * REGION.size))
            name, *words = HALF.unpack(memory.read(HALF.size))
            regions = [REGION.unpack(memory.read(REGION.size)) for _ in range(words[10])]
            found[name.rstrip(b"\0").decode()] = {
                "window": Window(words[0], words[1]), "tls": words[2], "count": words[7],
                "table": words[8], "resolver": words[9], "regions": [r[:3] for r in regions],
            }  # fmt: skip
    assert found.pop("upper")["window"] == WINDOWS["upper"]
    return found


def facts_of(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        found.setdefault(name, []).append(rest)
    return found


@pytest.fixture(scope="module")
def later(bench):
    """Another copy of the library, for dlopen."""
    return shutil.copy(bench.side, bench.folder / "libside-later.so")


@pytest.fixture
def facts(run, bench, later):
    done = run(bench.program("facts.c"), str(later))
    assert (done.returncode, done.stderr) == (0, "")
    return facts_of(done.stdout)


def test_later_mappings_lie_in_the_window_of_their_half(facts):
    assert len(facts["at"]) == 17
    for line in facts["at"]:
        half, what, address = line.split()
        assert int(address, 16) in WINDOWS[half], what


@pytest.mark.parametrize("moment", ["early", "late"])
def test_every_mapping_of_the_process_has_an_owner(facts, bench, later, moment):
    libc: dict[str, int] = {}
    for line in facts[f"maps.{moment}"]:
        parts = line.split()
        start, name = int(parts[0].partition("-")[0], 16), parts[5] if len(parts) > 5 else ""
        owner = maps.owner(start, name, WINDOWS)
        assert owner in {"one", "two", "upper", "loader", "kernel"}, line
        if name.endswith("libc.so.6") and "x" in parts[1]:
            libc[owner] = libc.get(owner, 0) + 1
        if name.endswith(("half", "_lh")) or "/one_lh" in name:
            assert owner in name
        if name == str(later):
            assert owner in {"one", "two"}
    assert libc == {"one": 1, "two": 1, "upper": 1}
    opened = {maps.owner(int(line.split("-")[0], 16), "", WINDOWS)
              for line in facts[f"maps.{moment}"] if line.endswith(str(later))}  # fmt: skip
    assert opened == ({"one", "two"} if moment == "late" else set())


def test_each_half_has_libraries_of_its_own(facts):
    assert facts["order"] == ["123 123 123"]  # constructors ran by priority, in each copy once
    assert facts["ifunc"] == ["42 42 42"]
    assert facts["count"] == ["3 2 1"]  # globals apart
    assert facts["local"] == ["102 103 101"]  # thread_locals apart
    assert facts["errno"] == ["11 22 33"]


def test_arguments_arrive_in_registers_and_on_the_stack(facts):
    values = [1, 2.5, 3, 4.5, 5, 6, 7, 8, 9, 10.5, 11]
    assert float(facts["many"][0]) == sum(n * v for n, v in enumerate(values, 1))


def test_the_upper_half_has_only_stubs(facts, bench):
    names = [name.rpartition("/")[2] for name in facts["link_map"]]
    assert set(names) >= {"libflytone.so", "libflyttwo.so", "libflytsplit.so", "libc.so.6"}
    assert not [name for name in names if "_lh" in name]


def test_the_maps_command_shows_a_running_process(bench):
    process = subprocess.Popen(
        bench.command(bench.program("smoke.c"), "wait"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "5 34\n"
        record = record_of(process.pid, bench)
        shown = subprocess.run(
            [sys.executable, "-m", "flyt.cli.main", "split", "maps", str(process.pid)],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        process.stdin.close()
        assert process.wait(60) == 7
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("record at 0xf00")
    owners = {line.split()[0] for line in lines[1:]}
    assert owners == {"one", "two", "upper", "loader", "kernel"}
    for name, half in record.items():
        for what in ("tls", "table", "resolver"):
            assert half[what] in WINDOWS[name], (name, what)
        assert half["window"] == WINDOWS[name]
        assert half["count"] == len(bench.tables[name].functions)
        # ld.so, the program, libside and libc have four or more mappings each.
        assert len(half["regions"]) >= 16
        assert all(start in WINDOWS[name] for start, _, _ in half["regions"])


def test_maps_refuses_another_process():
    shown = subprocess.run(
        [sys.executable, "-m", "flyt.cli.main", "split", "maps", "1"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert shown.returncode == 126
    assert "none that `flyt split` has started" in shown.stderr


def test_maps_of_another_user_s_process_is_one_clear_line(monkeypatch):
    def refused(path: Path) -> bytes:
        if path.name == "cmdline":  # anybody may read it
            return b"/x/flyt-loader\0--upper\x00300000000000\x0010000000000\0--\0program\0"
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refused)
    for ask in (maps.read, maps.address_of_record):
        with pytest.raises(ConfigurationError, match="process 1: Permission denied"):
            ask(1)


def test_a_small_window_is_used_again_and_then_full(run, bench):
    windows = {"one": "0x500000000000:8G", "upper": "0x580000000000:8G"}
    done = run(bench.program("windows.c"), windows=windows)
    found = facts_of(done.stdout)
    assert found["failed"] == ["0"]  # 40 GiB came and went in each window of 8
    assert found["too_large"] == ["1"]
    assert 10 <= int(found["fit"][0]) <= 15  # halves of 1 GiB, beside libraries and stacks
    assert found["other"] == ["1"]  # another half's window has room
    assert done.returncode == 0


FIXED = {
    "100000000000": "17 12",  # EEXIST, ENOMEM: one's window, where its ld.so lies
    "12ffffffe000": "17 12",  # the end of two's
    "11fffffff000": "17 12",  # reaches into it
    "f0000000000": "17 12",  # the loader
    "400000000000": "17 12",  # device memory
    "30fffffff000": "0 0",  # its own, and beyond
    "600000000000": "0 0",
    "100000": "0 0",
    "fffffff000": "0 0",
}


def test_a_program_maps_nothing_over_another_half(run, bench):
    done = run(bench.program("fixed.c"), *FIXED)
    expected = [f"{address} {errors}" for address, errors in FIXED.items()]
    assert done.stdout.splitlines()[: len(FIXED) + 1] == [*expected, "calls 5 9"], done.stderr
    assert done.returncode == 0


def test_only_a_driver_maps_outside_of_windows(bench):
    """``one`` has `own_hints`, as ``cuda`` has; ``two`` is any other half."""
    halves = [replace(bench.halves["one"], own_hints=True), bench.halves["two"]]
    prepared = prepare(halves, [str(bench.program("hints.c"))])
    done = subprocess.run(
        prepared.command, capture_output=True, text=True, check=True, timeout=60,
        env={**prepared.environment, "HALF_HINT": f"{WINDOWS['upper'].base - (1 << 20):x}"},
    )  # fmt: skip
    found = dict(line.split() for line in done.stdout.splitlines() if line.count(" ") == 1)
    places = {name: int(address, 16) for name, address in found.items()}
    assert places["one.hint"] == 0x5000_0000_0000
    assert places["one.early"] in WINDOWS["one"]  # it would have reached into the upper half's
    # The kernel places from the top, below the stack.
    assert WINDOWS["arena"].end <= places["one.large"] < 0x7FFF_FFFF_F000
    assert places["two.hint"] in WINDOWS["two"]
    assert places["two.early"] in WINDOWS["two"]
    assert places["two.large"] == 2**64 - 1  # MAP_FAILED


BAD = {
    "overlap": ({"one": Window(0x1200_0000_0000 - 4 * GIB, 8 * GIB)}, "one .* and two .* overlap"),
    "arena": ({"arena": Window(0x3000_0000_0000, TIB)}, "overlap"),
    "loader": ({"one": Window(0xF00_0000_0000, TIB)}, "the loader .* overlap"),
    "small": ({"two": Window(0x1200_0000_0000, GIB)}, "too small"),
    "off the grid": ({"two": Window(0x1200_0000_1000, 4 * GIB)}, "multiples of 4 GiB"),
    "empty": ({"two": Window(0x1200_0000_0000, 0)}, "too small"),
    "low": ({"two": Window(0, 4 * GIB)}, "must lie in"),
    "high": ({"two": Window(0x7000_0000_0000, TIB)}, "must lie in"),
    "nobody": ({"three": Window(0x1200_0000_0000, TIB)}, "none of the halves"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_windows_are_refused(bench, case):
    windows, message = BAD[case]
    with pytest.raises(ConfigurationError, match=message):
        prepare(list(bench.halves.values()), [str(bench.program("smoke.c"))], windows=windows)


def test_a_window_too_small_for_a_half_s_files_is_refused(bench, tmp_path):
    source = tmp_path / "large.c"
    source.write_text("char large[6ul << 30]; int main(void) { return large[5]; }\n")
    bench.cc("-mcmodel=large", "-o", tmp_path / "large", source)
    windows = {"upper": Window(0x3000_0000_0000, 4 * GIB)}
    with pytest.raises(ConfigurationError, match="too small: its files and stack take"):
        prepare([], [str(tmp_path / "large")], windows=windows)
    prepare([], [str(tmp_path / "large")], windows={"upper": Window(0x3000_0000_0000, 8 * GIB)})


@pytest.mark.parametrize("text", ["1T", "0x1000", "0x10:1P", "12:1G", ""])
def test_a_window_s_text_is_checked(text):
    with pytest.raises(ConfigurationError, match="is no window"):
        Window.parse(text)


def test_a_window_s_text():
    assert Window.parse("0x100000000000:2T") == Window(0x1000_0000_0000, 2 * TIB)


def test_windows_of_many_halves_do_not_overlap():
    layout.check(default_windows([f"half{n}" for n in range(7)]), {})


def test_the_cost_of_a_crossing_is_measured():
    found = measure()
    assert set(found) == {"call", "crossing", "getppid", "mmap_munmap"}
    assert found["crossing"][0] is None
    assert found["crossing"][1] > found["call"][1] > 0
