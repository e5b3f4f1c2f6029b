# SPDX-License-Identifier: Apache-2.0
"""What one session holds on the devices, and how it learns that its work is done."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable

from flyt.backend.apart import Apart
from flyt.backend.blocks import Block, BlockTable
from flyt.backend.bounce import BounceBuffer
from flyt.backend.devices.base import Device, Handle
from flyt.backend.modules import ModuleTable
from flyt.backend.services import Services
from flyt.backend.streams import SessionStream, StreamTable
from flyt.errors import DeviceError
from flyt.rpc.patience import device_spin_seconds

log = logging.getLogger(__name__)

CallSoon = Callable[[Callable[[], None]], None]


Finished = Callable[[int], None]


@dataclasses.dataclass(slots=True, eq=False)
class _Watched:
    """A mark that the session's thread asks for until ``until`` (`time.monotonic`), and then leaves
    to the device to tell; and who is to hear that it is reached."""

    device: Device
    mark: Handle
    work: int
    finished: list[Finished]
    until: float
    left: bool = False
    code: int | None = None
    """What the device told."""


def _look_again() -> None:
    """Only wakes the session's thread: `Holdings.look` does the rest, in the streams' order."""


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
    has_news : bool
        Whether work was marked on its own since the last `look`: its end may be near.
    told : int
        How often somebody heard of the end of work.
    moved : int
        Bytes of the copies so far.
    errors : int
        Commands that the device refused or failed.
    """

    def __init__(self, services: Services, call_soon: CallSoon, limit: int) -> None:
        self.blocks = BlockTable(limit)
        self.streams = StreamTable(services.devices, self.mark_before)
        self.aside: set[int] = set()
        """Blocks whose addresses the frontend could not reserve; kept until the end."""
        self.bounce: BounceBuffer | None = None
        self.modules = ModuleTable(services.images)
        self.apart = Apart(self, call_soon)
        self.waiting = 0
        self.has_news = False
        self.told = self.moved = self.errors = 0
        self._services = services
        self._call_soon = call_soon
        self._pools: dict[int, Handle] = {}
        self._marks: dict[SessionStream, collections.deque[_Watched]] = {}
        self._unmarked: dict[SessionStream, list[Finished]] = {}

    def figures(self) -> dict[str, int]:
        """For displays; from any thread."""
        return {
            "device_bytes": self.blocks.used,
            "in_flight": self.waiting,
            "bytes_moved": self.moved,
            "errors": self.errors,
        }

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

    def when_done(
        self, streams: Iterable[SessionStream], call: Finished, *, brief: bool = False
    ) -> None:
        """Call ``call(code)`` on the session's thread once all the work that was put on these
        streams so far is done; ``code`` is the first error of it, or 0.

        Brief work may share a mark with what follows it, until `mark` is called: then ``call`` is
        made when that is done too.
        """
        pending = list(streams)
        if len(pending) == 1:
            self._await(pending[0], call, brief)
            return
        if not pending:
            self._call_soon(lambda: call(0))
            return
        left, first = len(pending), 0

        def finished(code: int) -> None:
            nonlocal left, first
            left, first = left - 1, first or code
            if left == 0:
                call(first)

        for stream in pending:
            self._await(stream, finished, brief)

    def _await(self, stream: SessionStream, finished: Finished, brief: bool) -> None:
        self.waiting += 1
        self._unmarked.setdefault(stream, []).append(finished)
        if not brief:
            self._mark(stream)

    def unmarked(self, stream: SessionStream) -> int:
        """How many wait for brief work of a stream that has no mark yet."""
        return len(self._unmarked.get(stream, ()))

    def mark(self) -> None:
        """Mark where the streams are now that have brief work without a mark of its own. Those
        that are through with it already are told at once, unless others come first."""
        for stream in list(self._unmarked):
            self._mark(stream, at_once=not self._marks)

    def mark_before(self, stream: SessionStream) -> None:
        """Something long comes next on the stream: brief work must not share its mark."""
        if stream in self._unmarked:
            self._mark(stream)

    def _mark(self, stream: SessionStream, *, at_once: bool = False) -> None:
        finished, device, code = self._unmarked.pop(stream), stream.device, None
        mark: Handle = None
        try:
            mark = device.mark(stream.handle)
            if at_once:
                code = device.reached(mark)
        except DeviceError as exc:
            code = exc.code
        if at_once and code is not None:
            self._tell(finished, code)
            return
        watched = _Watched(
            device=device,
            mark=mark,
            work=self._services.activity.enter(),
            finished=finished,
            until=time.monotonic() + device_spin_seconds(),
        )
        self._marks.setdefault(stream, collections.deque()).append(watched)
        self.has_news = True
        if code is not None:
            watched.left = True
            self._told(watched, code)

    def look(self) -> bool:
        """Finish what is done; whether it is worth looking again at once.

        For a while the session's thread asks the device itself, which spares three wake-ups of
        threads; what takes longer is left to the device's own notification.
        """
        self.has_news = False
        while self._marks and self._look_once() and len(self._marks) > 1:
            continue  # one stream waits for another: what it waited for is told no later than it
        return any(not marks[0].left for marks in self._marks.values())

    def _look_once(self) -> bool:
        """One look at each stream; whether something was done."""
        done = False
        for stream, marks in list(self._marks.items()):
            while marks and (code := self._code(marks[0])) is not None:
                done = True
                self._finish(marks.popleft(), code)
            if not marks:
                self._marks.pop(stream, None)
        return done

    def _code(self, watched: _Watched) -> int | None:
        """The code of a mark that is the first of its stream; None while it is not reached."""
        if watched.left:
            return watched.code
        code = watched.device.reached(watched.mark)
        if code is None and time.monotonic() >= watched.until:
            watched.left = True
            try:
                watched.device.watch(watched.mark, functools.partial(self._told, watched))
            except DeviceError as exc:
                return exc.code
        return code

    def _told(self, watched: _Watched, code: int) -> None:
        """From any thread: the device tells that a mark is reached."""
        watched.code = code
        self._call_soon(_look_again)

    def _finish(self, watched: _Watched, code: int) -> None:
        self._services.activity.leave(watched.work)
        self._tell(watched.finished, code)

    def _tell(self, all_finished: list[Finished], code: int) -> None:
        """Tell all who wait for a mark, also when one of them ends the session."""
        first: Exception | None = None
        self.told += 1
        for finished in all_finished:
            self.waiting -= 1
            try:
                finished(code)
            except Exception as exc:  # noqa: BLE001 - raised again below, when all have heard
                first = first or exc
        if first is not None:
            raise first

    def free(self, block: Block) -> list[SessionStream]:
        """Free a block behind all work of its device, as cudaFree does; returns the stream on
        which that happens."""
        legacy = self.streams.legacy(block.device)
        self.streams.join(legacy, self.streams.all())  # of all devices: copies cross them
        block.device.free(block.address, legacy.handle)
        self.blocks.remove(block)
        return [legacy]

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
            steps.callback(self.modules.destroy)
            for device in self.devices:
                if (pool := self._pools.pop(device.ordinal, None)) is not None:
                    steps.callback(device.destroy_pool, pool)
