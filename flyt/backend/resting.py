# SPDX-License-Identifier: Apache-2.0
"""How a session's thread waits: a moment awake, for the next command is often near, then asleep."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from flyt.backend.wire import Wire
from flyt.rpc.patience import is_polite, linger_seconds
from flyt.rpc.sockets import Listener

GLANCE_SECONDS = 0.00002
"""How long to look at the ring between two looks at the device."""

IN_VAIN_MS = 1
"""How long nobody listens to a doorbell that rang for nothing, in milliseconds: so who rings
without end costs at most a thousand wake-ups a second. No ring is lost: an eventfd keeps it."""

FULL_MS = 5
"""A client whose commands are not read is looked at so often, in milliseconds: mostly it does not
read its replies, and nothing wakes the thread when it does."""


class Resting:
    """The waits of one session's thread.

    Parameters
    ----------
    listener : Listener
        The session's socket.
    wire : Wire
        On that socket.
    inbox : int
        Descriptor that has input when another thread wants something.
    spin : callable, optional
        Looks for a command for so many seconds, and answers whether it is worth to go on; by
        default `Wire.spin`.

    Attributes
    ----------
    has_slept : bool
        Whether the inbox's descriptor may have ended a wait, and has to be read. Set to False by
        who has done that.
    """

    def __init__(
        self,
        listener: Listener,
        wire: Wire,
        inbox: int,
        spin: Callable[[float], bool] | None = None,
    ) -> None:
        self._look = spin or wire.spin
        self._wire = wire
        self._all = zmq.Poller()
        self._deaf = zmq.Poller()  # does not look for commands, so they don't keep it from sleeping
        for source in (*listener.pollables, inbox):
            self._all.register(source, zmq.POLLIN)
        for source in (listener.pollables[1], inbox):
            self._deaf.register(source, zmq.POLLIN)
        self._belled = zmq.Poller()
        for source in (*listener.pollables, inbox):
            self._belled.register(source, zmq.POLLIN)
        for bell in wire.bells:
            self._belled.register(bell, zmq.POLLIN)
        self._until = 0.0
        self._fresh = True
        self._in_vain = False
        self.has_slept = False

    def for_command(
        self, took: bool, *, busy: bool, waiting: bool, patience_ms: int | None
    ) -> None:
        """Until the next command, or anything else.

        Parameters
        ----------
        took : bool
            Something was done just now: stay awake a little longer.
        busy : bool
            The thread asks the device for the end of work: no sleep.
        waiting : bool
            The device is to tell of the end of work: that is waited for, so sleep at once.
        patience_ms : int or None
            How long to sleep at most.
        """
        wire = self._wire
        if took:
            self._until = time.monotonic() + linger_seconds()
            self._fresh, self._in_vain = True, False
        if busy and wire.has_rings:
            wire.spin(GLANCE_SECONDS)
        elif busy or self._asks_socket():
            self.has_slept = True
            self._all.poll(0)
        elif waiting or not self._spin():
            if wire.fall_asleep():
                self.has_slept = True
                self._sleep(patience_ms)
            wire.wake_up()

    def _spin(self) -> bool:
        """Once after each command, and when the client has just woken this side: the command is on
        its way then."""
        fresh = self._fresh or self._wire.was_kicked
        self._fresh = self._wire.was_kicked = False
        if fresh:
            self._fresh = self._look(linger_seconds())
        return self._fresh

    def _sleep(self, patience_ms: int | None) -> None:
        if not self._wire.has_bell:
            self._all.poll(patience_ms)
        elif not (self._in_vain and self._all.poll(IN_VAIN_MS)):
            self._belled.poll(patience_ms)
            heard = self._wire.heard_bell()
            self._fresh = heard and not self._in_vain  # else it rings for nothing
            self._in_vain = heard

    def _asks_socket(self) -> bool:
        """Without rings: whether the socket is asked a little longer."""
        return not (self._wire.has_rings or is_polite()) and time.monotonic() < self._until

    def for_room(self, *, busy: bool) -> None:
        """Until there may be room for another command, or for replies. Nothing is received here."""
        wire = self._wire
        self.has_slept = True
        self._deaf.poll(0 if busy else FULL_MS)
        wire.look_for_end()
        wire.push()
