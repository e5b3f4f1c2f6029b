# SPDX-License-Identifier: Apache-2.0
"""``flyt.runtime`` and ``cupy.cuda.runtime`` itself: one list of facts, one list of names."""

from __future__ import annotations

import fnmatch
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flyt
from flyt import runtime
from flyt.frontend import current

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "cupy_facts.py"
NAMES = {
    line
    for line in (HERE.parent / "data" / "cupy-14-runtime-names.txt").read_text().splitlines()
    if not line.startswith("#")
}

_spec = importlib.util.spec_from_file_location("cupy_facts", PROGRAM)
assert _spec is not None
assert _spec.loader is not None
cupy_facts = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cupy_facts)

FACES = ("flyt.runtime", "cupy.cuda.runtime")
LIMIT = 100.0

GAPS = {
    "*GraphDebugDotFlags*": "constants of graphs, which Flyt has not",
    "cudaChannelFormatKind*": "constants of CUDA arrays, which Flyt has not",
    "cudaArray*": "constants of CUDA arrays, which Flyt has not",
    "cudaResourceType*": "constants of textures, which Flyt has not",
    "cudaAddressMode*": "constants of textures, which Flyt has not",
    "cudaFilterMode*": "constants of textures, which Flyt has not",
    "cudaReadMode*": "constants of textures, which Flyt has not",
}
"""CuPy's names that ``flyt.runtime`` lacks, and why."""


@pytest.fixture(scope="module", params=FACES)
def seen(
    request: pytest.FixtureRequest, module_backend: Callable[..., Any], device_kind: str
) -> Any:
    """What the program of facts said of one face, in a process of its own."""
    environment = dict(os.environ)
    if request.param == "flyt.runtime":
        served = module_backend()
        environment |= {**served.env, "FLYT_BACKEND": served.endpoint}
    elif device_kind != "cupy":
        pytest.skip("asks CuPy itself: needs a GPU and --device cupy")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), request.param],
        capture_output=True, text=True, check=False, timeout=LIMIT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", cupy_facts.FACTS)
def test_fact(seen: Any, name: str) -> None:
    assert not seen["facts"][name], seen["facts"][name]


def test_names(seen: Any, request: pytest.FixtureRequest) -> None:
    face = request.node.callspec.params["seen"]
    allowed = {name for gap in GAPS for name in fnmatch.filter(NAMES, gap)}
    missing = NAMES - set(seen["names"]) - (allowed if face == "flyt.runtime" else set())
    assert not missing, f"{face} lacks {sorted(missing)}"
    assert not set(seen["names"]) - NAMES, f"the snapshot lacks {set(seen['names']) - NAMES}"


def test_every_gap_is_one() -> None:
    for gap, reason in GAPS.items():
        names = fnmatch.filter(NAMES, gap)
        assert names, f"{gap} names nothing of CuPy's"
        assert not set(names) & set(runtime.__all__), f"{gap} is there by now"
        assert reason


def test_what_flyt_refuses_raises_it() -> None:
    parameters = {"path": "x"}
    for name in ("mallocManaged", "graphLaunch", "mallocArray", "deviceEnablePeerAccess",
                 "graphDebugDotPrint", "createTextureObject", "profilerStart"):  # fmt: skip
        function = getattr(runtime, name)
        arguments = [parameters.get(p, 1) for p in inspect.signature(function).parameters]
        with pytest.raises(runtime.CUDARuntimeError) as caught:
            function(*arguments)
        assert caught.value.status == 801, name


def test_signatures() -> None:
    """By CuPy's sources."""
    wanted = {
        "memcpyAsync": "(dst, src, size, kind, stream)",
        "streamWaitEvent": "(stream, event, flags=0)",
        "streamAddCallback": "(stream, callback, arg, flags=0)",
        "ipcOpenMemHandle": "(handle, flags=1)",
        "mallocManaged": "(size, flags=1)",
        "streamBeginCapture": "(stream, mode=2)",
        "getDeviceProperties": "(device: 'int') -> 'dict[str, Any]'",
    }
    seen = {name: str(inspect.signature(getattr(runtime, name))) for name in wanted}
    assert seen == wanted


def test_a_failure_clears_the_last_error() -> None:
    flyt.cudaGraphCreate(0)
    assert current.thread.last_error == 801
    with pytest.raises(runtime.CUDARuntimeError):
        runtime.graphLaunch(1, 1)
    assert current.thread.last_error == 0
