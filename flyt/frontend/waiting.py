# SPDX-License-Identifier: Apache-2.0
"""Waiting for answers: among the threads of a process that wait, one leads.

The leader polls the socket for all of them; the others sleep. Who leaves wakes another, so that
somebody always leads. Nobody holds the connection's lock while it polls or sleeps. But a signal's
handler, or a finalizer, may wait while its own thread leads, or holds the lock, further out: nobody
else reads until it is back, so it takes the lead, and gives it back.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from threading import get_ident

from flyt.frontend.inflight import InflightTable, Pending
from flyt.frontend.shield import ShieldedLock
from flyt.frontend.wire import Wire
from flyt.rpc.patience import is_polite, spin_seconds


class WaitingRoom:
    """The threads that wait on one connection.

    Parameters
    ----------
    lock : ShieldedLock
        The connection's.
    inflight : InflightTable
        To find those who sleep.
    wire : Wire
        Where answers come from.
    step : float
        Seconds: a waiter looks at the connection at least this often.
    look : callable
        Gets the condition that is waited for: reads what has come, answers whether the condition
        holds, or raises what ends the wait. Called under the lock, as is ``drain``.
    drain : callable
        Reads what has come.
    """

    def __init__(
        self,
        lock: ShieldedLock,
        inflight: InflightTable,
        wire: Wire,
        *,
        step: float,
        look: Callable[[Callable[[], bool]], bool],
        drain: Callable[[], None],
    ) -> None:
        self._lock = lock
        self._inflight = inflight
        self._step = step
        self._look = look
        self._drain = drain
        self._leading = 0  # the identifier of the thread that leads
        self._closed = False
        self._stirred = False
        self._has_followers = False  # since ever: most programs have one thread
        self._left: threading.Event | None = None
        self._wire = wire
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._descriptors = (*wire.filenos(), self._wake)
        self._spare: list[select.poll] = []

    @property
    def descriptor(self) -> int:
        """The wake-up's descriptor: a forked child closes it."""
        return self._wake

    @property
    def is_led(self) -> bool:
        """Under the lock: whether a thread waits for what comes."""
        return bool(self._leading)

    def wait(self, ready: Callable[[], bool], pending: Pending | None) -> None:
        """Return once ``ready()``; ``pending`` is what this thread can be woken for."""
        while not self._turn(ready, pending):
            continue

    def _turn(self, ready: Callable[[], bool], pending: Pending | None) -> bool:
        """Wait for something once, and look; whether ``ready()`` holds."""
        leads = slept = False
        further_out = 0
        holds = self._lock.is_held
        try:
            with self._lock:
                further_out = self._leading
                # Who leads looks when something has come, all others now.
                leads = self._takes_the_lead(holds)
                if leads and ready():  # not before: who leads is told of what others read
                    self._leading, leads = further_out, False
                    self._pass_on(further_out)
                if not leads and self._look(ready):
                    self._hand_over()  # an heir may find its own answer before it leads
                    return True
                if not leads and pending is not None:
                    pending.event = pending.event or threading.Event()
                    self._has_followers = True
            if leads:
                slept = self._listen()
            elif pending is not None and (event := pending.event) is not None:
                self._follow(pending, event)
            else:
                time.sleep(0.001)  # out of credits while another thread leads: it drains for us
            if not leads:
                return False
            with self._lock:
                self._leading, leads = further_out, False  # at once: an interrupt finds it so
                try:
                    if slept:  # not sooner: the sleep may be that of who has taken the lead since
                        self._wire.wake_up()
                    self._pass_on(further_out)
                    return self._look(ready)
                finally:
                    self._hand_over()
        except BaseException:  # KeyboardInterrupt: the others need a leader all the same
            while leads:
                with contextlib.suppress(KeyboardInterrupt), self._lock:
                    self._leading, leads = further_out, False
                    self._pass_on(further_out)
                    self._drain()
                    self._hand_over()
            raise

    def _takes_the_lead(self, holds: bool) -> bool:
        """Under the lock; ``holds``: this thread has held it before. Whoever leads already is this
        thread itself, further out, or can't read until this thread gives the lock back."""
        me = get_ident()
        may_lead = holds or self._leading in (0, me)
        if may_lead:
            self._calm()
        if self._closed or not may_lead:
            return False
        self._leading = me  # last: an interrupt before it leaves no leader that is none
        return True

    def stir(self) -> None:
        """Under the lock, by whoever read answers: one may be the leader's own."""
        if self._leading and not self._stirred:
            self._stirred = True
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Under the lock. A leader that is polling closes its wake-up itself: another file may get
        the number at once."""
        self._closed = True
        if self._leading:
            self._left = threading.Event()
            os.eventfd_write(self._wake, 1)
        else:
            os.close(self._wake)

    def is_left(self, seconds: float) -> bool:
        """After `close`: whether the last leader has gone, waiting for it so many seconds."""
        return self._left is None or self._left.wait(seconds)

    def _follow(self, pending: Pending, event: threading.Event) -> None:
        try:
            event.wait(self._step)
        except BaseException:  # KeyboardInterrupt: nobody sleeps there any more, so it is no heir
            with self._lock:
                pending.event = None
                self._hand_over()
            raise
        event.clear()

    def _listen(self) -> bool:
        """Wait for something; whether the other side was told of a sleep."""
        came = self._wire.spin()
        if came is None:
            came = self._ask_descriptors()
        if came:
            return False
        if self._wire.fall_asleep() and not self._poll(self._step):
            with self._lock:
                self._wire.nudge()
        return True

    def _ask_descriptors(self) -> bool:
        if is_polite():
            return False
        until = time.monotonic() + spin_seconds()
        while time.monotonic() < until:
            if self._poll(0):
                return True
        return False

    def _poll(self, seconds: float) -> bool:
        try:  # not one for all: the leader may be in the middle of this, further out
            poll = self._spare.pop()
        except IndexError:
            poll = select.poll()
            for descriptor in self._descriptors:
                poll.register(descriptor, select.POLLIN)
        came = bool(poll.poll(seconds * 1000))
        self._spare.append(poll)
        return came

    def _pass_on(self, further_out: int) -> None:
        """Under the lock, by who leads no more. Who leads instead has to look: what was read may be
        its own."""
        if further_out:
            self.stir()
        elif self._left is not None:  # since it led the connection was closed
            os.close(self._wake)
            self._left.set()
        else:
            self._calm()

    def _calm(self) -> None:
        if self._stirred and not self._closed:
            self._stirred = False
            os.eventfd_read(self._wake)

    def _hand_over(self) -> None:
        """Wake one that waits, if nobody leads. Under the lock, by whoever leaves."""
        if self._leading or not self._has_followers:
            return
        heir = self._inflight.waiting()
        if heir is not None and heir.event is not None:
            heir.event.set()
