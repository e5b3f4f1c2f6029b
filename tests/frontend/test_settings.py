# SPDX-License-Identifier: Apache-2.0
"""Settings: arguments, then the environment, then defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from flyt.environment import VARIABLES
from flyt.errors import ConfigurationError
from flyt.frontend.settings import LARGEST_SLOT, SHARE_OF_REGION, Settings

HERE = {"FLYT_BACKEND": "ipc:///env", "FLYT_REGION": "/dev/shm/env"}
MIB = 1 << 20


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ((), HERE, ("ipc:///env", "/dev/shm/env")),
        (("tcp://h:1",), HERE, ("tcp://h:1", "/dev/shm/env")),
        (("tcp://h:1", "/r"), HERE, ("tcp://h:1", "/r")),
        ((None, "/r"), HERE, ("ipc:///env", "/r")),
        ((None, ""), HERE, ("ipc:///env", "")),  # an empty argument is one: the backend's word
        (("emulated:",), {}, ("emulated:", "")),
    ],
)
def test_arguments_come_before_the_environment(
    arguments: tuple[Any, ...], environ: dict[str, str], expected: tuple[str, str]
) -> None:
    settings = Settings.read(*arguments, environ=environ)
    assert (settings.endpoint, settings.region) == expected


@pytest.mark.parametrize("environ", [{}, {"FLYT_BACKEND": ""}])
def test_the_default_is_the_local_endpoint(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLYT_RUNTIME_DIR", str(tmp_path / "run"))
    settings = Settings.read(environ=environ)
    assert settings.endpoint == f"ipc://{tmp_path}/run/backend.sock"
    assert settings.region == ""


def test_the_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for port in (1, 2):
        monkeypatch.setenv("FLYT_BACKEND", f"tcp://h:{port}")
        assert Settings.read().endpoint == f"tcp://h:{port}"


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("FLYT_STAGING_SLOTS", "2", "slots", 2),
        ("FLYT_STAGING_SLOTS", "64", "slots", 64),
        ("FLYT_STAGING_SLOTS", "", "slots", 0),
        ("FLYT_SLOT_SIZE", "0", "slot_size", 0),
        ("FLYT_SLOT_SIZE", "4096", "slot_size", 4096),
        ("FLYT_SLOT_SIZE", str(1 << 30), "slot_size", 1 << 30),
        ("FLYT_SLOT_SIZE", "", "slot_size", 0),
        ("FLYT_SLOT_SIZE", "64K", "slot_size", 64 << 10),
        ("FLYT_SLOT_SIZE", "8m", "slot_size", 8 << 20),
        ("FLYT_SLOT_SIZE", "1GiB", "slot_size", 1 << 30),
        ("FLYT_COPY_THREADS", "64", "copy_threads", 64),
    ],
)
def test_numbers(name: str, text: str, field: str, value: int) -> None:
    assert getattr(Settings.read("ipc:///x", environ={name: text}), field) == value


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("FLYT_STAGING_SLOTS", 2, 64),
        ("FLYT_SLOT_SIZE", 0, 1 << 30),
        ("FLYT_COPY_THREADS", 0, 64),
        ("FLYT_SPIN_US", 0, 1_000_000),
    ],
)
@pytest.mark.parametrize(
    "text", ["-1", "+3", "1.5", "4X", "2G", "0x10", "four", "²", "٤", "1_0", "9" * 30]
)
def test_anything_else_is_refused_by_name(name: str, low: int, high: int, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"from {low} to {high}") as caught:
        Settings.read("ipc:///x", environ={name: text})
    assert f"{name}={text!r}" in str(caught.value)


@pytest.mark.parametrize("name", ["FLYT_RING", "FLYT_NATIVE", "FLYT_NVRTC_UNCONFINED"])
@pytest.mark.parametrize("text", ["maybe", "2", "true", "no", " 0"])
def test_a_switch_takes_0_or_1(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match="takes 0 or 1") as caught:
        Settings.read("ipc:///x", environ={name: text})
    assert f"{name}={text!r}" in str(caught.value)
    for good in ("0", "1", ""):
        Settings.read("ipc:///x", environ={name: good})


@pytest.mark.parametrize("text", ["nonsense", "tcp://host", "http://host:1", "ipc://"])
def test_a_bad_endpoint_names_its_variable(text: str) -> None:
    with pytest.raises(ConfigurationError, match="FLYT_BACKEND: endpoint"):
        Settings.read(environ={"FLYT_BACKEND": text})


def test_the_readme_lists_what_the_code_reads() -> None:
    root = Path(__file__).resolve().parents[2]
    readme = (root / "README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith("| `FLYT_")]
    listed = {name for row in rows for name in re.findall(r"`(FLYT_[A-Z_]+)`", row.split("|")[1])}
    assert listed == {variable.name for variable in VARIABLES}


@pytest.mark.parametrize("text", ["0", "1", "65"])
def test_slots_out_of_range(text: str) -> None:
    with pytest.raises(ConfigurationError, match="FLYT_STAGING_SLOTS"):
        Settings.read("ipc:///x", environ={"FLYT_STAGING_SLOTS": text})


def test_more_digits_than_python_reads() -> None:
    with pytest.raises(ConfigurationError, match="FLYT_SLOT_SIZE"):
        Settings.read("ipc:///x", environ={"FLYT_SLOT_SIZE": "9" * 5000})


# --- staging ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("region", "page", "expected"),
    [
        (4 << 30, 2 * MIB, (8, 8 * MIB)),  # a 32nd is 128 MiB: more than eight slots of 8 MiB
        (2 << 30, 2 * MIB, (8, 8 * MIB)),
        ((2 << 30) - 2 * MIB, 2 * MIB, (4, 8 * MIB)),
        (1 << 30, 2 * MIB, (4, 8 * MIB)),
        (512 * MIB, 2 * MIB, (4, 4 * MIB)),
        (256 * MIB, 64 << 10, (4, 2 * MIB)),
        (64 * MIB, 64 << 10, (4, 512 << 10)),
        (4 * MIB, 64 << 10, (4, 32 << 10)),
        (2 * MIB, 64 << 10, (4, 16 << 10)),
        (1 * MIB, 64 << 10, (4, 16 << 10)),  # whole pages: less would leave one half used
        (64 * MIB, 2 * MIB, (4, 512 << 10)),
        (16 * MIB, 2 * MIB, (4, 512 << 10)),
    ],
)
def test_slots_of_a_region(region: int, page: int, expected: tuple[int, int]) -> None:
    assert Settings("ipc:///x").staging(region, page) == expected


@pytest.mark.parametrize(
    ("wanted", "size"), [(4096, 4096), (5000, 4096), (1, 4096), (MIB + 1, MIB), (8 * MIB, 8 * MIB)]
)
def test_a_chosen_size_is_kept_in_whole_os_pages(wanted: int, size: int) -> None:
    assert Settings("ipc:///x", slot_size=wanted).staging(1 << 30, 2 * MIB) == (4, size)


@given(
    region=st.integers(20, 42).map(lambda bits: 1 << bits) | st.integers(1 << 20, 1 << 40),
    page=st.integers(16, 21).map(lambda bits: 1 << bits),
    slots=st.integers(2, 64),
)
def test_staging_takes_its_share_and_no_more(region: int, page: int, slots: int) -> None:
    count, size = Settings("ipc:///x", slots=slots).staging(region, page)
    assert count == slots
    assert size % 4096 == 0
    assert 4096 <= size <= LARGEST_SLOT
    share = max(region // SHARE_OF_REGION, 4096 * slots)
    assert count * size <= -(-share // page) * page
