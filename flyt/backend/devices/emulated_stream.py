# SPDX-License-Identifier: Apache-2.0
"""Streams and events of an emulated device: each stream is a queue with a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from flyt.backend.devices import codes
from flyt.backend.devices.base import Notification
from flyt.backend.devices.emulated_context import Context
from flyt.backend.devices.emulated_memory import Dying
from flyt.errors import DeviceError

_log = logging.getLogger(__name__)

Task = Callable[[], None]


class Record:
    """One cudaEventRecord: done once the stream has reached it."""

    __slots__ = ("done", "reached")

    def __init__(self) -> None:
        self.done = False
        self.reached = 0.0

    def reach(self) -> None:
        self.reached = time.perf_counter()
        self.done = True


class Event:
    """An event is its latest record; whoever waits has captured the record, not the event."""

    def __init__(self, owner: object, timed: bool) -> None:
        self.owner = owner
        self.timed = timed
        self.record: Record | None = None
        self.destroyed = False


class Stream:
    """Runs tasks in the order in which they were put, on a thread that starts with the first.

    Parameters
    ----------
    context : Context
    owner : object
        The device, to tell its streams from another's.
    ended : callable
        Called with the stream, from its thread, when the last task is done.
    """

    def __init__(self, context: Context, owner: object, ended: Callable[[Stream], None]) -> None:
        self.owner = owner
        self.destroyed = False
        self.dying: list[Dying] = []  # guarded by the context's lock
        self.issued = 0
        self.finished = 0
        self._context = context
        self._ended = ended
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error = codes.SUCCESS
        self._hurried = False
        self._abandoned = False

    # --- called from any thread, with the context's lock held ---

    def start(self) -> Stream:
        """Makes sure of the thread: to be called before the tables change for what is put."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="flyt-emulated-stream", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:  # the process has as many threads as it may have
                raise DeviceError(codes.OPERATING_SYSTEM, f"start a stream: {exc}") from exc
            self._thread = thread
        return self

    @property
    def is_idle(self) -> bool:
        """Whether everything that was put is done."""
        return self.issued == self.finished

    @property
    def has_nothing_to_tell(self) -> bool:
        """Whether it is idle, and no failure is left for a notification to tell."""
        return self.is_idle and not self._error

    def put(self, task: Task) -> None:
        """Bookkeeping, which happens whatever became of the work before it."""
        self.issued += 1
        self._tasks.put(task)

    def put_work(self, work: Task, failure: int) -> None:
        """Work, which is not done in a broken context; with a ``failure`` it fails instead."""
        self.put(lambda: self._work(work, failure))

    def put_wait(self, record: Record) -> None:
        self.put(lambda: self._wait(record))

    def put_notification(self, call: Notification) -> None:
        self.put(lambda: self._notify(call))

    def finish(self) -> None:
        """No more tasks will come: the thread ends after those that were put."""
        self.destroyed = True
        if self._thread is None:
            self._ended(self)
        else:
            self._tasks.put(None)

    # --- called from any thread ---

    def hurry(self, *, abandon: bool = False) -> None:
        """Ends the emulated slowness, or with ``abandon`` all work that has not begun."""
        with self._context.progress:
            self._hurried = True
            self._abandoned = self._abandoned or abandon
            self._context.progress.notify_all()

    def join(self, deadline: float) -> bool:
        """Waits until ``deadline`` (`time.monotonic`) for the end of the thread."""
        if self._thread is None:
            return True
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller is a task of this stream."""
        return self._thread is threading.current_thread()

    # --- the stream's own thread ---

    def pause(self, seconds: float) -> None:
        """What a DMA takes. Every stream wakes its neighbours, so this waits for its own end."""
        if seconds > 0:
            with self._context.progress:
                self._context.progress.wait_for(lambda: self._hurried, seconds)

    def _run(self) -> None:
        # An idle stream waits here for its next task, and ends when finish() puts None.
        while (task := self._tasks.get()) is not None:
            task()
            with self._context.progress:
                self.finished += 1
                self._context.progress.notify_all()
        self._ended(self)

    def _work(self, work: Task, failure: int) -> None:
        if failure:
            self._error = self._error or failure
            self._context.failed(failure)
        elif not (self._context.broken or self._abandoned):
            work()

    def _wait(self, record: Record) -> None:
        context = self._context
        with context.progress:
            context.progress.wait_for(lambda: record.done or self._abandoned or context.broken)

    def _notify(self, call: Notification) -> None:
        code = self._context.broken or self._error
        if not code and self._abandoned:
            code = codes.CONTEXT_IS_DESTROYED
        self._error = codes.SUCCESS
        try:
            call(code)
        except Exception:  # noqa: BLE001 - a bug of the caller: it would silently end the stream
            _log.exception("a notification raised; the stream goes on")
