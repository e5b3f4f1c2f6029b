# SPDX-License-Identifier: Apache-2.0
"""``scripts/fuzz``: says what it lacks, or finds nothing in a few seconds."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fuzz"


def test_a_short_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--seconds", "2"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=90,
    )
    if importlib.util.find_spec("atheris") is None:
        assert done.returncode == 1
        assert "pip install atheris" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert " runs in " in done.stderr
    assert list(tmp_path.iterdir()) == []
