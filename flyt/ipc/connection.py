# SPDX-License-Identifier: Apache-2.0
"""`Connection`: shares go over it, and each side keeps what the other still uses.

if TYPE_CHECKING:
    from typing_extensions import Self

The exporter holds a shared array until the receiver's Release or the end of the connection: a
crashed peer's EOF is as good. The receiver holds a mapping while an array over it lives, and keeps
an idle one for the next share as long as the exporter's block exists.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from flyt.errors import (
    FlytError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    SharingError,
)
from flyt.ipc import frames, sockets
from flyt.ipc.blocks import blocks
from flyt.ipc.driver import get_driver
from flyt.ipc.greeting import check_greeting
from flyt.ipc.holdings import Holdings
from flyt.ipc.inbox import Answer, Inbox, Parcel
from flyt.ipc.link import Link
from flyt.ipc.messages import (
    VERSION,
    Bye,
    Claim,
    Ended,
    Hello,
    Message,
    Refusal,
    Release,
    Share,
)
from flyt.ipc.outgoing import Outgoing

if TYPE_CHECKING:
    from typing_extensions import Self

TIMEOUT = 60.0
"""Seconds that send and recv wait by default."""


class Connection:
    """A channel for arrays between two processes of one user.

    Made by `connect`, `Listener.accept` or from a socket of `pair`. Any thread may use it.

    Parameters
    ----------
    sock : socket.socket or int
        A connected UNIX socket of kind SOCK_SEQPACKET, or its descriptor; the connection owns it.
    allowed_uids : frozenset of int, optional
        Users that may be at the other end; by default only this process's own.
    on_claim : callable, optional
        Finds what a one-time token stands for, or raises SharingError (the reducers' desk).
    """

    def __init__(
        self,
        sock: socket.socket | int,
        *,
        allowed_uids: frozenset[int] | None = None,
        on_claim: Callable[[bytes], Outgoing] | None = None,
    ) -> None:
        self._sock = socket.socket(fileno=sock) if isinstance(sock, int) else sock
        self._inbox = Inbox()
        self._lock, self._changed = self._inbox.lock, self._inbox.changed
        self._greeted = False
        self._closed = False
        self._said_bye = False
        self._exports: dict[int, Outgoing] = {}
        self._ids = itertools.count()
        self._shared_keys: set[bytes] = set()
        self._mapped_keys: set[bytes] = set()
        self._on_claim = on_claim or _no_desk
        try:
            self.peer_pid = sockets.check_peer(self._sock, allowed_uids or sockets.own_uids())
            self._kind = get_driver().kind
            os.set_inheritable(self._sock.fileno(), False)
            self._link = Link(self._sock, self)
            self.holdings = Holdings(self._lock, self._changed, self._link.note)
            self._link.send(Hello(VERSION, self._kind), (), TIMEOUT)
        except BaseException:
            self._sock.close()
            raise
        blocks.watch(self)
        self._link.start()

    # --- out -----------------------------------------------------------------------------------

    def share(self, out: Outgoing, timeout: float = TIMEOUT) -> None:
        """Send one array; it is kept until the peer lets go of it."""
        with self._lock:
            self._check_open()
            share, fds = self._export(out, b"")
        try:
            self._link.send(share, fds, timeout)
        except BaseException:
            self._drop_export(share.id)
            raise

    def _export(self, out: Outgoing, token: bytes) -> tuple[Share, tuple[int, ...]]:
        """Enter an array as shared, before it is sent: its release may come at once.

        Its message, and the descriptors that go with it: none for a block that the peer has mapped.
        """
        ident, fds = next(self._ids), out.fds
        with self._lock:
            self._exports[ident] = out
            if out.block is not None:
                self._shared_keys.add(out.block.key)
                if out.block.key in self._mapped_keys:
                    fds = ()
        return Share(ident, token, out.block, out.layout, out.event), fds

    def claim(self, token: bytes, timeout: float = TIMEOUT) -> Parcel:
        """Ask for what a one-time token stands for."""
        self._check_open()
        self._inbox.expect(token)
        try:
            self._link.send(Claim(token), (), timeout)
            self._link.lead(lambda: self._inbox.has_answer(token), timeout)
            answer, fds = self._inbox.take_answer(token, self.peer_pid, timeout)
        finally:
            self._inbox.forget(token)
        if isinstance(answer, Refusal):
            raise SharingError(f"the sender gives nothing for this token: {answer.reason}")
        return answer, fds

    def _drop_export(self, ident: int) -> None:
        with self._changed:
            out = self._exports.pop(ident, None)
            self._changed.notify_all()
        del out  # outside: what dies here may take locks of its own

    # --- in ------------------------------------------------------------------------------------

    def next_share(self, timeout: float = TIMEOUT) -> Parcel:
        """The next array that the peer sent; the descriptors are the caller's to close."""
        deadline = time.monotonic() + timeout
        if not self._inbox.has_parcel():
            self._link.lead(self._inbox.has_parcel, timeout)
        was_full = not self._inbox.has_room()
        parcel = self._inbox.take(self.peer_pid, deadline - time.monotonic())
        if was_full:
            self._link.wake()
        return parcel

    # --- the link's thread ---------------------------------------------------------------------

    def has_room(self) -> bool:
        return self._inbox.has_room()

    def on_noted(self) -> None:
        for release in self.holdings.releases():
            self._link.post(release)
            self.holdings.told(release)
        self._maybe_finish()

    def on_message(self, message: Message, fds: tuple[int, ...]) -> None:
        if not self._greeted:
            frames.close_all(fds)
            check_greeting(message, self._kind)
            self._greeted = True
        elif isinstance(message, Share):
            self._take_share(message, fds)
        elif isinstance(message, Release):
            self._take_release(message)
        elif isinstance(message, Ended):
            self.holdings.forget(message.key)
        elif isinstance(message, Claim):
            self._answer(message.token)
        elif isinstance(message, Refusal):
            self._settle(message.token, (message, ()))
        elif isinstance(message, Bye):
            self._inbox.end(PeerLost("the peer has closed the connection"))
        else:
            raise ProtocolError("the peer greets twice")

    def _take_release(self, message: Release) -> None:
        with self._changed:  # one that has ended meanwhile is of no use
            self._mapped_keys.update(self._shared_keys.intersection(message.mapped))
            dropped = [self._exports.pop(ident, None) for ident in message.ids]
            self._changed.notify_all()
        if None in dropped:
            ident = message.ids[dropped.index(None)]
            raise ProtocolError(f"the peer releases share {ident}, which it does not hold")
        dropped.clear()  # outside: what dies here may take locks of its own
        self._maybe_finish()

    def _take_share(self, share: Share, fds: tuple[int, ...]) -> None:
        if share.token:
            self._settle(share.token, (share, fds))
        else:
            self._inbox.put((share, fds))

    def _settle(self, token: bytes, answer: Answer) -> None:
        if not self._inbox.put_answer(token, answer):
            frames.close_all(answer[1])
            if isinstance(answer[0], Share):
                self._link.post(Release((answer[0].id,)))

    def _answer(self, token: bytes) -> None:
        try:
            out = self._on_claim(token)
        except SharingError as exc:
            self._link.post(Refusal(token, str(exc)))
            return
        self._link.post(*self._export(out, token))

    def on_hangup(self) -> None:
        with self._changed:
            exports, self._exports = self._exports, {}
            self._changed.notify_all()
        exports.clear()  # outside: what dies here may take locks of its own

    def on_end(self, reason: FlytError) -> None:
        self.on_hangup()
        with self._changed:
            self._inbox.end(reason)
            if self._closed:
                self._discard()
            self._changed.notify_all()
        self.holdings.end()

    def block_ended(self, key: bytes) -> None:
        """`BlockTable` says so, perhaps from a finalizer."""
        if key in self._shared_keys:
            self._link.note(lambda: self._tell_ended(key))

    def _tell_ended(self, key: bytes) -> None:
        if key in self._shared_keys:
            with self._changed:
                self._shared_keys.discard(key)
                self._mapped_keys.discard(key)
            self._link.post(Ended(key))

    # --- the end -------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise SharingError("this connection was closed here")
        self._inbox.check()

    def _discard(self) -> None:
        for share, fds in self._inbox.drain():
            frames.close_all(fds)
            self.holdings.refuse(share.id)

    def _maybe_finish(self) -> None:
        if self._closed and not self._exports and not self.holdings.count:
            self._link.close(wait=False)

    def _say_bye(self) -> None:
        if not self._said_bye:
            self._said_bye = True
            self._link.post(Bye())
        self._maybe_finish()

    @property
    def shares_out(self) -> int:
        """Arrays that the peer still holds, or has not received yet."""
        return len(self._exports)

    @property
    def shares_in(self) -> int:
        """Arrays of the peer that live here."""
        return self.holdings.count

    @property
    def is_over(self) -> bool:
        return self._link.is_ended

    def wait_released(self, timeout: float = TIMEOUT) -> None:
        """Wait until the peer has let go of every array that it was sent."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._exports, timeout):
                count = len(self._exports)
                raise PeerTimeout(f"process {self.peer_pid} still holds {count} arrays")

    def close(self) -> None:
        """Send and receive nothing more.

        Shared arrays stay so: the socket closes once the last is released, in the background.
        """
        self._end(abrupt=False)

    def abort(self) -> None:
        """Close the socket at once: to the peer this process is dead.

        Arrays that came from there stay mapped, but their owner may reuse the memory.
        """
        self._end(abrupt=True)

    def _end(self, *, abrupt: bool) -> None:
        with self._changed:
            self._closed = True
            self._discard()
            idle = abrupt or not (self._exports or self.holdings.count)
        self._link.close(wait=True) if idle else self._link.note(self._say_bye)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        held = f"{self.shares_out} out, {self.shares_in} in"
        return f"<Connection to process {self.peer_pid}, {held}>"


def _no_desk(token: bytes) -> Outgoing:
    raise SharingError(f"this connection serves no tokens such as {token.hex()}")
