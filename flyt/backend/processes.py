# SPDX-License-Identifier: Apache-2.0
"""`Child`: a process of the daemon that runs one of its modules and talks over a channel.

A child knows by a pidfd when its parent has ended and ends, too. The parent knows by a pidfd when
the child has ended; only then is it sure that no DMA of the child's runs any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from flyt.backend.channel import Channel, ChannelClosed
from flyt.backend.loop import EventLoop, Timer
from flyt.errors import ProtocolError, SessionLost
from flyt.rpc.codec import Vocabulary

log = logging.getLogger(__name__)

EXIT_GRACE = 5.0
"""Seconds between a child's closing of its channel and our kill, should it not exit by itself."""

SEND_LIMIT = 0.5
"""Seconds the event loop waits for one child to read its full socket; all others wait meanwhile.
The socket takes thousands of messages before it is full, so a child this far behind is stuck."""

KILL_LIMIT = 10.0
"""Seconds a killed child may take to end: the driver tears its context down inside the kernel."""


IN_ORDER = "exit status 0"
"""How a child ends that was told to."""


class Owner(Protocol):
    """Who hears of a child's messages and of its end."""

    def heard(self, message: Any) -> None:
        """The child sent a message."""

    def ended(self, reason: str) -> None:
        """The process is gone and reaped; ``reason`` says how."""


class Child:
    """A running process.

    Parameters
    ----------
    loop : EventLoop
        Makes all calls to ``owner``.
    module : str
        What ``python -m`` runs; gets ``--channel-fd`` and ``--parent-pidfd`` before ``arguments``.
    sends, receives : Vocabulary
        What goes to the child, and what comes from it.
    inherit : sequence of int
        Descriptors that the child gets under the same numbers.

    Raises
    ------
    OSError
        When the system has no room for it: processes, memory, descriptors.
    """

    def __init__(
        self,
        loop: EventLoop,
        owner: Owner,
        module: str,
        arguments: Sequence[str],
        *,
        sends: Vocabulary,
        receives: Vocabulary,
        inherit: Sequence[int] = (),
    ) -> None:
        self._loop = loop
        self._owner = owner
        self.name = module.rpartition(".")[2]
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as childs:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            undo.enter_context(ours)
            childs.enter_context(theirs)
            parent = os.pidfd_open(os.getpid())
            childs.callback(os.close, parent)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", module),
                    *("--channel-fd", str(theirs.fileno()), "--parent-pidfd", str(parent)),
                    *arguments,
                ],
                env={**os.environ, "FLYT_DAEMON": "1"},  # see flyt/__init__.py
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), parent, *inherit),
                start_new_session=True,  # Ctrl-C is for the supervisor; it tells its children
            )
            undo.callback(self._process.wait, KILL_LIMIT)
            undo.callback(self._process.kill)
            self.pid = self._process.pid
            self._pidfd = os.pidfd_open(self.pid)
            undo.pop_all()
        self._channel = Channel(ours, sends, receives, send_limit=SEND_LIMIT)
        self._grace: Timer | None = None
        self._deaf = False
        self.running = True
        loop.watch(self._channel.fileno(), self._readable)
        loop.watch(self._pidfd, self._exited)

    def send(self, message: Any, descriptor: int = -1) -> None:
        """Tell the child something, and give it a copy of a descriptor. One that can't be
        told is killed, and `Owner.ended` comes."""
        if not self.running:
            return
        try:
            self._channel.send(message, descriptor)
        except ChannelClosed:  # it is ending, and `Owner.ended` says how
            self.kill()
        except SessionLost as exc:
            log.warning("%s %d: %s", self.name, self.pid, exc)
            self.kill()

    def hear(self) -> None:
        """Hand over what the child has said so far, ahead of the loop's turn."""
        if self.running and self._grace is None:
            self._readable()

    def kill(self) -> None:
        """SIGKILL; `Owner.ended` comes when the process is gone."""
        if self.running:
            self._process.kill()

    def _readable(self) -> None:
        try:
            for message in self._channel.messages():
                self._owner.heard(message)
        except ProtocolError as exc:
            log.error("%s %d talks nonsense and is killed: %s", self.name, self.pid, exc)
            self._deaf = True
            self.kill()
        if self._channel.closed or self._deaf:
            self._loop.unwatch(self._channel.fileno())
            if self._grace is None:
                self._grace = self._loop.call_later(EXIT_GRACE, self.kill)

    def _exited(self) -> None:
        status = self._process.wait()  # returns at once: the pidfd said that it has ended
        self.running = False
        if self._grace is not None:
            self._grace.cancel()
        self._loop.unwatch(self._channel.fileno())
        self._loop.unwatch(self._pidfd)
        self._hear_last_words()
        self._channel.close()
        os.close(self._pidfd)
        self._owner.ended(_manner(status))

    def _hear_last_words(self) -> None:
        if self._deaf:
            return
        with contextlib.suppress(ChannelClosed, ProtocolError):
            while (message := self._channel.receive(0)) is not None:
                self._owner.heard(message)

    def end(self, seconds: float) -> None:
        """Turn the loop until the child has ended; kill it after ``seconds``."""
        if not self._loop.turn_until(lambda: not self.running, seconds):
            self.kill()
            if not self._loop.turn_until(lambda: not self.running, KILL_LIMIT):
                log.error("%s %d does not end, not even by SIGKILL", self.name, self.pid)


def _manner(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
