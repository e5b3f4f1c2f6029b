# SPDX-License-Identifier: Apache-2.0
"""`Handshakes`: from a stranger's HELLO to WELCOME, or to a refusal that says why."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import secrets
import time

from flyt.backend.loop import EventLoop, Timer
from flyt.backend.operators import Operators
from flyt.backend.options import MAX_SESSIONS
from flyt.backend.orders import Opened
from flyt.backend.pool import WorkerPool
from flyt.backend.principals import Principal, principal_of
from flyt.backend.relay import Relay
from flyt.backend.terms import NO_DEVICE, Terms
from flyt.backend.workers import (
    DEVICES_UNAVAILABLE,
    START_LIMIT,
    SessionRecord,
    WorkerProcess,
    session_address,
)
from flyt.errors import DeviceError, FlytError, HandshakeError, ProtocolError
from flyt.rpc.greetings import HELLOS, WELCOMES, Answer, Hello, Question, Refused, Welcome
from flyt.rpc.handshake import Feature, Offer, foreign_version, negotiate, offer, offer_of
from flyt.rpc.sockets import Full, Incoming, Listener
from flyt.shm import ring

log = logging.getLogger(__name__)

HANDSHAKE_LIMIT = START_LIMIT + 10.0
"""Seconds from HELLO to WELCOME; a new worker's start is in between."""

MAX_PENDING = 256
"""HELLOs not yet answered; anybody can send one, and each costs a socket in a worker."""

MESSAGES_PER_TURN = 64
"""One endpoint's share before the event loop looks at the others."""

PROGRAM_LIMIT = 64
"""Characters kept of a client's name, so that a status report of all sessions fits a message."""

TEXT_LIMIT = 4096
"""Characters that the protocol has for a reason."""


@dataclasses.dataclass(slots=True)
class _Pending:
    """A client between HELLO and WELCOME."""

    hello: Hello
    listener: Listener
    incoming: Incoming
    principal: Principal
    features: frozenset[Feature]
    limit: Timer
    token: bytes
    worker: WorkerProcess | None = None
    session: int = 0
    """0 until the worker was asked for one."""
    retried: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """The connection."""
        return id(self.listener), self.incoming.source

    def answer(self, message: Welcome | Refused) -> bool:
        """Whether the client is still there to hear it."""
        return _send(self.listener, self.incoming, message)


class Handshakes:
    """All handshakes under way.

    Parameters
    ----------
    loop : EventLoop
    pool : WorkerPool
    terms : Terms
    operators : Operators
    relay : Relay, optional
        Carries the sessions of TCP clients, which then get no port of their own.

    Attributes
    ----------
    garbage : int
        Messages that were no HELLO; they get no answer.
    """

    def __init__(
        self,
        loop: EventLoop,
        pool: WorkerPool,
        terms: Terms,
        operators: Operators,
        relay: Relay | None = None,
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._terms = terms
        self._operators = operators
        self._relay = relay
        self._pending: dict[tuple[int, int], _Pending] = {}
        self._staying: dict[tuple[int, int], tuple[WorkerProcess, int]] = {}
        """Clients that were welcomed and keep the connection until they have attached."""
        self.garbage = 0

    # --- what clients do ---

    def serve(self, listener: Listener) -> None:
        """Take what came in at one of the main endpoints."""
        for _ in range(MESSAGES_PER_TURN):
            incoming = listener.receive()
            # Descriptors are used again: who has gone is settled before a newcomer is entered.
            for source in listener.gone():
                self._gone((id(listener), source))
                if self._relay is not None:
                    self._relay.gone(listener, source)
            if incoming is None:
                return
            if self._relay is None or not self._relay.takes(listener, incoming):
                self._arrived(listener, incoming)

    def waits(self, listener: Listener, source: int) -> bool:
        """Whether this connection is between HELLO and WELCOME."""
        return (id(listener), source) in self._pending

    def _arrived(self, listener: Listener, incoming: Incoming) -> None:
        principal = principal_of(incoming.peer, listener.endpoint)
        if principal is None or incoming.source < 0:
            return  # it has gone already
        answer: Refused
        try:
            message = self._decode(incoming)
            listener.connections.heard(incoming.source)
            if isinstance(message, Hello):
                self._greet(listener, incoming, principal, message)
                return
            reply = functools.partial(_send, listener, incoming)
            self._operators.serve(incoming.peer, message, reply)
            return
        except ProtocolError as exc:
            self.garbage += 1
            log.debug("dropping garbage of %s: %s", principal, exc)
            return
        except HandshakeError as exc:
            log.info("refusing a client of %s: %s", principal, exc)
            answer = Refused(NO_DEVICE, str(exc))
        except DeviceError as exc:
            log.warning("refusing a client of %s: %s", principal, exc.detail)
            answer = Refused(exc.code, exc.detail)
        _send(listener, incoming, answer)

    def _offer(self) -> Offer:
        return offer("backend", ring=ring.usable() is not None, doorbell=self._terms.has_doorbell)

    def _decode(self, incoming: Incoming) -> Question:
        if len(incoming.frames) != 1:
            raise ProtocolError(
                f"the client sent {len(incoming.frames)} frames where HELLO has one"
            )
        data = incoming.frames[0]
        try:
            message: Question = HELLOS.decode(data)
        except ProtocolError:
            version = foreign_version(data)
            if version is not None:
                negotiate(self._offer(), Offer("frontend", version, frozenset()))
            raise
        return message

    def _greet(
        self, listener: Listener, incoming: Incoming, principal: Principal, hello: Hello
    ) -> None:
        features = negotiate(self._offer(), offer_of(hello))
        limit = self._loop.call_later(HANDSHAKE_LIMIT, lambda: self._too_slow(pending))
        pending = _Pending(
            hello, listener, incoming, principal, features, limit, secrets.token_bytes(16)
        )
        try:
            if pending.key in self._pending:
                raise ProtocolError("a second HELLO before the answer to the first")
            if len(self._pending) >= MAX_PENDING:
                raise DeviceError(
                    DEVICES_UNAVAILABLE,
                    f"{MAX_PENDING} clients are waiting for this backend already; try again later",
                )
            self._pool.hear()
            self._check_room(principal)
            self._assign(pending)
        except FlytError:
            limit.cancel()
            raise
        self._pending[pending.key] = pending

    def _check_room(self, principal: Principal) -> None:
        limit = self._terms.sessions_per_user
        own = self._pool.sessions_of(principal) + sum(
            p.principal == principal and not p.session for p in self._pending.values()
        )
        if own >= limit:
            raise DeviceError(
                DEVICES_UNAVAILABLE,
                f"{principal} has {own} sessions, as many as one user may have here "
                "(--sessions-per-user); end some of them",
            )
        if self._pool.session_count >= MAX_SESSIONS:
            raise DeviceError(
                DEVICES_UNAVAILABLE,
                f"this backend serves {MAX_SESSIONS} sessions already; end some of them",
            )

    def _assign(self, pending: _Pending) -> None:
        worker = pending.worker = self._pool.assign(pending.principal)
        pending.session = 0
        if worker.snapshot is not None:
            self._open(pending, worker)

    def _open(self, pending: _Pending, worker: WorkerProcess) -> None:
        # Never 0, and nobody can guess whose turn is next.
        pending.session = secrets.randbelow((1 << 64) - 1) + 1
        relay = self._relay_of(pending)
        record = SessionRecord(
            session=pending.session,
            pid=pending.hello.pid,
            program=pending.hello.program[:PROGRAM_LIMIT],
            address=session_address(
                pending.listener.endpoint if relay is None else relay.endpoint,
                self._terms.session_ports,
                pending.session,
            ),
            peer=pending.principal.proven if relay is None else str(os.getuid()),
            since=time.time(),
            bell=self._terms.free_bell() if Feature.DOORBELL in pending.features else 0,
        )
        region = None
        if Feature.REGION in pending.features:
            region = self._terms.own_region(
                record.session, pending.token, record.peer, pending.listener.endpoint
            )
        worker.open(record, pending.token, self._terms.memory_limit, region)

    def _gone(self, key: tuple[int, int]) -> None:
        pending = self._pending.get(key)
        if pending is not None:
            self._drop(pending, "the client went away before its WELCOME")
        if (staying := self._staying.pop(key, None)) is not None:
            worker, session = staying
            worker.end_session(session, "the client went away", unless_attached=True)

    # --- what workers do ---

    def worker_ready(self, worker: WorkerProcess) -> None:
        """Open the sessions that waited for it."""
        for pending in self._of(worker):
            self._open(pending, worker)

    def opened(self, worker: WorkerProcess, opened: Opened) -> None:
        """Say WELCOME, or why there is none."""
        pending = next((p for p in self._of(worker) if p.session == opened.session), None)
        if opened.error:
            worker.sessions.pop(opened.session, None)
            self._terms.not_opened(opened.session)
            if pending is not None:
                self._refuse(pending, f"no socket for the session: {opened.error}")
            self._pool.settle(worker)
            return
        if pending is None:
            worker.end_session(opened.session, "nobody waits for this session any more")
            return
        self._forget(pending)
        welcome = self._terms.welcome(
            opened,
            pending.token,
            worker.snapshot or {},
            pending.features,
            worker.sessions[opened.session].bell,
        )
        if not pending.answer(welcome):
            worker.end_session(opened.session, "the client went away before its WELCOME")
            return
        if (relay := self._relay_of(pending)) is not None:
            address = worker.sessions[opened.session].address
            relay.expect(pending.token, address, pending.incoming.peer.proven)
        if Feature.STAYS in pending.features:
            self._staying[pending.key] = worker, opened.session

    def _relay_of(self, pending: _Pending) -> Relay | None:
        return self._relay if pending.listener.endpoint.scheme == "tcp" else None

    def worker_lost(self, worker: WorkerProcess, reason: str) -> None:
        """It has ended, or is about to: whoever waited for it gets its successor; not twice, and
        not if it had no device."""
        for pending in self._of(worker):
            if worker.snapshot is None or pending.retried:
                detail = worker.failure.detail if worker.failure is not None else reason
                self._refuse(pending, f"the process for this session failed: {detail}")
                continue
            pending.retried = True
            try:
                self._assign(pending)
            except DeviceError as exc:
                self._refuse(pending, exc.detail)

    def refuse_all(self, text: str) -> None:
        """End every handshake."""
        for pending in list(self._pending.values()):
            self._refuse(pending, text)

    # --- the end of a handshake ---

    def _of(self, worker: WorkerProcess) -> list[_Pending]:
        return [p for p in self._pending.values() if p.worker is worker]

    def _too_slow(self, pending: _Pending) -> None:
        self._refuse(pending, f"no session was ready within {HANDSHAKE_LIMIT:.0f} s; try again")

    def _refuse(self, pending: _Pending, text: str) -> None:
        log.warning("refusing a client of %s: %s", pending.principal, text)
        self._drop(pending, "its handshake failed")
        pending.answer(Refused(DEVICES_UNAVAILABLE, text[:TEXT_LIMIT]))

    def _drop(self, pending: _Pending, reason: str) -> None:
        self._forget(pending)
        worker = pending.worker
        if worker is None:
            return
        if pending.session:
            worker.end_session(pending.session, reason)
        else:
            self._pool.settle(worker)

    def _forget(self, pending: _Pending) -> None:
        pending.limit.cancel()
        del self._pending[pending.key]


def _send(listener: Listener, incoming: Incoming, answer: Answer) -> bool:
    """Whether the client is still there to hear it, and hears."""
    try:
        return listener.send(incoming.identity, [WELCOMES.encode(answer)])
    except Full:
        log.warning("dropping an answer: a client asks on and on and reads nothing")
        return False
