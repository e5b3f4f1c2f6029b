# SPDX-License-Identifier: Apache-2.0
"""The first message of a peer: can the two work together?"""

from __future__ import annotations

from flyt.errors import HandshakeError, ProtocolError
from flyt.ipc.messages import VERSION, Hello, Message


def check_greeting(message: Message, driver: str) -> None:
    """Raise unless the peer speaks this version and has memory of this ``driver``."""
    if not isinstance(message, Hello):
        raise ProtocolError("the peer's first message is no greeting")
    if message.version != VERSION:
        raise HandshakeError(
            f"the peer speaks version {message.version} of the sharing protocol, this process "
            f"{VERSION}: run the same Flyt on both sides"
        )
    if message.driver != driver:
        raise HandshakeError(
            f"the peer's memory is {message.driver!r}, this process's {driver!r}: "
            "set FLYT_IPC_DRIVER alike on both sides"
        )
