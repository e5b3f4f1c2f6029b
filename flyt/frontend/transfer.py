# SPDX-License-Identifier: Apache-2.0
"""How bytes move: one strategy for each pair of places, chosen from a table.

All run in the order of the session's commands. When a strategy returns, host memory that it read
may be changed and host memory that it wrote is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from flyt.frontend.connection import Connection
from flyt.frontend.inflight import Command
from flyt.frontend.pointers import Place, Space
from flyt.frontend.scheduling import Scheduler
from flyt.frontend.statistics import Statistics
from flyt.frontend.streams import Stream
from flyt.frontend.users import Users
from flyt.frontend.ways import Way, copy_in, copy_out
from flyt.rpc import messages as m
from flyt.shm import memory
from flyt.shm.copy import CopyEngine


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
        move = self._STRATEGIES[destination.space, source.space]
        with self._users:
            move(self, destination, source, size, stream)

    def fill(self, place: Place, value: int, size: int, stream: Stream) -> None:
        """cudaMemsetAsync: posted on the device; complete on return in host memory."""
        if place.space == Space.DEVICE:
            self._connection.submit(
                lambda number: m.Memset(number, place.address, value, size, stream.number),
                size=size,
                posted=True,
                stream=stream,
            )
            return
        self._scheduler.synchronize(stream)
        with self._users:
            memory.fill(place.address, value, size)

    def _to_device(self, destination: Place, source: Place, size: int, stream: Stream) -> None:
        if source.index < 0:
            self._way.to_device(destination.address, source.address, size, stream)
            return
        make = copy_in(destination.address, source.index, size, self._pid, stream)
        self._post(make, size, source.index, stream)
        self._statistics.add("pinned_h2d_bytes", size)

    def _to_host(self, destination: Place, source: Place, size: int, stream: Stream) -> None:
        if destination.index < 0:
            self._way.to_host(destination.address, source.address, size, stream)
            return
        make = copy_out(source.address, destination.index, size, self._pid, stream)
        self._post(make, size, destination.index, stream)
        self._statistics.add("pinned_d2h_bytes", size)

    def _on_device(self, destination: Place, source: Place, size: int, stream: Stream) -> None:
        self._connection.submit(
            lambda number: m.CopyOn(
                number, destination.address, source.address, size, stream.number
            ),
            size=size,
            posted=True,
            stream=stream,
        )
        self._statistics.add("device_to_device_bytes", size)

    def _on_host(self, destination: Place, source: Place, size: int, stream: Stream) -> None:
        # The bytes may be the source or target of what is on the stream (recorded: CUDA waits).
        self._scheduler.synchronize(stream)
        self._engine.copy(destination.address, source.address, size)
        self._statistics.add("host_to_host_bytes", size)

    def _post(self, make: Callable[[int], Command], size: int, index: int, stream: Stream) -> None:
        self._connection.submit(make, size=size, pages=(index, size), posted=True, stream=stream)

    _STRATEGIES: ClassVar[
        dict[tuple[Space, Space], Callable[[Transfers, Place, Place, int, Stream], None]]
    ] = {
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
