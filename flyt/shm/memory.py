# SPDX-License-Identifier: Apache-2.0
"""Raw memory of this process: libc's mmap family and plain loads, stores and copies.

Python's ``mmap`` module can't place a mapping at an address, so this goes to libc. Addresses are
integers; whoever calls answers for them, as in C. Calls into libc release the GIL.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from errno import EAGAIN, EEXIST, ENOMEM

from flyt.errors import RegionError

PROT_NONE = 0
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
MAP_FIXED_NOREPLACE = 0x100000
MADV_DONTFORK = 10
MREMAP_MAYMOVE = 1
MREMAP_FIXED = 2
MAP_FAILED = (1 << 64) - 1
OS_PAGE = mmap.PAGESIZE
ADDRESS_LIMIT = 1 << 64
"""ctypes cuts integers to 64 bits in silence, so they are checked before."""
WORD = 8
_PYBUF_WRITE = 0x200

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
_mremap = _libc.mremap
_mremap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
)
_mremap.restype = ctypes.c_void_p
_mincore = _libc.mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# Copies report no errno; a second handle spares swapping it around each call.
_plain = ctypes.CDLL(None)
_memmove = _plain.memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None
_memset = _plain.memset
_memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_memset.restype = None

_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_from_memory.restype = ctypes.py_object


_PAGES_AT_ONCE = 1 << 16
"""Of `is_mapped`, which the kernel answers with a byte for each."""


def _failure(what: str, address: int, size: int) -> Exception:
    code = ctypes.get_errno()
    text = f"{what} of {size} bytes at {address:#x} failed: {os.strerror(code)}"
    if code in (ENOMEM, EAGAIN):
        return MemoryError(
            f"{text} (address space, vm.max_map_count or a memory limit is exhausted)"
        )
    return RegionError(text)


def _check_range(address: int, size: int) -> None:
    if address <= 0 or size <= 0 or address + size > ADDRESS_LIMIT or address % OS_PAGE:
        raise RegionError(f"{size} bytes at {address:#x} are no page-aligned address range")


def _map(address: int, size: int, prot: int, flags: int, fd: int, offset: int) -> int | None:
    result = _mmap(address, size, prot, flags, fd, offset)
    return None if result == MAP_FAILED else int(result or 0)


def whole_pages(size: int) -> int:
    """The size of the OS pages that so many bytes take."""
    return -(-size // OS_PAGE) * OS_PAGE


def reserve(address: int, size: int) -> bool:
    """Reserve exactly this address range, without memory behind it (PROT_NONE).

    Returns
    -------
    bool
        False when part of the range is in use in this process; nothing is changed then.
    """
    _check_range(address, size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE
    got = _map(address, size, PROT_NONE, flags, -1, 0)
    if got is None:
        if ctypes.get_errno() == EEXIST:
            return False
        raise _failure("reserving", address, size)
    if got != address:  # Linux before 4.17 takes the address for a mere hint.
        release(got, size)
        return False
    return True


def release(address: int, size: int) -> None:
    """Unmap a range (munmap): a reservation of ours, with all that was mapped into it."""
    _check_range(address, size)
    if _munmap(address, size) != 0:
        raise _failure("unmapping", address, size)


def map_shared(address: int, fd: int, offset: int, size: int, *, writable: bool = True) -> None:
    """Map a file's bytes over part of a reservation of ours, replacing what is mapped there."""
    _check_range(address, size)
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if _map(address, size, prot, mmap.MAP_SHARED | MAP_FIXED, fd, offset) is None:
        raise _failure("mapping the region", address, size)


def unmap_reserved(address: int, size: int) -> None:
    """Turn a mapped part of a reservation of ours back into plain reservation."""
    _check_range(address, size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
    if _map(address, size, PROT_NONE, flags, -1, 0) is None:
        raise _failure("unmapping", address, size)


def exclude_from_fork(address: int, size: int) -> None:
    """Leave the range out of forked children (MADV_DONTFORK): it simply isn't there."""
    _check_range(address, size)
    if _madvise(address, size, MADV_DONTFORK) != 0:
        raise _failure("excluding from fork", address, size)


def is_mapped(address: int, size: int) -> bool:
    """Whether something is mapped at each of ``size`` > 0 bytes from ``address`` on."""
    end = address + size
    at = address // mmap.PAGESIZE * mmap.PAGESIZE
    pages = ctypes.create_string_buffer(_PAGES_AT_ONCE)
    while at < end:
        step = min(end - at, _PAGES_AT_ONCE * mmap.PAGESIZE)
        if _mincore(at, step, pages):
            return False
        at += step
    return True


def anonymous(size: int) -> int:
    """Address of fresh private zeroed memory, page-aligned. The caller gives it to `release`."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    got = None
    if size > 0:
        got = _map(0, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if got is None:
        raise MemoryError(f"no anonymous mapping of {size} bytes")
    return got


def copy(dst: int, src: int, size: int) -> None:
    """memmove; the ranges may overlap."""
    _memmove(dst, src, size)


def fill(address: int, value: int, size: int) -> None:
    """memset."""
    _memset(address, value, size)


def view(address: int, size: int) -> memoryview:
    """Writable bytes of this memory, format ``"B"``. It keeps nothing alive."""
    if size == 0:
        return memoryview(bytearray())
    result = _from_memory(address, size, _PYBUF_WRITE)
    if not isinstance(result, memoryview):
        raise RegionError(f"no view of {size} bytes at {address:#x}")
    return result


def _check_word(address: int) -> None:
    if address <= 0 or address % WORD:
        raise RegionError(f"{address:#x} is no aligned word: the access would not be atomic")


def load_word(address: int) -> int:
    """Read an aligned 8-byte word in one access."""
    _check_word(address)
    return ctypes.c_uint64.from_address(address).value


def store_word(address: int, value: int) -> None:
    """Write an aligned 8-byte word in one access."""
    _check_word(address)
    ctypes.c_uint64.from_address(address).value = value


def make_private(address: int, size: int) -> None:
    """Replace a mapped range by private memory with the same bytes, in one step.

    A thread that reads or writes there notices nothing: at every moment one of the two is mapped.
    What it stores after its byte was copied and before the step is lost.

    Raises
    ------
    MemoryError
        There is no memory for it; the range is as before.
    """
    _check_range(address, size)
    fresh = anonymous(size)
    copy(fresh, address, size)
    if _mremap(fresh, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, address) == MAP_FAILED:
        failure = _failure("replacing", address, size)
        release(fresh, size)
        raise failure
