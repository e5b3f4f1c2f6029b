# SPDX-License-Identifier: Apache-2.0
"""`Connection`: shares go over it, and each side keeps what the other still uses.

The exporter holds a shared array until the receiver's Release or the end of the connection: a
crashed peer's EOF is as good. The receiver holds a mapping while an array over it lives, and keeps
an idle one for the next share as long as the exporter's block exists.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from flyt.errors import (
    FlytError,
    HandshakeError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    SharingError,
)
from flyt.ipc import frames, sockets
from flyt.ipc.blocks import blocks
from flyt.ipc.driver import get_driver
from flyt.ipc.link import Link
from flyt.ipc.buffer import Buffer
from flyt.ipc.messages import (
    VERSION,
    Block,
    Bye,
    Claim,
    Ended,
    Hello,
    Layout,
    Message,
    Refusal,
    Release,
    Share,
)

MAX_UNREAD = 256
"""Messages that may wait for `recv`; the peer's `send` blocks behind them."""

MAX_UNREAD_FDS = 512
"""Their descriptors: half of the usual limit of a process (1,024)."""

TIMEOUT = 60.0
"""Seconds that send and recv wait by default."""


@dataclasses.dataclass(slots=True)
class Outgoing:
    """An array on its way out: what is said of it, and what keeps it alive meanwhile."""

    block: Block | None
    fds: tuple[int, ...]
    layout: Layout
    event: bytes
    keep: list[Any]
    """Dropped once the receiver has let go."""


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
        self._inbox: deque[tuple[Share, tuple[int, ...]]] = deque()
        self._answers: dict[bytes, tuple[Share | Refusal, tuple[int, ...]] | None] = {}
        self._unread_fds = 0
        self._changed = threading.Condition()
        self._reason: FlytError | None = None
        self._greeted = False
        self._closed = False
        self._said_bye = False
        self._exports: dict[int, Outgoing] = {}
        self._leases = 0
        self._ids = itertools.count()
        self._shared_keys: set[bytes] = set()
        self._lasting: dict[bytes, list[Buffer]] = {}
        self._on_claim = on_claim
        try:
            if self._sock.family != socket.AF_UNIX or self._sock.type != socket.SOCK_SEQPACKET:
                raise HandshakeError("a connection needs a UNIX socket of kind SOCK_SEQPACKET")
            self.peer_pid = sockets.check_peer(self._sock, allowed_uids or sockets.own_uids())
            self._kind = get_driver().kind
            os.set_inheritable(self._sock.fileno(), False)
            self._link = Link(self._sock, self)
            self._link.send(Hello(VERSION, self._kind), (), TIMEOUT)
        except BaseException:
            self._sock.close()
            raise
        blocks.watch(self)
        self._link.start()

    # --- out -----------------------------------------------------------------------------------

    def share(self, out: Outgoing, timeout: float = TIMEOUT) -> None:
        """Send one array; it is kept until the peer lets go of it."""
        with self._changed:
            self._check_open()
            share = self._export(out, b"")
        try:
            self._link.send(share, out.fds, timeout)
        except BaseException:
            self._drop_export(share.id)
            raise

    def _export(self, out: Outgoing, token: bytes) -> Share:
        """Enter an array as shared, before it is sent: its release may come at once."""
        ident = next(self._ids)
        with self._changed:
            self._exports[ident] = out
            if out.block is not None and out.block.lasting:
                self._shared_keys.add(out.block.key)
        return Share(ident, token, out.block, out.layout, out.event)

    def claim(self, token: bytes, timeout: float = TIMEOUT) -> tuple[Share, tuple[int, ...]]:
        """Ask for what a one-time token stands for."""
        with self._changed:
            self._check_open()
            self._answers[token] = None
        try:
            self._link.send(Claim(token), (), timeout)
            self._wait(lambda: self._answers[token] is not None, timeout, "an answer")
            answer = self._answers[token]
        finally:
            with self._changed:
                self._answers.pop(token)
        if answer is None or isinstance(answer[0], Refusal):
            reason = answer[0].reason if answer and isinstance(answer[0], Refusal) else "no answer"
            raise SharingError(f"the sender gives nothing for this token: {reason}")
        return answer[0], answer[1]

    def _drop_export(self, ident: int) -> bool:
        with self._changed:
            out = self._exports.pop(ident, None)
            self._changed.notify_all()
        return out is not None

    # --- in ------------------------------------------------------------------------------------

    def next_share(self, timeout: float = TIMEOUT) -> tuple[Share, tuple[int, ...]]:
        """The next array that the peer sent; the descriptors are the caller's to close."""
        self._wait(lambda: bool(self._inbox), timeout, "an array")
        with self._changed:
            if not self._inbox:  # another thread was faster
                raise PeerTimeout("another thread took the array that had come")
            share, fds = self._inbox.popleft()
            self._unread_fds -= len(fds)
        self._link.wake()
        return share, fds

    def _wait(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._reason is not None, timeout)
            if condition():
                return
            if self._reason is not None:
                raise type(self._reason)(*self._reason.args) from self._reason
        raise PeerTimeout(f"process {self.peer_pid} has not sent {what} within {timeout} s")

    def hold(self, owner: object, ident: int, quiesce: Callable[[], None]) -> None:
        """Release the share once ``owner`` is garbage and ``quiesce`` has returned."""
        with self._changed:
            self._leases += 1
        end = weakref.finalize(owner, self._link.note, lambda: self._end_lease(ident, quiesce))
        end.atexit = False  # the peer sees EOF then

    def _end_lease(self, ident: int, quiesce: Callable[[], None]) -> None:
        quiesce()
        self._link.post(Release(ident))
        with self._changed:
            self._leases -= 1
            self._changed.notify_all()
        self._maybe_finish()

    def refuse(self, ident: int) -> None:
        """Let go of a share that can't be used here."""
        with self._changed:
            self._leases += 1
        self._link.note(lambda: self._end_lease(ident, lambda: None))

    def keep_idle(self, key: bytes, buffer: Buffer) -> None:
        """Keep a mapping for the next share while the exporter's block exists."""
        with self._changed:
            if self._reason is None and buffer not in self._lasting.setdefault(key, []):
                self._lasting[key].append(buffer)

    # --- the link's thread ---------------------------------------------------------------------

    def has_room(self) -> bool:
        return len(self._inbox) < MAX_UNREAD and self._unread_fds < MAX_UNREAD_FDS

    def on_message(self, message: Message, fds: tuple[int, ...]) -> None:
        if not self._greeted:
            frames.close_all(fds)
            self._greet(message)
        elif isinstance(message, Share):
            self._take_share(message, fds)
        elif isinstance(message, Release):
            if not self._drop_export(message.id):
                raise ProtocolError(f"the peer releases share {message.id}, which it does not hold")
            self._maybe_finish()
        elif isinstance(message, Ended):
            with self._changed:
                dropped = self._lasting.pop(message.key, [])
            del dropped  # unmapped here, if nobody uses it
        elif isinstance(message, Claim):
            self._answer(message.token)
        elif isinstance(message, Refusal):
            self._settle(message.token, (message, ()))
        elif isinstance(message, Bye):
            with self._changed:
                self._reason = self._reason or PeerLost("the peer has closed the connection")
                self._changed.notify_all()
        else:
            raise ProtocolError("the peer greets twice")

    def _greet(self, message: Message) -> None:
        if not isinstance(message, Hello):
            raise ProtocolError("the peer's first message is no greeting")
        if message.version != VERSION:
            raise HandshakeError(
                f"the peer speaks version {message.version} of the sharing protocol, this process "
                f"{VERSION}: run the same Flyt on both sides"
            )
        if message.driver != self._kind:
            raise HandshakeError(
                f"the peer's memory is {message.driver!r}, this process's {self._kind!r}: "
                "set FLYT_IPC_DRIVER alike on both sides"
            )
        self._greeted = True

    def _take_share(self, share: Share, fds: tuple[int, ...]) -> None:
        if share.token:
            return self._settle(share.token, (share, fds))
        with self._changed:
            self._inbox.append((share, fds))
            self._unread_fds += len(fds)
            self._changed.notify_all()
        return None

    def _settle(self, token: bytes, answer: tuple[Share | Refusal, tuple[int, ...]]) -> None:
        with self._changed:
            awaited = token in self._answers and self._answers[token] is None
            if awaited:
                self._answers[token] = answer
                self._changed.notify_all()
        if not awaited:  # its claimer has given up, or the peer made it up
            frames.close_all(answer[1])
            if isinstance(answer[0], Share):
                self._link.post(Release(answer[0].id))

    def _answer(self, token: bytes) -> None:
        try:
            if self._on_claim is None:
                raise SharingError("this connection serves no tokens")
            out = self._on_claim(token)
        except SharingError as exc:
            self._link.post(Refusal(token, str(exc)))
            return
        self._link.post(self._export(out, token), out.fds)

    def on_hangup(self) -> None:
        with self._changed:
            exports = list(self._exports.values())
            self._exports.clear()
        exports.clear()

    def on_end(self, reason: FlytError) -> None:
        self.on_hangup()
        with self._changed:
            self._reason = self._reason or reason
            self._leases = 0
            lasting, self._lasting = self._lasting, {}
            if self._closed:
                self._discard()
            self._changed.notify_all()
        lasting.clear()

    def block_ended(self, key: bytes) -> None:
        """`BlockTable` says so, perhaps from a finalizer."""
        if key in self._shared_keys:
            self._link.note(lambda: self._tell_ended(key))

    def _tell_ended(self, key: bytes) -> None:
        if key in self._shared_keys:
            self._shared_keys.discard(key)
            self._link.post(Ended(key))

    # --- the end -------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise SharingError("this connection was closed here")
        if self._reason is not None:
            raise type(self._reason)(*self._reason.args) from self._reason

    def _discard(self) -> None:
        while self._inbox:
            share, fds = self._inbox.popleft()
            frames.close_all(fds)
            self.refuse(share.id)
        self._unread_fds = 0

    def _maybe_finish(self) -> None:
        if self._closed and not self._exports and not self._leases:
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
        return self._leases

    def wait_released(self, timeout: float = TIMEOUT) -> None:
        """Wait until the peer has let go of every array that it was sent."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._exports, timeout):
                raise PeerTimeout(
                    f"process {self.peer_pid} still holds {len(self._exports)} arrays "
                    f"after {timeout} s"
                )

    def close(self) -> None:
        """Send and receive nothing more. Arrays that are shared stay so: the socket closes in the
        background when the last one is released, or at once when there is none. Idempotent.
        """  # fmt: skip
        self._end(abrupt=False)

    def abort(self) -> None:
        """Close the socket at once. To the peer this process is dead; arrays that came from there
        stay mapped, but their owner may reuse the memory.
        """  # fmt: skip
        self._end(abrupt=True)

    def _end(self, *, abrupt: bool) -> None:
        with self._changed:
            self._closed = True
            self._discard()
            idle = abrupt or not (self._exports or self._leases)
        if idle:
            self._link.close(wait=True)
        else:
            self._link.note(self._say_bye)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Connection to process {self.peer_pid}, {self.shares_out} out, {self._leases} in>"


class Listener(sockets.ListeningSocket):
    """An abstract socket name at which processes of this user can connect.

    Parameters
    ----------
    name : str, optional
        By default one that nobody can guess; tell it to the peer.
    """

    def connection(
        self, timeout: float = TIMEOUT, *, allowed_uids: frozenset[int] | None = None
    ) -> Connection:
        """Accept the next process; HandshakeError if it is a stranger's."""
        return Connection(self.accept(timeout), allowed_uids=allowed_uids)


def connect(
    name: str, timeout: float = sockets.CONNECT_LIMIT, *, allowed_uids: frozenset[int] | None = None
) -> Connection:
    """Connect to a `Listener` by its name."""
    return Connection(sockets.connect(name, timeout), allowed_uids=allowed_uids)
