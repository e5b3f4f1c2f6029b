# SPDX-License-Identifier: Apache-2.0
"""Host functions in streams: cudaLaunchHostFunc and cudaStreamAddCallback.

One helper thread a session calls them, and nothing else: never a thread that is in a CUDA call of
its own, which may hold any lock of the program's. It starts with the first function. The stream
waits in the backend until the function has returned.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flyt.errors import FlytError
from flyt.frontend.connection import Connection
from flyt.frontend.inflight import Pending
from flyt.frontend.streams import Stream
from flyt.rpc import messages as m

log = logging.getLogger("flyt")

MOST_WAITING = 128
"""Functions that wait for their streams before the next launch waits too; the backend, which keeps
a place in memory for each, takes twice as many."""

SPARE = 16
"""Credits for the return of a function beyond all others: commands that wait for it may have those.
The backend takes it whatever else waits, and a ring has 32 places more than there are credits."""

CLOSE_SECONDS = 5.0
"""How long the end of a session waits for a function that runs."""

STEP = 0.5
"""Seconds: whoever waits for room looks this often whether the session has ended."""

Function = Callable[[int], None]
"""Gets the cudaError_t of the work before it."""


class _Call:
    """One function on its way; ``sent`` has its command once that goes out."""

    __slots__ = ("function", "sent")

    def __init__(self, function: Function) -> None:
        self.function = function
        self.sent: list[Pending] = []

    @property
    def pending(self) -> Pending | None:
        return self.sent[0] if self.sent else None

    @property
    def is_reached(self) -> bool:
        return bool(self.sent) and self.sent[0].done


class HostCalls:
    """The host functions of one session, and the thread that calls them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._calls: list[_Call] = []
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._waits = False
        self._closed = False
        self.thread: threading.Thread | None = None

    def put(self, function: Function, stream: Stream) -> None:
        """Let ``function`` be called when ``stream`` gets there; later work waits for it."""
        connection, call = self._connection, _Call(function)
        with self._changed:
            self._make_room()
            self._start()
            self._calls.append(call)  # before it goes out: an interrupt loses none
            self._changed.notify_all()
        try:
            pending = connection.submit(
                lambda number: m.HostCall(number, stream.number),
                posted=True,
                stream=stream,
                sent=call.sent,
            )
        except BaseException:
            if not call.sent:
                self._forget(call)
            raise
        with connection.lock:
            if self._waits and not pending.done:
                pending.event = self._wake
        # Answered once the function has returned: until then the stream is not idle.
        connection.submit(
            lambda number: m.Passed(number, stream.number), posted=True, stream=stream
        )

    def close(self) -> None:
        """After the connection's end: let the thread end, too."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        thread = self.thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(CLOSE_SECONDS)
        if thread.is_alive():
            log.error("a host function goes on after the end of its session")

    def _make_room(self) -> None:
        while len(self._calls) >= MOST_WAITING and self._connection.lost is None:
            self._changed.wait(STEP)

    def _start(self) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="flyt-host-calls", daemon=True)
            self.thread.start()

    def _forget(self, call: _Call) -> None:
        with self._changed:
            self._calls.remove(call)
            self._changed.notify_all()

    # --- the helper thread ---

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closed)
                if not self._calls:
                    return
            try:
                self._await()
            except FlytError as exc:  # the session was lost: those that were sent are answered
                log.debug("host functions: %s", exc)
            for call in [call for call in list(self._calls) if call.is_reached]:
                self._serve(call)
                self._forget(call)
            if self._connection.lost is not None:
                self._drop_unsent()

    def _await(self) -> None:
        """Return when a function's turn has come."""
        lock = self._connection.lock
        with lock:
            self._watch(self._wake)
        try:
            oldest = next((call.pending for call in self._calls if call.pending), None)
            self._connection.room.wait(lambda: any(c.is_reached for c in self._calls), oldest)
        finally:
            with lock:
                self._watch(None)

    def _watch(self, event: threading.Event | None) -> None:
        """Under the connection's lock: let answers to our commands wake this thread, or not."""
        self._waits = event is not None
        for call in self._calls:
            if call.pending is not None and not call.pending.done:
                call.pending.event = event

    def _serve(self, call: _Call) -> None:
        [pending] = call.sent
        lost = self._connection.lost
        status = lost.code if pending.ended and lost is not None else pending.status
        earlier = self._connection.deferred  # work before it may have been answered by itself
        status = status or (earlier.code if earlier is not None else 0)
        try:
            call.function(status)
        except Exception:  # the program's own fault: its stream must go on all the same
            log.exception("a host function raised")
        if not pending.ended:
            try:
                self._connection.submit(
                    lambda number: m.HostReturn(number, pending.id), posted=True, spare=SPARE
                )
            except FlytError as exc:
                log.debug("a host function returned to a lost session: %s", exc)

    def _drop_unsent(self) -> None:
        """Nothing goes out any more; whoever tries hears why."""
        with self._changed:
            self._calls = [call for call in self._calls if call.sent]
            self._changed.notify_all()
