# SPDX-License-Identifier: Apache-2.0
"""OFD locks: who holds a frame, and what death, stopping and forking do to that."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flyt.errors import RegionError
from flyt.shm.locks import _FLOCK, FrameLocks, split

HOLDER = """
import os, sys, time
from flyt.shm.locks import FrameLocks
locks = FrameLocks(sys.argv[1])
print(locks.lock(10, 5), flush=True)
input()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "flyt" / "region.lock"


@pytest.fixture
def locks(path: Path) -> Iterator[FrameLocks]:
    locks = FrameLocks(path)
    yield locks
    locks.close()


def test_the_file_is_private(locks: FrameLocks, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_all_or_none_between_two_descriptions(locks: FrameLocks, path: Path) -> None:
    with closing(FrameLocks(path)) as other:
        assert locks.lock(10, 5)
        assert not other.lock(8, 3)
        assert not other.lock(14, 1)
        assert not other.lock(0, 100)
        assert other.lock(8, 2)  # nothing of the refused ranges was kept
        assert other.lock(15, 1)
        locks.unlock(12, 1)
        assert other.lock(12, 1)
        assert not other.lock(11, 1)
        assert not locks.lock(12, 1)
        other.close()
        assert locks.lock(12, 1)
        assert locks.lock(0, 10)


def test_who_looks_sees_all_locks_but_takes_none(locks: FrameLocks, path: Path) -> None:
    with closing(FrameLocks(path)) as other, open(path, "rb") as looker:
        fd = looker.fileno()
        assert split(fd, [(0, 20), (30, 5)]) == (((0, 20), (30, 5)), ())
        assert other.lock(12, 3)
        assert locks.lock(2, 2)
        assert locks.lock(15, 1)
        assert locks.lock(19, 12)
        unlocked, locked = split(fd, [(40, 2), (0, 20), (30, 5)])
        assert unlocked == ((40, 2), (0, 2), (4, 8), (16, 3), (31, 4))
        assert sorted(locked) == [(2, 2), (12, 3), (15, 1), (19, 1), (30, 1)]
        assert locks.lock(0, 2), "a look holds nothing"
        assert split(fd, [(12, 1), (13, 1)]) == ((), ((12, 1), (13, 1)))
        whole = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 50, 0, 0)  # length 0: to the end
        fcntl.fcntl(other._fd, fcntl.F_OFD_SETLK, whole)
        assert split(fd, [(45, 10)]) == (((45, 5),), ((50, 5),))


def test_one_object_does_not_take_a_frame_twice(locks: FrameLocks) -> None:
    assert locks.lock(3, 2)
    assert not locks.lock(4, 1)
    assert not locks.lock(0, 9)
    locks.unlock(0, 9)
    assert locks.lock(4, 1)


def test_another_process_that_is_stopped_holds_on_and_killed_lets_go(
    locks: FrameLocks, path: Path, python: Callable[..., Any]
) -> None:
    child = python(HOLDER, path)
    assert child.line() == "True"
    assert not locks.lock(12, 1)
    os.kill(child.pid, signal.SIGSTOP)
    assert not locks.lock(12, 1)
    child.end()
    assert locks.lock(10, 5)


def test_a_forked_child_holds_nothing(
    locks: FrameLocks, path: Path, python: Callable[..., Any]
) -> None:
    """The parent is killed; its forked child lives on, and the frames are free all the same."""
    child = python(
        HOLDER.replace(
            "input()",
            "pid = os.fork()\n"
            "if not pid:\n"
            "    from flyt.errors import RegionError\n"
            "    held = [os.readlink(f'/proc/self/fd/{f}') for f in os.listdir('/proc/self/fd')"
            " if os.path.exists(f'/proc/self/fd/{f}')]\n"
            "    try:\n"
            "        locks.lock(40, 1)\n"
            "        said = 'locked'\n"
            "    except RegionError as exc:\n"
            "        said = str(exc)\n"
            "    locks.unlock(10, 5); locks.close()\n"
            "    print(os.getpid(), sys.argv[1] in held, said, flush=True)\n"
            "    input()\n"
            "    os._exit(0)\n"
            "os.waitpid(pid, 0)",
        ),
        path,
    )
    assert child.line() == "True"
    orphan, inherited, said = child.line().split(maxsplit=2)
    assert inherited == "False"
    assert said == f"the lock file {path} is closed here; a forked child has no session"
    try:
        assert not locks.lock(10, 1)  # the child's close unlocked nothing of the parent's
        os.kill(child.pid, signal.SIGKILL)
        child.popen.wait(60)
        assert locks.lock(10, 5)
        os.kill(int(orphan), 0)  # it does live
    finally:
        os.kill(int(orphan), signal.SIGKILL)


@pytest.mark.parametrize(("first", "count"), [(0, 0), (5, -1), (-1, 2)])
def test_what_is_no_range(locks: FrameLocks, first: int, count: int) -> None:
    for call in (locks.lock, locks.unlock):
        with pytest.raises(RegionError, match="can't be locked"):
            call(first, count)
    assert locks.lock(1000, 1)


def test_closed(locks: FrameLocks) -> None:
    assert locks.lock(0, 1)
    locks.close()
    locks.close()
    locks.unlock(0, 1)
    with pytest.raises(RegionError, match="closed"):
        locks.lock(0, 1)


def test_a_lock_file_that_can_t_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RegionError, match="FLYT_RUNTIME_DIR"):
        FrameLocks(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RegionError, match="symbolic"):
        FrameLocks(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_exec_does_not_inherit(locks: FrameLocks) -> None:
    assert not os.get_inheritable(locks._fd)


@pytest.mark.parametrize(("folder", "file"), [(0o700, 0o600), (0o2770, 0o660), (0o777, 0o660)])
def test_a_guests_lock_file_is_for_whom_its_folder_is(
    tmp_path: Path, folder: int, file: int
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(folder)
    FrameLocks(tmp_path / "run" / "flyt.lock").close()
    assert stat.S_IMODE((tmp_path / "run" / "flyt.lock").stat().st_mode) == file
