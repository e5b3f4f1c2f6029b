# SPDX-License-Identifier: Apache-2.0
"""The study's kernels: what NVRTC says of them, and the whole study against a stand-in for CUDA.

The stand-in (``native/stub_gpu.c``) checks each call's arguments and runs what stands for a kernel
on threads of the CPU, in both processes. What a GPU answers is for a run on one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flyt.compiling import compiler
from flyt.errors import ConfigurationError
from flyt.ipc import native_build
from flyt.ipc.study import bandwidth, litmus, litmus_kernels
from flyt.ipc.study.litmus_kernels import VARIANTS
from flyt.ipc.study.report import Row

HERE = Path(__file__).with_name("native")
LIMIT = 110.0

NVRTC = (
    "import sys; from flyt.ipc.study import bandwidth, crashes, gpu, litmus_kernels\n"
    "from flyt.errors import ConfigurationError\n"
    "for source in ('', bandwidth.SOURCE, litmus_kernels.SOURCE, crashes.FAULT):\n"
    "  try: cubin = gpu.compile_kernels(gpu.WAIT + source, 'sm_90')\n"
    "  except ConfigurationError as exc:\n"
    "    if gpu.NVRTC_MISSING in str(exc): sys.exit(77)\n"
    "    raise\n"
    "  assert cubin[:4] == b'\\x7fELF'\n"
    "try: gpu.compile_kernels('nonsense', 'sm_90')\n"
    "except ConfigurationError as exc: assert 'study.cu(1)' in str(exc), exc\n"
)


def test_nvrtc_compiles_the_kernels() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NVRTC], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    if done.returncode == 77:
        pytest.skip("no NVRTC here: pip install nvidia-cuda-nvrtc")
    assert done.returncode == 0, done.stderr


def test_a_source_has_a_writer_and_a_reader_for_each_variant() -> None:
    for name, variant in VARIANTS.items():
        for side in (f"write_{name}(", f"read_{name}("):
            assert litmus_kernels.SOURCE.count(side) == 1
        text = litmus_kernels.SOURCE.partition(f"write_{name}(")[2]
        for part in (*variant.writer.split("; "), *variant.reader.split("; ")):
            assert part in text
    assert "STORE" not in litmus_kernels.SOURCE.replace("RESTORE", "")
    assert "LOAD" not in litmus_kernels.SOURCE


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    try:
        cc = compiler(native_build.NO_COMPILER)[0]
    except ConfigurationError:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("stand-in")
    layout = {
        "PAIR": litmus_kernels.PAIR_BYTES,
        "SLOTS": litmus_kernels.DATA_SLOTS,
        "START": litmus_kernels.START_OFFSET,
    }
    for target, sources in (
        ("libcuda.so.1", ("stub_cuda", "stub_gpu")),
        ("libnvrtc.so.13", ("stub_nvrtc",)),
    ):
        command = [cc, "-O1", "-g", "-w", "-shared", "-fPIC", f"-Wl,-soname,{target}"]
        command += [f"-D{name}={value}" for name, value in layout.items()]
        command += ["-o", str(folder / target), *(str(HERE / f"{s}.c") for s in sources)]
        subprocess.run([*command, "-ldl", "-lpthread"], check=True, timeout=LIMIT)
    return {
        **os.environ,
        "FLYT_IPC_DRIVER": "cuda",
        "LD_LIBRARY_PATH": str(folder),
        # Before any NVRTC that is installed.
        "LD_PRELOAD": str(folder / "libnvrtc.so.13"),
    }


def study(
    question: str, environment: dict[str, str], folder: Path
) -> tuple[dict[str, Any], list[Row]]:
    done = subprocess.run(
        [sys.executable, "-m", "flyt.cli.main", "ipc", "study",
         "--only", question, "--out", str(folder), "--limit", str(LIMIT)],
        env=environment, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (answer,) = json.loads((folder / "study.json").read_text())["answers"]
    assert answer["error"] is None
    return answer, answer["rows"]


def test_costs_of_both_kinds_of_sharing(stand_in: dict[str, str], tmp_path: Path) -> None:
    answer, rows = study("costs", stand_in, tmp_path)
    assert [row["step"] for row in rows[:2]] == ["second process", "allocate"]
    assert {(row["way"], row["size"]) for row in rows[1:]} == {
        (way, size) for way in ("vmm", "legacy") for size in (1 << 20, 16 << 20, 256 << 20)
    }
    assert all(row["device_bytes"] in (0, None) for row in rows)
    assert "legacy IPC, 1 to 256 MiB: opening takes" in answer["verdict"]


def test_every_memory_is_read_written_and_chased(stand_in: dict[str, str], tmp_path: Path) -> None:
    answer, rows = study("bandwidth", stand_in, tmp_path)
    assert [(row["size"], row["operation"], row["memory"]) for row in rows] == [
        (size, operation, memory)
        for size in bandwidth.SIZES
        for operation in bandwidth.OPERATIONS
        for memory in bandwidth.MEMORIES
    ]
    assert {row["of_local"] for row in rows} == {1.0}
    # Events are a millisecond apart there: eight launches over 256 MiB.
    (one,) = (r for r in rows[:-12] if r["memory"] == "imported vmm"
              and (r["operation"], r["size"]) == ("read", 256 << 20))  # fmt: skip
    assert (one["median_us"], one["gb_per_s"]) == (125.0, 2147.5)
    assert "is kept" in answer["verdict"]


def test_blocks_that_do_not_fit_are_left_out(stand_in: dict[str, str], tmp_path: Path) -> None:
    _, rows = study("bandwidth", {**stand_in, "STUB_FREE": str(100 << 20)}, tmp_path)
    assert {row["size"] for row in rows} == {64 << 10, 1 << 20, 16 << 20}


def test_both_sides_of_the_litmus_test_meet(stand_in: dict[str, str], tmp_path: Path) -> None:
    answer, rows = study("coherence", stand_in, tmp_path)
    assert [(row["where"], row["variant"]) for row in rows] == [
        (where, name) for where in (litmus.TOGETHER, litmus.APART) for name in VARIANTS
    ]
    for row in rows:
        assert row["rounds"] > 0
        assert row["pairs"] == 2
        # The stand-in has one stale round of each pair's reader.
        assert row["stale"] == (2 if "relaxed_flag" in row["variant"] else 0)
    assert "two processes: old data or a flag unseen with relaxed_flag_gpu" in answer["verdict"]


def test_the_matrix_is_what_the_driver_answers(stand_in: dict[str, str], tmp_path: Path) -> None:
    _, rows = study("compatibility", stand_in, tmp_path)
    assert len(rows) == 40
    shared = {(row["allocator"], row["export"]) for row in rows if row["result"] == "shared"}
    assert shared == {
        ("cudaMalloc", "cudaIpcGetMemHandle"),
        ("cuMemCreate, POSIX handle type", "cuMemExportToShareableHandle"),
        ("cudaMallocFromPoolAsync, POSIX handle type", "cuMemPoolExportToShareableHandle"),
    }
    only = [row for row in rows if row["result"] == "exported only"]
    assert {row["export"] for row in only} == {"cuMemGetHandleForAddressRange, dma-buf"}
    assert {(row["export_code"], row["import_code"]) for row in only} == {(0, 1)}
    refused = [row for row in rows if row["result"] == "refused"]
    assert {row["export_code"] for row in refused} == {1}
    assert len(shared) + len(only) + len(refused) == len(rows)
    no_type = next(r for r in refused if r["allocator"] == "cuMemCreate, no handle type"
                   and r["export"] == "cuMemExportToShareableHandle")  # fmt: skip
    assert no_type["detail"].startswith("cuMemExportToShareableHandle: ")


def test_a_call_that_takes_its_process_down_costs_one_cell(
    stand_in: dict[str, str], tmp_path: Path
) -> None:
    """The stand-in's importer dies at a legacy handle."""
    answer, rows = study("compatibility", {**stand_in, "STUB_DIES": "1"}, tmp_path)
    (broken,) = (row for row in rows if row["result"] == "broken")
    assert (broken["allocator"], broken["export"]) == ("cudaMalloc", "cudaIpcGetMemHandle")
    assert broken["detail"] == "the second process ended with exit code -6"
    assert (len(rows), sum(row["result"] == "shared" for row in rows)) == (40, 2)
    assert "BROKEN: cudaMalloc × cudaIpcGetMemHandle" in answer["verdict"]


def test_a_launch_that_fails_is_told(stand_in: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flyt.cli.main", "ipc", "study", "--only", "bandwidth"],
        env={**stand_in, "STUB_FAULT": "chase"},
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "broken off: CUDA error 719: cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED" in done.stdout
