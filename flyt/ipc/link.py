# SPDX-License-Identifier: Apache-2.0
"""`Link`: a socket and the one thread that reads it and carries out what finalizers left to do.

The thread ends with the connection. Whoever shares need not call anything for releases to be
served or for the peer's death to be seen.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from flyt.errors import FlytError, PeerLost, PeerTimeout, ProtocolError
from flyt.ipc import frames, lifetime
from flyt.ipc.messages import Message, decode, encode
from flyt.ipc.patience import give_way, spin_seconds

TICK = 0.001
"""Seconds that a note waits at most while many come; then one wake-up serves them all."""

TICKING = 0.005
"""Seconds after a note within which another makes them many."""

HASTE = 0.0002
"""Seconds without a message after which a receiver has its notes seen to: the peer may wait for
a release before it sends."""

JOIN_LIMIT = 10.0
"""Seconds for the thread to end; it is only ever busy with one driver call."""


class Handler(Protocol):
    """Whom a link serves: called on the link's thread, or on one that leads; never on both."""

    def has_room(self) -> bool:
        """Whether another message may be read now; `Link.wake` when that changes."""

    def on_message(self, message: Message, fds: tuple[int, ...]) -> None:
        """Take a message; its descriptors are the handler's. FlytError ends the link."""

    def on_noted(self) -> None:
        """Notes were carried out: tell the peer what they left to tell."""

    def on_hangup(self) -> None:
        """The peer is gone; messages that it sent before may still follow."""

    def on_end(self, reason: FlytError) -> None:
        """The link is over, once, for this reason; what was read before stays readable."""


class Link:
    """One connection to one process.

    Parameters
    ----------
    sock : socket.socket
        Connected and checked; the link closes it.
    handler : Handler
    """

    def __init__(self, sock: socket.socket, handler: Handler) -> None:
        self._sock = sock
        self._handler = handler
        self._sock.setblocking(False)
        self._wake = -1
        # deque: appended to by finalizers, at any point, so without a lock.
        self._notes: deque[Callable[[], None]] = deque()
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._closing = False
        self._ended = False
        self._hung_up = False
        self._fault: FlytError | None = None
        # Held by whoever reads: the thread, or a thread that waits for a message.
        self._reading = threading.Lock()
        self._led = False
        self._was_led = False
        self._watched: int | None = None
        # The thread looks around each TICK by itself: notes and messages need not wake it.
        self._ticking = False
        self._noted_at = self._tick_until = 0.0
        self._spin = spin_seconds()
        # Held for a moment, never while waiting; re-entrant, since finalizers take it too. Without
        # it a late wake-up could write into a descriptor that has become somebody else's.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="flyt-ipc", daemon=True)

    def start(self) -> None:
        """Begin to serve; until then only `send` may be used."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        lifetime.watch(self)
        self._thread.start()

    @property
    def is_ended(self) -> bool:
        return self._ended

    def note(self, todo: Callable[[], None]) -> None:
        """Have the thread do this, within a TICK. May be called at any point, by finalizers too."""
        if not self._ended:
            self._notes.append(todo)
            if not self._ticking:
                self.wake()

    def post(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send this when there is room, after what was posted before; from a handler's calls.

        Descriptors must stay open until the peer answers, or the connection ends.
        """
        self._outbox.append((encode(message), fds))
        if threading.current_thread() is not self._thread:
            self.wake()

    def wake(self) -> None:
        """Have the thread look around."""
        with self._lock:
            if not self._ended:
                os.eventfd_write(self._wake, 1)

    def send(self, message: Message, fds: tuple[int, ...], timeout: float) -> None:
        """Send from any other thread; returns when the kernel has it.

        Raises
        ------
        PeerLost
            The connection is over.
        PeerTimeout
            The peer has not read what it was sent before.
        """
        frame = encode(message)
        deadline = time.monotonic() + timeout
        while not self._ended:
            try:
                return frames.send(self._sock, frame, fds)
            except BlockingIOError as exc:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerTimeout(f"the peer has not read for {timeout} s") from exc
                self._await(select.POLLOUT, left)
            except OSError as exc:
                raise PeerLost(f"the peer can't be sent to: {exc.strerror}") from exc
        raise PeerLost("the connection is over")

    def _await(self, events: int, seconds: float) -> None:
        waiter = select.poll()
        with self._lock:
            if self._ended:
                return
            waiter.register(self._sock, events)
        waiter.poll(seconds * 1000)

    def close(self, *, wait: bool) -> None:
        """End the connection; with ``wait``, return when the thread has ended."""
        self._closing = True
        self.wake()
        if wait and self._thread is not threading.current_thread() and self._thread.ident:
            self._thread.join(JOIN_LIMIT)

    def forget(self) -> None:
        """In a forked child: the connection is the parent's; drop our copies of descriptors."""
        if not self._ended:
            self._ended = True
            self._sock.close()
            self._epoll.close()
            os.close(self._wake)

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        reason: FlytError = PeerLost("the connection was closed here")
        try:
            if not self._serve():
                reason = PeerLost("the peer has closed the connection, or its process is gone")
        except FlytError as exc:
            reason = exc
        except OSError as exc:
            reason = PeerLost(f"the connection failed: {exc.strerror}")
        finally:
            with self._lock:
                self._ended = True
                self._sock.close()
                self._epoll.close()
                os.close(self._wake)
            self._notes.clear()
            self._handler.on_end(reason)

    def _serve(self) -> bool:
        """Serve until it is closed here (True) or there (False)."""
        while not self._closing:
            self._ticking = time.monotonic() < self._tick_until
            self._watch()
            pause = TICK if self._ticking else 0 if self._notes else None
            for fd, events in self._epoll.poll(pause):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif events & (select.EPOLLHUP | select.EPOLLERR):
                    self._hang_up()
            if self._notes:
                self._carry_out()
            self._flush()
            if self._fault is not None:
                raise self._fault
            if self._ticking and self._was_led:  # who leads reads; don't stand in its way
                self._was_led = False
            elif self._reading.acquire(blocking=False):  # else a waiter reads, and goes on to
                try:
                    if not self._read():
                        return False
                finally:
                    self._reading.release()
        self._flush()
        return True

    def _carry_out(self) -> None:
        while self._notes:
            self._notes.popleft()()
        self._handler.on_noted()
        now = time.monotonic()
        if now - self._noted_at < TICKING:
            self._tick_until = now + TICKING
        self._noted_at = now

    def _watch(self) -> None:
        """Tell the kernel what wakes the thread; a waiter may change it while it sleeps."""
        with self._lock:
            if self._ended:
                return
            room = self._handler.has_room()
            wanted: int | None = (
                select.EPOLLIN if room and not self._led and not self._ticking else 0
            )
            if self._outbox:
                wanted = (wanted or 0) | select.EPOLLOUT
            elif self._hung_up and not room:  # EPOLLHUP stays: the thread would only spin
                wanted = None
            if wanted == self._watched:
                return
            if wanted is None:
                self._epoll.unregister(self._sock)
            elif self._watched is None:
                self._epoll.register(self._sock, wanted)
            else:
                self._epoll.modify(self._sock, wanted)
            self._watched = wanted

    def lead(self, done: Callable[[], bool], timeout: float) -> None:
        """Read in the caller's thread until ``done``, or the time or the connection is over.

        Spares waking two threads for each message, and sleeping when the next is near. Returns at
        once if another thread does so.
        """
        if not self._reading.acquire(blocking=False):
            return
        begin, haste = time.monotonic(), min(HASTE, self._spin)
        try:
            self._led = True
            if not self._ticking:  # else the thread does not watch the socket, or is about to look
                self._watch()
            while not done() and not self._ended and self._fault is None:
                if not self._read(done):  # its end: the thread sees it too, and says so
                    return
                waited = time.monotonic() - begin
                if done() or waited >= timeout:
                    return
                if waited >= haste:
                    haste = timeout
                    if self._notes:
                        self.wake()
                if waited < self._spin:
                    give_way()
                else:
                    self._await(select.POLLIN, timeout - waited)
        except FlytError as exc:
            self._fault = exc
        except OSError:  # the thread meets the same, and says so
            return
        finally:
            self._led, self._was_led = False, True
            self._reading.release()
            if not self._ticking:
                self._watch()
            if self._fault is not None:
                self.wake()

    def _hang_up(self) -> None:
        """The peer is gone; what it sent before may still be read, and nothing needs an answer."""
        if not self._hung_up:
            self._hung_up = True
            self._handler.on_hangup()
        self._outbox.clear()

    def _flush(self) -> None:
        while self._outbox:
            try:
                frames.send(self._sock, *self._outbox[0])
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._hang_up()
                return
            self._outbox.popleft()

    def _read(self, done: Callable[[], bool] | None = None) -> bool:
        """Read while there is room, or until ``done``; False at the connection's end."""
        while self._handler.has_room():
            try:
                received = frames.receive(self._sock)
            except BlockingIOError:
                return True
            except ConnectionResetError:  # said once; what was queued before it still comes
                self._hang_up()
                continue
            if received is None:
                return False
            frame, fds = received
            try:
                message = decode(frame, len(fds))
            except ProtocolError:
                frames.close_all(fds)
                raise
            self._handler.on_message(message, fds)
            if done is not None and done():
                break
        return True
