# SPDX-License-Identifier: Apache-2.0
"""What kernels print. The driver writes it to the standard output of the process that synchronises,
a worker's; one that serves a single session keeps it for that session's client.

In a file in memory: a pipe that nobody empties would block the driver in the middle of a call.
"""

from __future__ import annotations

import ctypes
import os

from flyt.rpc import messages as m

MOST_BYTES = 8 << 20
"""Kept for a client that doesn't ask; then the oldest goes, as in CUDA's own buffer of 1 MiB."""

_PAGE = 4096
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_LINES = 1
"""_IOLBF."""


class Prints:
    """The standard output of this process, in memory from now on."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._file = os.memfd_create("flyt-prints", os.MFD_CLOEXEC)
        os.dup2(self._file, 1)
        self._begin = 0
        """Where what nobody has taken begins. The file only grows: threads of the driver may be
        writing, and what they write must not get lost between a look and a truncation."""

    def take(self) -> bytes:
        """The oldest text that is there, and was not taken; 1 MiB at most."""
        self._libc.fflush(None)  # the driver writes with the C library, which keeps it back
        text = os.pread(self._file, m.INLINE_CHUNK, self._begin)
        self._forget(self._begin + len(text))
        return text

    def bound(self) -> None:
        """Kernels are launched on and on, and nobody asks: keep only the newest."""
        end = os.fstat(self._file).st_size
        if end - self._begin > MOST_BYTES:
            self._forget(end - MOST_BYTES)

    def _forget(self, until: int) -> None:
        """Give the memory of what lies before back."""
        start, self._begin = self._begin // _PAGE * _PAGE, until
        size = until // _PAGE * _PAGE - start
        if size:
            numbers = (ctypes.c_long(start), ctypes.c_long(size))
            self._libc.fallocate(self._file, _PUNCH_HOLE | _KEEP_SIZE, *numbers)


def begin(*, alone: bool) -> Prints | None:
    """Keep what kernels print, in a worker that serves one session alone. In any other each line
    goes out as it is written: the worker's end is none that the C library hears of."""
    if alone:
        return Prints()
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _LINES, ctypes.c_size_t(0))
    return None


def may_print(image: bytes) -> bool:
    """Whether an image's kernels may print: in a fatbin, compressed, nobody sees it."""
    return b"vprintf" in image or image.startswith(b"\x50\xed\x55\xba")
