# SPDX-License-Identifier: Apache-2.0
"""The memory pools of one session, by the numbers that the frontend minted."""

from __future__ import annotations

import contextlib

from flyt.backend.devices.base import Device, Handle
from flyt.backend.quota import Quota
from flyt.errors import DeviceError, ProtocolError
from flyt.rpc.messages import FIRST_STREAM

INVALID_VALUE = 1
MEMORY_ALLOCATION = 2
INVALID_DEVICE = 101

MAX_POOLS = 1024
"""What one session may have; programs with more have lost track of theirs."""

ATTRIBUTES = range(1, 9)
RELEASE_THRESHOLD = 4
"""cudaMemPoolAttrReleaseThreshold."""


class SessionPool:
    """One pool; what its blocks take is bounded by its ``quota``."""

    def __init__(self, device: Device, limit: int) -> None:
        self.device = device
        self.handle: Handle = device.create_pool()
        self.quota = Quota(limit, "the pool's maxSize")
        self.threshold = 0


class PoolTable:
    """Pools by number.

    Parameters
    ----------
    devices : list of Device
    holds_back : bool
        Whether pools may keep memory that they don't use. In a session with a limit they may not:
        what they keep would count for nobody.
    """

    def __init__(self, devices: list[Device], *, holds_back: bool) -> None:
        self._devices = devices
        self._holds_back = holds_back
        self._pools: dict[int, SessionPool] = {}

    def get(self, number: int) -> SessionPool:
        """A pool by number; the default pool of a device is made now."""
        pool = self._pools.get(number)
        if pool is not None:
            return pool
        if number >= FIRST_STREAM:
            raise DeviceError(INVALID_VALUE, f"pool {number:#x} does not exist")
        return self._made(number, number, 0)

    def create(self, number: int, ordinal: int, limit: int) -> None:
        if number < FIRST_STREAM or number in self._pools:
            raise ProtocolError(f"pool number {number:#x} can't be given out now")
        if len(self._pools) >= MAX_POOLS:
            raise DeviceError(MEMORY_ALLOCATION, f"the session has {MAX_POOLS} pools already")
        self._made(number, ordinal, limit)

    def _made(self, number: int, ordinal: int, limit: int) -> SessionPool:
        if ordinal >= len(self._devices):
            raise DeviceError(INVALID_DEVICE, f"there is no device {ordinal}")
        return self._pools.setdefault(number, SessionPool(self._devices[ordinal], limit))

    def remove(self, number: int) -> None:
        """Destroy a pool; its blocks stay until they are freed."""
        if number < FIRST_STREAM:
            raise DeviceError(INVALID_VALUE, "a device's default pool can't be destroyed")
        pool = self.get(number)
        del self._pools[number]
        pool.device.destroy_pool(pool.handle)

    def attribute(self, number: int, attribute: int) -> int:
        pool = self.get(number)
        if attribute not in ATTRIBUTES:
            raise DeviceError(INVALID_VALUE, f"a pool has no attribute {attribute}")
        if attribute == RELEASE_THRESHOLD:
            return pool.threshold
        return pool.device.pool_attribute(pool.handle, attribute)

    def set_attribute(self, number: int, attribute: int, value: int) -> None:
        pool = self.get(number)
        if attribute not in ATTRIBUTES:
            raise DeviceError(INVALID_VALUE, f"a pool has no attribute {attribute}")
        if attribute != RELEASE_THRESHOLD or self._holds_back:
            pool.device.set_pool_attribute(pool.handle, attribute, value)
        if attribute == RELEASE_THRESHOLD:
            pool.threshold = value

    def destroy(self) -> None:
        """Destroy all of them, whatever fails meanwhile."""
        with contextlib.ExitStack() as steps:
            for pool in self._pools.values():
                steps.callback(pool.device.destroy_pool, pool.handle)
            self._pools.clear()
