# SPDX-License-Identifier: Apache-2.0
"""Lower halves of the tests' own, programs over them, and how to run those."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from flyt.split import build, prototypes
from flyt.split.halves import Half
from flyt.split.launch import IMAGE, prepare
from flyt.split.layout import Window

NATIVE = Path(__file__).with_name("native")
LIMIT = 30.0
"""Seconds that a program may run; each takes a few at most."""

REQUIRED = "FLYT_TEST_REQUIRE_SPLIT"
"""Set where a skip for lack of a compiler or of an MPI would hide that nothing is tested."""


def missing(what: str) -> None:
    """Skip, or fail where CI says that everything is installed."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, but there is {what}")
    pytest.skip(what)


@pytest.fixture(scope="session")
def missing_tool() -> Callable[[str], None]:
    return missing


@pytest.fixture(scope="session", autouse=True)
def native_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled pieces go to a cache of the tests' own; lack of tools skips, or fails in CI."""
    if not shutil.which("gcc") or not shutil.which("g++"):
        missing("no gcc or no g++ here")
    flags = re.search(r"^flags\s*:.*$", Path("/proc/cpuinfo").read_text(), re.M)
    if os.uname().machine != "x86_64" or flags is None or "fsgsbase" not in flags[0].split():
        missing("no x86-64 with FSGSBASE")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


class Bench:
    """Compiled pieces: the halves ``one`` and ``two``, their stubs, programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.side = folder / "libside.so"
        self.cc("-shared", "-fPIC", "-o", self.side, NATIVE / "side.c")
        self.tables: dict[str, prototypes.Table] = {}
        self.stubs: list[Path] = []
        self.halves: dict[str, Half] = {}
        for name in ("one", "two"):
            protos = folder / f"{name}.protos"
            protos.write_text((NATIVE / "half.protos").read_text().replace("@", name))
            table = self.tables[name] = prototypes.read(protos)
            [stub] = build.stub_libraries(table)
            self.stubs.append(stub)
            program = build.lower_half(
                table, [NATIVE / "half.c"], flags=[f"-DHALF={name}"],
                libraries=[f"-L{folder}", "-lside", f"-Wl,-rpath,{folder}"],
            )  # fmt: skip
            self.halves[name] = Half(name, program, stubs=(stub.parent,))

    def cc(self, *words: object, compiler: str = "gcc") -> None:
        subprocess.run([compiler, "-w", "-O1", *map(str, words)], check=True, timeout=LIMIT)

    def program(self, source: str | Path, *flags: str, name: str = "") -> Path:
        """Compile an upper half against the stubs of both halves."""
        path = NATIVE / source
        target = self.folder / (name or path.stem)
        libraries = [f"-L{stub.parent}" for stub in [*self.stubs, build.upper_library()]]
        libraries += [f"-l:{stub.name}" for stub in [*self.stubs, build.upper_library()]]
        libraries += [f"-L{self.folder}", "-lside", f"-Wl,-rpath,{self.folder}", "-pthread", "-ldl"]
        compiler = "g++" if path.suffix == ".cc" else "gcc"
        self.cc(*flags, f"-I{build.INCLUDE}", "-o", target, path, *libraries, compiler=compiler)
        return target

    def command(
        self, program: Path | str, *arguments: str, options: Sequence[str] = ()
    ) -> list[str]:
        words = [sys.executable, "-m", "flyt.cli.main", "split", "run", *options]
        for name, half in self.halves.items():
            words += ["--half", f"{name}={half.program}", "--stubs", str(half.stubs[0])]
        return [*words, str(program), *arguments]


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, native_tools: None) -> Bench:
    return Bench(tmp_path_factory.mktemp("split"))


Run = Callable[..., subprocess.CompletedProcess[str]]


def threads_of(pid: int) -> str:
    """Where each thread of a process that hangs is: what it waits in, its masks."""
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
        status = (task / "status").read_text()
        lines = re.findall(r"^(?:Name|State|SigPnd|SigBlk):.*$", status, re.M)
        found += [f"{task.name} {(task / 'syscall').read_text().strip()} {lines}"]
    return "\n".join(found)


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for a program; one that hangs fails the test and says where."""
    try:
        output, errors = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        where = threads_of(process.pid)
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        process.kill()
        output, errors = process.communicate(timeout=LIMIT)
        pytest.fail(f"it hangs:\n{where}\n{maps}\n{output}\n{errors}", pytrace=False)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.fixture
def run(bench: Bench) -> Run:
    """``run(program, *arguments, windows=None, env=None)``: as ``flyt split run`` starts it."""

    def start(
        program: Path | str,
        *arguments: str,
        halves: Sequence[Half] = (),
        windows: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        before: Sequence[str] = (),
        image: str = IMAGE,
    ) -> subprocess.CompletedProcess[str]:
        prepared = prepare(
            [*bench.halves.values(), *halves],
            [str(program), *arguments],
            windows={name: Window.parse(text) for name, text in (windows or {}).items()},
            image=image,
        )
        process = subprocess.Popen(
            [*before, *prepared.command],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
            env={**prepared.environment, **(env or {})},
        )  # fmt: skip
        return finish(process)

    return start
