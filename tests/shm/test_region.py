# SPDX-License-Identifier: Apache-2.0
"""The region as an object of the system: names, space, adoption, the daemon's lock."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flyt.errors import ConfigurationError, RegionError
from flyt.shm.layout import MAGIC, MIB
from flyt.shm.region import Region, free_space, resolve

SIZE = 2 * MIB
SHM = Path("/dev/shm")


def test_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.img").touch()
    (tmp_path / "flyt").mkdir()
    assert resolve("flyt") == "/dev/shm/flyt"  # a folder can't be meant
    assert resolve("/flyt") == "/dev/shm/flyt"
    assert resolve("/dev/shm/flyt") == "/dev/shm/flyt"
    assert resolve("there.img") == str(tmp_path / "there.img")
    assert resolve("./new.img") == str(tmp_path / "new.img")
    assert resolve(str(tmp_path / "new.img")) == str(tmp_path / "new.img")
    for bad in ("", "/", ".", "/..", "a\0b"):
        with pytest.raises(ConfigurationError):
            resolve(bad)


@pytest.mark.parametrize("where", ["posix", "slash", "file"])
def test_create_open_unlink(where: str, name: str, tmp_path: Path) -> None:
    spec = {"posix": name, "slash": f"/{name}", "file": str(tmp_path / name)}[where]
    path = tmp_path / name if where == "file" else SHM / name
    region = Region.create(spec, SIZE)
    with closing(region):
        assert (region.path, region.size, region.created) == (str(path), SIZE, True)
        status = path.stat()
        assert status.st_size == SIZE
        assert status.st_blocks * 512 >= SIZE  # allocated, not sparse
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert fcntl.fcntl(region.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        with pytest.raises(RegionError, match="exists already"):
            Region.create(spec, SIZE)
        with closing(Region.open(spec)) as other:
            assert (other.size, other.created) == (SIZE, False)
            os.pwrite(other.fd, b"same", 100)
            other.unlink()
        assert os.pread(region.fd, 4, 100) == b"same"
        assert path.exists()
        region.unlink()
        assert not path.exists()
        region.unlink()
    assert region.fd == -1
    region.close()


def test_unlink_spares_a_successor(name: str) -> None:
    with closing(Region.create(name, SIZE)) as first:
        (SHM / name).unlink()
        with closing(Region.create(name, SIZE)) as second:
            first.unlink()
            assert (SHM / name).exists()
            second.unlink()
        assert not (SHM / name).exists()


def test_adopt(name: str) -> None:
    with closing(Region.create(name, SIZE)) as made:
        for size in (SIZE, None):
            with closing(Region.create_or_adopt(name, size)) as adopted:
                assert (adopted.size, adopted.created) == (SIZE, False)
                adopted.unlink()
                assert (SHM / name).exists()
        with pytest.raises(RegionError, match=rf"{SIZE} bytes, not {2 * SIZE}"):
            Region.create_or_adopt(name, 2 * SIZE)
        made.unlink()
    with closing(Region.create_or_adopt(name, SIZE)) as made:
        assert made.created
        made.unlink()
    with pytest.raises(RegionError, match="there is no region"):
        Region.create_or_adopt(name, None)


def test_adopting_a_sparse_file_allocates_it_and_keeps_its_bytes(name: str) -> None:
    bytes_there = MAGIC.to_bytes(8, "little") + b"was here"  # of an earlier daemon
    with open(SHM / name, "wb") as file:
        file.write(bytes_there)
        file.truncate(SIZE)
    assert (SHM / name).stat().st_blocks * 512 < SIZE
    with closing(Region.create_or_adopt(name, SIZE)) as region:
        assert (SHM / name).stat().st_blocks * 512 >= SIZE
        assert os.pread(region.fd, 16, 0) == bytes_there


def test_a_file_that_holds_something_else_is_not_adopted(tmp_path: Path) -> None:
    """Formatting would wipe it: a mistyped path to a disk image, say."""
    for at in (0, 100_000, SIZE - 1):
        path = tmp_path / f"image{at}"
        path.write_bytes(bytes(at) + b"x" + bytes(SIZE - at - 1))
        with pytest.raises(RegionError, match="no Flyt region"):
            Region.create_or_adopt(str(path), SIZE)
        assert path.read_bytes()[at : at + 1] == b"x"
    fresh = tmp_path / "fresh"
    fresh.write_bytes(bytes(SIZE))
    with closing(Region.create_or_adopt(str(fresh), None)) as region:
        assert not region.created


@pytest.mark.parametrize("size", [0, 4096, 256 * 1024 - 1])
def test_a_file_too_small_for_any_region(size: int, tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(bytes(size))
    for call in (Region.open, lambda spec: Region.create_or_adopt(spec, None)):
        with pytest.raises(RegionError, match=f"has {size} bytes"):
            call(str(path))
    path.unlink()
    with pytest.raises(ConfigurationError, match="too small"):
        Region.create(str(path), size)
    assert not path.exists()


def test_what_can_t_be_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(RegionError, match="start flyt-backend"):
        Region.open(name)
    with pytest.raises(RegionError, match="directory"):
        Region.open(str(tmp_path))
    with pytest.raises(RegionError, match="create"):
        Region.create(str(tmp_path / "no" / "folder"), SIZE)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RegionError, match="no mappable file"):
        Region.open(str(tmp_path / "pipe"))
    (SHM / name).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(bytes(SIZE))
    with pytest.raises(RegionError, match="symbolic links"):
        Region.open(name)


def test_more_than_is_free_says_so_and_leaves_nothing(name: str) -> None:
    wanted = free_space(str(SHM)) + 64 * MIB
    with pytest.raises(RegionError, match=r"\d+ bytes free.*--size"):
        Region.create(name, wanted)
    assert not (SHM / name).exists()
    with open(SHM / name, "wb") as file:
        file.truncate(wanted)
    with pytest.raises(RegionError, match="--size"):
        Region.create_or_adopt(name, wanted)
    assert (SHM / name).stat().st_blocks == 0


def test_an_allocation_that_fails_leaves_nothing(name: str, python: Callable[..., Any]) -> None:
    """RLIMIT_FSIZE makes posix_fallocate itself fail, as a cgroup or a race for space would."""
    child = python(
        "import os, resource, sys\n"
        "from flyt.errors import RegionError\n"
        "from flyt.shm.region import Region\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "try:\n"
        "    Region.create(sys.argv[1], 2 << 20)\n"
        "except RegionError as exc:\n"
        "    print(exc, len(os.listdir('/proc/self/fd')) - before)\n",
        name,
    )
    said = child.finish()
    assert "can't allocate 2097152 bytes" in said
    assert said.endswith("choose a smaller --size 0")
    assert not (SHM / name).exists()


def test_one_daemon_a_region(region: Region, python: Callable[..., Any]) -> None:
    region.lock_exclusive()
    region.lock_exclusive()
    with closing(Region.open(region.path)) as other:
        with pytest.raises(RegionError, match="another flyt-backend"):
            other.lock_exclusive()
        region.close()
        other.lock_exclusive()


def test_a_killed_daemon_s_lock_is_gone_though_its_child_lives(
    region: Region, python: Callable[..., Any]
) -> None:
    child = python(
        "import os, subprocess, sys\n"
        "from flyt.shm.region import Region\n"
        "region = Region.open(sys.argv[1])\n"
        "region.lock_exclusive()\n"
        "worker = subprocess.Popen(['sleep', '60'], pass_fds=[region.fd], stdout=2)\n"
        "print(worker.pid, flush=True)\n"
        "input()\n",
        region.path,
    )
    worker = int(child.line())
    try:
        with pytest.raises(RegionError, match="another flyt-backend"):
            region.lock_exclusive()
        child.end()
        region.lock_exclusive()
    finally:
        os.kill(worker, 9)


def test_free_space_of_a_path_that_is_not_there_yet(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    near = free_space(str(tmp_path / "a" / "b"))
    assert abs(near - status.f_bavail * status.f_frsize) < 256 * MIB
