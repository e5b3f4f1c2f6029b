# SPDX-License-Identifier: Apache-2.0
"""Checkpoint, kill, restart in a new process: memory, pointers, device contents, MPI ranks."""

from __future__ import annotations

import os
import re
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from flyt.errors import ConfigurationError
from flyt.split import build, halves, image, prototypes, request
from flyt.split.launch import Launch, prepare, prepare_restart
from flyt.split.layout import Window

NATIVE = Path(__file__).with_name("native")
LIMIT = 60.0
ELSEWHERE = {"cuda": Window(0x5555_0000_0000, 64 << 30)}
ELSEWHERE_AGAIN = {"cuda": Window(0x2222_0000_0000, 64 << 30)}


def compile_program(bench, *flags: str, mpi: bool = False, name: str) -> Path:
    tables = ["cuda", "mpi"] if mpi else ["cuda"]
    stubs = [build.upper_library()]
    stubs += [build.stub_libraries(prototypes.read(halves.TABLES[t]))[0] for t in tables]
    words = [word for s in stubs for word in (f"-L{s.parent}", f"-l:{s.name}")]
    target = bench.folder / name
    options = [*flags, "-DWITH_MPI"] if mpi else flags
    bench.cc(
        *options, f"-I{build.INCLUDE}", "-o", target, NATIVE / "keeps.c", *words, "-lm", "-pthread"
    )
    return target


class Process:
    """A started program: lines from it, lines to it."""

    def __init__(self, launch: Launch) -> None:
        self.process = subprocess.Popen(
            launch.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**launch.environment, "FLYT_SPLIT_CUDA": "twin", "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        self.lines: list[str] = []
        self._pending = b""

    def until(self, start: str) -> str:
        """The next line that starts so."""
        assert self.process.stdout is not None
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            line, found, rest = self._pending.partition(b"\n")
            if found:
                self._pending = rest
                self.lines.append(line.decode())
                if self.lines[-1].startswith(start):
                    return self.lines[-1]
            elif select.select([self.process.stdout], [], [], 1.0)[0]:
                got = os.read(self.process.stdout.fileno(), 65536)
                if not got:
                    break
                self._pending += got
        pytest.fail(f"no line {start!r}: {self.lines}, exit code {self.process.poll()}")

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def dispose(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def close(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        code = self.process.wait(LIMIT)
        self.process.stdout.close()
        return code


@pytest.fixture
def start():
    started = []

    def make(launch: Launch) -> Process:
        started.append(Process(launch))
        return started[-1]

    yield make
    for one in started:
        one.dispose()


def digests(lines: Sequence[str]) -> list[str]:
    return [line.split(" digest ")[1].split()[0] for line in lines if line.startswith("ready")]


def undisturbed(program: Path, folder: Path, start) -> list[str]:
    """The digests of a run that nothing interrupts: what every other run must show."""
    process = start(
        prepare([halves.find("cuda")], [str(program), "x", "3"], image=str(folder / "undisturbed"))
    )
    for pause in range(3):
        process.until(f"ready {pause}")
        process.tell()
    process.until("end")
    assert process.close() == 9
    return digests(process.lines)


@pytest.mark.parametrize("kind", ["-pie", "-no-pie"])
@pytest.mark.parametrize("aslr", [True, False], ids=["aslr", "no-aslr"])
def test_killed_and_restarted_twice_in_a_row(bench, tmp_path, start, kind, aslr):
    flags = ["-fPIE", "-pie"] if kind == "-pie" else ["-fno-pie", "-no-pie"]
    program = compile_program(bench, *flags, name=f"keeps{kind}")
    expected = undisturbed(program, tmp_path, start)
    assert len(set(expected)) == 3
    cuda = halves.find("cuda")
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))

    def with_aslr(launch: Launch) -> Launch:
        return launch if aslr else Launch(["setarch", "-R", *launch.command], launch.environment)

    process = start(with_aslr(prepare([cuda], [str(program), "x", "3"], image=first)))
    before = [process.until("tls"), process.until("ready 0")]
    process.kill()

    # Lower halves elsewhere: the device's addresses and contents are the same.
    process = start(
        with_aslr(prepare_restart([cuda], image.read(first), windows=ELSEWHERE, image=second))
    )
    after = [process.until("tls"), process.until("ready 0")]
    assert after == [before[0], before[1].replace("restarted 0", "restarted 1")]
    assert before[0] == "tls 18 errno 40 recursive 1 cpu 1"
    assert before[1].endswith("same 1")
    assert process.until("wrong") == "wrong 0"
    process.until("ready 1")  # allocations were freed and made in between; checkpointed again
    process.kill()

    process = start(
        with_aslr(prepare_restart([cuda], image.read(second), windows=ELSEWHERE_AGAIN, image=third))
    )
    assert process.until("ready 1").endswith(f"restarted 1 digest {expected[1]} same 1")
    assert process.until("wrong") == "wrong 0"
    process.until("ready 2")
    process.tell()
    assert process.until("wrong") == "wrong 0"
    assert process.until("guard") == ("guard 'kept though unreadable' handled 1 sin 0.479426")
    process.until("end")
    assert process.close() == 9
    assert digests(process.lines) == expected[1:]

    # The first image is still good, and starts the same future.
    process = start(with_aslr(prepare_restart([cuda], image.read(first), image=third)))
    process.until("ready 1")
    assert digests(process.lines) == expected[:2]


def test_asked_from_outside(bench, tmp_path, start):
    program = compile_program(bench, name="keeps")
    path = tmp_path / "image"
    process = start(
        prepare([halves.find("cuda")], [str(program), "x", "1", "signal"], image=str(path))
    )
    ready = process.until("ready 0")
    asked = [sys.executable, "-m", "flyt.cli.main", "split", "checkpoint", str(process.process.pid)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}\n", "")
    process.kill()
    done = subprocess.run(
        [sys.executable, "-m", "flyt.cli.main", "split", "restart", "--half", "cuda",
         "--window", "cuda=0x555500000000:64G", str(path)],
        capture_output=True, text=True, timeout=LIMIT, input="go\n", check=False,
        env={**os.environ, "FLYT_SPLIT_CUDA": "twin"}, cwd=tmp_path,
    )  # fmt: skip
    # It was within its loop of calls, after it had printed; it goes on where it was.
    assert done.returncode == 9, done.stderr
    assert "ready" not in done.stdout
    assert done.stdout.splitlines()[0] == "wrong 0"
    assert ready.endswith("same 1")


def test_a_process_that_ends_instead_is_not_waited_for(bench, tmp_path, start):
    """Although nobody has asked for its exit code yet."""
    program = compile_program(bench, name="keeps")
    launch = prepare([halves.find("cuda")], [str(program), "x", "1"], image=str(tmp_path / "image"))
    process = start(launch)
    process.until("ready 0")
    threading.Timer(0.5, process.process.kill).start()
    with pytest.raises(ConfigurationError, match="has ended before"):
        request.checkpoint(process.process.pid, LIMIT)


def test_a_process_that_is_none_of_ours_is_not_asked():
    asked = [sys.executable, "-m", "flyt.cli.main", "split", "checkpoint", str(os.getpid())]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 126
    assert "none that `flyt split` has started" in done.stderr


def test_what_forbids_a_checkpoint(run, bench, tmp_path):
    done = run(bench.program("refused.c"), str(tmp_path / "image"))
    facts = dict(line.split(" ", 1) for line in done.stdout.splitlines() if "end" not in line)
    assert facts == {
        "thread": "-16",  # EBUSY
        "shared": "-16",
        "stray": "-16",
        "folder": "-2",  # ENOENT
        "full": "-27",  # EFBIG
        "exists": "0",
        "good": "0",
        "calls": "5 9",
        "low": "1 kept",  # MAP_32BIT
    }
    assert "more threads than its main one" in done.stderr
    assert re.search(r"memory at 0x3\w+ is shared", done.stderr)
    assert (
        "memory at 0x600000000000, where the program has asked for it, lies outside" in done.stderr
    )
    assert "/nowhere/at/all can't be written: errno 2" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["image"]
    assert image.read(str(tmp_path / "image")).halves == ("one", "two")


@pytest.fixture(scope="module")
def good(bench, tmp_path_factory):
    """An image of the tests' halves."""
    path = tmp_path_factory.mktemp("image") / "image"
    launch = prepare(list(bench.halves.values()), [str(bench.program("refused.c")), str(path)])
    subprocess.run(
        launch.command, env=launch.environment, check=True, timeout=LIMIT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return path


def with_header(data: bytes, change) -> bytes:
    """The image with a changed header whose own checksum is right."""
    page = bytearray(data[:4096])
    change(page)
    page[12:16] = bytes(4)
    page[12:16] = struct.pack("<I", zlib.crc32(page))
    return bytes(page) + data[4096:]


DAMAGE = {
    "body": (lambda d: d[:70000] + bytes([d[70000] ^ 1]) + d[70001:], "its checksum is wrong"),
    "last": (lambda d: d[:-1] + bytes([d[-1] ^ 128]), "its checksum is wrong"),
    "header": (lambda d: d[:100] + b"?" + d[101:], "its header's checksum is wrong"),
    "short": (lambda d: d[:-4096], "bytes in place of"),
    "long": (lambda d: d + b"x", "bytes in place of"),
    "cut": (lambda d: d[:100], "ends within its header"),
    "empty": (lambda d: b"", "is no image"),
    "foreign": (lambda d: b"\x7fELF" + d[4:], "is no image"),
    "pipe": (None, "is no regular file"),
    "version": (lambda d: d[:8] + b"\x07" + d[9:], "image of version 7"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_or_foreign_image_is_refused(good, tmp_path, what):
    change, message = DAMAGE[what]
    path = tmp_path / "damaged"
    if change is None:
        os.mkfifo(path)
    else:
        path.write_bytes(change(good.read_bytes()))
    with pytest.raises(ConfigurationError, match=message):
        image.read(str(path))


def test_a_missing_image_is_one_clear_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "flyt.cli.main", "split", "restart", str(tmp_path / "none")],
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 126
    assert (
        done.stderr
        == f"flyt split: the image {tmp_path}/none can't be read: No such file or directory\n"
    )


def restart_of(bench, path: Path, **options) -> subprocess.CompletedProcess[str]:
    launch = prepare_restart(list(bench.halves.values()), image.read(str(path)), **options)
    return subprocess.run(
        launch.command, env=launch.environment, capture_output=True, text=True, check=False,
        timeout=LIMIT,
    )  # fmt: skip


def test_the_tests_halves_restart_too(bench, good):
    done = restart_of(bench, good, windows={"one": Window(0x6000_0000_0000, 8 << 30)})
    assert (done.returncode, done.stderr) == (0, "")
    assert "good 1\ncalls 5 9\nlow 1 kept\n" in done.stdout


@pytest.mark.parametrize(
    ("at", "message"),
    [(32, "another build of Flyt's loader"), (56 + 40 + 16, "another lower half than one")],
    ids=["build", "digest"],
)
def test_an_image_over_something_else_is_refused(bench, good, tmp_path, at, message):
    def change(page: bytearray) -> None:
        page[at] ^= 1

    path = tmp_path / "image"
    path.write_bytes(with_header(good.read_bytes(), change))
    done = restart_of(bench, path)
    assert done.returncode == 126
    assert message in done.stderr


def test_no_checkpoint_under_a_lower_half_s_frames(run, bench, tmp_path):
    path = tmp_path / "image"
    done = run(bench.program("nested.c"), str(path), image=str(path))
    assert done.stdout.splitlines()[:5] == [
        "callback 6 -16",  # EBUSY: a restart would return into a lower half that is gone
        "handler -16",
        "other_stack -16",
        "requested 6 -1 2 0",  # one from outside waits until the lower half has returned
        "left 0 inner -16 calls 5 9",  # longjmp has left them all
    ], done.stderr
    assert done.stderr.count("a lower half has called this code and waits for it") == 4
    done = restart_of(bench, path, windows={"one": Window(0x6000_0000_0000, 8 << 30)})
    assert (done.returncode, done.stderr) == (0, "")
    assert "left 1 inner -16 calls 5 9\n" in done.stdout


REGION = 4096 + 8 * 3 + 8 * 3 + 8 * 8 + 8 + 64 * 32
"""Where the first region lies: behind the header and image_state of image.h."""

HOSTILE = {
    "region over another half": (
        {REGION: 0x10F0_0000_0000, REGION + 8: 0x10F0_0000_1000},
        "window",
    ),
    "region over the end": ({REGION + 8: 0x5000_0000_0000}, "outside of the program's window"),
    "pages behind": ({REGION + 24: 0x3100_0000_0000}, "pages outside of their mapping"),
    "pages too long": ({REGION + 32: 2**64 - 4096}, "pages outside of their mapping"),
    "signals": ({4096 + 8 * 14: 65}, "more signals than there are"),
    "stack": ({4096: 8}, "its registers point outside of its memory"),
    "tls": ({4096 + 8: 1 << 63}, "its registers point outside of its memory"),
    "thread": ({4096 + 8 * 6: 0x1000_0000_0000}, "its registers point outside of its memory"),
    "rseq": ({4096 + 8 * 9: 12}, "its registers point outside of its memory"),
}
"""Words that are put at these offsets of the file, under checksums that are right again."""


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_image_is_refused(bench, good, tmp_path, what):
    words, message = HOSTILE[what]
    data = bytearray(good.read_bytes())
    for at, value in words.items():
        struct.pack_into("<Q", data, at, value)

    def change(page: bytearray) -> None:
        struct.pack_into("<I", page, 24, zlib.crc32(data[4096:]))

    path = tmp_path / "image"
    path.write_bytes(with_header(bytes(data), change))
    done = restart_of(bench, path)
    assert done.returncode == 126
    assert message in done.stderr


def test_an_image_over_other_halves_is_refused(bench, good):
    with pytest.raises(ConfigurationError, match="was made over the lower halves one, two"):
        prepare_restart([bench.halves["one"]], image.read(str(good)))
    window = {"upper": Window(0x5000_0000_0000, 8 << 30)}
    with pytest.raises(ConfigurationError, match="can't move the upper half"):
        prepare_restart(list(bench.halves.values()), image.read(str(good)), windows=window)


MPIRUN = {
    "openmpi": ["mpirun.openmpi", "--oversubscribe", "--allow-run-as-root"],
    "mpich": ["mpirun.mpich"],
}


PAIRS = [("openmpi", "openmpi"), ("openmpi", "mpich"), ("mpich", "openmpi")]
"""Saved over one, restarted over the other; the handles in the program's memory are Flyt's."""


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_ranks_restart_over_either_mpi(bench, tmp_path, missing_tool, first, second):
    for tool in [*halves.MPI_COMPILERS.values(), *(words[0] for words in MPIRUN.values())]:
        if not shutil.which(tool):
            missing_tool(f"no {tool} here (Debian: openmpi-bin, libopenmpi-dev, mpich)")
    program = compile_program(bench, mpi=True, name="keeps-mpi")
    images = [str(tmp_path / f"image.{rank}") for rank in range(2)]

    def start(mpi: str, launches: Sequence[Launch]) -> subprocess.CompletedProcess[str]:
        words: list[str] = []
        for launch in launches:  # one rank each; a colon begins the next
            words += [*([":"] if words else []), "-n", "1", *launch.command]
        env = {**launches[0].environment, "FLYT_SPLIT_CUDA": "twin",
               "OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_btl": "self,vader"}  # fmt: skip
        return subprocess.run(
            [*MPIRUN[mpi], *words], env=env, capture_output=True, text=True, timeout=90,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    lower = [halves.find("cuda"), halves.find(f"mpi={first}")]
    done = start(first, [prepare(lower, [str(program), "x", "1", "stop"], image=i) for i in images])
    assert done.returncode == 0, done.stderr
    before = sorted(re.findall(r"rank (\d) of (\d) restarted 0 digest (\w+) same 1", done.stdout))
    assert [found[:2] for found in before] == [("0", "2"), ("1", "2")]
    assert before[0][2] != before[1][2]
    lower = [halves.find("cuda"), halves.find(f"mpi={second}")]
    launches = [prepare_restart(lower, image.read(i)) for i in images]
    done = start(second, launches)
    assert done.returncode == 0, done.stderr
    again = re.findall(r"rank (\d) of (\d) restarted 1 digest (\w+) same 1", done.stdout)
    assert sorted(again) == before
    assert done.stdout.count("wrong 0\n") == 2
    assert done.stdout.count("sum 3\n") == 2  # Allreduce over the new MPI
    if first == second:
        other = start(first, launches[::-1])
        assert other.returncode != 0
        expected = "the image is of rank {} of 2, this process is rank {} of 2"
        assert expected.format(1, 0) in other.stderr or expected.format(0, 1) in other.stderr


@pytest.mark.parametrize("mpi", halves.MPI_COMPILERS)
def test_a_program_that_has_left_mpi_restarts_without_it(bench, tmp_path, missing_tool, mpi):
    if halves.mpi_compiler(mpi) is None:
        missing_tool(f"no {mpi} here")
    source = tmp_path / "left.c"
    source.write_text(
        "#include <mpi.h>\n#include <stdio.h>\n#include <flyt_split.h>\n"
        "int main(int argc, char **argv) {\n"
        "    int before[2], after[2];\n"
        "    MPI_Initialized(&before[0]), MPI_Init(&argc, &argv), MPI_Initialized(&after[0]);\n"
        "    MPI_Finalized(&before[1]), MPI_Finalize();\n"
        "    int restarted = flyt_split_checkpoint(NULL);\n"
        "    MPI_Finalized(&after[1]);\n"
        '    printf("%d %d%d %d%d\\n", restarted, before[0], before[1], after[0], after[1]);\n'
        "    return 0;\n}\n"
    )
    stubs = [build.upper_library(), *build.stub_libraries(prototypes.read(halves.TABLES["mpi"]))]
    words = [word for s in stubs for word in (f"-L{s.parent}", f"-l:{s.name}")]
    bench.cc(f"-I{build.INCLUDE}", "-o", tmp_path / "left", source, *words)
    lower, path = [halves.find(f"mpi={mpi}")], str(tmp_path / "image")
    launch = prepare(lower, [str(tmp_path / "left")], image=path)
    for restarted in range(2):
        done = subprocess.run(
            launch.command, env=launch.environment, capture_output=True, text=True, timeout=LIMIT,
            check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, f"{restarted} 00 11\n"), done.stderr
        launch = prepare_restart(lower, image.read(path))


def test_the_rank_names_the_image(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "3")
    launch = prepare([], [sys.executable], image=str(tmp_path / "state.{rank}"))
    assert launch.command[launch.command.index("--image") + 1] == f"{tmp_path}/state.3"


PYTHON = """
import ctypes, subprocess, threading
cuda, split = ctypes.CDLL("libcudart.so.13"), ctypes.CDLL("libflytsplit.so")
done = []
threads = [threading.Thread(target=done.append, args=(n,)) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
said = subprocess.run(["echo", "child"], capture_output=True, text=True).stdout.strip()
text, at = ctypes.create_string_buffer(b"device bytes"), ctypes.c_void_p()
assert cuda.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(12)) == 0
assert cuda.cudaMemcpy(at, text, ctypes.c_size_t(12), 1) == 0
restarted = split.flyt_split_checkpoint(None)
back = ctypes.create_string_buffer(13)
assert cuda.cudaMemcpy(back, at, ctypes.c_size_t(12), 2) == 0
print(restarted, sorted(done), said, back.value.decode(), hex(at.value))
"""


def test_a_large_program_that_knows_nothing_of_this(tmp_path):
    path = tmp_path / "image"
    cuda = halves.find("cuda")
    launch = prepare([cuda], [sys.executable, "-c", PYTHON], image=str(path))
    said = "[0, 1, 2, 3] child device bytes 0x400000000000\n"
    for restarted in range(2):
        done = subprocess.run(
            launch.command, env={**launch.environment, "FLYT_SPLIT_CUDA": "twin"},
            capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, f"{restarted} {said}"), done.stderr
        launch = prepare_restart([cuda], image.read(str(path)), windows=ELSEWHERE)


TAKEN = {
    "device": (
        "400000000000",
        "bytes of device memory can't be had at 0x400000000000 again: error 2",
    ),
    "memory": ("300000000000", "no restart: the program's memory at 0x300000000000 can't be had"),
}


@pytest.mark.parametrize("what", TAKEN)
def test_addresses_that_are_taken_are_refused(bench, tmp_path, what):
    path, library = tmp_path / "image", tmp_path / "libtaken.so"
    bench.cc("-shared", "-fPIC", "-o", library, NATIVE / "taken.c")
    program = compile_program(bench, name="keeps")
    cuda = halves.find("cuda")
    launch = prepare([cuda], [str(program), "x", "1", "stop"], image=str(path))
    twin = {"FLYT_SPLIT_CUDA": "twin"}
    subprocess.run(
        launch.command, env={**launch.environment, **twin}, check=False, timeout=LIMIT,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    launch = prepare_restart([cuda], image.read(str(path)))
    address, message = TAKEN[what]
    done = subprocess.run(
        launch.command, capture_output=True, text=True, check=False, timeout=LIMIT,
        env={**launch.environment, **twin, "LD_PRELOAD": str(library), "TAKEN": address},
    )  # fmt: skip
    assert done.returncode == 126
    assert done.stdout == ""
    assert message in done.stderr
