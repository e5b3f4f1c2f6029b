# SPDX-License-Identifier: Apache-2.0
"""The lower halves cuda (over its twin) and mpi (over Open MPI and MPICH), alone and together."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flyt.split import build, halves, image, prototypes
from flyt.split.launch import prepare, prepare_restart

NATIVE = Path(__file__).with_name("native")
MPIS = {
    "openmpi": (["mpirun.openmpi", "--oversubscribe", "--allow-run-as-root"], "Open MPI"),
    "mpich": (["mpirun.mpich"], "MPICH"),
}
LIMIT = 90.0


def environment() -> dict[str, str]:
    # Two ranks or four on two cores: yield while waiting.
    return {**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_btl": "self,vader"}


@pytest.fixture(params=MPIS)
def mpi(request, missing_tool) -> str:
    for tool in (halves.MPI_COMPILERS[request.param], MPIS[request.param][0][0]):
        if not shutil.which(tool):
            missing_tool(f"no {tool} here (Debian: openmpi-bin, libopenmpi-dev, mpich)")
    return request.param


@pytest.fixture
def compiled(bench):
    """A program against the stubs of cuda and mpi."""

    def make(source: str) -> Path:
        target = bench.folder / Path(source).stem
        stubs = [build.upper_library()]
        for table in halves.TABLES.values():
            stubs.append(build.stub_libraries(prototypes.read(table))[0])
        words = [w for s in stubs for w in (f"-L{s.parent}", f"-l:{s.name}")]
        bench.cc(
            f"-I{build.INCLUDE}",
            "-Wl,--as-needed",
            "-o",
            target,
            NATIVE / source,
            *words,
            "-pthread",
        )
        return target

    return make


def test_cuda_over_its_twin(compiled):
    prepared = prepare([halves.find("cuda")], [str(compiled("kernels.c"))])
    done = subprocess.run(
        prepared.command, env={**prepared.environment, "FLYT_SPLIT_CUDA": "twin"},
        capture_output=True, text=True, check=False, timeout=LIMIT,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "wrong 0 runs 3",
        "unknown 98 cudaErrorInvalidDeviceFunction",
        "cleared 0",
        "freed 0 twice 1 null 0",
        "last 2 0; 2 2 2 0",
        "kind 21 outside 1 empty 0 large 2",
    ]
    assert done.returncode == 0
    assert "cuda_lh answers with host memory, not with a GPU" in done.stderr


def test_registrations_and_kernel_handles_hold_over_a_restart(compiled, tmp_path):
    path, cuda = str(tmp_path / "image"), halves.find("cuda")
    launch = prepare([cuda], [str(compiled("kernels.c")), path])
    for restarted in range(2):
        done = subprocess.run(
            launch.command, env={**launch.environment, "FLYT_SPLIT_CUDA": "twin"},
            capture_output=True, text=True, check=False, timeout=LIMIT,
        )  # fmt: skip
        lines = done.stdout.splitlines()
        assert lines[:2] == [f"restarted {restarted}", "wrong 0 runs 5"], done.stderr
        assert done.returncode == 0
        launch = prepare_restart([cuda], image.read(path))


def test_the_real_runtime_is_refused_where_there_is_none(compiled):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU here")
    prepared = prepare([halves.find("cuda")], [str(compiled("kernels.c"))])
    done = subprocess.run(
        prepared.command, env={**prepared.environment, "FLYT_SPLIT_CUDA": "real"},
        capture_output=True, text=True, check=False, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 126
    assert "a lower half can't serve: libcuda.so.1: cannot open" in done.stderr


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_under_mpirun(compiled, mpi, ranks):
    mpirun, name = MPIS[mpi]
    program = str(compiled("ranks.c"))
    if ranks == 2:  # as a user would; Python starts in each rank
        command = [sys.executable, "-m", "flyt.cli.main", "split", "run"]
        command += ["--half", "cuda", "--half", "mpi", program]  # mpirun's own is taken
        variables = environment()
    else:
        prepared = prepare([halves.find("cuda"), halves.find(f"mpi={mpi}")], [program])
        command, variables = prepared.command, {**environment(), **prepared.environment}
    done = subprocess.run(
        [*mpirun, "-n", str(ranks), *command], env={**variables, "FLYT_SPLIT_CUDA": "twin"},
        capture_output=True, text=True, check=False, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    total, most = sum(10 * (n + 1) for n in range(ranks)), 10 * ranks
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    expected = [
        f"rank {n} size {ranks} sum {total} max {most} least 0.5 word 'from one' good 1 library "
        for n in range(ranks)
    ]
    assert [re.sub(r"library .*", "library ", line) for line in lines] == expected
    assert all(line.partition("library ")[2].startswith(name) for line in lines)


def test_ranks_of_another_mpi_s_launcher_are_refused(compiled, mpi):
    """They would not find each other: each would be rank 0 of 1."""
    if len([kind for kind in MPIS if halves.mpi_compiler(kind)]) < len(MPIS):
        pytest.skip("one MPI is here")
    [other] = {*MPIS} - {mpi}
    prepared = prepare(
        [halves.find("cuda"), halves.find(f"mpi={other}")], [str(compiled("ranks.c"))]
    )
    done = subprocess.run(
        [*MPIS[mpi][0], "-n", "2", *prepared.command],
        env={**environment(), **prepared.environment, "FLYT_SPLIT_CUDA": "twin"},
        capture_output=True, text=True, check=False, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode != 0
    assert "but this MPI sees one rank: start it with the mpirun of the same MPI" in done.stderr
    assert "rank 0" not in done.stdout


def test_an_upper_half_holds_no_mpi_and_no_cuda_library(compiled, mpi):
    program = compiled("link_map.c")
    prepared = prepare([halves.find("cuda"), halves.find(f"mpi={mpi}")], [str(program)])
    done = subprocess.run(
        prepared.command, env={**prepared.environment, "FLYT_SPLIT_CUDA": "twin"},
        capture_output=True, text=True, check=True, timeout=LIMIT,
    )  # fmt: skip
    names = [line.rpartition("/")[2] for line in done.stdout.splitlines() if line[0] != "="]
    assert {"libflytmpi.so", "libcudart.so.13", "libflytsplit.so", "libc.so.6"} <= set(names)
    assert not [n for n in names if n.startswith(("libmpi", "libcuda.", "libopen-", "libpmix"))]
    mapped = {line[1:] for line in done.stdout.splitlines() if line[0] == "="}
    assert any(re.search(r"/libmpi(ch)?\.so", name) for name in mapped)  # in the lower half
