# SPDX-License-Identifier: Apache-2.0
"""Copies and fills of an emulated device, and gates: memory moved in the order of a stream."""

from __future__ import annotations

import ctypes
import math

from flyt.backend.devices import codes
from flyt.backend.devices.base import Direct, Handle, Row
from flyt.backend.devices.emulated_base import EmulatedBase
from flyt.backend.devices.emulated_stream import Record, Task
from flyt.errors import DeviceError
from flyt.shm.copy import move
from flyt.shm.native import native


class EmulatedWork(EmulatedBase):
    """cudaMemcpyAsync, cudaMemsetAsync, their forms for rows, and cuStreamWaitValue."""

    def copy(self, destination: int, source: int, size: int, stream: Handle) -> None:
        def work() -> None:
            move(destination, source, size)

        self._put("copy", [(destination, size), (source, size)], size, work, stream)

    def fill(self, address: int, value: int, size: int, stream: Handle) -> None:
        def work() -> None:
            ctypes.memset(address, value & 0xFF, size)

        self._put("fill", [(address, size)], size, work, stream)

    def direct(self, stream: Handle) -> Direct | None:
        """Where nothing slows the device or makes it fail: what is brief is done at the call."""
        library = native()
        options = self._context.options
        plain = not options.faults and not options.latency and math.isinf(options.bandwidth)
        if library is None or not plain or self._stream(stream).destroyed:
            return None
        return Direct(0, library.plain_move, library.plain_fill, 0, 0, 0, 0)

    def copy_rows(
        self, destination: Row, source: Row, width: int, height: int, stream: Handle
    ) -> None:
        def move() -> None:
            for row in range(height):
                to = destination.address + row * destination.pitch
                ctypes.memmove(to, source.address + row * source.pitch, width)

        sides = _spans(width, height, destination, source)
        self._put("copy_rows", sides, width * height, move, stream)

    def fill_rows(self, rows: Row, value: int, width: int, height: int, stream: Handle) -> None:
        def work() -> None:
            for row in range(height):
                ctypes.memset(rows.address + row * rows.pitch, value & 0xFF, width)

        self._put("fill_rows", _spans(width, height, rows), width * height, work, stream)

    def gate(self, stream: Handle) -> Record:
        self._enter("gate")
        gate = Record()
        with self._context.lock:
            self._stream(stream).start().put_wait(gate)
        return gate

    def open_gate(self, gate: Handle) -> None:
        with self._context.progress:
            gate.reach()
            self._context.progress.notify_all()

    def _put(
        self, operation: str, sides: list[tuple[int, int]], size: int, work: Task, stream: Handle
    ) -> None:
        """Check the memory now, and do the work in the stream's turn."""
        failure = self._enter(operation)
        with self._context.lock:
            queue = self._stream(stream)
            if not size:
                return
            for address, span in sides:
                self._context.check(address, span, operation)
            if self._is_brief(queue, size, failure):
                work()
                return
            options = self._context.options
            seconds = options.latency + size / options.bandwidth if len(sides) == 2 else 0.0

            def slow_work() -> None:
                queue.pause(seconds)  # what a DMA takes
                work()

            queue.start().put_work(slow_work, failure)


def _spans(width: int, height: int, *rows: Row) -> list[tuple[int, int]]:
    if height > 1 and any(row.pitch < width for row in rows):
        raise DeviceError(codes.INVALID_PITCH, f"rows of {width} bytes overlap")
    return [(row.address, row.span(width, height)) for row in rows]
