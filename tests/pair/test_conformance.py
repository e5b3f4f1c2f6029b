# SPDX-License-Identifier: Apache-2.0
"""One list of facts about the CUDA runtime, true of Flyt however it is reached, and of CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from flyt.testing import FACTS, ConformanceError, Report, check_memcpy

CLIENT = """
import importlib, json, sys
from flyt.testing import FACTS, check_memcpy
asked = {fact.name for fact in FACTS} - set(sys.argv[2:])
report = check_memcpy(importlib.import_module(sys.argv[1]), asked)
print(json.dumps([str(report), report.passed, report.failed, report.skipped]))
"""

FEWEST_FACTS = 100
"""The list only grows."""

REACHED: dict[str, dict[str, Any]] = {
    "ipc": {},
    "tcp": {"listen": ["tcp://127.0.0.1:0"]},
    "inline-tcp": {"extra": ["--no-region"], "listen": ["tcp://127.0.0.1:0"]},
    "process": {"extra": ["--isolation", "process"]},
    "small-region": {"size": "12M"},
    "own-region-process": {"extra": ["--region", "per-client", "--isolation", "process"]},
}
"""Every way in which a client's calls and bytes get to the device."""

NOT_INLINE = [
    "streams.pinned_to_device_is_asynchronous",
    "streams.device_to_pinned_is_asynchronous",
    "rows.rows_in_the_order_of_a_stream",
]
"""Inline, payloads are in the messages: docs/semantics.md names this deviation."""

NAMES = [fact.name for fact in FACTS]


def check(done: subprocess.CompletedProcess[str], *but: str) -> None:
    assert done.returncode == 0, done.stderr
    text, passed, failed, skipped = json.loads(done.stdout.splitlines()[-1])
    assert not failed, f"{text}\n{done.stderr}"
    assert sorted([*passed, *skipped]) == sorted(set(NAMES) - set(but))
    assert not skipped, text


@pytest.mark.alone
@pytest.mark.parametrize("way", REACHED)
def test_flyt_does_what_cuda_does(
    way: str, backend: Callable[..., Any], run_client: Callable[..., Any]
) -> None:
    but = NOT_INLINE if "inline" in way else []
    check(run_client(CLIENT, backend(**REACHED[way]), "flyt", *but), *but)


def test_cuda_does_what_cuda_does(device_kind: str) -> None:
    """The oracle: a fact that a GPU itself does not show is none."""
    if device_kind != "cupy":
        pytest.skip("asks the real runtime: needs --device cupy")
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, "cuda.bindings.runtime"],
        capture_output=True, text=True, check=False, timeout=90, env=dict(os.environ),
    )  # fmt: skip
    check(done)


# --- the checker itself ---


def test_facts_are_data() -> None:
    assert len(NAMES) == len(set(NAMES)) >= FEWEST_FACTS
    assert all(fact.clause for fact in FACTS)


class Broken(ModuleType):
    """Refuses everything, as CUDA does without a device, and lacks most functions."""

    def __init__(self) -> None:
        super().__init__("broken")
        for name in ("cudaDeviceSynchronize", "cudaGetLastError", "cudaFree"):
            setattr(self, name, lambda *_: (0,))


def test_a_broken_implementation_is_told_which_facts_it_breaks() -> None:
    report = check_memcpy(Broken(), only=NAMES[:3])
    assert (report.passed, set(report.failed)) == ((), set(NAMES[:3]))
    assert "cudaMalloc" in report.failed[NAMES[0]]
    with pytest.raises(ConformanceError, match=NAMES[0]):
        report.raise_if_failed()
    with pytest.raises(AssertionError):
        report.raise_if_failed()


def test_a_sound_report_raises_nothing() -> None:
    report = Report(("one",), {}, {"two": "why"})
    report.raise_if_failed()
    assert "two: why" in str(report)


def test_unknown_facts_are_refused() -> None:
    with pytest.raises(ConformanceError, match="nonsense"):
        check_memcpy(Broken(), only=["nonsense"])
