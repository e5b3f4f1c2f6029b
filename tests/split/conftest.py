# SPDX-License-Identifier: Apache-2.0
"""Lower halves of the tests' own, programs over them, and how to run those."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from flyt.split import build, prototypes
from flyt.split.halves import Half

NATIVE = Path(__file__).with_name("native")
LIMIT = 60.0
"""Seconds that a program may run; each takes far less than one."""

REQUIRED = "FLYT_TEST_REQUIRE_SPLIT"
"""Set where a skip for lack of a compiler or of an MPI would hide that nothing is tested."""


def missing(what: str) -> None:
    """Skip, or fail where CI says that everything is installed."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, but there is {what}")
    pytest.skip(what)


@pytest.fixture(scope="session", autouse=True)
def native_tools() -> None:
    if not shutil.which("gcc") or not shutil.which("g++"):
        missing("no gcc or no g++ here")
    flags = re.search(r"^flags\s*:.*$", Path("/proc/cpuinfo").read_text(), re.M)
    if os.uname().machine != "x86_64" or flags is None or "fsgsbase" not in flags[0].split():
        missing("no x86-64 with FSGSBASE")


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


@pytest.fixture
def run(bench: Bench) -> Run:
    """``run(program, *arguments, options=(), env=None)``: under ``flyt split run``."""

    def start(
        program: Path | str,
        *arguments: str,
        options: Sequence[str] = (),
        env: dict[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*before, *bench.command(program, *arguments, options=options)],
            capture_output=True, text=True, check=False, timeout=LIMIT,
            env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    return start
