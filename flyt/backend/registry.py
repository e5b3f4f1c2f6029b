# SPDX-License-Identifier: Apache-2.0
"""The <pid:VA> map: which window belongs to which client process.

A command names a place by an index into its window, a size and a pid. The index is arithmetic on
the window's base; the pid only verifies that the command means this process. What identifies a
client is its session, never its pid: pids of two guests may be equal.
"""

from __future__ import annotations

import dataclasses
import threading

from flyt.errors import DeviceError, ProtocolError
from flyt.shm.window import Window


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One client process: its pid and the window at its virtual address ``window.base``."""

    pid: int
    window: Window


class Registry:
    """All windows of a worker, by session."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, Entry] = {}

    def bind(self, session: int, pid: int, window: Window) -> None:
        with self._lock:
            self._entries[session] = Entry(pid, window)

    def drop(self, session: int) -> None:
        with self._lock:
            self._entries.pop(session, None)

    def locate(self, session: int, pid: int, index: int, size: int) -> int:
        """Address of ``[index, index + size)`` of a client's window.

        Raises
        ------
        ProtocolError
            No window is attached, or the pid is another process's.
        DeviceError
            cudaErrorInvalidValue when the range is not inside one segment (CUDA: a copy may not
            span two registrations), or touches the control page.
        """
        with self._lock:
            entry = self._entries.get(session)
        if entry is None:
            raise ProtocolError("a copy through the region was asked for, but there is no window")
        if pid != entry.pid:
            raise ProtocolError(f"the command is for pid {pid}, the session is of pid {entry.pid}")
        if index < entry.window.geometry.page_size or not entry.window.contains(index, size):
            raise DeviceError(1, f"{size} bytes at index {index:#x} are not within one segment")
        return entry.window.base + index
