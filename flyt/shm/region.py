# SPDX-License-Identifier: Apache-2.0
"""The region as an object of the operating system: found, created, adopted, locked, unlinked.

A region is a file that both sides map. Emulated it is a POSIX shared-memory object (QEMU's
``memory-backend-file`` maps the very same object under /dev/shm); any other mappable file serves
as well. Its pages are allocated at once: a write to a page that a full /dev/shm can't supply
would be SIGBUS, long after the cause.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os

import posix_ipc

from flyt.errors import ConfigurationError, RegionError
from flyt.shm.layout import MAGIC, MIN_PAGE_COUNT, MIN_PAGE_SIZE

SHM_DIRECTORY = "/dev/shm"
"""Where Linux shows POSIX shared-memory objects."""
MIN_SIZE = (MIN_PAGE_COUNT + 1) * MIN_PAGE_SIZE
"""The smallest region that can be formatted, with the smallest pages."""
MODE = 0o600
"""Who can open the region sees every client's bytes."""
LOOKED_AT = 256 << 20
"""Bytes of a file without Flyt's magic that have to be zero before it is adopted: a fresh memory
backend is all zero, a disk image or a data set is not."""
STAT_BLOCK = 512
"""The unit of ``st_blocks``, whatever the file system."""


class _Exists(RegionError):
    """The object to create is there already."""


def resolve(spec: str) -> str:
    """Absolute path of the region that ``spec`` names.

    Parameters
    ----------
    spec : str
        The name of a POSIX shared-memory object (``"flyt"`` or ``"/flyt"``), or a path: whatever
        has a slash beyond its first character, or names an existing file as it stands.

    Raises
    ------
    ConfigurationError
        ``spec`` can name neither.
    """
    name = spec.removeprefix("/")
    if name in ("", ".", "..") or "\0" in spec:
        raise ConfigurationError(
            f"{spec!r} is no region: give a name like 'flyt' or the path of a file"
        )
    if "/" in name or (os.path.exists(spec) and not os.path.isdir(spec)):
        return os.path.abspath(spec)
    return os.path.join(SHM_DIRECTORY, name)


def free_space(path: str) -> int:
    """Bytes that an ordinary user may still allocate on the file system of ``path``."""
    while not os.path.exists(path):
        parent = os.path.dirname(path)
        if parent == path:
            break
        path = parent or os.curdir
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _is_posix_name(path: str) -> bool:
    return os.path.dirname(path) == SHM_DIRECTORY


def _make(path: str) -> int:
    try:
        if _is_posix_name(path):
            name = "/" + os.path.basename(path)
            return int(posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=MODE).fd)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(path, flags, MODE)
    except (FileExistsError, posix_ipc.ExistentialError) as exc:
        raise _Exists(f"{path} exists already: adopt it, remove it or choose another name") from exc
    except (OSError, ValueError, posix_ipc.Error) as exc:
        raise RegionError(f"can't create the region {path}: {exc}") from exc


def _remove(path: str) -> None:
    if _is_posix_name(path):
        posix_ipc.unlink_shared_memory("/" + os.path.basename(path))
    else:
        os.unlink(path)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _allocate(fd: int, path: str, size: int) -> None:
    """Back all ``size`` bytes with memory; what the file holds stays."""
    missing = size - os.fstat(fd).st_blocks * STAT_BLOCK
    free = free_space(path)
    if missing > free:
        raise RegionError(
            f"{os.path.dirname(path)} has {free} bytes free, the region {path} of {size} bytes "
            f"needs {missing}: choose a smaller --size, or enlarge it "
            "(docker run --shm-size, mount -o remount,size=...)"
        )
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as exc:
        hint = ""
        if exc.errno in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
            hint = f" ({free_space(path)} bytes are free): choose a smaller --size"
        raise RegionError(
            f"can't allocate {size} bytes for the region {path}: {exc.strerror}{hint}"
        ) from exc


def _check_adoptable(region: Region) -> None:
    """Refuse a file that holds something else: formatting would wipe it."""
    step = 1 << 20
    if int.from_bytes(os.pread(region.fd, 8, 0), "little") == MAGIC:
        return
    for offset in range(0, min(region.size, LOOKED_AT), step):
        if any(os.pread(region.fd, step, offset)):
            raise RegionError(
                f"{region.path} holds something that is no Flyt region: choose another --region, "
                "or remove the file"
            )


class Region:
    """An open region. It owns its descriptors (close-on-exec) and maps nothing.

    Attributes
    ----------
    fd : int
        Maps page frames with payload; -1 once closed.
    control_fd : int
        Maps what both sides race on: superblock, page table, control pages. The same as ``fd``
        but for a PCI device (`flyt.shm.ivshmem`).
    path : str
        Absolute.
    size : int
        Bytes.
    created : bool
        Whether this object made the file, so that `unlink` may remove it.
    """

    def __init__(
        self, fd: int, path: str, size: int, created: bool, *, control_fd: int | None = None
    ) -> None:
        self.fd = fd
        self.control_fd = fd if control_fd is None else control_fd
        self.path = path
        self.size = size
        self.created = created
        self._identity = _identity(os.fstat(fd))
        self._lock_fd = -1

    @classmethod
    def create(cls, spec: str, size: int) -> Region:
        """Make a new region of ``size`` bytes, readable by its owner alone.

        Raises
        ------
        ConfigurationError
            The size is too small for any region.
        RegionError
            It exists, or there is too little space; nothing is left behind.
        """
        path = resolve(spec)
        if size < MIN_SIZE:
            raise ConfigurationError(
                f"a region of {size} bytes is too small: choose --size {MIN_SIZE} or more"
            )
        with contextlib.ExitStack() as undo:
            fd = _make(path)
            undo.callback(_remove, path)
            undo.callback(os.close, fd)
            _allocate(fd, path, size)
            undo.pop_all()
        return cls(fd, path, size, True)

    @classmethod
    def open(cls, spec: str) -> Region:
        """Open a region that exists.

        Raises
        ------
        RegionError
            It doesn't exist, isn't ours to open, or has no size.
        """
        path = resolve(spec)
        # /dev/shm is writable for all: a link there may lead anywhere.
        follow = os.O_NOFOLLOW if _is_posix_name(path) else 0
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | follow)
        except FileNotFoundError as exc:
            raise RegionError(
                f"there is no region {path}: start flyt-backend, or name another region"
            ) from exc
        except OSError as exc:
            raise RegionError(f"can't open the region {path}: {exc.strerror}") from exc
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            try:
                size = os.lseek(fd, 0, os.SEEK_END)
            except OSError as exc:
                raise RegionError(f"{path} is no mappable file: {exc.strerror}") from exc
            if size < MIN_SIZE:
                raise RegionError(
                    f"{path} has {size} bytes, a region needs {MIN_SIZE} or more: "
                    "give the file its size before flyt-backend adopts it"
                )
            undo.pop_all()
        return cls(fd, path, size, False)

    @classmethod
    def create_or_adopt(cls, spec: str, size: int | None) -> Region:
        """Create the region, or adopt the object that has its name already (QEMU made it, say).

        Parameters
        ----------
        spec : str
        size : int or None
            None adopts whatever size is there, and creates nothing.

        Raises
        ------
        RegionError
            The object's size is not ``size``, or it can't be created or backed with memory.
        """
        if size is not None:
            with contextlib.suppress(_Exists):
                return cls.create(spec, size)
        region = cls.open(spec)
        with contextlib.ExitStack() as undo:
            undo.callback(region.close)
            if size is not None and size != region.size:
                raise RegionError(
                    f"the region {region.path} exists with {region.size} bytes, not {size}: "
                    f"choose --size {region.size}, another --region, or remove it"
                )
            _check_adoptable(region)
            # Whoever made it may have left it sparse.
            if os.fstat(region.fd).st_blocks * STAT_BLOCK < region.size:
                _allocate(region.fd, region.path, region.size)
            undo.pop_all()
        return region

    def lock_exclusive(self) -> None:
        """Keep every other daemon off this region until `close` or the end of this process.

        The lock hangs on a file description of its own, so that a worker that inherits ``fd``
        does not hold it on.

        Raises
        ------
        RegionError
            Another daemon has it.
        """
        if self._lock_fd >= 0:
            return
        try:
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise RegionError(f"can't lock the region {self.path}: {exc.strerror}") from exc
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise RegionError(
                    f"another flyt-backend serves the region {self.path}: "
                    "stop it or choose another --region"
                ) from exc
            except OSError as exc:
                raise RegionError(f"can't lock the region {self.path}: {exc.strerror}") from exc
            undo.pop_all()
        self._lock_fd = fd

    def unlink(self) -> None:
        """Remove the name, if this object created it and it still names this very file.

        Works after `close` too. May be called again.
        """
        if not self.created:
            return
        self.created = False
        with contextlib.suppress(FileNotFoundError, posix_ipc.ExistentialError):
            if _identity(os.stat(self.path)) == self._identity:
                _remove(self.path)

    def close(self) -> None:
        """Close the descriptors. May be called again. Mappings stay."""
        for fd in {self._lock_fd, self.fd, self.control_fd}:
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self.fd = self.control_fd = -1
