# SPDX-License-Identifier: Apache-2.0
"""Pools and blocks of an emulated device, in the order of streams."""

from __future__ import annotations

from collections.abc import Iterable

from flyt.backend.devices import codes
from flyt.backend.devices.base import Handle
from flyt.backend.devices.emulated_base import EmulatedBase, nothing
from flyt.backend.devices.emulated_memory import Dying, Pool
from flyt.backend.devices.emulated_stream import Stream
from flyt.errors import DeviceError

_COUNTS = {5: "reserved", 6: "reserved_high", 7: "used", 8: "used_high"}
"""Of cudaMemPoolAttr; each high-water mark follows what it is the mark of."""

_RESET = frozenset({6, 8})
"""What may be set, and to 0 only."""


class EmulatedPools(EmulatedBase):
    """cudaMallocFromPoolAsync and what belongs to it."""

    def create_pool(self) -> Pool:
        self._enter("create_pool")
        return Pool(self)

    def destroy_pool(self, pool: Handle) -> None:
        self._enter("destroy_pool")
        with self._context.lock:
            self._pool(pool).destroyed = True

    def trim_pool(self, pool: Handle, keep: int) -> None:  # noqa: ARG002 - nothing is kept anyway
        self._enter("trim_pool")
        with self._context.lock:
            self._pool(pool)

    def settle(self, streams: Iterable[Handle]) -> None:  # noqa: ARG002
        # Freed memory is free here once the work before it is done.
        self._enter("settle")

    def pool_attribute(self, pool: Handle, attribute: int) -> int:
        self._enter("pool_attribute")
        with self._context.lock:
            known = self._pool(pool)
            values = {**known.settings, **{n: getattr(known, f) for n, f in _COUNTS.items()}}
        if attribute not in values:
            raise DeviceError(codes.INVALID_VALUE, f"a pool has no attribute {attribute}")
        return int(values[attribute])

    def set_pool_attribute(self, pool: Handle, attribute: int, value: int) -> None:
        self._enter("set_pool_attribute")
        with self._context.lock:
            known = self._pool(pool)
            if attribute in known.settings:
                known.settings[attribute] = value
            elif attribute in _RESET and not value:
                setattr(known, _COUNTS[attribute], getattr(known, _COUNTS[attribute - 1]))
            else:
                raise DeviceError(
                    codes.INVALID_VALUE, f"attribute {attribute} of a pool can't be set to {value}"
                )

    def allocate(self, size: int, pool: Handle, stream: Handle) -> int:
        failure = self._enter("allocate")
        with self._context.lock:
            queue = self._stream(stream)
            if failure:
                queue.start().put_work(nothing, failure)
            return self._memory.allocate(size, self._pool(pool), queue.dying)

    def free(self, address: int, stream: Handle) -> None:
        failure = self._enter("free")
        with self._context.lock:
            queue = self._stream(stream).start()
            block = self._memory.forget(address)
            queue.dying.append(block)
            if failure:
                queue.put_work(nothing, failure)
            queue.put(lambda: self._reclaim(block, queue))

    def _reclaim(self, block: Dying, queue: Stream) -> None:
        with self._context.lock:
            queue.dying.remove(block)
            self._memory.reclaim(block)
