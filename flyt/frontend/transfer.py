# SPDX-License-Identifier: Apache-2.0
"""How bytes move: one strategy for each pair of places, chosen from a table.

All run in the order of the session's commands. When a strategy returns, host memory that it read
may be changed and host memory that it wrote is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from flyt.frontend import rows
from flyt.frontend.connection import Connection
from flyt.frontend.copy_commands import copy_in, copy_out, copy_rows
from flyt.frontend.inflight import Command
from flyt.frontend.pointers import Place, Space
from flyt.frontend.rows import Row, Rows
from flyt.frontend.scheduling import Scheduler
from flyt.frontend.statistics import Statistics
from flyt.frontend.streams import Stream
from flyt.frontend.users import Users
from flyt.frontend.ways import Way
from flyt.rpc import messages as m
from flyt.shm import memory
from flyt.shm.copy import CopyEngine


class _Copy(NamedTuple):
    """``height`` rows of ``width`` bytes between two places, at a pitch on either side."""

    destination: Place
    to_pitch: int
    source: Place
    pitch: int
    width: int
    height: int

    @property
    def size(self) -> int:
        return self.width * self.height


class Transfers:
    """Copies and fills of one session.

    Parameters
    ----------
    way : Way
        For memory that the device can't read where it is.
    """

    def __init__(
        self,
        connection: Connection,
        scheduler: Scheduler,
        way: Way,
        engine: CopyEngine,
        users: Users,
        pid: int,
        statistics: Statistics,
    ) -> None:
        self._connection = connection
        self._scheduler = scheduler
        self._way = way
        self._users = users
        self._engine = engine
        self._pid = pid
        self._statistics = statistics

    def copy(self, destination: Place, source: Place, size: int, stream: Stream) -> None:
        """cudaMemcpyAsync between places that were checked.

        Pinned and device memory: posted. Pageable memory to the device: the source may be changed
        on return. To pageable memory, and from host to host: complete on return.
        """
        self.copy_rows(destination, size, source, size, size, 1, stream)

    def copy_rows(
        self,
        destination: Place,
        destination_pitch: int,
        source: Place,
        source_pitch: int,
        width: int,
        height: int,
        stream: Stream,
    ) -> None:
        """cudaMemcpy2DAsync, as `copy`."""
        if destination_pitch == source_pitch == width:  # one row, if not by name
            destination_pitch = source_pitch = width = width * height
            height = 1
        move = self._STRATEGIES[destination.space, source.space]
        with self._users:
            copy = _Copy(destination, destination_pitch, source, source_pitch, width, height)
            move(self, copy, stream)

    def fill(self, place: Place, value: int, size: int, stream: Stream) -> None:
        """cudaMemsetAsync: posted on the device; complete on return in host memory."""
        self.fill_rows(place, size, value, size, 1, stream)

    def fill_rows(
        self, place: Place, pitch: int, value: int, width: int, height: int, stream: Stream
    ) -> None:
        """cudaMemset2DAsync, as `fill`."""
        if pitch == width:
            pitch = width = width * height
            height = 1
        address = place.address
        if place.space == Space.DEVICE:
            self._connection.submit(
                (lambda number: m.Memset(number, address, value, width, stream.number))
                if height == 1
                else lambda number: m.FillRows(
                    number, address, pitch, value, width, height, stream.number
                ),
                size=width * height,
                posted=True,
                stream=stream,
            )
            return
        self._scheduler.synchronize(stream)
        with self._users:
            if height == 1:
                memory.fill(address, value, width)
            else:
                rows.fill(Row(address, pitch), value, width, height)

    def _to_device(self, copy: _Copy, stream: Stream) -> None:
        to, origin = copy.destination, copy.source
        if origin.index < 0:
            host, device = (origin.address, copy.pitch), (to.address, copy.to_pitch)
            self._way.to_device(Rows(*host, *device, copy.width, copy.height), stream)
            return
        self._post(copy, m.Way.IN, to.address, origin.index, stream)
        self._statistics.add("pinned_h2d_bytes", copy.size)

    def _to_host(self, copy: _Copy, stream: Stream) -> None:
        to, origin = copy.destination, copy.source
        if to.index < 0:
            host, device = (to.address, copy.to_pitch), (origin.address, copy.pitch)
            self._way.to_host(Rows(*host, *device, copy.width, copy.height), stream)
            return
        self._post(copy, m.Way.OUT, to.index, origin.address, stream)
        self._statistics.add("pinned_d2h_bytes", copy.size)

    def _on_device(self, copy: _Copy, stream: Stream) -> None:
        self._post(copy, m.Way.ON, copy.destination.address, copy.source.address, stream)
        self._statistics.add("device_to_device_bytes", copy.size)

    def _on_host(self, copy: _Copy, stream: Stream) -> None:
        # The bytes may be the source or target of what is on the stream (recorded: CUDA waits).
        self._scheduler.synchronize(stream)
        to, origin = copy.destination.address, copy.source.address
        if copy.height == 1:
            self._engine.copy(to, origin, copy.width)
        else:
            rows.move(Row(to, copy.to_pitch), Row(origin, copy.pitch), copy.width, copy.height)
        self._statistics.add("host_to_host_bytes", copy.size)

    def _post(self, copy: _Copy, way: m.Way, to: int, origin: int, stream: Stream) -> None:
        """Post a copy whose places the backend reaches; ``to`` or ``origin`` may be an index."""
        width, height = copy.width, copy.height
        if height == 1:
            make = _one_row(way, to, origin, width, self._pid, stream)
        else:
            ends = Row(to, copy.to_pitch), Row(origin, copy.pitch)
            make = copy_rows(way, *ends, width, height, self._pid, stream)
        pages = (0, 0)
        if way == m.Way.IN:
            pages = (origin, copy.pitch * (height - 1) + width)
        elif way == m.Way.OUT:
            pages = (to, copy.to_pitch * (height - 1) + width)
        self._connection.submit(make, size=copy.size, pages=pages, posted=True, stream=stream)

    _STRATEGIES: ClassVar[dict[tuple[Space, Space], Callable[[Transfers, _Copy, Stream], None]]] = {
        (Space.DEVICE, Space.PAGEABLE): _to_device,
        (Space.DEVICE, Space.PINNED): _to_device,
        (Space.PAGEABLE, Space.DEVICE): _to_host,
        (Space.PINNED, Space.DEVICE): _to_host,
        (Space.DEVICE, Space.DEVICE): _on_device,
        (Space.PAGEABLE, Space.PAGEABLE): _on_host,
        (Space.PAGEABLE, Space.PINNED): _on_host,
        (Space.PINNED, Space.PAGEABLE): _on_host,
        (Space.PINNED, Space.PINNED): _on_host,
    }


def _one_row(
    way: m.Way, to: int, origin: int, size: int, pid: int, stream: Stream
) -> Callable[[int], Command]:
    if way == m.Way.IN:
        return copy_in(to, origin, size, pid, stream)
    if way == m.Way.OUT:
        return copy_out(origin, to, size, pid, stream)
    return lambda number: m.CopyOn(number, to, origin, size, stream.number)
