# SPDX-License-Identifier: Apache-2.0
"""`Suspension`: what a session's thread does between `Suspend` and `Resume`.

It ends the work in flight, has the process's GPU state moved to host memory, and then only holds
what the client says: the first command is kept, the others stay where they are. One that waited too
long is refused, with those behind it; nothing is lost, and after the resumption the session goes on
where it was.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import zmq

from flyt.backend.answers import Answers
from flyt.backend.devices.codes import SYSTEM_NOT_READY
from flyt.backend.ending import Drain, Ended
from flyt.backend.inbox import Inbox
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

SIGN_SECONDS = 0.25
"""Part of a heartbeat (or second, without any) after which a client that waits hears that its
session lives: it would give up on one that says nothing."""


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
    held : list
        The command that was taken and is not done yet, if there is one.

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
        held: list[list[bytes]],
    ) -> None:
        self._session = session
        self._services = session.services
        self._inbox = inbox
        self._wire = wire
        self._answers = answers
        self._held = held
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
            if drain.is_done:  # else it has waited
                self._poller.poll(STEP_MS)
        return True

    def _suspended(self, patience: float) -> None:
        device = self._services.devices[0]  # for all of them
        try:
            device.suspend()
        except DeviceError as exc:
            self._tell(str(exc))
            return
        self.stands = True
        self._tell()
        started = time.monotonic()
        held_since = sign_at = 0.0
        while not self._is_back():
            now = time.monotonic()
            if not self._hold():
                held_since = 0.0
            elif not held_since:
                held_since = now
            elif now - held_since >= patience:
                held_since = 0.0
                self._refuse(self._error(now - started))
            if held_since and now >= sign_at and not self._wire.is_full:
                self._answers.give_sign()
                sign_at = now + self._sign_seconds()
            self._answers.tell()
            self._wire.push()
            self._poller.poll(STEP_MS)
            self._inbox.run()
            self._look_for_end()

    def _hold(self) -> bool:
        """Take a command, but don't do it yet; whether one is held."""
        if not self._held and not self._wire.is_full:
            frames = self._wire.receive()
            if frames is not None:
                self._answers.take()
                self._held.append(frames)
        return bool(self._held)

    def _refuse(self, error: DeviceError) -> None:
        """Answer the commands that are there with an error, but for a goodbye."""
        while self._hold():
            frames = self._held.pop()
            command = m.COMMANDS.decode(frames[0] if frames else b"")
            if isinstance(command, m.Bye):
                self._session.leave(command.id)
            self._session.fail(command.id, error)

    def _is_back(self) -> bool:
        wanted, self._wanted_back = self._wanted_back, False
        if not wanted:
            return False
        try:
            self._services.devices[0].resume()
        except DeviceError as exc:
            self._tell(str(exc))
            return False
        self.stands = False
        self._tell()
        return True

    def _look_for_end(self) -> None:
        self._wire.look_for_end()
        if self._wire.gone:
            raise Ended("the client's connection ended")

    def _sign_seconds(self) -> float:
        return SIGN_SECONDS * (self._services.heartbeat_ms / 1000 or 1.0)

    def _error(self, seconds: float) -> DeviceError:
        return DeviceError(
            SYSTEM_NOT_READY,
            f"this session has been suspended for {seconds:.0f} s, and so long nothing waits; who "
            f"runs the backend can bring it back: flyt resume {self._session.id:016x}",
        )
