# SPDX-License-Identifier: Apache-2.0
"""The way to the session's thread: a connection, and with a window two rings in its control page.

Once a session has rings every command takes its place in them, so the order stays total. What is
too long for a place goes by the connection, announced by an empty entry. The connection carries
wake-ups, where no doorbell does, and tells of the other side's end; its last words come that way,
unannounced, for the control page is wiped when a session ends.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from flyt.errors import RegionError
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.keys import ClientKeys
from flyt.rpc.patience import is_polite, spin_seconds
from flyt.rpc.sockets import Dialer, Payload
from flyt.shm import ring
from flyt.shm.doorbell import Doorbell
from flyt.shm.native import Native
from flyt.shm.ring import RingDamaged, RingReader, RingWriter

LOOK_SECONDS = 0.001
"""How often a side that reads a ring looks at the connection too: five times the cost of a look at
the ring, and nothing urgent comes that way."""

SENDS_A_LOOK = 16
"""Commands between two looks for replies, of which the ring holds 128."""

END_SECONDS = 1.0
"""How long after its control page was wiped a session's end may take to be heard of."""


_IS_NO_KICK = [m.KICK].__ne__


class Reply(NamedTuple):
    """What has come, and where it was: its number in the ring, or `_BY_CONNECTION`."""

    frames: list[bytes]
    at: int


_BY_CONNECTION = -1


class Wire:
    """One session's messages, out and in. Guarded by the connection's lock, but for `spin`.

    Parameters
    ----------
    context
        From `flyt.rpc.sockets.open_context`.
    endpoint : Endpoint
        The session's own socket.
    heartbeat_ms : int
        A backend that is silent for so long has ended.
    keys : ClientKeys, optional
        For TCP.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        heartbeat_ms: int,
        keys: ClientKeys | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._dialer = Dialer(context, endpoint, heartbeat_ms=heartbeat_ms, keys=keys)
        self._doorbell: Doorbell | None = None
        self._commands: RingWriter | None = None
        self._replies: RingReader | None = None
        self._came: collections.deque[list[bytes]] = collections.deque()
        """By the connection, in order, but for wake-ups. What is received is here at once, and what
        is taken is counted at once: a signal's handler may do the same in between."""
        self._brought = 0  # of what was announced: came by the connection, and was received
        self._look_at = 0.0
        self._sends = 0
        self._damaged_at = 0.0

    def use_rings(self, native: Native, control_page: int, doorbell: Doorbell | None) -> None:
        """From now on; the backend knows it from ATTACH. The doorbell, which is closed with this
        object, wakes it without the network."""
        self._doorbell = doorbell
        self._commands, self._replies = ring.frontend_rings(native, control_page)

    @property
    def rings(self) -> tuple[RingWriter, RingReader]:
        """The two ends, for those who use them under the same lock."""
        if self._commands is None or self._replies is None:
            raise RegionError("this session has no rings")
        return self._commands, self._replies

    @property
    def is_plain(self) -> bool:
        """Whether the next reply is the next entry of the ring, and not one that is on its way by
        the connection."""
        others = self._came or self._damaged_at or self._announced
        return self._replies is not None and not others

    @property
    def _announced(self) -> bool:
        """Whether a message is on its way by the connection that the ring has told of. The reader
        counts those, so this holds also in the middle of a `receive`, where a signal's handler may
        make another call."""
        replies = self._replies
        return replies is not None and self._brought < replies.position[1]

    def wake(self, asleep: int) -> bool:
        """After a command was published and ``asleep`` found: wake the reader, once for each of
        its sleeps. False when the connection is gone."""
        commands = self._commands
        if commands is None or asleep in (0, commands.woken):
            return self._dialer.lost is None
        alive = self._wake()
        commands.woken = asleep  # behind it: a handler's call in between has to be heard of as well
        return alive

    @property
    def handed(self) -> int:
        """Commands handed over so far: whether an interrupted `send` has happened."""
        return self._dialer.sent if self._commands is None else self._commands.written

    @property
    def lost(self) -> str | None:
        """Why the connection ended, once it did."""
        return self._dialer.lost

    # --- out ---

    def send(self, frames: Sequence[Payload]) -> bool:
        """Hand a command over; False when the connection is gone. Never waits: credits see to it
        that there is a place."""
        commands = self._commands
        if commands is None:
            return self._dialer.send(frames)
        first = frames[0]
        fits = len(frames) == 1 and len(first) <= ring.LARGEST
        written, sent = commands.written, self._dialer.sent
        try:
            asleep = commands.publish(bytes(first) if fits else ring.ELSEWHERE)
            return self.wake(asleep) if fits else self._by_dialer(frames)
        except RegionError as exc:
            self._dialer.lost = self._dialer.lost or f"{self.endpoint}: {exc}"
            return False
        except BaseException:  # an interrupt, perhaps behind the command: it must be heard of
            if commands.written != written and not fits and self._dialer.sent == sent:
                self._by_dialer(frames)  # what was announced has to come
            self.nudge()
            raise

    def _wake(self) -> bool:
        try:
            if self._doorbell is None:
                return self._by_dialer([m.KICK])
            self._doorbell.ring()
            return self._dialer.lost is None
        except BaseException:  # an interrupt: perhaps no command follows that would wake it
            self.nudge()
            raise

    def nudge(self) -> None:
        """After a long wait: wake the other side, should a neighbour have wiped its word that it
        sleeps, or a ring have been lost."""
        if self._commands is not None:
            self._by_dialer([m.KICK])

    def _by_dialer(self, frames: Sequence[Payload]) -> bool:
        self._look_at = 0.0  # a send may swallow the wake-up of what has come meanwhile
        return self._dialer.send(frames)

    def wants_a_look(self) -> bool:
        """Whether to `receive` after a send: by the connection each, as a send may swallow the
        wake-up of what has come meanwhile; by the ring now and then, so that it never fills up."""
        self._sends += 1
        return self._commands is None or not self._look_at or self._sends % SENDS_A_LOOK == 0

    # --- in ---

    def receive(self) -> Reply | None:
        """The next reply, or None; never waits. It stays the next one until it is `dropped`: who is
        interrupted in seeing to it sees it once more, and so does a call of a handler's in between,
        which may wait for what it says."""
        replies = self._replies
        if replies is not None and not self._announced:
            if time.monotonic() >= self._look_at:
                self._look()
            try:
                entry, at = replies.peek()  # after the connection: what is announced is seen to be
            except RingDamaged:
                return self._wiped()
            if entry is None:
                return self._first()
            self._damaged_at = 0.0  # the writer has repaired it
            if entry != ring.ELSEWHERE:
                return Reply([entry], at)
            replies.drop(entry, at)
        self._look()
        return self._first()

    def dropped(self, reply: Reply) -> None:
        """It was seen to; does nothing where that has been said of it."""
        frames, at = reply
        replies = self._replies
        if at != _BY_CONNECTION:
            if replies is not None:
                replies.drop(frames[0], at)
        # From here on no function of Python's: no handler runs before all is done.
        elif self._came and self._came[0] is frames:
            if replies is not None and self._brought < replies.position[1]:
                self._brought += 1  # as `_announced` asks
            self._came.popleft()

    def is_quiet(self) -> bool:
        """Whether the connection has nothing to tell; changes nothing."""
        return self._dialer.is_quiet()

    @property
    def may_have_more(self) -> bool:
        """After `receive` gave something: whether it is worth calling again at once."""
        replies = self._replies
        if replies is None or replies.has_more or self._came:
            return True
        return not self._look_at  # the connection was not looked at to its end

    def _look(self) -> None:
        self._dialer.check()
        received = iter(self._dialer.receive, None)
        self._came.extend(filter(_IS_NO_KICK, received) if self._replies else received)
        if not self._came:
            self._look_at = time.monotonic() + LOOK_SECONDS

    def _first(self) -> Reply | None:
        """What has come first by the connection."""
        return Reply(self._came[0], _BY_CONNECTION) if self._came else None

    def _wiped(self) -> Reply | None:
        """The control page was wiped: the session's end is on its way, or a neighbour did it."""
        now = time.monotonic()
        self._damaged_at = self._damaged_at or now
        self._look()
        if now - self._damaged_at > END_SECONDS and self._dialer.lost is None:
            self._dialer.lost = (
                f"{self.endpoint}: the session's control page was overwritten, by another process "
                "that maps the region"
            )
        return self._first()

    # --- waiting ---

    def filenos(self) -> tuple[int, int]:
        """Descriptors to poll for input, after `fall_asleep`; then call `wake_up`."""
        return self._dialer.filenos()

    def spin(self, seconds: float | None = None) -> bool | None:
        """Wait briefly for a reply, without the lock: whether one came; None without rings. At most
        so many seconds, by default `flyt.rpc.patience.spin_seconds`."""
        replies = self._replies
        if replies is None or self._damaged_at or self._announced:
            return None
        most = spin_seconds() if seconds is None else seconds
        return replies.wait(most, polite=is_polite())

    def fall_asleep(self) -> bool:
        """Ask to be woken by the connection; False when a reply is there already."""
        replies = self._replies
        return replies is None or self._damaged_at > 0 or replies.fall_asleep()

    def wake_up(self) -> None:
        """Awake again."""
        self._look_at = 0.0
        if self._replies is not None:
            self._replies.wake_up()

    # --- the end ---

    def close(self) -> None:
        """The control page may be unmapped once nobody is in `spin`."""
        self._commands = self._replies = None
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None
        self._dialer.close()

    def close_in_child(self) -> None:
        """After a fork, in the child: the pages are not there, the connection is the parent's."""
        self._doorbell = None
        self._commands = self._replies = None
        self._dialer.close_in_child()
