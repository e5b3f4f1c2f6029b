# SPDX-License-Identifier: Apache-2.0
"""On real GPUs, with PyTorch: what the emulated driver and the stand-in for libcuda can't show.

Each test is a program in a process of its own (this one stays on the emulated driver) with a child
of its own; ``scripts/gpu`` runs them with ``-m gpu``.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("gpu_program.py")
LIMIT = 110.0


@functools.cache
def gpus() -> tuple[int, str]:
    """How many GPUs PyTorch sees in a process of its own, and why not more."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    if done.returncode:
        return 0, "PyTorch is not installed"
    return int(done.stdout), f"PyTorch sees {done.stdout.strip()} GPUs"


TESTS = [
    pytest.param("round_trips", 1, marks=pytest.mark.gpu(1)),
    pytest.param("exporter_killed", 1, marks=pytest.mark.gpu(1)),
    pytest.param("memory_comes_back", 1, marks=pytest.mark.gpu(1)),
    pytest.param("pool_trains", 1, marks=pytest.mark.gpu(1)),
    pytest.param("preload_trains", 1, marks=pytest.mark.gpu(1)),
    pytest.param("thousand_cycles", 1, marks=pytest.mark.gpu(1)),
    pytest.param("event_order", 1, marks=pytest.mark.gpu(1)),
    pytest.param("hand_off_time", 1, marks=pytest.mark.gpu(1)),
    pytest.param("two_gpus", 2, marks=pytest.mark.gpu(2)),
]


@pytest.mark.alone
@pytest.mark.parametrize(("name", "count"), TESTS)
def test_on_a_gpu(name: str, count: int) -> None:
    found, why = gpus()
    if found < count:
        pytest.skip(f"needs {count} GPUs: {why}")
    command = [sys.executable, str(PROGRAM), name]
    if name == "preload_trains":
        command = [sys.executable, "-m", "flyt.cli.main", "ipc", "run", "--", *command]
    done = subprocess.run(
        command,
        env={k: v for k, v in os.environ.items() if k != "FLYT_IPC_DRIVER"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sys.stdout.write(done.stdout)


@pytest.mark.alone
@pytest.mark.gpu(1)
def test_the_study_on_a_gpu(tmp_path: Path) -> None:
    """All experiments go through, and what they must find on any GPU is found."""
    found, why = gpus()
    if not found:
        pytest.skip(f"needs a GPU: {why}")
    done = subprocess.run(
        [sys.executable, "-m", "flyt.cli.main", "ipc", "study", "--out", str(tmp_path)],
        env={k: v for k, v in os.environ.items() if k != "FLYT_IPC_DRIVER"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sys.stdout.write(done.stdout)
    answers = {
        answer["question"]: answer
        for answer in json.loads((tmp_path / "study.json").read_text())["answers"]
    }
    assert "is kept" in answers["bandwidth"]["verdict"]
    assert "BROKEN" not in answers["coherence"]["verdict"]
    assert all(row["rounds"] for row in answers["coherence"]["rows"] if row["ordered"])
    shared = {
        (row["allocator"], row["export"])
        for row in answers["compatibility"]["rows"]
        if row["result"] == "shared"
    }
    assert ("cudaMalloc", "cudaIpcGetMemHandle") in shared
    assert ("cuMemCreate, POSIX handle type", "cuMemExportToShareableHandle") in shared
    assert all(row["bytes_intact"] for row in answers["crashes"]["rows"])
