# SPDX-License-Identifier: Apache-2.0
"""numba-cuda through Flyt, each program in a process of its own. Without a GPU its kernels compile,
and end where they are loaded; the rest of numba works."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flyt.numba

SUITE = Path(__file__).parents[1] / "numba"
KNOWN = SUITE / "known_failures.txt"
LIMIT = 110.0

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed"
)

PROGRAM = """
import numpy as np
from numba import cuda

array = np.arange(1000.0).reshape(10, 100)
device = cuda.to_device(array)
assert (device.copy_to_host() == array).all()
stream = cuda.stream()
with cuda.pinned(array):
    twin = cuda.to_device(array, stream=stream)
    back = twin.copy_to_host(stream=stream)
    stream.synchronize()
assert (back == array).all()
print(cuda.get_current_device().compute_capability, cuda.current_context().get_memory_info().free)
"""

KERNEL = """
import warnings
warnings.simplefilter("ignore")
import numpy as np
from numba import cuda

@cuda.jit
def kernel(x):
    x[cuda.grid(1)] = 1

try:
    kernel[1, 32](np.zeros(32))
except Exception as exc:
    print(exc)
"""


@pytest.fixture
def environment(one_backend: Any) -> dict[str, str]:
    """Of a process that sees no GPU."""
    return {
        **os.environ,
        **one_backend.env,
        "FLYT_BACKEND": one_backend.endpoint,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": f"{SUITE}:{os.environ['PYTHONPATH']}",
    }


@pytest.fixture
def numba(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``python`` with arguments."""

    def run(*arguments: str, where: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
            cwd=where,
            env=environment,
        )

    return run


def test_a_script_runs_unchanged(numba: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    done = numba("-m", "flyt.numba", str(script), where=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ComputeCapability(major=")


def test_a_module_runs_unchanged(numba: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = numba("-m", "flyt.numba", "-m", "program", where=tmp_path)
    assert done.returncode == 0, done.stderr


SPAWNS = """
import multiprocessing
import numpy as np
from numba import cuda

def child(queue):
    queue.put(cuda.to_device(np.arange(5)).copy_to_host().sum())

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=60))
    process.join()
"""


def test_spawned_processes_follow(numba: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNS)
    done = numba("-m", "flyt.numba", str(script), where=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "10\n"


STARTS = """
import subprocess, sys
command = [sys.executable, "program.py"]
print(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
"""


@pytest.fixture
def site(numba: Callable[..., Any], environment: dict[str, str], tmp_path: Path) -> Path:
    """``flyt.numba.SITE`` is first on the path, and a ``sitecustomize`` of somebody else's next."""
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.others = 'other'\n")
    path = f"{flyt.numba.SITE}:{tmp_path}:{environment['PYTHONPATH']}"
    environment["PYTHONPATH"] = path
    return tmp_path


def test_children_follow_where_the_site_folder_is_on_the_path(
    site: Path, numba: Callable[..., Any]
) -> None:
    (site / "program.py").write_text(PROGRAM)
    (site / "starts.py").write_text(STARTS)
    done = numba("starts.py", where=site)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ComputeCapability(major=")


def test_the_site_folder_costs_nothing_without_numba(site: Path, numba: Callable[..., Any]) -> None:
    code = "import sys; print(sorted({'flyt', 'numba', 'numpy'} & sys.modules.keys()), others)"
    done = numba("-c", code, where=site)
    assert done.stdout == "[] other\n", done.stderr


def test_the_site_folder_and_an_install_go_together(site: Path, numba: Callable[..., Any]) -> None:
    (site / "program.py").write_text("import flyt.numba\nflyt.numba.install()\n" + PROGRAM)
    done = numba("-W", "error", "program.py", where=site)
    assert done.returncode == 0, done.stderr


def test_with_the_site_folder_nobody_gets_the_machine_s_own_gpu_in_silence(
    site: Path, numba: Callable[..., Any]
) -> None:
    done = numba("-c", "import sys; sys.modules['flyt'] = None; from numba import cuda", where=site)
    assert done.returncode == 1
    assert "No module named 'flyt.numba'" in done.stderr


def test_a_kernel_is_not_supported_without_a_gpu(
    emulated: None, numba_compiles: None, numba: Callable[..., Any], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(KERNEL)
    done = numba("-m", "flyt.numba", str(script), where=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "CUDA_ERROR_NOT_SUPPORTED" in done.stdout
    assert "runs no kernels" in done.stdout


@pytest.mark.parametrize(
    "part",
    [
        "cudadrv.test_events",
        "cudadrv.test_host_alloc",
        "cudadrv.test_context_stack",
        "cudapy.test_errors",  # one starts a child
    ],
)
def test_numba_s_own_tests(
    numba_compiles: None, numba: Callable[..., Any], device_kind: str, tmp_path: Path, part: str
) -> None:
    done = numba(
        *("-m", "pytest", "-q", "-p", "numba_suite", "-p", "flyt.numba", "-p", "no:cacheprovider"),
        *("-o", "consider_namespace_packages=true", f"--known-failures={KNOWN}"),
        *(["--no-kernels"] if device_kind == "emulated" else []),
        *("--pyargs", f"numba.cuda.tests.{part}"),
        where=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_a_second_use_of_the_machine_s_own_gpu_is_refused(tmp_path: Path) -> None:
    code = """
import numba.cuda.cudadrv.driver as d
d.driver.is_initialized, d.driver.initialization_error = True, None
import flyt.numba
try:
    flyt.numba.install()
except flyt.ConfigurationError as exc:
    print(exc)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert "call flyt.numba.install() first" in done.stdout, done.stderr


def test_without_numba_it_says_what_is_missing(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["numba"] = None
import flyt.numba
try:
    flyt.numba.install()
except flyt.ConfigurationError as exc:
    print(exc)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert "pip install numba-cuda" in done.stdout, done.stderr
