# SPDX-License-Identifier: Apache-2.0
"""The runtime folder: where it is, and that it is safe."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from flyt.errors import ConfigurationError
from flyt.shm import runtime_dir as module
from flyt.shm.runtime_dir import runtime_dir


@pytest.fixture(autouse=True)
def _bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLYT_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(module, "SYSTEM_FOLDER", tmp_path / "run" / "flyt")
    monkeypatch.setattr(module, "SHARED_TEMPORARY", tmp_path)


@pytest.fixture
def uid(monkeypatch: pytest.MonkeyPatch) -> int:
    """The tests of ordinary users run as root too."""
    uid = os.geteuid() or 4321
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    return uid


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_variable_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    monkeypatch.setenv("FLYT_RUNTIME_DIR", str(tmp_path / "chosen" / "here"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    assert runtime_dir() == tmp_path / "chosen" / "here"
    assert _mode(tmp_path / "chosen" / "here") == 0o700
    assert runtime_dir() == tmp_path / "chosen" / "here"


def test_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    assert runtime_dir() == tmp_path / "run" / "flyt"
    assert _mode(tmp_path / "run" / "flyt") == 0o700


def test_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    assert runtime_dir() == tmp_path / "xdg" / "flyt"
    assert _mode(tmp_path / "xdg" / "flyt") == 0o700


def test_temporary(tmp_path: Path, uid: int) -> None:
    folder = tmp_path / f"flyt-{uid}"
    folder.mkdir(mode=0o700)
    if os.getuid() == 0:
        os.chown(folder, uid, -1)
    assert runtime_dir() == folder
    folder.chmod(0o750)
    with pytest.raises(ConfigurationError, match="FLYT_RUNTIME_DIR"):
        runtime_dir()


def test_temporary_that_is_a_link_to_our_own_folder(tmp_path: Path, uid: int) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    if os.getuid() == 0:
        os.chown(own, uid, -1)
    (tmp_path / f"flyt-{uid}").symlink_to(own)
    with pytest.raises(ConfigurationError, match="alone"):
        runtime_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's folder")
def test_temporary_of_another_user(tmp_path: Path, uid: int) -> None:
    (tmp_path / f"flyt-{uid}").mkdir(mode=0o700)
    with pytest.raises(ConfigurationError, match="alone"):
        runtime_dir()


def test_unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    monkeypatch.setenv("FLYT_RUNTIME_DIR", "relative/folder")
    with pytest.raises(ConfigurationError, match="relative"):
        runtime_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLYT_RUNTIME_DIR", str(tmp_path / "file" / "sub"))
    with pytest.raises(ConfigurationError, match="set FLYT_RUNTIME_DIR"):
        runtime_dir()
    monkeypatch.setenv("FLYT_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match="set FLYT_RUNTIME_DIR"):
        runtime_dir()
