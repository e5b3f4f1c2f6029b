# SPDX-License-Identifier: Apache-2.0
"""Split processes over a real GPU, step by step: verdicts, then a table and a JSON file.

A step that fails does not keep the next from running; the exit code is 1 then. Expected values are
arithmetic's, or those of a run that nothing interrupts; the programs lie in tests/split/native.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "tests/split/native"
FLYT = [sys.executable, "-m", "flyt.cli.main", "split"]
STEP_LIMIT = 120.0
"""Seconds that one program may take: CUDA's start takes seconds, the rest less."""

ARENA = 0x4000_0000_0000
ELSEWHERE = ("cuda=0x222200000000:1T", "cuda=0x2c0000000000:1T")
"""Windows for restarts: away from the usual ones, from the arena, and from where PIEs lie."""

REAL = "cuda_lh answers with the real CUDA runtime"
MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,vader",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}  # fmt: skip
"""For one host, in a container, as root, with more ranks than it may have slots."""


class Failed(Exception):
    """A step has not shown what it must."""


def need(truth: object, what: str) -> None:
    if not truth:
        raise Failed(what)


def run(
    words: Sequence[object], *, env: dict[str, str] | None = None, limit: float = STEP_LIMIT
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; an exit code but 0, or none in time, fails the step."""
    command = [str(word) for word in words]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, **(env or {})}, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise Failed(f"no end in {limit:.0f} s: {command}\n{out}\n{err}") from None
    if process.returncode:
        raise Failed(f"exit code {process.returncode}: {command}\n{out}\n{err}")
    return subprocess.CompletedProcess(command, 0, out, err)


class Program:
    """A program under `flyt split` that waits for input: lines from it, lines to it."""

    def __init__(self, words: Sequence[object]) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self.process = subprocess.Popen(
            [*FLYT, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.errors, bufsize=0,
        )  # fmt: skip
        self.lines: list[str] = []
        self._rest = b""

    def __enter__(self) -> Program:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.errors.close()

    def said(self) -> str:
        self.errors.seek(0)
        return "\n".join([*self.lines, self.errors.read()])

    def until(self, start: str) -> str:
        """The next line that starts so."""
        end = time.monotonic() + STEP_LIMIT
        while time.monotonic() < end:
            line, found, rest = self._rest.partition(b"\n")
            if found:
                self._rest = rest
                self.lines.append(line.decode(errors="replace"))
                if self.lines[-1].startswith(start):
                    return self.lines[-1]
            elif select.select([self.process.stdout], [], [], 1.0)[0]:
                got = os.read(self.process.stdout.fileno(), 65536)
                if not got:
                    break
                self._rest += got
        raise Failed(f"no line {start!r}; exit code {self.process.poll()}:\n{self.said()}")

    def tell(self) -> None:
        self.process.stdin.write(b"go\n")

    def kill(self) -> None:
        need(self.process.poll() is None, f"it had ended before it was killed:\n{self.said()}")
        self.process.kill()
        self.process.wait()

    def end(self, code: int) -> None:
        try:
            found = self.process.wait(STEP_LIMIT)
        except subprocess.TimeoutExpired:
            raise Failed(f"it does not end:\n{self.said()}") from None
        need(found == code, f"exit code {found}, not {code}:\n{self.said()}")


# --- where the machine has its libraries ---


def folder_of(library: str, candidates: Sequence[Path]) -> tuple[Path | None, bool]:
    """Where a library lies, and whether ld.so finds it there by itself.

    Not by loading it into this process: an interpreter's own search path would hide what a
    program of nvcc's lacks.
    """
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        if (Path(folder) / library).exists():
            return Path(folder), True
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    cached = run([ldconfig, "-p"]).stdout
    known = re.search(rf"^\s*{re.escape(library)} \(.*x86-64.*\) => (/\S+)", cached, re.M)
    if known and Path(known[1]).exists():
        return Path(known[1]).parent, True
    return next((folder for folder in candidates if (folder / library).exists()), None), False


def toolkit_folders() -> list[Path]:
    """Where nvcc says that its toolkit lies, then the usual places, then pip's."""
    found = []
    with tempfile.TemporaryDirectory() as room:
        (Path(room) / "x.cu").touch()
        told = subprocess.run(["nvcc", "-dryrun", "x.cu"], cwd=room, capture_output=True, text=True,
                              check=False)  # fmt: skip
    top = re.search(r"^#\$ TOP=(.+)$", told.stderr, re.M)
    homes = [top[1].strip()] if top else []
    homes += [
        os.environ.get("CUDA_HOME", ""),
        "/usr/local/cuda",
        *map(str, Path("/usr/local").glob("cuda-*")),
    ]
    for home in filter(None, homes):
        found += [
            Path(home).resolve() / name for name in ("lib64", "lib", "targets/x86_64-linux/lib")
        ]
    for site in {*sys.path, "/usr/lib/python3/dist-packages"}:
        found += [Path(site) / "nvidia" / name / "lib" for name in ("cu13", "cuda_runtime")]
    return found


def set_library_path() -> str:
    driver = [
        Path("/usr/local/nvidia/lib64"),
        Path("/usr/lib/x86_64-linux-gnu"),
        Path("/usr/lib64"),
    ]
    told, missing = [], []
    for library, candidates in (("libcuda.so.1", driver), ("libcudart.so.13", toolkit_folders())):
        folder, found = folder_of(library, candidates)
        if folder is None:
            missing.append(library)
            continue
        told.append(f"{folder / library}{'' if found else ' (added to LD_LIBRARY_PATH)'}")
        if not found:
            paths = [os.environ.get("LD_LIBRARY_PATH"), str(folder)]
            os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, paths))
    need(not missing, f"found: {told}; nowhere: {missing}")
    return ", ".join(told)


# --- the steps ---

WORK = Path(tempfile.mkdtemp(prefix="split-gpu-"))


def is_real(text: str) -> None:
    if os.environ["FLYT_SPLIT_CUDA"] == "real":
        need(REAL in text, f"cuda_lh did not say that it answers with the real runtime:\n{text}")


def compile_upper(source: str, name: str, *halves: str, options: Sequence[str] = ()) -> Path:
    flags = run([*FLYT, "flags", *halves]).stdout.split()
    run(
        [
            "gcc",
            "-w",
            "-O1",
            *options,
            "-o",
            WORK / name,
            SOURCES / source,
            *flags,
            "-lm",
            "-pthread",
        ]
    )
    return WORK / name


def versions() -> str:
    def first(*words: str) -> str:
        if not shutil.which(words[0]):
            return f"no {words[0]}"
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=STEP_LIMIT
        )
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        return lines[-1] if words[0] == "nvcc" and lines else lines[0] if lines else "nothing said"

    gpu = first("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    told = [
        gpu,
        first("nvcc", "--version"),
        first("gcc", "--version"),
        first("mpirun", "--version"),
    ]
    told += [
        f"glibc {os.confstr('CS_GNU_LIBC_VERSION')}",
        f"Linux {os.uname().release}",
        sys.version.split()[0],
    ]
    return "; ".join(told)


def build_nvcc() -> str:
    # One as anybody compiles it, for which the driver translates PTX; one for this very GPU.
    for name, options in (("vector", []), ("steps", ["-arch=native"])):
        words = ["nvcc", *options, "-cudart", "shared", "-o", WORK / name, SOURCES / f"{name}.cu"]
        run(words, limit=300.0)
    return "vector.cu, steps.cu with -cudart shared"


def vector_alone() -> str:
    need(run([WORK / "vector"]).stdout == "wrong 0\n", "not `wrong 0`")
    return "wrong 0 without Flyt: nvcc, driver and library fit"


def vector_split() -> str:
    done = run([*FLYT, "run", "--half", "cuda", WORK / "vector"])
    is_real(done.stderr)
    need(done.stdout == "wrong 0\n", f"not `wrong 0`: {done.stdout}")
    return "100000 elements, 3 launches: wrong 0"


STEPS_END = re.compile(r"total 110 wrong 0 failed 0 at (0x[0-9a-f]+)")


def steps_alone() -> str:
    found = STEPS_END.search(run([WORK / "steps"]).stdout)
    need(found, "not 110 in all, or something wrong")
    return found[0]


def steps_asked() -> str:
    image = WORK / "steps.image"
    with Program(["run", "--half", "cuda", "--image", image, WORK / "steps"]) as program:
        ready = program.until("ready")
        need(ready == f"ready 0 at {ARENA:#x}", ready)
        asked = run([*FLYT, "checkpoint", program.process.pid])
        need(asked.stdout.strip() == str(image), asked.stdout)
        program.kill()
        is_real(program.said())
    with Program(["restart", "--half", "cuda", "--window", ELSEWHERE[0], image]) as program:
        program.tell()
        end = program.until("total")
        found = STEPS_END.fullmatch(end)
        need(found and found[1] == f"{ARENA:#x}", end)
        program.end(0)
        is_real(program.said())
    return f"asked from outside, killed, restarted elsewhere: {end}"


def placed() -> str:
    with Program(
        ["run", "--half", "cuda", "--image", WORK / "maps.image", WORK / "steps"]
    ) as program:
        program.until("ready")
        lines = run([*FLYT, "maps", program.process.pid]).stdout.splitlines()
    outside = [line for line in lines if line.startswith("outside")]
    print("\n".join([*outside[:40], f"({len(outside)} outside in all)"]))
    cuda = [line for line in lines if re.search(r"/libcuda(rt)?\.so", line)]
    mine = [line for line in cuda if line.startswith("cuda ")]
    upper = [line for line in cuda if line.startswith("upper ")]
    if os.environ["FLYT_SPLIT_CUDA"] == "real":
        need(any("/libcuda.so" in line for line in mine), "libcuda does not lie in cuda's window")
    need(
        upper and all("/split/" in line for line in upper),
        f"not stubs only in the upper half: {upper}",
    )
    need(len(cuda) == len(mine) + len(upper), f"a library of CUDA's outside of windows: {cuda}")
    sizes = [int(b, 16) - int(a, 16) for line in outside for a, b in [line.split()[1].split("-")]]
    return f"{len(lines)} mappings, {len(outside)} outside of windows ({sum(sizes) >> 20} MiB)"


def ready_facts(lines: Sequence[str]) -> list[str]:
    found = [re.search(r"digest (\w+) same 1$", line) for line in lines if line.startswith("ready")]
    need(found and all(found), f"contents differ after the checkpoint: {lines}")
    return [one[1] for one in found]


def keeps_twice() -> str:
    keeps = compile_upper("keeps.c", "keeps", "cuda")
    images = [WORK / f"keeps.{n}" for n in range(4)]
    with Program(["run", "--half", "cuda", "--image", images[3], keeps, "x", "3"]) as program:
        for pause in range(3):
            program.until(f"ready {pause}")
            program.tell()
        program.until("end")
        program.end(9)
        is_real(program.said())
        need("allocation failed" not in program.said(), program.said())
        need(program.lines.count("wrong 0") == 3, program.said())
        expected = ready_facts(program.lines)
    need(len(set(expected)) == 3, f"digests that do not change prove nothing: {expected}")

    with Program(["run", "--half", "cuda", "--image", images[0], keeps, "x", "3"]) as program:
        program.until("ready 0")
        program.kill()
    windows = ["--window", ELSEWHERE[0], "--image", images[1]]
    with Program(["restart", "--half", "cuda", *windows, images[0]]) as program:
        program.until("ready 0 rank 0 of 1 restarted 1")
        need(program.until("wrong") == "wrong 0", program.said())
        program.until("ready 1")
        program.kill()
        is_real(program.said())
        need(ready_facts(program.lines) == expected[:2], f"{program.lines}, not {expected[:2]}")
    windows = ["--window", ELSEWHERE[1], "--image", images[2]]
    with Program(["restart", "--half", "cuda", *windows, images[1]]) as program:
        program.until("ready 1 rank 0 of 1 restarted 1")
        program.until("ready 2")
        program.tell()
        guard = program.until("guard")
        need(guard == "guard 'kept though unreadable' handled 1 sin 0.479426", guard)
        program.until("end")
        program.end(9)
        is_real(program.said())
        answers = [line for line in program.lines if line.startswith("wrong")]
        need(len(answers) >= 2 and set(answers) == {"wrong 0"}, program.said())
        need(ready_facts(program.lines) == expected[1:], f"{program.lines}, not {expected[1:]}")
    return f"pointers and contents as in an undisturbed run: digests {' '.join(expected)}"


def mpirun(count: int, words: Sequence[object]) -> subprocess.CompletedProcess[str]:
    need(shutil.which("mpirun"), "no mpirun here: not run")
    told = run(["mpirun", "--version"]).stdout
    options = (
        ["--allow-run-as-root", "--oversubscribe"]
        if "Open MPI" in told or "OpenRTE" in told
        else []
    )
    return run(["mpirun", *options, "-n", count, *words], env=MPI_ENV)


def ranks(count: int) -> str:
    program = compile_upper("ranks.c", "ranks", "cuda", "mpi")
    done = mpirun(count, [*FLYT, "run", "--half", "cuda", "--half", "mpi", program])
    need(done.stderr.count(REAL) == count or os.environ["FLYT_SPLIT_CUDA"] == "twin", done.stderr)
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    total, most = sum(10 * (n + 1) for n in range(count)), 10 * count
    expected = [
        f"rank {n} size {count} sum {total} max {most} least 0.5 word 'from one' good 1 library"
        for n in range(count)
    ]
    need([line.partition(" library")[0] + " library" for line in lines] == expected, done.stdout)
    return f"sum {total}, ring, copies on the GPU good on each; {lines[0].partition('library ')[2]}"


def ranks_restart() -> str:
    program = compile_upper("keeps.c", "keeps-mpi", "cuda", "mpi", options=["-DWITH_MPI"])
    halves = ["--half", "cuda", "--half", "mpi"]
    image = WORK / "ranks.{rank}"
    done = mpirun(2, [*FLYT, "run", *halves, "--image", image, program, "x", "1", "stop"])
    before = sorted(re.findall(r"rank (\d) of 2 restarted 0 digest (\w+) same 1", done.stdout))
    need([rank for rank, _ in before] == ["0", "1"] and before[0][1] != before[1][1], done.stdout)
    done = mpirun(2, [*FLYT, "restart", *halves, "--window", ELSEWHERE[0], image])
    after = sorted(re.findall(r"rank (\d) of 2 restarted 1 digest (\w+) same 1", done.stdout))
    need(after == before, f"{done.stdout}, not {before}")
    need(
        done.stdout.count("wrong 0\n") == 2 == done.stdout.count("wrong")
        and done.stdout.count("sum 3\n") == 2,
        done.stdout,
    )
    return "two ranks, each with its device memory, continue in new processes; Allreduce right"


def crossing() -> str:
    lines = run([*FLYT, "cost"]).stdout.splitlines()
    print("\n".join(lines))
    return "; ".join(" ".join(line.split()) for line in lines[1:])


STEPS: list[tuple[str, Callable[[], str]]] = [
    ("machine", versions),
    ("libraries", set_library_path),
    ("nvcc builds", build_nvcc),
    ("vector alone", vector_alone),
    ("vector, split", vector_split),
    ("steps alone", steps_alone),
    ("steps, checkpoint, restart", steps_asked),
    ("placement", placed),
    ("memory, two restarts", keeps_twice),
    ("2 ranks", lambda: ranks(2)),
    ("4 ranks", lambda: ranks(4)),
    ("2 ranks, restart", ranks_restart),
    ("cost", crossing),
]


def main() -> int:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("XDG_CACHE_HOME", str(WORK / "cache"))
    found = []
    for name, step in STEPS:
        print(f"== {name} ==", flush=True)
        began = time.monotonic()
        try:
            seen, passed = step(), True
        except Failed as exc:
            seen, passed = str(exc), False
        except Exception as exc:  # noqa: BLE001 - what breaks one step must not hide the next
            seen, passed = f"{type(exc).__name__}: {exc}", False
        seconds = round(time.monotonic() - began, 1)
        found.append({"step": name, "passed": passed, "seconds": seconds, "seen": seen})
        print(f"{'ok' if passed else 'FAILED'} ({seconds} s): {seen}", flush=True)
        (out / "split-gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n== summary ==")
    for one in found:
        lines = str(one["seen"]).strip().splitlines() or [""]
        verdict, seen = ("ok", lines[0]) if one["passed"] else ("FAILED", lines[-1])
        print(f"{verdict:<7}{one['step']:<28}{one['seconds']:>6}  {seen[:150]}")
    shutil.rmtree(WORK, ignore_errors=True)
    return 0 if all(one["passed"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
