# SPDX-License-Identifier: Apache-2.0
"""Memory pools as this process knows them, and memory in the order of streams.

A pool's handle is a number that this side mints; small ones, from 1, name the default pools.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from flyt.errors import DeviceError, ProtocolError
from flyt.frontend.allocating import allocate, free
from flyt.frontend.inflight import Make
from flyt.frontend.streams import Stream
from flyt.rpc import messages as m

if TYPE_CHECKING:
    from flyt.frontend.session import Session

INVALID_VALUE = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """One pool; ``number`` is its name in messages, ``limit`` its maxSize."""

    handle: int
    number: int
    device: int
    limit: int = 0


class Pools:
    """The pools of one session. Its tables are guarded by the connection's lock."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._connection = session.connection
        devices = range(len(session.devices))
        self._pools = {n + 1: Pool(n + 1, n, n) for n in devices}
        self._current = {n: n + 1 for n in devices}

    def default(self, device: int) -> int:
        """The handle of a device's default pool."""
        return self._session.check_device(device) + 1

    def current(self, device: int) -> int:
        """The handle of the pool that cudaMallocAsync takes from. Of a device that is not there
        CUDA says cudaErrorInvalidValue here (recorded), unlike for `default`."""
        try:
            return self._current[self._session.check_device(device)]
        except DeviceError as exc:
            raise DeviceError(INVALID_VALUE, exc.detail) from exc

    def make_current(self, device: int, handle: int) -> None:
        pool = self.get(handle)
        if pool.device != device:
            raise DeviceError(INVALID_VALUE, f"the pool is device {pool.device}'s, not {device}'s")
        with self._connection.lock:
            self._current[device] = handle

    def get(self, handle: int) -> Pool:
        """A pool by handle, or DeviceError cudaErrorInvalidValue."""
        pool = self._pools.get(handle)
        if pool is None:
            raise DeviceError(INVALID_VALUE, f"{handle:#x} is no memory pool of this process")
        return pool

    def create(self, device: int, limit: int) -> int:
        self._session.check_device(device)
        with self._connection.lock:
            handle = self._session.scheduler.table.mint()
        self._post(lambda number: m.PoolCreate(number, handle, device, limit))
        with self._connection.lock:
            self._pools[handle] = Pool(handle, handle, device, limit)
        return handle

    def destroy(self, handle: int) -> None:
        """The handle is gone at once; blocks stay until they are freed."""
        pool = self.get(handle)
        if handle == self.default(pool.device):
            raise DeviceError(INVALID_VALUE, "a device's default pool can't be destroyed")
        with self._connection.lock:
            del self._pools[handle]
            if self._current[pool.device] == handle:
                self._current[pool.device] = self.default(pool.device)
        self._post(lambda number: m.PoolDestroy(number, pool.number))

    def trim(self, handle: int, keep: int) -> None:
        pool = self.get(handle)
        self._connection.call(lambda number: m.PoolTrim(number, pool.number, keep))

    def attribute(self, handle: int, attribute: int) -> int:
        pool = self.get(handle)
        answer = self._connection.call(lambda number: m.PoolGet(number, pool.number, attribute))
        if len(answer.values) != 1:
            raise ProtocolError("the backend's answer to POOL_GET is not one number")
        return answer.values[0]

    def set_attribute(self, handle: int, attribute: int, value: int) -> None:
        pool = self.get(handle)
        self._connection.call(lambda number: m.PoolSet(number, pool.number, attribute, value))

    def allocate(self, size: int, handle: int, stream: Stream) -> int:
        """cudaMallocFromPoolAsync of ``size`` > 0 bytes; the address comes at once."""
        pool = self.get(handle)

        def make(wanted: int, taken: int) -> Make:
            return lambda number: m.MallocAsync(number, pool.number, wanted, taken, stream.number)

        return allocate(self._session, size, pool.device, make, handle)

    def free(self, address: int, stream: Stream) -> None:
        """cudaFreeAsync: posted; the address may be another block's before the stream gets there,
        if that is allocated on the same stream."""
        session = self._session
        with self._connection.lock:
            found = session.pointers.find(address)
            if found is None or not found.pool:
                raise DeviceError(INVALID_VALUE, f"{address:#x} is not of cudaMallocAsync")
        free(
            session,
            address,
            lambda number: m.FreeAsync(number, address, stream.number),
            posted=True,
            stream=stream,
        )

    def _post(self, make: Make) -> None:
        self._connection.submit(make, posted=True)
