# SPDX-License-Identifier: Apache-2.0
"""Memory that a C allocator handed out (PyTorch's pool, the preloaded cudaMalloc), as buffers.

The allocator frees without asking Python. So a block is looked up there each time, by a serial that
is never used twice, and a thread reads which exported blocks were freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import struct
import threading

from flyt.errors import DeviceError, SharingError
from flyt.ipc.blocks import blocks
from flyt.ipc.buffer import KEY_BYTES, Buffer, IPCBufferDescriptor
from flyt.ipc.memory import VirtualMemoryResource

_SERIAL = struct.Struct("=Q")


class _Found(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("serial", ctypes.c_uint64),
        ("device", ctypes.c_int32),
    )


class ForeignAllocator:
    """Finds the blocks of one C library.

    Parameters
    ----------
    library : ctypes.CDLL
        With the functions of ``native/vmm.h``.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._find = library.flyt_vmm_find
        self._find.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Found))
        self._export = library.flyt_vmm_export
        self._export.argtypes = (ctypes.c_uint64, ctypes.POINTER(ctypes.c_int))
        self._lock = threading.Lock()
        self._known: dict[int, Buffer] = {}
        read, write = os.pipe2(os.O_CLOEXEC)
        # The allocator may be called with the GIL held, so it must not wait for our thread. The
        # pipe holds 8,192 notes; a lost one keeps its block's memory until this process ends.
        os.set_blocking(write, False)
        library.flyt_vmm_watch.argtypes = (ctypes.c_int,)
        library.flyt_vmm_watch.restype = None
        library.flyt_vmm_watch(write)
        threading.Thread(
            target=self._watch, args=(read,), name="flyt-ipc-freed", daemon=True
        ).start()
        blocks.add_finder(self.find)

    def find(self, address: int) -> Buffer | None:
        """The block that holds this address, if it is the library's."""
        found = _Found()
        if not self._find(address, found):
            return None
        with self._lock:
            if found.serial not in self._known:
                self._known[found.serial] = self._buffer(found)
            return self._known[found.serial]

    def _buffer(self, found: _Found) -> Buffer:
        resource = VirtualMemoryResource(found.device)
        fd = ctypes.c_int(-1)
        code = self._export(found.serial, fd)
        if code:
            raise DeviceError(code, "cuMemExportToShareableHandle for an allocator's block")
        size, key = int(found.size), secrets.token_bytes(KEY_BYTES)
        uuid = resource.driver.uuid(found.device)
        descriptor = IPCBufferDescriptor(key, uuid, size, (size,), (fd.value,))
        undo = contextlib.ExitStack()
        undo.callback(os.close, fd.value)  # it pins the memory, so it goes when the block does
        return Buffer(
            resource, int(found.start), lambda: descriptor, undo, key=key, size=size,
            mapped_size=size, device=int(found.device), foreign=True,
        )  # fmt: skip

    def _watch(self, read: int) -> None:
        while data := os.read(read, _SERIAL.size * 4096):
            for (serial,) in _SERIAL.iter_unpack(data):  # notes are written whole
                with self._lock:
                    buffer = self._known.pop(serial, None)
                if buffer is not None:
                    buffer.close()


_allocators: dict[str, ForeignAllocator] = {}
_lock = threading.Lock()


def adopt(name: str, library: ctypes.CDLL) -> None:
    """Let this process share what a library allocates. Idempotent."""
    if not hasattr(library, "flyt_vmm_find"):
        raise SharingError(f"{name} is no allocator of Flyt's")
    with _lock:
        if name not in _allocators:
            _allocators[name] = ForeignAllocator(library)
