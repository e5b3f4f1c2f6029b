# SPDX-License-Identifier: Apache-2.0
"""`Suspension`: what a session's thread does between `Suspend` and `Resume`.

It ends the work in flight, has the process's GPU state moved to host memory, and then only has
commands wait in line (`flyt.backend.line`). When the first has waited too long all that are there
are refused. After the resumption the session goes on where it was.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from flyt.backend.answers import Answers
from flyt.backend.devices.codes import OPERATING_SYSTEM, SYSTEM_NOT_READY
from flyt.backend.ending import Drain, Ended
from flyt.backend.inbox import Inbox
from flyt.backend.line import MOST, Line
from flyt.backend.orders import Paused
from flyt.backend.wire import Wire
from flyt.errors import DeviceError
from flyt.rpc import messages as m

if TYPE_CHECKING:
    from flyt.backend.session import Session

DRAIN_SECONDS = 30.0
"""How long work in flight may hold a suspension up: it can't be moved, and nobody else is let in
meanwhile. Who has longer kernels asks again."""

STEP_MS = 100
"""How often a suspended session looks for commands; nothing else it does is frequent."""


class Suspension:
    """Of one session. Called on its thread, from its inbox, which is run in here as well.

    Parameters
    ----------
    session : Session
    inbox : Inbox
    wire : Wire
    monitor : zmq.Socket
        Has input when the connection has ended.
    answers : Answers
    line : Line

    Attributes
    ----------
    stands : bool
        Whether the state is off the GPU: no device may be asked for anything.
    """

    def __init__(
        self,
        session: Session,
        inbox: Inbox,
        wire: Wire,
        monitor: zmq.Socket[bytes],
        answers: Answers,
        line: Line,
    ) -> None:
        self._session = session
        self._services = session.services
        self._inbox = inbox
        self._wire = wire
        self._answers = answers
        self._line = line
        self._wanted_back = False
        self._poller = zmq.Poller()
        for source in (monitor, inbox.fileno()):
            self._poller.register(source, zmq.POLLIN)
        self.stands = False

    # --- from the inbox ---

    def begin(self, patience: float) -> None:
        """Suspend; returns once it is resumed, or could not be suspended.

        Parameters
        ----------
        patience : float
            Seconds that a command waits before it is refused.

        Raises
        ------
        Ended
            The session ended meanwhile.
        """
        if self.stands:
            self._tell()
            return
        reaper = self._services.reaper
        if not self._drained():
            self._tell(f"work of the client still runs after {DRAIN_SECONDS:.0f} s; try again")
        elif not reaper.pause(DRAIN_SECONDS):
            self._tell("memory that the client gave back is still being unregistered; try again")
        else:
            try:
                self._suspended(patience)
            finally:
                reaper.go_on()

    def finish(self) -> None:
        """Resume. What comes of it is told."""
        if self.stands:
            self._wanted_back = True
        else:
            self._tell()

    # --- inside ---

    def _tell(self, error: str = "") -> None:
        self._services.tell(Paused(self._session.id, self.stands, error[:4096]))

    def _drained(self) -> bool:
        """Whether nothing of the session is in flight, after waiting for that: on the device, or
        between us and the supervisor, whose answers would have us use the device."""
        drain = Drain(self._inbox, self._session.holdings, self._answers)
        deadline = time.monotonic() + DRAIN_SECONDS
        while not drain.is_done or self._session.requests:
            if time.monotonic() > deadline:
                return False
            drain.turn(STEP_MS)
            self._look_for_end()
            self._attend()
            if drain.is_done and self._session.requests:  # else it has waited, or need not
                self._poller.poll(STEP_MS)
        return True

    def _suspended(self, patience: float) -> None:
        error = self._meanwhile(self._services.devices[0].suspend)  # for all of them
        if error is not None:
            self._tell(str(error))
            return
        self.stands = True
        self._tell()
        started, held_since = time.monotonic(), 0.0
        while not self._is_back():
            now = time.monotonic()
            if not self._attend():
                held_since = 0.0
            elif not held_since:
                held_since = now
            elif now - held_since >= patience:
                held_since = 0.0
                self._refuse(self._error(now - started))
            self._answers.tell()
            self._poller.poll(STEP_MS)
            self._inbox.run()
            self._look_for_end()

    def _meanwhile(self, call: Callable[[], None]) -> DeviceError | None:
        """Make a call to the device that takes long, on a thread of its own; its error."""
        outcome: list[DeviceError | None] = []

        def run() -> None:
            try:
                call()
                outcome.append(None)
            except DeviceError as exc:
                outcome.append(exc)

        thread = threading.Thread(target=run, name="flyt-suspension", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # the process has as many threads as it may have
            return DeviceError(OPERATING_SYSTEM, str(exc))
        while thread.is_alive():  # the call itself is bounded
            self._attend()
            thread.join(STEP_MS / 1000)
        return outcome[0] if outcome else DeviceError(OPERATING_SYSTEM, "a fault of Flyt's own")

    def _attend(self) -> bool:
        """Receive what has come, and do of it only what is ordered with nothing; whether a command
        waits."""
        for _ in range(MOST):
            if (frames := self._line.unordered()) is None:
                break
            self._answers.take()
            self._session.execute(frames)
        self._answers.tell()
        self._wire.push()
        return bool(self._line.held or self._line)

    def _refuse(self, error: DeviceError) -> None:
        """Answer the commands that are there with an error, but for a goodbye."""
        for frames, taken in self._line.drop():
            if not taken:
                self._answers.take()
            command = m.COMMANDS.decode(frames[0] if frames else b"")
            if isinstance(command, m.Bye):
                self._session.leave(command.id)
            self._session.fail(command.id, error)

    def _is_back(self) -> bool:
        wanted, self._wanted_back = self._wanted_back, False
        if not wanted:
            return False
        error = self._meanwhile(self._services.devices[0].resume)
        if error is not None:
            self._tell(str(error))
            return False
        self.stands = False
        self._tell()
        return True

    def _look_for_end(self) -> None:
        self._wire.look_for_end()
        if self._wire.gone:
            raise Ended("the client's connection ended")

    def _error(self, seconds: float) -> DeviceError:
        return DeviceError(
            SYSTEM_NOT_READY,
            f"this session has been suspended for {seconds:.0f} s, and so long nothing waits; who "
            f"runs the backend can bring it back: flyt resume {self._session.id:016x}",
        )
