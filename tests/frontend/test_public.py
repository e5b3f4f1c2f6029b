# SPDX-License-Identifier: Apache-2.0
"""What ``import flyt`` loads, and when."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = "{'numpy', 'cuda'} & set(sys.modules)"


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["backend.worker", "backend.keeper", "cli.backend"])
def test_the_daemon_loads_no_numpy_and_no_cuda(module: str) -> None:
    assert python(f"import sys, flyt.{module}; print({HEAVY})") == "set()"


def test_the_first_use_loads_all() -> None:
    code = f"import sys, flyt; print(not {HEAVY}); flyt.cudaMalloc; print(len({HEAVY}))"
    assert python(code) == "True\n2"


def test_every_way_to_a_name() -> None:
    assert python("from flyt import cudaMemcpy; print(cudaMemcpy.__name__)") == "cudaMemcpy"
    assert python("from flyt import *; print(cudaFree.__name__)") == "cudaFree"
    assert python("import flyt; print('cudaMalloc' in dir(flyt))") == "True"
    assert python("import flyt; print(flyt.cudaMemcpyKind(1).name)") == "cudaMemcpyHostToDevice"


def test_names_that_are_not_there() -> None:
    code = "import flyt\ntry: flyt.{}\nexcept AttributeError as exc: print(exc)"
    assert "does not offer cudaGraphCreate yet" in python(code.format("cudaGraphCreate"))
    assert "no attribute 'cudaNonsense'" in python(code.format("cudaNonsense"))
    assert "no attribute 'nonsense'" in python(code.format("nonsense"))
    assert "no attribute '__nonsense__'" in python(code.format("__nonsense__"))
