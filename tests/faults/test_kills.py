# SPDX-License-Identifier: Apache-2.0
"""Clients die at any point of any operation: everything they held is back within two seconds, and
the others' bytes are right. ``scripts/soak`` does the same for half an hour."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.chaos import Chaos
from tests.faults.load import NAMES

SEED = 20_261_128
AT_ONCE = 4


@pytest.mark.alone
@pytest.mark.parametrize(
    ("isolation", "kills", "extra"),
    [
        ("shared", 104, []),
        ("shared", 16, ["--region", "per-client"]),
        ("process", 16, []),
        ("process", 8, ["--region", "per-client"]),
    ],
)
def test_random_kills(
    backend: Callable[..., Any],
    tmp_path: Path,
    device_kind: str,
    isolation: str,
    kills: int,
    extra: list[str],
) -> None:
    served = backend(size="128M", extra=["--isolation", isolation, *extra])
    grain = 0 if device_kind == "emulated" else 64 << 20
    with Chaos(served, tmp_path, SEED, survivors=4, grain=grain) as chaos:
        for _ in range(kills // AT_ONCE):
            chaos.kill(AT_ONCE)
            if isolation == "shared":
                chaos.comes_back()
        assert sum(chaos.kills.values()) == kills
        assert isolation == "process" or min(chaos.kills.values()) >= kills // len(NAMES)
        lines = chaos.finish()
    assert len(lines) == 4
