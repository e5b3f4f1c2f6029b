# SPDX-License-Identifier: Apache-2.0
"""What ``import flyt`` loads, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HEAVY = "{'numpy', 'cuda'} & set(sys.modules)"


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["backend.worker", "backend.keeper", "cli.backend"])
def test_the_daemon_loads_no_numpy_and_no_cuda(module: str) -> None:
    code = f"import sys, flyt.{module}; print({HEAVY})"
    assert python(code, FLYT_DAEMON="1") == "set()"


def test_the_daemons_children_map_no_numpy(backend: Callable[..., Any], device_kind: str) -> None:
    if device_kind != "emulated":
        pytest.skip("CuPy brings NumPy with it")
    children = [f"/proc/{pid}/maps" for pid in backend().descendants()]
    assert len(children) >= 2
    assert not [child for child in children if "numpy" in Path(child).read_text()]


def test_a_program_has_all_from_the_start() -> None:
    assert python(f"import sys, flyt; print(len({HEAVY}))") == "2"
    code = f"import sys, flyt; print({HEAVY}); flyt.cudaMalloc; print(len({HEAVY}))"
    assert python(code, FLYT_DAEMON="1") == "set()\n2"


def test_every_way_to_a_name() -> None:
    assert python("from flyt import cudaMemcpy; print(cudaMemcpy.__name__)") == "cudaMemcpy"
    assert python("from flyt import *; print(cudaFree.__name__)") == "cudaFree"
    assert python("import flyt; print('cudaMalloc' in dir(flyt))") == "True"
    assert python("import flyt; print(flyt.cudaMemcpyKind(1).name)") == "cudaMemcpyHostToDevice"


def test_names_that_are_not_there() -> None:
    code = "import flyt\ntry: flyt.{}\nexcept AttributeError as exc: print(exc)"
    assert "no attribute 'cudaNonsense'" in python(code.format("cudaNonsense"))
    assert "no attribute 'nonsense'" in python(code.format("nonsense"))
    assert "no attribute '__nonsense__'" in python(code.format("__nonsense__"))


def test_what_is_left_out_is_refused_at_once() -> None:
    code = "import flyt; print(*(int(v) if v else v for v in flyt.cudaGraphGetEdges(1, 2, 3)))"
    assert python(code, FLYT_BACKEND="ipc:///nowhere") == "801 None None None None"
    assert "graphs" in python("import flyt; flyt.cudaGraphCreate(0); print(flyt.last_failure())")
