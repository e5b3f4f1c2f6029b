# SPDX-License-Identifier: Apache-2.0
"""What one session holds on the devices."""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Iterable

from flyt.backend.apart import Apart
from flyt.backend.blocks import Block, BlockTable
from flyt.backend.bounce import BounceBuffer
from flyt.backend.completions import CallSoon, Completions
from flyt.backend.devices.base import Device, Handle
from flyt.backend.exports import Shared
from flyt.backend.modules import ModuleTable
from flyt.backend.pools import PoolTable
from flyt.backend.services import Services
from flyt.backend.streams import SessionStream, StreamTable
from flyt.errors import DeviceError

log = logging.getLogger(__name__)

POOL_GRAIN = 32 << 20
"""Bytes. A GPU's pool takes memory in large pieces: a trim for less mostly gives nothing back."""


class Holdings(Completions):
    """Blocks, streams, pools and the bounce buffer of one session; its thread alone uses them.

    Parameters
    ----------
    services : Services
    call_soon : callable
        Runs a function on the session's thread; callable from any thread.
    limit : int
        Bytes of device memory the session may have; 0 means no limit.

    Attributes
    ----------
    moved : int
        Bytes of the copies so far.
    errors : int
        Commands that the device refused or failed.
    """

    def __init__(self, services: Services, call_soon: CallSoon, limit: int) -> None:
        super().__init__(services, call_soon)
        self.blocks = BlockTable(limit)
        self.streams = StreamTable(services.devices, self.mark_before)
        self.aside: set[int] = set()
        """Blocks whose addresses the frontend could not reserve; kept until the end."""
        self.bounce: BounceBuffer | None = None
        self.newborn: dict[int, SessionStream] = {}
        """Blocks of cudaMallocAsync that are not known to be clear yet, and the stream that clears
        them."""
        self.pools = PoolTable(services.devices, holds_back=not limit)
        self.shared: dict[int, Shared[Block]] = {}
        """By address, the blocks that this session shares or has opened."""
        self.gates: dict[int, tuple[Device, Handle]] = {}
        """By the number of its command, each place where a stream waits for the client."""
        self.modules = ModuleTable(services.images)
        self.apart = Apart(self, call_soon)
        self.moved = self.errors = 0
        self._pools: dict[int, Handle] = {}
        self._freed: collections.Counter[int] = collections.Counter()
        """By device, bytes freed since the session's own pool there was trimmed."""

    def figures(self) -> dict[str, int]:
        """For displays; from any thread."""
        return {
            "device_bytes": self.blocks.used,
            "in_flight": self.waiting,
            "bytes_moved": self.moved,
            "errors": self.errors,
        }

    @property
    def is_quiet(self) -> bool:
        """Whether a copy has nothing to be ordered with: nothing is in flight, here or behind a
        gate, no memory waits for being cleared, and none is shared with others."""
        return not (self.waiting or self.newborn or self.gates or self.shared)

    @property
    def devices(self) -> list[Device]:
        """All devices of the worker."""
        return self._services.devices

    def pool(self, device: Device) -> Handle:
        """The session's own memory pool on a device."""
        if device.ordinal not in self._pools:
            self._pools[device.ordinal] = device.create_pool()
        return self._pools[device.ordinal]

    def bounce_buffer(self) -> BounceBuffer:
        """Registered memory for inline payloads, made at the first one."""
        if self.bounce is None:
            bounce = BounceBuffer()
            try:
                self.devices[0].register(bounce.address, bounce.size)
            except DeviceError:
                bounce.close()
                raise
            self.bounce = bounce
        return self.bounce

    def free(self, block: Block) -> list[SessionStream]:
        """Free a block behind all work of its device, as cudaFree does; returns the stream on
        which that happens. A block that others share is let go of."""
        legacy = self.streams.legacy(block.device)
        self.streams.join(legacy, self.streams.all())  # of all devices: copies cross them
        shared = self.shared.pop(block.address, None)
        if shared is None:
            block.device.free(block.address, legacy.handle)
        else:
            if shared.thing is block:
                self._services.blocks.withdraw(shared)
            self.when_done([legacy], lambda _: self.let_go(shared))
        self.blocks.remove(block)
        return [legacy]

    def freed(self, block: Block) -> None:
        """A block's `free` is done: once it is worth it, let everyone have the bytes."""
        self._freed[block.device.ordinal] += block.size
        if self._freed[block.device.ordinal] >= POOL_GRAIN:
            self.trim(block.device)

    def trim(self, device: Device) -> None:
        """Let everyone have what cudaFree gave back."""
        if self._freed.pop(device.ordinal, 0):
            self.settle(device)
            device.trim_pool(self.pool(device), 0)

    def settle(self, device: Device) -> None:
        """What was freed behind work that is done by now counts as free memory."""
        device.settle([stream.handle for stream in self.streams.of(device)])

    def let_go(self, shared: Shared[Block]) -> None:
        """The last who holds a block frees it; all work that used it is done."""
        if self._services.blocks.drop(shared):
            block, own = shared.thing, self.streams.own(shared.thing.device)
            try:
                block.device.free(block.address, own.handle)
            except DeviceError as exc:
                log.warning("a shared block of %d bytes stays: %s", block.size, exc)
            else:
                self.when_done([own], lambda _: self._settled(block))

    def _settled(self, block: Block) -> None:
        """The pool of a block that others shared may be gone with its session: nobody trims it."""
        try:
            self.settle(block.device)
        except DeviceError as exc:
            log.warning("a shared block of %d bytes may stay: %s", block.size, exc)

    def wait_for_birth(self, stream: SessionStream, blocks: Iterable[Block] | None = None) -> None:
        """Let a stream wait for blocks that another one clears; for all where nobody knows which it
        will use."""
        addresses = list(self.newborn) if blocks is None else [block.address for block in blocks]
        for address in addresses:
            clearing = self.newborn.get(address)
            if clearing is not None and clearing is not stream:
                self.streams.behind([stream], clearing)

    def open_gates(self) -> None:
        """The client is gone: nothing waits for it any more."""
        while self.gates:
            device, gate = self.gates.popitem()[1]
            device.open_gate(gate)

    def take_back(self, block: Block) -> None:
        """Free a block that the client never heard of; one that can't be freed is kept aside."""
        try:
            self.free(block)
        except DeviceError as exc:
            log.warning("a block of %d bytes stays: %s", block.size, exc)

    def free_blocks(self) -> None:
        """Free all device memory behind the work that uses it."""
        for block in self.blocks.all():
            self.take_back(block)

    def destroy(self) -> None:
        """Give back pools, streams and the bounce buffer, whatever fails meanwhile; all work is
        done."""
        bounce, self.bounce = self.bounce, None
        with contextlib.ExitStack() as steps:  # from the last to the first
            if bounce is not None:
                steps.callback(
                    self._services.reaper.take, self.devices[0], bounce.address, bounce.close
                )
            steps.callback(self.streams.destroy)
            steps.callback(self.pools.destroy)
            steps.callback(self.modules.destroy)
            for device in self.devices:
                if (pool := self._pools.pop(device.ordinal, None)) is not None:
                    steps.callback(device.destroy_pool, pool)
