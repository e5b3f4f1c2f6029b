# SPDX-License-Identifier: Apache-2.0
"""How a session learns that its work is done, and tells it in the order of that work."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable

from flyt.backend.devices.base import Device, Handle
from flyt.backend.services import Services
from flyt.backend.streams import SessionStream
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
    number: int
    after: list[tuple[SessionStream, int]]
    """Marks of other streams that are told first: the device has ordered them."""
    left: bool = False
    code: int | None = None
    """What the device told."""

    def may_be_told(self) -> bool:
        return all(stream.told >= number for stream, number in self.after)


def _look_again() -> None:
    """Only wakes the session's thread: `Completions.look` does the rest, in the streams' order."""


class Completions:
    """Who waits for the end of what; the session's thread alone uses it.

    Parameters
    ----------
    services : Services
    call_soon : callable
        Runs a function on the session's thread; callable from any thread.

    Attributes
    ----------
    waiting : int
        Notifications that are still to come.
    has_news : bool
        Whether work was marked on its own since the last `look`: its end may be near.
    told : int
        How often somebody heard of the end of work.
    """

    def __init__(self, services: Services, call_soon: CallSoon) -> None:
        self._services = services
        self._call_soon = call_soon
        self.waiting = self.told = 0
        self.has_news = False
        self._marks: dict[SessionStream, collections.deque[_Watched]] = {}
        self._unmarked: dict[SessionStream, list[Finished]] = {}
        self._numbers = itertools.count(1)
        self._holds = False

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
        after, stream.after = list(stream.after.items()), {}
        stream.marked = number = next(self._numbers)
        mark: Handle = None
        try:
            mark = device.mark(stream.handle)
            if at_once:
                code = device.reached(mark)
        except DeviceError as exc:
            code = exc.code
        if at_once and code is not None:
            stream.told = number
            self._tell(finished, code)
            return
        watched = _Watched(
            device=device,
            mark=mark,
            work=self._services.activity.enter(),
            finished=finished,
            until=time.monotonic() + device_spin_seconds(),
            number=number,
            after=after,
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
        while self._marks and self._look_once() and (self._holds or len(self._marks) > 1):
            continue  # one stream waits for another: what it waited for is told before it
        return any(not marks[0].left for marks in self._marks.values())

    def _look_once(self) -> bool:
        """One look at each stream; whether something was done."""
        done = self._holds = False
        for stream, marks in list(self._marks.items()):
            while marks and (code := self._code(marks[0])) is not None:
                if not marks[0].may_be_told():
                    marks[0].left, marks[0].code = True, code
                    self._holds = True
                    break
                done = True
                stream.told = marks[0].number
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
