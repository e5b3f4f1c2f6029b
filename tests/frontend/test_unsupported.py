# SPDX-License-Identifier: Apache-2.0
"""Every function of the runtime API is there, or is refused and stands in the README."""

from __future__ import annotations

import fnmatch
import re
import types
from pathlib import Path

import pytest
from cuda.bindings import runtime as cudart

import flyt
from flyt.frontend import current, public
from flyt.frontend.api.unsupported import GROUPS, group_of, unsupported, values_of

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()

NOT_OF_CUDA = {"Any", "Optional"}
"""What the module happens to import."""

FUNCTIONS = sorted(
    name
    for name in dir(cudart)
    if not name.startswith("_")
    and callable(getattr(cudart, name))
    and not isinstance(getattr(cudart, name), type)
    and name not in NOT_OF_CUDA
)


def test_every_function_is_there_or_refused() -> None:
    assert len(FUNCTIONS) > 300
    there = set(public.__all__) | public.PASSED_ON
    both = [name for name in FUNCTIONS if name in there and group_of(name)]
    neither = [name for name in FUNCTIONS if name not in there and not group_of(name)]
    assert (both, neither) == ([], [])


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if group_of(name)])
def test_it_is_refused_before_anything_is_looked_at(name: str) -> None:
    error, *values = getattr(flyt, name)(object())
    assert error == cudart.cudaError_t.cudaErrorNotSupported
    assert set(values) <= {None}
    assert name in flyt.last_failure()
    assert current.thread.last_error == 801  # not asked for: a session may have been lost
    flyt.cudaGetLastError()


@pytest.mark.parametrize("pattern", " ".join(group.patterns for group in GROUPS.values()).split())
def test_no_pattern_is_idle(pattern: str) -> None:
    # Some are not in every version of the bindings.
    others = ("cudaDevice?etSharedMemConfig", "cudaMemGetLocationInfo")
    assert fnmatch.filter(FUNCTIONS, pattern) or pattern in others


def test_the_readme_has_the_table() -> None:
    rows = dict(re.findall(r"^\| ([^|]+) \| (`(?:cuda|\*|get)[^|]+`) \|", README, re.MULTILINE))
    told = {group: " ".join(re.findall(r"`([^`]+)`", row)) for group, row in rows.items()}
    assert {group: told.get(group) for group in GROUPS} == {
        group: patterns for group, (patterns, _) in GROUPS.items()
    }


def test_as_many_values_as_cuda_answers() -> None:
    """By the documentation of the CUDA runtime API."""
    wanted = {"cudaMalloc": 1, "cudaFree": 0, "cudaMemGetInfo": 2, "cudaArrayGetInfo": 3,
              "cudaStreamEndCapture": 1, "cudaFuncSetAttribute": 0}  # fmt: skip
    assert {name: values_of(getattr(cudart, name)) for name in wanted} == wanted


def test_types_and_nonsense_are_no_functions() -> None:
    assert unsupported("cudaGraph_t") is None
    assert unsupported("cudaGraphNonsense") is None
    assert isinstance(flyt.cudaGraphCreate, types.FunctionType)
    assert flyt.cudaGraph_t is cudart.cudaGraph_t
