# SPDX-License-Identifier: Apache-2.0
"""What one session holds on the devices, and how it learns that its work is done."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable

from flyt.backend.blocks import Block, BlockTable
from flyt.backend.bounce import BounceBuffer
from flyt.backend.devices.base import Device, Handle
from flyt.backend.services import Services
from flyt.backend.streams import SessionStream, StreamTable
from flyt.errors import DeviceError
from flyt.rpc.patience import spin_seconds

CallSoon = Callable[[Callable[[], None]], None]


@dataclasses.dataclass(slots=True)
class _Watched:
    """A mark that the session's thread asks for itself until ``until`` (`time.monotonic`)."""

    device: Device
    mark: Handle
    finished: Callable[[int], None]
    until: float


class Holdings:
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
    waiting : int
        Notifications that are still to come.
    """

    def __init__(self, services: Services, call_soon: CallSoon, limit: int) -> None:
        self.blocks = BlockTable(limit)
        self.streams = StreamTable(services.devices)
        self.aside: set[int] = set()
        """Blocks whose addresses the frontend could not reserve; kept until the end."""
        self.bounce: BounceBuffer | None = None
        self.waiting = 0
        self._services = services
        self._call_soon = call_soon
        self._pools: dict[int, Handle] = {}
        self._marks: list[_Watched] = []

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
            self.devices[0].register(bounce.address, bounce.size)
            self.bounce = bounce
        return self.bounce

    def when_done(self, streams: Iterable[SessionStream], call: Callable[[int], None]) -> None:
        """Call ``call(code)`` on the session's thread once all the work that was put on these
        streams so far is done; ``code`` is the first error of it, or 0."""
        pending = list(streams)
        if not pending:
            self._call_soon(lambda: call(0))
            return
        left, first = len(pending), 0

        def finished(code: int) -> None:
            nonlocal left, first
            left, first = left - 1, first or code
            self.waiting -= 1
            if left == 0:
                call(first)

        until = time.monotonic() + spin_seconds()
        for stream in pending:
            self.waiting += 1
            self._services.activity.enter()
            try:
                mark = stream.device.mark(stream.handle)
            except DeviceError as exc:
                self._arrived(finished, exc.code)
                continue
            self._marks.append(_Watched(stream.device, mark, finished, until))

    def look(self) -> bool:
        """Finish what is done; whether it is worth looking again at once.

        For a while the session's thread asks the device itself, which spares three wake-ups of
        threads; what takes longer is left to the device's own notification.
        """
        now = time.monotonic()
        for watched in list(self._marks):
            code = watched.device.reached(watched.mark)
            if code is None and now < watched.until:
                continue
            self._marks.remove(watched)
            if code is not None:
                self._services.activity.leave()
                watched.finished(code)
                continue
            arrived = functools.partial(self._arrived, watched.finished)
            try:
                watched.device.watch(watched.mark, arrived)
            except DeviceError as exc:
                arrived(exc.code)
        return bool(self._marks)

    def _arrived(self, finished: Callable[[int], None], code: int) -> None:
        """From any thread: the device has told that a mark is reached."""
        self._services.activity.leave()
        self._call_soon(functools.partial(finished, code))

    def free(self, block: Block) -> list[SessionStream]:
        """Free a block behind all work of its device, as cudaFree does; returns the stream on
        which that happens."""
        legacy = self.streams.legacy(block.device)
        self.streams.join(legacy, self.streams.of(block.device))
        block.device.free(block.address, legacy.handle)
        return [legacy]

    def free_blocks(self) -> None:
        """Free all device memory behind the work that uses it."""
        for block in self.blocks.all():
            self.free(self.blocks.remove(block.address))

    def destroy(self) -> None:
        """Give back pools, streams and the bounce buffer; all work is done."""
        for device in self.devices:
            if (pool := self._pools.pop(device.ordinal, None)) is not None:
                device.destroy_pool(pool)
        self.streams.destroy()
        bounce, self.bounce = self.bounce, None
        if bounce is not None:
            self._services.reaper.take(self.devices[0], bounce.address, bounce.close)
