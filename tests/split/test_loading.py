# SPDX-License-Identifier: Apache-2.0
"""Programs of all shapes as upper halves; what can't be loaded is refused with a clear error."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from flyt.errors import ConfigurationError
from flyt.split import build
from flyt.split.halves import Half
from flyt.split.launch import PRESET, VARIABLE, prepare

BODY = ["constructed local 2", "local", "caught", "upper's line"]
LOWER_ENDS = ["lower two's line", "end of two", "lower one's line", "end of one"]


@pytest.mark.parametrize("kind", ["-pie", "-no-pie"])
@pytest.mark.parametrize("aslr", [True, False], ids=["aslr", "no-aslr"])
@pytest.mark.parametrize("arguments", [(), ("a",), ("a", "b c"), ("", "x", "y")])
def test_arguments_and_kinds_of_programs(run, bench, kind, aslr, arguments):
    flags = ["-fPIE", "-pie"] if kind == "-pie" else ["-fno-pie", "-no-pie"]
    program = bench.folder / f"ends{kind}"
    if not program.exists():
        bench.program("ends.cc", *flags, name=f"ends{kind}")
    before = [] if aslr else ["setarch", "-R"]
    done = run(program, "return", *arguments, before=before)
    assert (done.returncode, done.stderr) == (11, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "constructed global 2"
    assert lines[1].startswith(f"argc {2 + len(arguments)} argv0 {program} ")
    assert lines[2 : 2 + len(arguments)] == [f"argument {text}" for text in arguments]
    assert lines[2 + len(arguments) :] == [
        *BODY,
        "destructed local 3",
        "atexit",
        "destructed global 3",
        *LOWER_ENDS,
    ]


def test_a_large_environment(run, bench):
    program = bench.program("ends.cc")
    small = run(program, "return").stdout.splitlines()[1].split()
    env = {f"FLYT_TEST_LARGE_{n}": "x" * 100_000 for n in range(12)}
    large = run(program, "return", env=env).stdout.splitlines()[1].split()
    grown = sum(len(name) + 1 + len(value) for name, value in env.items())
    assert int(large[-1]) - int(small[-1]) == grown


@pytest.mark.parametrize(
    ("how", "code", "ends"),
    [
        ("exit", 12, ["destructed local 3", "atexit", "destructed global 3", *LOWER_ENDS]),
        # No destructors of the upper half's, and its output is not flushed: as _exit is defined.
        ("_exit", 13, LOWER_ENDS),
        ("thread", 15, ["atexit", "destructed global 3", *LOWER_ENDS]),
    ],
)
def test_ways_to_end(run, bench, how, code, ends):
    done = run(bench.program("ends.cc"), how)
    assert (done.returncode, done.stderr) == (code, "")
    lines = done.stdout.splitlines()
    assert lines[-len(ends) :] == ends
    if how != "_exit":
        assert "upper's line" in lines


def test_a_lower_half_that_calls_exit_ends_the_program_and_no_output_is_lost(run, bench):
    done = run(bench.program("ends.cc"), "lower")
    assert (done.returncode, done.stderr) == (14, "")
    lines = done.stdout.splitlines()
    own, upper, other = (lines.index(text) for text in ("end of one", "atexit", "end of two"))
    assert own < upper < other
    assert {"upper's line", "lower one's line", "lower two's line"} <= set(lines)


def test_abort_is_a_death_by_signal(run, bench):
    assert run(bench.program("ends.cc"), "abort").returncode == -6


def test_the_variable_is_overwritten_in_place(run, bench):
    lines = run(bench.program("facts.c")).stdout.splitlines()
    values = dict(line.split(" ", 1) for line in lines if line.startswith(("preset", "variable")))
    assert values["preset"] == values["variable"]  # the kernel's own block, and the program's
    assert len(values["preset"]) == len(PRESET)
    assert int(values["preset"], 16) - build.LOADER_BASE in range(1 << 24)


def test_without_the_preset_variable_nothing_starts(bench):
    stubs = [half.stubs[0] for half in bench.halves.values()]
    prepared = prepare([], [str(bench.program("smoke.c"))], stubs=stubs)
    for value in (None, "0xffff"):
        environment = {**prepared.environment, VARIABLE: value or ""}
        if value is None:
            del environment[VARIABLE]
        done = subprocess.run(
            prepared.command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert f"{VARIABLE} must be preset to {PRESET}" in done.stderr


def test_a_program_started_alone_says_how_to_start_it(bench):
    path = ":".join(str(p.parent) for p in [*bench.stubs, build.upper_library()])
    done = subprocess.run(
        [bench.program("smoke.c")], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "LD_LIBRARY_PATH": path},
    )  # fmt: skip
    assert done.returncode == 126
    assert "start it with `flyt split run`" in done.stderr


def test_a_stub_without_its_half_is_refused(bench):
    one = bench.halves["one"]
    stubs = [half.stubs[0] for half in bench.halves.values()]
    prepared = prepare([one], [str(bench.program("smoke.c"))], stubs=stubs)
    done = subprocess.run(
        prepared.command,
        env=prepared.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 126
    assert "calls the lower half two, which is not loaded" in done.stderr


def test_a_half_of_another_table_is_refused(bench, tmp_path):
    halves = [bench.halves["one"], Half("two", bench.halves["one"].program)]
    stubs = [half.stubs[0] for half in bench.halves.values()]
    prepared = prepare(halves, [str(bench.program("smoke.c"))], stubs=stubs)
    done = subprocess.run(
        prepared.command,
        env=prepared.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 126
    assert "of different tables of prototypes" in done.stderr


def test_a_half_that_can_t_serve_says_why(run, bench):
    done = run(bench.program("smoke.c"), env={"HALF_FAILS": "no such device"})
    assert done.returncode == 126
    assert "a lower half can't serve: no such device" in done.stderr
    assert "the lower half one ended before it had published its functions" in done.stderr


@pytest.fixture
def program_with(bench, tmp_path):
    def make(what: str) -> Path:
        target = tmp_path / "program"
        source = tmp_path / "p.c"
        source.write_text("int gone(void); int main(void) { return gone(); }\n")
        (tmp_path / "gone.c").write_text("int gone(void) { return 0; }\n")
        if what == "static":
            bench.cc("-static", "-o", target, source, tmp_path / "gone.c")
            return target
        bench.cc("-shared", "-fPIC", "-o", tmp_path / "libgone.so", tmp_path / "gone.c")
        bench.cc("-o", target, source, f"-L{tmp_path}", "-lgone", f"-Wl,-rpath,{tmp_path}")
        if what == "library":
            (tmp_path / "libgone.so").unlink()
        elif what == "class":
            data = bytearray(target.read_bytes())
            data[4] = 1  # ELFCLASS32
            target.write_bytes(data)
        elif what == "machine":
            data = bytearray(target.read_bytes())
            data[18] = 183  # EM_AARCH64
            target.write_bytes(data)
        elif what == "short":
            target.write_bytes(target.read_bytes()[:80])
        elif what == "script":
            target.write_text("#!/bin/sh\n")
        elif what == "interpreter":
            data = target.read_bytes()
            target.write_bytes(data.replace(b"/lib64/ld-linux", b"/lib64/no-linux"))
        elif what == "interpreter is none":
            data = target.read_bytes()
            target.write_bytes(
                data.replace(b"/lib64/ld-linux-x86-64.so.2\0", b"/bin/true".ljust(28, b"\0"))
            )
        elif what == "interpreter is noise":
            data = target.read_bytes()
            target.write_bytes(data.replace(b"/lib64/ld-linux-x86", b"/lib64\n\xff\xfe-linux-x"))
        elif what == "high":
            bench.cc("-no-pie", "-o", target, source, tmp_path / "gone.c")
            data = bytearray(target.read_bytes())
            for at in range(64, 64 + 56 * data[56], 56):
                if data[at : at + 4] == b"\1\0\0\0":  # PT_LOAD
                    data[at + 21] = 0x10  # over a lower half's window
            target.write_bytes(data)
        elif what == "damaged":
            target.write_bytes(target.read_bytes()[:3000])
        elif what == "pipe":
            target.unlink()
            os.mkfifo(target)
        elif what == "absent":
            target.unlink()
        return target

    return make


REFUSALS = {
    "static": "names no interpreter",
    "library": "missing library: libgone.so",
    "class": "wrong ELF class",
    "machine": "not for x86-64",
    "short": "damaged",
    "script": "no ELF file",
    "interpreter": "its interpreter /lib64/no-linux-x86-64.so.2 is missing",
    "interpreter is none": "its interpreter /bin/true is no ld.so",
    "interpreter is noise": r"its interpreter /lib64.n.udcff.udcfe-linux-x.* is missing",
    "high": "is linked to lie at 0x10000.*: what is not position-independent must lie below",
    "damaged": r"can't be loaded: \S",
    "pipe": "is no regular file",
    "absent": "No such file",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_can_t_be_loaded_is_refused_as_either_half(program_with, bench, what):
    program = program_with(what)
    with pytest.raises(ConfigurationError, match=REFUSALS[what]):
        prepare([], [str(program)])
    with pytest.raises(ConfigurationError, match=REFUSALS[what]):
        prepare([Half("bad", program)], [str(bench.program("smoke.c"))])


def test_a_link_to_a_program_finds_the_libraries_beside_the_file(
    run, bench, program_with, tmp_path
):
    program = program_with("")
    bench.cc("-o", program, tmp_path / "p.c", f"-L{tmp_path}", "-lgone", "-Wl,-rpath,$ORIGIN")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "program").symlink_to("../program")
    assert run(tmp_path / "links" / "program").returncode == 0


def test_the_command_line_runs_a_program(bench):
    command = bench.command(bench.program("smoke.c"), options=["--window", "one=0x500000000000:8G"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines()[0] == "5 34"


def test_the_command_line_says_it_in_one_line(bench, program_with):
    command = bench.command(program_with("library"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 126
    assert done.stdout == ""
    assert done.stderr.startswith("flyt split: ")
    assert done.stderr.count("\n") == 1


def test_a_lower_half_must_be_position_independent(bench, program_with):
    program = program_with("")
    bench.cc("-no-pie", "-o", program, program.with_name("p.c"), program.with_name("gone.c"))
    with pytest.raises(ConfigurationError, match="must be position-independent"):
        prepare([Half("bad", program)], [str(bench.program("smoke.c"))])


def test_setarch_is_here_for_the_runs_without_aslr():
    assert shutil.which("setarch"), "util-linux's setarch turns ASLR off"
