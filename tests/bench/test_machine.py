# SPDX-License-Identifier: Apache-2.0
"""What the processors were at, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flyt.bench.machine import Ticks


def ticks(folder: Path, line: str) -> Ticks:
    stat = folder / "stat"
    stat.write_text(f"{line}\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    return Ticks.now(stat)


@pytest.mark.parametrize(
    ("later", "share"),
    [
        ("cpu  150 5 70 999 80 1 4 20 7 0", 0.0),  # nothing happened but idling and waiting
        ("cpu  230 5 70 999 80 1 4 40 7 0", 0.2),  # 100 ticks, 20 of them elsewhere
        ("cpu  150 5 70 999 80 1 4 120 7 0", 1.0),
    ],
)
def test_the_share_that_others_had(tmp_path: Path, later: str, share: float) -> None:
    before = ticks(tmp_path, "cpu  150 5 70 900 11 1 4 20 7 0")
    assert before == Ticks(250, 20)
    assert ticks(tmp_path, later).stolen_since(before) == pytest.approx(share)


def test_a_kernel_that_tells_less(tmp_path: Path) -> None:
    assert ticks(tmp_path, "cpu  150 5 70 900") == Ticks(225, 0)


def test_this_machine_tells() -> None:
    now = Ticks.now()
    assert now.busy > 0
    assert 0 <= Ticks.now().stolen_since(now) <= 1
