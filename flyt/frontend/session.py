# SPDX-License-Identifier: Apache-2.0
"""A session: this process's connection, memory and tables at one backend.

A session is never resumed: when it is lost, all it had is lost, and every call says so until
`flyt.connect` makes a new one.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flyt.errors import CommandTimeout, DeviceError, ProtocolError, SessionLost
from flyt.frontend import leftovers, pinning
from flyt.frontend.allocating import allocate, free
from flyt.frontend.attaching import attach
from flyt.frontend.connection import Connection
from flyt.frontend.express import express_of
from flyt.frontend.garbage import Release
from flyt.frontend.greeting import greeted
from flyt.frontend.host_calls import HostCalls
from flyt.frontend.inflight import InflightCommand
from flyt.frontend.kernels import Kernels
from flyt.frontend.launcher import Launched, launch
from flyt.frontend.lost import CLOSED, DEVICES_UNAVAILABLE, Lost
from flyt.frontend.pointers import Allocation, Place, PointerMap
from flyt.frontend.pools import Pools
from flyt.frontend.reservations import Reservations
from flyt.frontend.scheduling import Scheduler
from flyt.frontend.settings import Settings
from flyt.frontend.sharing import Sharing
from flyt.frontend.staging import StagingSlots
from flyt.frontend.staging_ring import StagingRing
from flyt.frontend.statistics import Statistics
from flyt.frontend.transfer import Transfers
from flyt.frontend.users import Users
from flyt.frontend.ways import InlineWay, StagedWay, Way
from flyt.frontend.window_memory import WindowMemory
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.patience import Deadline
from flyt.rpc.sockets import open_context
from flyt.shm.copy import CopyEngine

if TYPE_CHECKING:
    from typing_extensions import Self

MEMORY_ALLOCATION = 2
INVALID_DEVICE = 101

log = logging.getLogger("flyt")

GOODBYE_SECONDS = 5.0
"""How long an orderly close waits for the backend to give everything back."""


class Session:
    """One session with a backend; made by `flyt.connect` or by the first CUDA call.

    Parameters
    ----------
    settings : Settings

    Raises
    ------
    FlytError
        No backend, refused, or incompatible; the message says which.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pid = os.getpid()
        self.counts = Statistics()
        self.pointers = PointerMap()
        self.reservations = Reservations()
        self.memory: WindowMemory | None = None
        self.garbage: collections.deque[tuple[Release, int]] = collections.deque()
        """See `flyt.frontend.garbage`."""
        self.arrays: dict[Allocation, int] = {}
        """The memory of living arrays of `flyt.pinned_empty`, and its address."""
        self._engine = CopyEngine(settings.copy_threads)
        self._slots: StagingSlots | None = None
        self._ring: StagingRing | None = None
        self.users = Users()
        self.is_closed = False
        self._launched: Launched | None = None
        self._owned = contextlib.ExitStack()
        """What `close` lets go of, whatever fails on the way; from the last to the first."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._owned.close)
            self._context = open_context()
            self._owned.callback(self._context.term)
            self._owned.callback(self._engine.close)
            self._owned.callback(self.reservations.clear)
            endpoint, deadline = self._dialled()
            keys = settings.keys() if endpoint.scheme == "tcp" else None
            with greeted(self._context, endpoint, deadline, keys) as self.welcome:
                self.connection = Connection(
                    self._context,
                    endpoint.session(self.welcome.port, self.welcome.path),
                    self.welcome.heartbeat_ms,
                    self.welcome.credits,
                    keys,
                )
                self.host_calls = HostCalls(self.connection)
                self._owned.callback(self.host_calls.close)
                self._owned.callback(self._close_memory)
                self._owned.callback(self.connection.close)
                self.memory, self._slots, self._ring, area, self._doorbell = attach(
                    settings, endpoint, self.welcome, self.connection, self.counts
                )
            undo.pop_all()
        self.scheduler = Scheduler(self.connection)
        self.express = express_of(self, area)
        self.pools, self.sharing = Pools(self), Sharing(self)
        self.kernels = Kernels(self)
        self.transfers = Transfers(
            self.connection,
            self.scheduler,
            self._way(),
            self._engine,
            self.users,
            self.pid,
            self.counts,
        )

    # --- making it ---

    def _dialled(self) -> tuple[Endpoint, Deadline]:
        """Where the backend listens; a private one is started now."""
        endpoint = Endpoint.parse(self.settings.endpoint)
        deadline = Deadline.after(self.settings.connect_seconds)
        if endpoint.scheme == "emulated":
            self._launched = launch(endpoint.path, deadline)
            self._owned.callback(self._launched.end)
            endpoint = Endpoint.parse(self._launched.endpoint)
        return endpoint, deadline

    def _way(self) -> Way:
        """How pageable bytes get to the device and back."""
        inline = InlineWay(self.connection, self.welcome.inline_chunk, self.counts)
        if self._slots is None or self._ring is None:
            return inline
        return StagedWay(
            self.connection,
            self._slots,
            self._ring,
            self._engine,
            self.pid,
            self.counts,
            self.express,
            inline,
        )

    # --- facts ---

    @property
    def devices(self) -> list[dict[str, Any]]:
        """What WELCOME told of each device."""
        return list(self.welcome.snapshot["devices"])

    def check_device(self, ordinal: int) -> int:
        """The ordinal, or cudaErrorInvalidDevice."""
        if not 0 <= ordinal < len(self.devices):
            raise DeviceError(
                INVALID_DEVICE, f"device {ordinal} does not exist, there are {len(self.devices)}"
            )
        return ordinal

    def inflight(self) -> list[InflightCommand]:
        """Commands that were sent and not answered yet, oldest first."""
        with self.connection.lock:
            return self.connection.inflight.snapshot()

    def statistics(self) -> dict[str, int]:
        """Counters of `flyt.frontend.statistics`, and the sizes the session works with (bytes)."""
        region = self.memory.geometry.size if self.memory is not None else 0
        with self.connection.lock:
            flow, inflight = self.connection.flow, len(self.connection.inflight)
        count, size = (self._slots.count, self._slots.size) if self._slots is not None else (0, 0)
        return {
            **self.counts.snapshot(),
            "calls": flow.calls,
            "posts": flow.posts,
            "doorbell_rings": self._doorbell.rings if self._doorbell is not None else 0,
            "inflight": inflight,
            "slot_size": size,
            "slots": count,
            "window_size": size * count,
            "region_size": region,
        }

    def places(self, size: int, *addresses: int) -> list[Place]:
        """Where ranges of ``size`` bytes lie; see `PointerMap.place`."""
        with self.connection.lock.reading:
            return [self.pointers.place(address, size) for address in addresses]

    def two_places(self, to: int, to_size: int, origin: int, size: int) -> tuple[Place, Place]:
        """Where the two sides of a copy lie."""
        with self.connection.lock.reading:
            return self.pointers.place(to, to_size), self.pointers.place(origin, size)

    # --- device memory ---

    def allocate(self, size: int, device: int) -> int:
        """cudaMalloc of ``size`` > 0 bytes."""
        return allocate(
            self,
            size,
            device,
            lambda wanted, taken: lambda number: m.Malloc(number, device, wanted, taken),
        )

    def free(self, address: int, block: Allocation | None = None) -> None:
        """cudaFree of a block's address; see `PointerMap.remove`."""
        pending = free(self, address, lambda number: m.Free(number, address), block=block)
        self.connection.wait(pending)
        self.connection.checked(pending)

    def memory_info(self, device: int) -> tuple[int, int]:
        """cudaMemGetInfo: free and total bytes."""
        answer = self.connection.call(lambda number: m.MemInfo(number, device))
        if len(answer.values) != 2:
            raise ProtocolError("the backend's answer to MEM_INFO is not two numbers")
        return answer.values[0], answer.values[1]

    def synchronize(self, device: int) -> None:
        """cudaDeviceSynchronize, for this session's work alone."""
        self.scheduler.synchronize_device(device)

    # --- pinned memory ---

    def take_in(self, block: Allocation, *, lasting: bool) -> Allocation:
        """Note new pinned memory; Lost once the session is being closed."""
        with self.connection.lock:
            if self.is_closed:
                raise Lost(DEVICES_UNAVAILABLE, CLOSED)
            self.pointers.add(block)
            if lasting:
                self.arrays[block] = block.address
        return block

    def free_pinned(self, address: int, block: Allocation | None = None) -> None:
        """cudaFreeHost of an allocation's address; see `PointerMap.remove`."""
        pinning.free(self, address, block)

    def leave(self, release: Release, handle: int) -> None:
        """For the next call to give back; once, however often it is told."""
        if (release, handle) not in self.garbage:
            self.garbage.append((release, handle))

    def destroy_stream(self, handle: int) -> None:
        """cudaStreamDestroy."""
        self.scheduler.destroy(handle)

    def destroy_event(self, handle: int) -> None:
        """cudaEventDestroy."""
        self.scheduler.destroy_event(handle)

    # --- the end ---

    def close(self) -> None:
        """End the session and give everything back; waits a few seconds at most.

        Arrays of `flyt.pinned_empty` stay readable and writable all the while, and are ordinary
        memory in the end, with what was in flight before. What another thread stores in one while
        its bytes are copied, which is done for one array after the other, may be lost; so may be
        what the backend had of them when the session had ended before.
        """
        if os.getpid() != self.pid:
            return
        with self.connection.lock:
            if self.is_closed:
                return
            self.is_closed = True  # no array is made from now on
        with self._owned:
            self._say_goodbye(lambda: self._keep_arrays(self.memory))

    def _say_goodbye(self, before: Callable[[], None]) -> None:
        deadline = Deadline.after(GOODBYE_SECONDS)
        try:
            # What is in flight may end in an error, which comes by the ring. The backend wipes that
            # once it has read the goodbye, whether or not this side has looked.
            self.connection.settle(deadline)
            with self.connection.lock:
                before()
                # Other threads' commands of meanwhile: what they fetch comes too late.
                self.connection.inflight.fail_all(DEVICES_UNAVAILABLE, CLOSED)
                if self.connection.has_credit():  # else the end of the connection has to say it
                    self.connection.submit(m.Bye)
            self.connection.settle(deadline)
        except (SessionLost, CommandTimeout):
            return  # it ended from the other side; what it had is given back all the same

    def _keep_arrays(self, held: WindowMemory | None) -> None:
        """Before the goodbye: the backend zeroes the frames as soon as it has read it."""
        with self.connection.lock:
            for block in list(self.arrays):
                leftovers.keep(block, held)
                self.pointers.take_back(block.address)
                if self.arrays.pop(block, None) is None:  # its finalizer ran meanwhile
                    leftovers.drop(block)

    def _close_memory(self) -> None:
        """Give the window up; living arrays keep their bytes."""
        held, self.memory = self.memory, None
        self._keep_arrays(held)  # where there was no goodbye
        if held is None:
            return
        # In this order: no thread can begin to look once the connection is closed.
        if self.connection.is_left(GOODBYE_SECONDS) and self.users.wait_for_none(GOODBYE_SECONDS):
            held.close()
        else:  # better to leak the mapping than to unmap it under a copy
            log.error("a copy of another thread goes on; the session's window stays mapped")

    def leave_at_exit(self) -> None:
        """At interpreter exit: say goodbye, touch no memory; the kernel takes the rest."""
        if self.is_closed or os.getpid() != self.pid:
            return
        self._owned.pop_all()
        with contextlib.ExitStack() as steps:
            if self._launched is not None:
                steps.callback(self._launched.end)
            steps.callback(self._context.term)
            steps.callback(self.connection.close)
            self._say_goodbye(lambda: None)

    def forget_in_child(self) -> None:
        """After a fork, in the child: this session is the parent's."""
        self.is_closed = True
        if self.connection.link is not None:
            self.connection.link.end()
        self.connection.forget_in_child()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
