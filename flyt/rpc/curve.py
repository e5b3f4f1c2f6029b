# SPDX-License-Identifier: Apache-2.0
"""CURVE on TCP: both ends prove their keys before the first message, and all that follows is
encrypted.

libzmq does the cryptography, pyzmq's authenticator asks whether a key may come in. On ipc there is
none of it: there the kernel says who the peer is, and nobody listens in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq

from flyt.rpc.keys import ClientKeys, KeyPair

log = logging.getLogger(__name__)

DOMAIN = "flyt"
"""Names our sockets to the authenticator; libzmq takes it as the order to ask it."""

KNOWN = "User-Id"
"""The property of a message that holds its sender's proven key."""

_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)

MAKE_KEYS = "set FLYT_KEY and FLYT_SERVER_KEY (flyt keygen client makes a key)"


def guard(socket: zmq.Socket[bytes], own: KeyPair) -> None:
    """Let nobody in at this socket, which is not bound yet, whose key a `Gate` does not admit."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gate nobody comes in


def identify(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Dial with this key, and only to the server that has that one."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)


def refusal(event: int, value: int, *, keys: bool) -> str | None:
    """Why a handshake of ours over TCP failed, from its monitor's event; None if keys have no part
    in it."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MISMATCH:
        if keys:
            return (
                "the backend there uses no keys: start it with --server-key, or unset FLYT_KEY and "
                "FLYT_SERVER_KEY if you trust the network"
            )
        return f"the backend lets only clients in whose keys it knows: {MAKE_KEYS}"
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return (
            "the backend does not know this client's key (FLYT_KEY): copy its public file into the "
            "folder that the backend has as --authorized-keys"
        )
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # it hung up before we read why
        if keys:
            return (
                "the backend ended the handshake: it has another key than the one in "
                "FLYT_SERVER_KEY, or none"
            )
        return (
            "the backend ended the handshake; if it lets only clients in whose keys it knows: "
            f"{MAKE_KEYS}"
        )
    return None


class _Admits:
    """What pyzmq's authenticator wants: an object with this method."""

    def __init__(self, admits: Callable[[bytes], bool]) -> None:
        self._admits = admits

    def callback(self, _: str, key: bytes) -> bool:
        admitted = self._admits(key)
        if not admitted:
            log.warning("a client with the unknown key %s was turned away", key.decode("ascii"))
        return admitted


class Gate:
    """Decides which keys come in at all guarded sockets of a context.

    Parameters
    ----------
    context
        From `flyt.rpc.sockets.open_context`; one gate each.
    admits : callable
        ``admits(key)`` for a public key in Z85 whose owner has proven it. Called on a thread of the
        gate's own; must not raise.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], admits: Callable[[bytes], bool]
    ) -> None:
        # Here, since it imports asyncio: a tenth of the start of a client, which needs no gate.
        from zmq.auth.thread import ThreadAuthenticator

        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback(DOMAIN, _Admits(admits))
        self._authenticator.start()

    def close(self) -> None:
        """After the guarded sockets are closed."""
        self._authenticator.stop()
