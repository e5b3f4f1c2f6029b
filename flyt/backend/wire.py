# SPDX-License-Identifier: Apache-2.0
"""The way to one client: a socket, and once it has a window two rings in its control page.

The first ATTACH with the session's token binds a connection; strangers get no answer. From the
client's first entry in the ring of commands on, every command and every reply takes its place in a
ring: `flyt.frontend.wire` tells the rules. Used by the session's thread alone.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable

import zmq

from flyt.errors import ProtocolError, RegionError
from flyt.rpc import messages as m
from flyt.rpc.codec import MAX_MESSAGE_BYTES
from flyt.rpc.patience import is_polite
from flyt.rpc.sockets import Full, Incoming, Listener, Payload
from flyt.shm import layout, memory, ring
from flyt.shm.native import Native
from flyt.shm.ring import RingDamaged, RingReader, RingWriter

LOOK_SECONDS = 0.001
"""How often the socket is looked at while commands come by the ring."""

ANNOUNCED_SECONDS = 10.0
"""A command that the ring announced comes by the socket within this time; it is sent in one go."""

UNREAD = 64
"""Messages that libzmq keeps for a client that does not read, a MiB each at most (inline payloads).
Far beyond what an honest client leaves unread: the kernel's buffers come first."""

LARGEST_FRAME = MAX_MESSAGE_BYTES + (64 << 10)
"""A little more than the decoder takes, so that whoever goes beyond that hears why."""

BACKLOG = 64
"""Messages of a client that wait here; the others of its `flyt.rpc.messages.CREDITS` wait there."""

SOCKET_LIMITS = {"backlog": BACKLOG, "unread": UNREAD, "largest": LARGEST_FRAME}
"""Of a session's `Listener`."""

STRANGERS_A_LOOK = 64
"""Messages of strangers that are dropped before everything else gets its turn."""


_NOTHING: list[Payload] = []
"""What the socket carries of a reply that fits into the ring."""


class Wire:
    """One session's messages, in and out.

    Parameters
    ----------
    listener : Listener
        Its socket; closed by the owner.
    admits : callable
        Whether a message is the ATTACH that binds its connection.
    bell : int
        Eventfd that the client's doorbell signals; -1 without one.

    Attributes
    ----------
    gone : bool
        Whether the client's connection has ended.
    has_bell : bool
        Whether the client wakes this side with its doorbell.
    was_kicked : bool
        Whether it has woken this side by the socket. Set to False by who has taken note.
    """

    def __init__(
        self, listener: Listener, admits: Callable[[Incoming], bool], bell: int = -1
    ) -> None:
        self._bell = bell
        self.heard_bell()  # it rang for the session that had it before
        self.has_bell = self.was_kicked = False
        self._listener = listener
        self._admits = admits
        self._identity = b""
        self._source = -1
        self._commands: RingReader | None = None
        self._replies: RingWriter | None = None
        self._held: list[bytes] | None = None
        self._announced_at = 0.0
        self._look_at = 0.0
        self._unsent: collections.deque[tuple[bytes, list[Payload]]] = collections.deque()
        self._owed: collections.deque[list[Payload]] = collections.deque()
        self._room_until = 0
        """As many replies in the ring, ever, are known to find a place."""
        self.gone = False

    def use_rings(self, native: Native, control_page: int) -> bool:
        """The client may use them from the answer to its ATTACH on. Whether it has rung its
        doorbell by now: that is how it will wake this side, then."""
        # It has zeroed them too, if it is honest, and nobody who had the page before wrote late.
        memory.fill(control_page + layout.COMMAND_RING, 0, layout.RINGS_END - layout.COMMAND_RING)
        self._commands, self._replies = ring.backend_rings(native, control_page)
        self.has_bell = self.heard_bell()
        return self.has_bell

    def drop_rings(self) -> None:
        """The control page is about to be unmapped."""
        self.has_bell = False
        self._commands = self._replies = None
        self._unsent.clear()
        self._owed.clear()

    @property
    def has_rings(self) -> bool:
        return self._commands is not None

    @property
    def _ringing(self) -> bool:
        """Whether the client has used the ring: replies follow it there."""
        return self._commands is not None and self._commands.taken > 0

    @property
    def rings(self) -> tuple[RingReader, RingWriter]:
        """The ends for the compiled loop, which uses them between two calls here."""
        if self._commands is None or self._replies is None:
            raise RegionError("this session has no rings")
        return self._commands, self._replies

    @property
    def is_quiet(self) -> bool:
        """Whether the ring has all there is: nothing waits here, or is on its way by the socket."""
        waits = self._announced_at or self._held is not None
        return self._commands is not None and not (waits or self.is_full)

    def kick(self) -> None:
        """Wake the client: if it finds no room, the client has enough there to wake it."""
        self._send([m.KICK])

    # --- in ---

    def receive(self) -> list[bytes] | None:
        """The next command's frames, or None; never waits.

        Raises
        ------
        ProtocolError
            The ring is damaged, or a command came past it.
        """
        commands = self._commands
        if commands is None:
            return self._from_socket()
        if not self._announced_at:
            self.glance()
            try:
                entry = commands.read()  # after the socket: what is announced is seen to be
            except RingDamaged as exc:
                raise ProtocolError(f"the client's side of the control page: {exc}") from exc
            if entry is None:
                return self._past_the_ring()
            if entry != ring.ELSEWHERE:
                return [entry]
            self._announced_at = time.monotonic()
        self._look()
        frames, self._held = self._held, None
        if frames is not None:
            self._announced_at = 0.0
        elif time.monotonic() > self._announced_at + ANNOUNCED_SECONDS:
            raise ProtocolError("the client announced a command in the ring and did not send it")
        return frames

    def glance(self) -> None:
        """At the socket, if that is due: for who took what is in the ring without `receive`."""
        if time.monotonic() >= self._look_at:
            self._look()

    @property
    def may_have_more(self) -> bool:
        """After `receive` gave something: whether it is worth calling again at once."""
        commands = self._commands
        return commands is None or commands.has_more or self._held is not None

    def _past_the_ring(self) -> list[bytes] | None:
        frames, self._held = self._held, None
        if frames is not None and self._ringing:
            raise ProtocolError("the client sent a command past its ring")
        return frames

    def _look(self) -> None:
        """At the socket and its monitor."""
        self.look_for_end()
        if self._held is None:
            self._held = self._from_socket()
        if self._held is None:
            self._look_at = time.monotonic() + LOOK_SECONDS

    def _from_socket(self) -> list[bytes] | None:
        for _ in range(STRANGERS_A_LOOK):
            incoming = self._listener.receive()
            if incoming is None:
                return None
            if not (incoming.identity == self._identity or self._binds(incoming)):
                continue
            if not (self.has_rings and incoming.frames == [m.KICK]):
                return incoming.frames
            self.was_kicked = True
        return None

    def _binds(self, incoming: Incoming) -> bool:
        if self._identity or not self._admits(incoming):
            return False
        # Descriptors are used again: strangers that had this one before are settled first.
        self._listener.gone()
        self._identity, self._source = incoming.identity, incoming.source
        self._cut_strangers()
        return True

    def look_for_end(self) -> None:
        """Bring `gone` up to date."""
        if self._source in self._listener.gone():
            self.gone = True
        if self._identity and len(self._listener.connections) > 1:
            self._cut_strangers()

    def _cut_strangers(self) -> None:
        """A session has one connection; whoever else comes could make this process keep bytes."""
        connections = self._listener.connections
        connections.cut(source for source in connections.silent(0) if source != self._source)

    # --- out ---

    def reply(self, frames: list[Payload]) -> None:
        """Hand a reply over. Never waits: what finds no place, in the ring or the socket, is
        kept, and `is_full` says so until the client has read."""
        if not self._identity or self.gone:
            return
        if not self._ringing:
            self._send_in_turn(frames)
            return
        first = frames[0]
        fits = len(frames) == 1 and len(first) <= ring.LARGEST
        self._unsent.append((bytes(first), _NOTHING) if fits else (ring.ELSEWHERE, frames))
        self.push()

    def push(self) -> None:
        """Put replies into the ring, or the socket, as far as there is room."""
        while self._owed and self._send(self._owed[0]):
            self._owed.popleft()
        replies = self._replies
        if replies is None:
            return
        asleep = False
        while self._unsent and not self._owed:
            if replies.written >= self._room_until:  # the compiled loop writes there, too
                self._room_until = replies.written + self._room_of(replies)
                if replies.written >= self._room_until:
                    break
            entry, frames = self._unsent.popleft()
            asleep = self._written(replies, entry) or asleep
            if frames:
                self._send_in_turn(frames)
                asleep = False
        if asleep:
            self.kick()

    @staticmethod
    def _written(replies: RingWriter, entry: bytes) -> bool:
        try:
            return replies.write(entry)
        except RegionError as exc:
            raise ProtocolError(f"the client's side of the control page: {exc}") from exc

    @staticmethod
    def _room_of(replies: RingWriter) -> int:
        try:
            return replies.room()
        except RingDamaged as exc:
            raise ProtocolError(f"the client's side of the control page: {exc}") from exc

    @property
    def is_full(self) -> bool:
        """Whether replies wait for the client to read."""
        return bool(self._unsent or self._owed)

    def last_word(self, frames: list[Payload]) -> None:
        """A reply after which the session ends: by the socket, for the control page is wiped."""
        if self._identity and not self.gone:
            self._send(frames)

    def _send_in_turn(self, frames: list[Payload]) -> None:
        if self._owed or not self._send(frames):
            self._owed.append(frames)

    def _send(self, frames: list[Payload]) -> bool:
        """Whether it is out, or never will be."""
        self._look_at = 0.0  # a send may swallow the wake-up of what has come meanwhile
        try:
            self.gone = not self._listener.send(self._identity, frames) or self.gone
        except Full:
            return False
        return True

    # --- waiting ---

    def spin(self, seconds: float) -> bool:
        """Look for a command in the ring for a moment, without the GIL."""
        if self._commands is None or self._announced_at:
            return False
        return self._commands.wait(seconds, polite=is_polite())

    def fall_asleep(self) -> bool:
        """Ask to be woken by the socket; False when there is something already."""
        if self._commands is None:
            return True
        return self._held is None and self._commands.fall_asleep()

    def wake_up(self) -> None:
        """Awake again."""
        self._look_at = 0.0
        if self._commands is not None:
            self._commands.wake_up()

    @property
    def bells(self) -> tuple[int, ...]:
        """Descriptors that have input when the client's doorbell has rung: one at most."""
        return (self._bell,) if self._bell >= 0 else ()

    def heard_bell(self) -> bool:
        """Whether the doorbell has rung since the last call."""
        if self._bell < 0:
            return False
        try:
            return os.eventfd_read(self._bell) > 0
        except BlockingIOError:
            return False

    def farewell(self, seconds: float) -> None:
        """Keep the socket until the client has gone, or had its time to read the last words: when a
        connection ends, the client's libzmq drops what was not read yet."""
        deadline = time.monotonic() + seconds
        monitor: zmq.Socket[bytes] = self._listener.pollables[1]
        while not self.gone and (left := deadline - time.monotonic()) > 0:
            monitor.poll(int(left * 1000) + 1)
            self.look_for_end()
