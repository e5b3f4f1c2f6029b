# SPDX-License-Identifier: Apache-2.0
"""`TwinDriver`: the driver without a GPU. Physical memory is a sealed memfd, a mapping is an mmap.

Page tables, descriptors, access rights and the death of processes are the kernel's own, so whatever
is shown here about copies, references and leaks is real. What it can't show is a GPU's: streams are
always idle, and peer access is a setting.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import mmap
import os
import threading
from errno import ENODEV, ENOMEM, ENOSPC

from flyt.errors import DeviceError
from flyt.ipc.driver import Driver

MINIMUM_GRANULARITY = 65_536
RECOMMENDED_GRANULARITY = 2 << 20
"""As a GPU's large pages; the minimum is kept apart from it so that both matter in tests."""

INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, PEER_UNSUPPORTED = 1, 2, 101, 217

MAX_DEVICES = 16
"""Emulated devices of a host; their UUIDs end in two digits."""

DEFAULT_MEMORY = 4 << 30
"""Bytes that one process may have allocated. The kernel would give a memfd all memory there is, and
then kill somebody."""

MEMORY_NAME = "flyt-ipc"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""A file that can still shrink would kill whoever maps it (SIGBUS)."""

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = (1 << 64) - 1

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_mmap.restype = ctypes.c_void_p
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_mprotect = _libc.mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclasses.dataclass(slots=True)
class TwinHandle:
    """Physical memory: a memfd of this process's own."""

    fd: int
    size: int
    uuid: bytes
    own: bool = False
    """Whether this process allocated it."""


class TwinDriver(Driver):
    """Emulated devices of this host.

    Parameters
    ----------
    visible : tuple of int
        Host numbers of the devices that this process sees, in its own order, as
        CUDA_VISIBLE_DEVICES would say.
    peer_access : bool
        Whether the devices can use each other's memory.
    memory : int
        Bytes that this process may have allocated at a time, on all devices together.
    """

    kind = "emulated"
    host_accessible = True

    def __init__(
        self,
        visible: tuple[int, ...] = (0, 1),
        *,
        peer_access: bool = True,
        memory: int = DEFAULT_MEMORY,
    ) -> None:
        if not all(0 <= number < MAX_DEVICES for number in visible):
            raise DeviceError(INVALID_DEVICE, f"emulated devices are 0 to {MAX_DEVICES - 1}")
        self._uuids = tuple(b"flyt-ipc-twin-%02d" % number for number in visible)
        self._peer_access = peer_access
        self._free = memory
        self._lock = threading.Lock()

    def device_count(self) -> int:
        return len(self._uuids)

    def uuid(self, device: int) -> bytes:
        if not 0 <= device < len(self._uuids):
            raise DeviceError(INVALID_DEVICE, f"there is no device {device}")
        return self._uuids[device]

    def granularity(self, device: int, *, recommended: bool) -> int:
        self.uuid(device)
        return RECOMMENDED_GRANULARITY if recommended else MINIMUM_GRANULARITY

    def can_access(self, device: int, resident: int) -> bool:
        return self.uuid(device) == self.uuid(resident) or self._peer_access

    def create(self, device: int, size: int) -> TwinHandle:
        uuid = self.uuid(device)
        if size <= 0 or size % MINIMUM_GRANULARITY:
            raise DeviceError(INVALID_VALUE, f"{size} bytes are no multiple of the granularity")
        with self._lock:  # a reservation: what fails gives it back
            if size > self._free:
                raise DeviceError(OUT_OF_MEMORY, f"{size} bytes of {self._free} that are left")
            self._free -= size
        with contextlib.ExitStack() as undo:
            undo.callback(self._give_back, size)
            fd = self._physical(uuid, size)
            undo.pop_all()
        return TwinHandle(fd, size, uuid, own=True)

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._free += size

    def _physical(self, uuid: bytes, size: int) -> int:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        fd = os.memfd_create(f"{MEMORY_NAME}-{uuid.hex()}", flags)
        try:
            os.posix_fallocate(fd, 0, size)  # physical at once, as cuMemCreate's is
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as exc:
            os.close(fd)
            code = OUT_OF_MEMORY if exc.errno in (ENOMEM, ENOSPC) else INVALID_VALUE
            raise DeviceError(code, f"{size} bytes of emulated memory: {exc.strerror}") from exc
        return fd

    def release(self, handle: TwinHandle) -> None:
        fd, handle.fd = handle.fd, -1
        if fd < 0:
            raise DeviceError(INVALID_VALUE, "this handle was released already")
        os.close(fd)
        if handle.own:
            self._give_back(handle.size)

    def export_fd(self, handle: TwinHandle) -> int:
        return fcntl.fcntl(handle.fd, fcntl.F_DUPFD_CLOEXEC, 0)

    def import_fd(self, fd: int) -> TwinHandle:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as exc:
            raise DeviceError(INVALID_VALUE, "the descriptor is no memfd") from exc
        if seals != SEALS:
            raise DeviceError(
                INVALID_VALUE,
                f"the memfd's seals are {seals:#x}: memory of a TwinDriver has {SEALS:#x}",
            )
        name = os.readlink(f"/proc/self/fd/{fd}").removeprefix(f"/memfd:{MEMORY_NAME}-")
        try:
            uuid = bytes.fromhex(name.removesuffix(" (deleted)"))
        except ValueError as exc:
            raise DeviceError(INVALID_VALUE, "the memfd is no memory of a TwinDriver") from exc
        size = os.fstat(fd).st_size
        return TwinHandle(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0), size, uuid)

    def resident_device(self, handle: TwinHandle) -> int:
        device = self.device_of(handle.uuid)
        if device is None:
            raise DeviceError(INVALID_DEVICE, "the memory lies on a device out of sight")
        return device

    def reserve(self, size: int, alignment: int) -> int:
        _check(size, alignment)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = _map(0, size + alignment, _PROT_NONE, flags, -1)
        address = -(-start // alignment) * alignment
        if address > start:
            _unmap(start, address - start)
        if end := start + alignment - address:
            _unmap(address + size, end)
        return address

    def unreserve(self, address: int, size: int) -> None:
        _unmap(address, size)

    def map(self, address: int, size: int, handle: TwinHandle) -> None:
        if size != handle.size:  # mapping past its end would be SIGBUS
            raise DeviceError(INVALID_VALUE, f"the memory has {handle.size} bytes, not {size}")
        _map(address, size, _PROT_NONE, mmap.MAP_SHARED | _MAP_FIXED, handle.fd)

    def unmap(self, address: int, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _map(address, size, _PROT_NONE, flags, -1)

    def set_access(
        self, address: int, size: int, devices: tuple[int, ...], *, read_only: bool
    ) -> None:
        for device in devices:
            self.uuid(device)
        prot = mmap.PROT_READ | (0 if read_only else mmap.PROT_WRITE)
        if _mprotect(address, size, prot if devices else _PROT_NONE) != 0:
            raise _failure(f"access to {size} bytes at {address:#x}")

    def synchronize(self, device: int, stream: int | None = None) -> None:
        self.uuid(device)

    def export_event(self, device: int, stream: int) -> tuple[None, bytes]:
        self.uuid(device)
        return None, b"flyt-ipc-twin-event".ljust(64, b"\0")

    def return_event(self, event: None) -> None:
        """Nothing is kept for an event: the emulated streams are idle."""

    def wait_event(self, device: int, stream: int, handle: bytes) -> None:
        self.uuid(device)


def _check(size: int, alignment: int) -> None:
    if size <= 0 or size % mmap.PAGESIZE or alignment < mmap.PAGESIZE or alignment & alignment - 1:
        raise DeviceError(INVALID_VALUE, f"{size} bytes aligned to {alignment} can't be reserved")


def _failure(what: str) -> DeviceError:
    number = ctypes.get_errno()
    code = OUT_OF_MEMORY if number in (ENOMEM, ENODEV) else INVALID_VALUE
    return DeviceError(code, f"{what}: {os.strerror(number)}")


def _map(address: int, size: int, prot: int, flags: int, fd: int) -> int:
    result = _mmap(address, size, prot, flags, fd, 0)
    if result in (None, _MAP_FAILED):
        raise _failure(f"mapping {size} bytes at {address:#x}")
    return int(result)


def _unmap(address: int, size: int) -> None:
    if _munmap(address, size) != 0:
        raise _failure(f"unmapping {size} bytes at {address:#x}")
