# SPDX-License-Identifier: Apache-2.0
"""A session: one client process, served by one thread on one socket of its own.

The thread takes commands in order, gives them to the device and goes on reading: whatever takes
time answers later, through its `Inbox`. So an ended connection is seen at once, and no
client waits for another.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

import zmq

from flyt.backend import window_commands
from flyt.backend.admission import admits
from flyt.backend.answers import Answers
from flyt.backend.devices.codes import STICKY
from flyt.backend.ending import Drain, Ended
from flyt.backend.handlers import HANDLERS
from flyt.backend.holdings import Holdings
from flyt.backend.inbox import Inbox
from flyt.backend.line import Line
from flyt.backend.memory_commands import Stall
from flyt.backend.orders import Closed, Granted, Open, Opened, Paused, Reclaimed
from flyt.backend.plain import PlainCommands
from flyt.backend.resting import Resting
from flyt.backend.services import OwnRegion, Services
from flyt.backend.streams import SessionStream
from flyt.backend.suspension import Suspension
from flyt.backend.wire import SOCKET_LIMITS, Wire
from flyt.errors import ConfigurationError, DeviceError, ProtocolError, RegionError
from flyt.rpc import messages as m
from flyt.rpc.sockets import Listener, Payload
from flyt.shm import ring
from flyt.shm.window import Window

log = logging.getLogger(__name__)

ATTACH_SECONDS = 10.0
"""A client that was welcomed attaches within this time, or the session ends."""

FAREWELL_SECONDS = 0.5
"""How long a session that ends with words for its client keeps the socket."""

_MESSAGES_A_TURN = 64
"""Messages taken before the thread looks at everything else: a stranger can flood the socket."""


class Session(threading.Thread):
    """Serves one client until its connection, its client or its worker ends."""

    def __init__(self, services: Services, order: Open, own: OwnRegion | None = None) -> None:
        super().__init__(name=f"flyt-session-{order.session:016x}", daemon=True)
        self.services = services
        self._own = own
        self.region = own.region if own is not None else services.region
        self.order = order
        self.id = order.session
        self.pid = order.pid
        self._inbox = Inbox()
        self.holdings = Holdings(services, self._inbox.put, order.memory_limit)
        self.window: Window | None = None
        self.reserved: Window | None = None
        """The window of an ATTACH whose frames are not granted yet."""
        self.attached = False
        self.requests: dict[int, Callable[[Granted | Reclaimed], None]] = {}
        self.proof = int.from_bytes(os.urandom(8), "little")
        self._request = self._bye = 0  # numbers: of our last request, of the command Bye
        self._deadline = time.monotonic() + ATTACH_SECONDS
        self.plain: PlainCommands | None = None
        self._wire: Wire | None = None
        self._answers: Answers | None = None
        self._suspension: Suspension | None = None

    # --- from any thread ---

    def deliver(self, order: Granted | Reclaimed) -> None:
        """Hand the supervisor's answer over to whoever waits for it."""

        def run() -> None:
            if (waiter := self.requests.pop(order.request, None)) is not None:
                waiter(order)

        self._inbox.put(run)

    def end(self, reason: str, *, unless_attached: bool = False) -> None:
        """End the session from outside, in order."""

        def run() -> None:
            if not (unless_attached and self.attached):
                raise Ended(reason)

        self._inbox.put(run)

    def suspend(self, patience: float) -> None:
        """Take the state off the GPU and hold the client's commands."""

        def run() -> None:
            if self._suspension is not None and self.attached:
                self._suspension.begin(patience)
            else:
                self.services.tell(Paused(self.id, False, "its client has not attached yet"))

        self._inbox.put(run)

    def resume(self) -> None:
        """Undo `suspend`."""
        if self._suspension is not None:
            self._inbox.put(self._suspension.finish)

    def sticky(self, code: int, text: str) -> None:
        """The worker's context is gone: tell the client, as the last word."""
        self._inbox.put(functools.partial(self._last_word, code, text))

    # --- the thread ---

    def run(self) -> None:
        try:
            listener = Listener(
                self.services.context,
                self.order.address,
                heartbeat_ms=self.services.heartbeat_ms,
                key=self.services.key,
                **SOCKET_LIMITS,
            )
        except (ConfigurationError, zmq.ZMQError, OSError) as exc:
            self.services.tell(Opened(self.id, 0, "", f"no socket for the session: {exc}"))
            self._inbox.close()
            self._close_region()
            return
        bell = self.services.bell(self.order.bell)
        wire = self._wire = Wire(listener, functools.partial(admits, self.order), bell)
        line, answers = Line(wire), Answers(wire)
        self._answers = answers
        plain = self.plain = PlainCommands(self, wire, answers, self._inbox)
        rest = Resting(listener, wire, self._inbox.fileno(), plain.serve)
        self._suspension = Suspension(self, self._inbox, wire, listener.pollables[1], answers, line)
        where = listener.endpoint
        self.services.tell(Opened(self.id, where.port, os.path.basename(where.path), ""))
        reason = "unknown"
        try:
            self._serve(rest, wire, line, answers)
        except Ended as exc:
            reason = str(exc)
        except Exception as exc:  # a fault of ours ends this session, never the worker's others
            log.exception("session %016x failed", self.id)
            reason = f"internal error: {exc!r}"
        try:
            self._release()
        except DeviceError as exc:
            self._device_failed(exc)
        finally:
            self._inbox.close()
            self.services.registry.drop(self.id)
            self.services.tell(Closed(self.id, reason[:4096]))
            if self._bye:  # last: whoever has the answer finds the session's place free
                answers.end_in_success(self._bye)
            if answers.have_ended:
                wire.farewell(FAREWELL_SECONDS)
            listener.close()
            self._close_region()

    def _close_region(self) -> None:
        if self._own is not None:
            self._own.close()

    def _serve(self, rest: Resting, wire: Wire, line: Line, answers: Answers) -> None:
        while True:
            try:
                told, taken = self.holdings.told, answers.taken
                if line.held is not None:
                    line.held = self.execute(line.held)
                self._take_commands(wire, line, answers)
                took = answers.taken != taken
                if self._inbox or rest.has_slept:
                    rest.has_slept = False
                    took = self._inbox.run() or took
                self.holdings.mark()
                busy = self.holdings.look()  # after the inbox, which tells of marks
                answers.tell()
                if wire.gone:
                    raise Ended("the client's connection ended")
                took = took or self.holdings.told != told
                held = line.held is not None
                if wire.is_full or line.is_full:
                    if not took:  # else there may be room by now
                        rest.for_room(busy=busy)
                elif not (took if held else line):
                    waiting = held or self.holdings.waiting > 0
                    patience_ms = self._patience_ms()
                    rest.for_command(took, busy=busy, waiting=waiting, patience_ms=patience_ms)
            except ProtocolError as exc:
                self._protocol_error(0, exc)

    def _take_commands(self, wire: Wire, line: Line, answers: Answers) -> None:
        """Take what has come, up to a turn's share."""
        if not wire.has_rings:
            wire.look_for_end()
        all_is_plain = line.is_empty and self.plain is not None and self.plain.take()
        for _ in range(_MESSAGES_A_TURN):
            if all_is_plain or (frames := line.next()) is None:
                return
            answers.take()
            line.held = self.execute(frames) or line.held
            if self.holdings.has_news or not (line or wire.may_have_more):
                return

    def _patience_ms(self) -> int | None:
        """How long to sleep at most: for ever once the client has attached."""
        if self.attached:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise Ended(f"the client did not attach within {ATTACH_SECONDS:.0f} s")
        return int(left * 1000) + 1

    # --- commands ---

    def execute(self, frames: list[bytes]) -> list[bytes] | None:
        """Do a command that was taken; the command itself when it can't be done yet."""
        number = 0
        try:
            command = m.COMMANDS.decode(frames[0] if frames else b"")
            number = command.id
            self._check_attached(command)
            HANDLERS[type(command)](self, command, frames[1:])
        except Stall:
            return frames
        except ProtocolError as exc:
            self._protocol_error(number, exc)
        except DeviceError as exc:
            self.fail(number, exc)
        except RegionError as exc:
            self.answer(number, m.Status.FRAMES_REFUSED, text=str(exc))
        return None

    def _protocol_error(self, number: int, exc: ProtocolError) -> NoReturn:
        if self._answers is not None:
            self._answers.end_in_protocol_error(number, str(exc))
        raise Ended(f"protocol error: {exc}") from exc

    def _check_attached(self, command: object) -> None:
        if not self.attached and not isinstance(command, m.Attach):
            raise ProtocolError(f"{type(command).__name__} came before ATTACH was answered")

    def answer(
        self,
        number: int,
        status: int = 0,
        values: Iterable[int] = (),
        *,
        text: str = "",
        payload: Payload | None = None,
    ) -> None:
        """Give the one answer to command ``number``; see `Answers.give`."""
        if self._answers is not None:
            self._answers.give(number, status, values, text=text, payload=payload)

    def fail(self, number: int, exc: DeviceError) -> None:
        """Answer with a device's error. A sticky one ends the worker, and is the last word at once:
        whoever has heard it must never hear anything else."""
        self.holdings.errors += 1
        self._device_failed(exc)
        if exc.code in STICKY:
            self._last_word(exc.code, exc.detail)
        self.answer(number, exc.code, text=exc.detail)

    def _last_word(self, code: int, text: str) -> NoReturn:
        if self._answers is not None:
            self._answers.end(m.Sticky(code, text[:4096]))
        raise Ended(f"sticky error {code}")

    def _device_failed(self, exc: DeviceError) -> None:
        if exc.code in STICKY:
            self.services.broken(exc.code, exc.detail)

    def use_rings(self, control_page: int, window: Window) -> bool:
        """The client will use the rings in its control page; whether it has rung its doorbell."""
        native = ring.usable()
        if native is None or self._wire is None or self.plain is None:
            raise ProtocolError("the client asks for rings, which this backend did not offer")
        rang = self._wire.use_rings(native, control_page)
        self.plain.begin(native, window)
        return rang

    def drop_rings(self) -> None:
        """The control page is about to be unmapped."""
        if self._wire is not None and self.plain is not None:
            self.plain.end()
            self._wire.drop_rings()

    # --- for the handlers ---

    def complete(
        self,
        number: int,
        streams: Iterable[SessionStream],
        values: Iterable[int] = (),
        *,
        brief: bool = False,
    ) -> None:
        """Answer command ``number`` once the work put on these streams so far is done; with
        ``brief`` it may be answered together with what follows it in the same turn."""

        def done(code: int) -> None:
            if code:
                self.fail(number, DeviceError(code, "an operation of the session failed"))
            else:
                self.answer(number, 0, values)

        self.holdings.when_done(streams, done, brief=brief)

    def ask(
        self, make: Callable[[int], object], then: Callable[[Granted | Reclaimed], None]
    ) -> None:
        """Ask the supervisor; ``make`` gets the request number for the message."""
        self._request += 1
        self.requests[self._request] = then
        self.services.tell(make(self._request))

    # --- the end ---

    def leave(self, number: int) -> None:
        """Bye: release everything; `run` answers."""
        self._release()
        self._bye = number
        raise Ended("the client left")

    def _release(self) -> None:
        """Wait for the session's own work, then give back all that it had. Safe to call twice."""
        if self._suspension is not None and self._suspension.stands:
            return  # its process, which was its own, ends now and takes all with it
        with contextlib.ExitStack() as steps:  # from the last to the first, whatever fails
            steps.callback(window_commands.release, self)
            steps.callback(self.holdings.destroy)
            steps.callback(self._finish_work)
            steps.callback(self.holdings.free_blocks)
            steps.callback(self._finish_work)
            steps.callback(self.holdings.open_gates)

    def _finish_work(self) -> None:
        Drain(self._inbox, self.holdings, self._answers).finish(self.id)
