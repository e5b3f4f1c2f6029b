# SPDX-License-Identifier: Apache-2.0
"""What the study makes of rows: verdicts, files and figures, from documents written by hand."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flyt.cli.ipc import ipc
from flyt.errors import ConfigurationError
from flyt.ipc.study import litmus, plots
from flyt.ipc.study.experiments import EXPERIMENTS
from flyt.ipc.study.litmus_kernels import VARIANTS
from flyt.ipc.study.report import QUESTIONS, Answer, Report, Row

MIB = 1 << 20
LIMIT = 110.0


def costs() -> list[Row]:
    rows = [_cost("", 0, "second process", None, 500 * MIB)]
    for way, size in itertools.product(("vmm", "legacy"), (MIB, 256 * MIB)):
        for step, us in (("import and map", 100.0), ("unmap the import", 50.0)):
            grown = 2 * MIB if step == "import and map" else None
            rows.append(_cost(way, size, step, us * size / MIB, grown))
    return rows


def _cost(way: str, size: int, step: str, us: float | None, grown: int | None) -> Row:
    return {
        "driver": "cuda", "way": way, "size": size, "mapped_size": size, "step": step,
        "median_us": us, "least_us": us, "most_us": us, "device_bytes": grown,
    }  # fmt: skip


def bandwidth(of_local: float = 0.995) -> list[Row]:
    memories = {"local": 1.0, "local vmm": 1.0, "imported vmm": of_local, "imported legacy": 0.98}
    return [
        {
            "driver": "cuda", "operation": operation, "size": size, "memory": memory,
            "median_us": 10.0, "low_us": 9.0, "high_us": 11.0,
            "gb_per_s": None if operation == "chase" else 4000.0 * ratio,
            "ns_per_load": 800.0 if operation == "chase" else None,
            "of_local": 0.5 if size < 256 * MIB else ratio,
        }
        for size in (MIB, 256 * MIB, 1024 * MIB)
        for operation in ("read", "write", "chase")
        for memory, ratio in memories.items()
    ]  # fmt: skip


def coherence(**changes: Any) -> list[Row]:
    """Two streams see old data with plain loads; two processes take turns and see none."""
    rows = []
    for where in (litmus.TOGETHER, litmus.APART):
        for name, what in VARIANTS.items():
            weak = where == litmus.TOGETHER and name in ("plain", "relaxed_flag_gpu")
            rows.append(
                {
                    "driver": "cuda", "where": where, "variant": name, "writer": what.writer,
                    "reader": what.reader, "ordered": what.ordered, "pairs": 32,
                    "rounds": 0 if weak and name == "plain" else 1000,
                    "stale": 1000 if weak and name != "plain" else 0,
                    "unseen": 32 if weak and name == "plain" else 0,
                    "broken_off": 0, "written": 1000,
                    "round_us": 2.0 if where == litmus.TOGETHER else 4000.0,
                    "same_processor": 0, "mps": False, **changes,
                }
            )  # fmt: skip
    return rows


def compatibility() -> list[Row]:
    def row(allocator: str, export: str, result: str, code: int | None = None) -> Row:
        return {
            "driver": "cuda", "allocator": allocator, "export": export, "result": result,
            "export_code": code, "import_code": None, "detail": "",
        }  # fmt: skip

    return [
        row("cudaMalloc", "legacy", "shared", 0),
        row("cudaMalloc", "dma-buf", "exported only", 0),
        row("cuMemCreate", "legacy", "refused", 1),
        row("cuMemCreate", "dma-buf", "broken"),
    ]


def crashes() -> list[Row]:
    return [
        {
            "driver": "cuda", "dies": dies, "how": how, "exit_code": -9, "bytes_intact": True,
            "memory_released": True, "descriptors_left": 0, "device_bytes_left": 3 * MIB,
        }
        for dies in ("exporter", "importer")
        for how in ("killed", "freed")
    ]  # fmt: skip


ROWS = {
    "costs": costs,
    "bandwidth": bandwidth,
    "coherence": coherence,
    "compatibility": compatibility,
    "crashes": crashes,
}

MACHINE = {
    "card": {"name": "NVIDIA H200", "driver_version": "580.1"},
    "commit": "abc",
    "date": "2026-11-28T00:00:00+00:00",
}


NOBODY = Answer("who", "", [])
ANSWER = {"question": "costs", "verdict": "", "rows": [], "error": None, "seconds": 1.0}


def document() -> Report:
    return Report(
        "cuda",
        MACHINE,
        [Answer(name, EXPERIMENTS[name].verdict(make()), make()) for name, make in ROWS.items()],
    )


def test_every_question_has_a_document_here() -> None:
    assert list(ROWS) == list(QUESTIONS) == list(EXPERIMENTS)


@pytest.mark.parametrize("question", ROWS)
def test_a_verdict_copes_with_an_experiment_that_was_broken_off(question: str) -> None:
    rows = ROWS[question]()
    for count in range(1, len(rows) + 1):
        assert EXPERIMENTS[question].verdict(rows[:count]).startswith("cuda: ")


def test_the_bound_is_of_the_worst_of_the_large_blocks() -> None:
    verdict = EXPERIMENTS["bandwidth"].verdict
    assert "0.995" in verdict(bandwidth())
    assert "from 256 MiB on is kept" in verdict(bandwidth())
    assert "from 256 MiB on is MISSED" in verdict(bandwidth(0.9899))
    for size in (256 * MIB, 1024 * MIB):
        rows = bandwidth()
        (one,) = (
            row
            for row in rows
            if (row["operation"], row["memory"], row["size"]) == ("read", "imported vmm", size)
        )
        one["of_local"] = 0.9
        assert "MISSED" in verdict(rows)


def test_loads_are_compared_in_one_block_s_size() -> None:
    rows = bandwidth()
    for row in rows:
        if row["operation"] == "chase":
            row["ns_per_load"] = {MIB: 54.0, 256 * MIB: 149.0, 1024 * MIB: 154.0}[row["size"]]
    for row in (row for row in rows if row["memory"].startswith("imported")):
        row["of_local"] -= 0.001 * (row["size"] == 1024 * MIB)  # the worst is not the first
    verdict = EXPERIMENTS["bandwidth"].verdict
    assert "local 154.0 ns, imported vmm 154.0 ns, imported legacy 154.0 ns" in verdict(rows)
    broken_off = [row for row in rows if (row["operation"], row["size"]) != ("chase", 1024 * MIB)]
    assert "local 149.0 ns, imported vmm 149.0 ns" in verdict(broken_off)
    broken_off.append(next(row for row in rows if row not in broken_off))
    assert "a load that waits" not in verdict(broken_off)


def test_small_blocks_alone_tell_nothing_of_the_bound() -> None:
    rows = [row for row in bandwidth() if row["size"] == MIB]
    assert EXPERIMENTS["bandwidth"].verdict(rows) == "cuda: no block of 256 MiB was measured"


def test_an_absence_between_contexts_that_take_turns_is_no_promise() -> None:
    verdict = EXPERIMENTS["coherence"].verdict
    assert "plain (0 stale, 32 unseen), relaxed_flag_gpu (1,000 stale" in verdict(coherence())
    assert "two processes: old data or a flag unseen with no variant" in verdict(coherence())
    assert "take turns" in verdict(coherence())
    assert "no promise" in verdict(coherence())
    at_once = coherence(round_us=2.0, mps=True)
    assert "take turns" not in verdict(at_once)
    assert "under MPS" in verdict(at_once)


def test_broken_order_is_shouted() -> None:
    rows = coherence()
    assert "BROKEN" not in EXPERIMENTS["coherence"].verdict(rows)
    for row in rows:
        row["stale"] += row["variant"] == "release_acquire_gpu"
    verdict = EXPERIMENTS["coherence"].verdict(rows)
    assert "ORDER WAS BROKEN in release_acquire_gpu" in verdict
    assert "never in 2,000 rounds with release_acquire_gpu" not in verdict


def test_the_matrix_tells_what_is_shared_and_what_died() -> None:
    verdict = EXPERIMENTS["compatibility"].verdict(compatibility())
    assert "legacy: cudaMalloc |" in verdict
    assert "dma-buf: shares nothing (exported, but not imported: cudaMalloc)" in verdict
    assert "BROKEN: cuMemCreate × dma-buf" in verdict


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = document()
    report.answers[0].error = "broken off"
    report.answers[0].seconds = 1.5
    report.write(tmp_path)
    assert Report.read(tmp_path / "study.json") == report
    assert report.failed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"driver": "cuda"}',
        '{"driver": "cuda", "machine": {}, "answers": [{"question": "costs"}]}',
        json.dumps({"driver": "cuda", "machine": {}, "answers": [dataclasses.asdict(NOBODY)]}),
        *(
            json.dumps({"driver": "cuda", "machine": machine, "answers": [{**ANSWER, **damage}]})
            for machine, damage in (
                ({"card": "a text"}, {}),
                ({"card": [1]}, {}),
                ({}, {"question": ["costs"]}),
                ({}, {"rows": [1]}),
                ({}, {"rows": 7}),
                ({}, {"rows": [{"a": 1}, {"b": 1}]}),
                ({}, {"seconds": "long"}),
                ({}, {"seconds": 10**400}),
            )
        ),
        "[" * 100_000,
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"other\.json"):
        Report.read(file)


def test_the_summary_measures_nothing_and_draws(tmp_path: Path) -> None:
    document().write(tmp_path)
    file, folder = tmp_path / "study.json", tmp_path / "plots"
    words = python("-m", "flyt.cli.main", "ipc", "study", "--summary", file, "--plot", folder)
    assert "NVIDIA H200, driver 580.1; commit abc; 2026-11-28" in words
    for question in QUESTIONS.values():
        assert question in words
    names = ("bandwidth", "coherence", "compatibility", "costs", "latency", "ratio")
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}.{kind}" for name in names for kind in plots.FORMATS
    )
    words = (folder / "coherence.svg").read_text()
    assert "flag unseen by 32 of 32" in words
    assert "1,000 of 1,000" in words
    assert "broken" in (folder / "compatibility.svg").read_text()
    assert "imported legacy" in (folder / "bandwidth.svg").read_text()
    assert "NVIDIA H200" in (folder / "costs.svg").read_text()


def test_figures_cope_with_experiments_that_were_broken_off(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from flyt.ipc.study import plots, report\n"
        "plots.FORMATS = ('svg',)\n"
        "for file in sys.argv[2:]: plots.draw(report.Report.read(Path(file)), Path(sys.argv[1]))\n"
    )
    files = []
    for count in (1, 2, 4):
        answers = [Answer(name, "", make()[:count]) for name, make in ROWS.items()]
        files.append(Report("cuda", MACHINE, answers).write(tmp_path / str(count))[0])
    python("-c", code, tmp_path / "plots", *files)
    assert len(list((tmp_path / "plots").iterdir())) == 6


def python(*command: str | Path) -> str:
    """What a program says: matplotlib keeps fonts open."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_failed_report_has_exit_code_1(tmp_path: Path) -> None:
    report = document()
    report.answers[1].error = "its process ended with exit code -11"
    report.write(tmp_path)
    done = CliRunner().invoke(ipc, ["study", "--summary", str(tmp_path / "study.json")])
    assert done.exit_code == 1
    assert "broken off: its process ended with exit code -11" in done.output
    assert json.loads((tmp_path / "study.json").read_text())["answers"][1]["error"]
