# SPDX-License-Identifier: Apache-2.0
"""The session's connection: sending commands, waiting for answers, noticing the end.

One lock covers tables and sending; who waits does so without it (`flyt.frontend.waiting`).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from typing import Any

import zmq

from flyt.errors import CommandTimeout, DeviceError, ProtocolError
from flyt.frontend.attempt import Attempt
from flyt.frontend.express_link import ExpressLink
from flyt.frontend.flow import Flow
from flyt.frontend.inflight import InflightTable, Make, Pending, checked
from flyt.frontend.lost import CLOSED, DEVICES_UNAVAILABLE, Lost
from flyt.frontend.shield import ShieldedLock
from flyt.frontend.streams import Event, Stream
from flyt.frontend.waiting import WaitingRoom
from flyt.frontend.wire import Wire
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.keys import ClientKeys
from flyt.rpc.patience import Deadline
from flyt.rpc.sockets import Payload
from flyt.shm.doorbell import Doorbell
from flyt.shm.native import Native

SILENT_LIMITS = 2
"""Heartbeat limits without an answer to a PING until a connected backend counts as stuck."""


class Connection:
    """Commands out, results in, for all threads of the process.

    Parameters
    ----------
    context, endpoint, keys
        See `flyt.frontend.wire.Wire`.
    heartbeat_ms, window : int
        As WELCOME told: the heartbeat limit, and how many commands may be untaken.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, heartbeat_ms: int,
        window: int, keys: ClientKeys | None = None,
    ) -> None:  # fmt: skip
        self.lock = ShieldedLock()
        self.inflight = InflightTable()
        self.lost: Lost | None = None
        self._wire = Wire(context, endpoint, heartbeat_ms, keys)
        self._limit = max(heartbeat_ms, 1000) / 1000 if heartbeat_ms else math.inf
        self._step = min(self._limit / 4, 1.0)
        self.flow = Flow(window)
        self.has_credit = self.flow.has_credit
        self.deferred: DeviceError | None = None
        self.link: ExpressLink | None = None
        self._let_go: Callable[[int, int], object] = lambda _first, _count: None
        self._pinged = self._nudged = 0.0
        with contextlib.ExitStack() as undo:
            undo.callback(self._wire.close)
            self.room = WaitingRoom(
                self.lock, self.inflight, self._wire,
                step=self._step, look=self._look, drain=self.drain,
            )  # fmt: skip
            undo.pop_all()
        self._wait = self.room.wait
        self._closed = False

    def use_rings(self, native: Native, control_page: int, doorbell: Doorbell | None) -> None:
        """Commands and replies go through the control page from now on."""
        with self.lock:
            self._wire.use_rings(native, control_page, doorbell)
            self.link = ExpressLink(self, native, self._wire)
            self._let_go = self.link.answered

    # --- sending ---

    def submit(
        self,
        make: Make,
        *,
        size: int = 0,
        pages: tuple[int, int] = (0, 0),
        payload: Payload | None = None,
        finish: Callable[[Pending], None] | None = None,
        posted: bool = False,
        stream: Stream | None = None,
        event: Event | None = None,
        sent: list[Pending] | None = None,
        spare: int = 0,
    ) -> Pending:
        """Send one command, in order with all others of the session.

        Parameters
        ----------
        make : callable
            Gets the command's id and returns the message.
        finish : callable, optional
            See `Pending.finish`.
        posted : bool
            Nobody waits for it: an error in its answer is kept for `raise_deferred`.
        stream : Stream, optional
            The command becomes the last one of this stream.
        event : Event, optional
            The command is the last record of this event.
        sent : list of Pending, optional
            See `Attempt`.
        spare : int
            Credits that it may take beyond those there are.

        Raises
        ------
        Lost
            The session is gone.
        """
        while True:
            with self.lock:
                self._check()
                if self.has_credit(spare):
                    pending = self._made(make, size, pages)
                    pending.finish, pending.posted = finish, posted
                    self._send(pending, payload, stream, event, sent)
                    return pending
            self._wait(lambda: self.has_credit(spare), None)

    def _made(self, make: Make, size: int = 0, pages: tuple[int, int] = (0, 0)) -> Pending:
        command = make(self.inflight.next_id())
        pending = Pending(command.id, type(command).__name__, size, pages)
        pending.wire = m.COMMANDS.encode(command)
        return pending

    def _send(
        self,
        pending: Pending,
        payload: Payload | None = None,
        stream: Stream | None = None,
        event: Event | None = None,
        sent: list[Pending] | None = None,
    ) -> None:
        frames: list[Payload] = [pending.wire] if payload is None else [pending.wire, payload]
        if not len(self.inflight):
            self.flow.heard = time.monotonic()  # an idle session's silence means nothing
        attempt = Attempt(self.inflight, self.flow, stream, event, sent)
        handed, outer, self.flow.within = self._wire.handed, self.flow.within, 0
        try:
            attempt.begin(pending)
            alive = self._wire.send(frames)
        except BaseException:  # a handler's, of a signal that another thread got: see the shield
            if self._wire.handed == handed + self.flow.within:
                attempt.undo(pending, self.flow.within)
            raise
        finally:
            self.flow.within = outer + self._wire.handed - handed
        if not alive:
            self.ended()
        self.flow.count(pending.posted)
        if self._wire.wants_a_look():
            self.drain()

    def ended(self) -> None:
        """Nothing can be sent any more: say so, or what the backend has said of it."""
        self.drain()
        self._lose(DEVICES_UNAVAILABLE, "the connection to the backend ended")
        self._check()

    def call(self, make: Make, **details: Any) -> Pending:
        """Send a command and wait for its answer.

        Raises
        ------
        DeviceError
            When the answer is a cudaError_t other than success.
        Lost, CommandTimeout
        """
        pending = self.submit(make, **details)
        self.wait(pending)
        return self.checked(pending)

    checked = staticmethod(checked)

    # --- waiting ---

    def wait(self, pending: Pending) -> None:
        """Return once the command is answered.

        Raises
        ------
        Lost, CommandTimeout
            The session ended first, or the backend is connected but its thread does not answer.
        """
        if self.link is None or not self.link.wait(pending):
            self._wait(lambda: pending.done, pending)
        if pending.ended:
            raise self.lost or Lost(pending.status, pending.text)

    def settle(self, deadline: Deadline) -> None:
        """Return once all that was sent so far is answered, or the time is over."""
        with self.lock:
            sent = self.inflight.all()
        self._wait(lambda: all(p.done for p in sent) or not deadline.left(), None)

    def _look(self, ready: Callable[[], bool]) -> bool:
        self.drain()
        if ready():
            return True
        self._check()
        self._watch()
        return False

    def _watch(self) -> None:
        """A backend that is connected but says nothing is asked, and given up after a while."""
        now = time.monotonic()
        silent = now - self.flow.heard
        if silent < self._limit or not len(self.inflight):
            return
        if silent > self._limit * (1 + SILENT_LIMITS) and self._pinged > self.flow.heard:
            text = (
                f"the backend at {self._wire.endpoint} is connected but has not answered for "
                f"{silent:.0f} s; {self.inflight.describe()}"
            )
            self._lose(DEVICES_UNAVAILABLE, text)
            raise CommandTimeout(text)
        if now - self._pinged > self._limit:
            self._pinged = now
            ping = self._made(m.Ping)
            ping.posted = True
            self._send(ping)

    # --- receiving, under the lock ---

    def drain(self) -> None:
        if self._closed:
            return
        heard = self.link is not None and self.link.read()
        while (reply := self._wire.receive()) is not None:
            heard = True
            self._dispatch(reply.frames)
            self._wire.dropped(reply)  # not before: see `Wire.receive`
            if not self._wire.may_have_more:
                break
        if heard:
            self.flow.heard = time.monotonic()
            self.room.stir()
        if self._wire.lost is not None and self.lost is None:
            self._lose(DEVICES_UNAVAILABLE, self._wire.lost)

    def _dispatch(self, frames: list[bytes]) -> None:
        try:
            reply = m.REPLIES.decode(frames[0])
        except ProtocolError as exc:
            self._lose(DEVICES_UNAVAILABLE, str(exc))
            return
        kind = type(reply)
        if kind is m.Sticky:
            self._lose(reply.code, f"the backend's context is gone: {reply.text}")
            return
        if reply.taken > self.flow.taken:  # noqa: PLR1730 - not max(): see ExpressLink.absorb
            self.flow.taken = reply.taken
        if kind is m.Done:
            self.succeeded(reply.first, reply.count)
        if kind is not m.Result:
            return
        self._let_go(reply.id, 1)
        pending = self.inflight.answer(
            reply.id, status=reply.status, text=reply.text, values=reply.values,
            payload=frames[1] if len(frames) > 1 else None,
        )  # fmt: skip
        if pending is None and reply.status == m.Status.PROTOCOL:
            self._lose(DEVICES_UNAVAILABLE, f"the backend ended the session: {reply.text}")
        elif pending is not None and reply.status:
            if pending.posted and self.deferred is None:
                self.deferred = DeviceError(reply.status, reply.text or pending.name)
            elif not pending.posted and self.deferred and self.deferred.code == reply.status:
                self.deferred = None  # the caller hears of it now, and once is enough

    def succeeded(self, first: int, count: int) -> None:
        """Under the lock: the answer to ``count`` commands from number ``first`` on has come."""
        self._let_go(first, count)
        if count > self.flow.sent:
            text = f"the backend answered {count} commands at once, {self.flow.sent} were sent"
            self._lose(DEVICES_UNAVAILABLE, text)
            return
        for number in range(first, first + count):
            self.inflight.succeed(number)

    def _lose(self, code: int, reason: str) -> None:
        if self.lost is None:
            self.lost = Lost(code, f"{reason} ({self.inflight.describe()})")
            self.inflight.fail_all(code, str(self.lost))
            self.room.stir()

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost

    # --- the rest ---

    def refresh(self) -> None:
        """Take note of all answers that have come; raises Lost when the session has ended."""
        with self.lock:
            self.drain()
            self._check()
            # Who only ever asks sleeps nowhere: a wake-up that was lost is made good here.
            now = time.monotonic()
            if len(self.inflight) and now - max(self.flow.heard, self._nudged) > self._step:
                self._nudged = now
                self._wire.nudge()

    def raise_deferred(self) -> None:
        """Report the error of an earlier post, once, as CUDA reports asynchronous errors."""
        if self.deferred is None:
            return
        with self.lock:
            error, self.deferred = self.deferred, None
        if error is not None:
            raise error

    def close(self, reason: str = CLOSED) -> None:
        """End the connection; the backend gives back all that the session had."""
        with self.lock:
            if self._closed:
                return
            self._lose(DEVICES_UNAVAILABLE, reason)
            self._closed = True
            if self.link is not None:
                self.link.end()
            self._wire.close()
            self.room.close()

    def is_left(self, seconds: float) -> bool:
        """After `close`: whether no thread looks at the control page any more."""
        return self.room.is_left(seconds)

    def forget_in_child(self) -> None:
        """After a fork, in the child: let go of the parent's connection without touching it."""
        if self._closed:  # its descriptors are closed, and their numbers another file's by now
            return
        self._closed = True
        self.lock = ShieldedLock()  # another thread of the parent may have held it
        self._wire.close_in_child()
        os.close(self.room.descriptor)
        self.lost = Lost(3, "this process was forked from one with a Flyt session")
