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
def numba(one_backend: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``python`` with arguments, in a process that sees no GPU."""
    environment = {
        **os.environ,
        **one_backend.env,
        "FLYT_BACKEND": one_backend.endpoint,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": f"{SUITE}:{os.environ['PYTHONPATH']}",
    }

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


def test_a_kernel_is_not_supported_without_a_gpu(
    emulated: None, numba_compiles: None, numba: Callable[..., Any], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(KERNEL)
    done = numba("-m", "flyt.numba", str(script), where=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "CUDA_ERROR_NOT_SUPPORTED" in done.stdout
    assert "runs no kernels" in done.stdout


@pytest.mark.parametrize("part", ["test_events", "test_host_alloc", "test_context_stack"])
def test_numba_s_own_tests(
    numba_compiles: None, numba: Callable[..., Any], device_kind: str, tmp_path: Path, part: str
) -> None:
    done = numba(
        *("-m", "pytest", "-q", "-p", "numba_suite", "-p", "flyt.numba", "-p", "no:cacheprovider"),
        *("-o", "consider_namespace_packages=true", f"--known-failures={KNOWN}"),
        *(["--no-kernels"] if device_kind == "emulated" else []),
        *("--pyargs", f"numba.cuda.tests.cudadrv.{part}"),
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
