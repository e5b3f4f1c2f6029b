# SPDX-License-Identifier: Apache-2.0
"""Who may bind a session: the first ATTACH with its token, from the right user or key."""

from __future__ import annotations

import hmac
import logging

from flyt.backend.orders import Open
from flyt.errors import ProtocolError
from flyt.rpc import messages as m
from flyt.rpc.sockets import Incoming

log = logging.getLogger(__name__)


def admits(order: Open, incoming: Incoming) -> bool:
    """Whether this message is the ATTACH that binds its connection to the session.

    Strangers get no answer and leave no trace but a line in the log.
    """
    if not incoming.frames:
        return False
    try:
        command = m.COMMANDS.decode(incoming.frames[0])
    except ProtocolError:
        return False
    if not isinstance(command, m.Attach):
        return False
    if not hmac.compare_digest(command.token, order.token):
        log.warning("session %016x: an ATTACH with a wrong token was dropped", order.session)
        return False
    if order.peer and incoming.peer.proven != order.peer:
        log.warning("session %016x: %r may not attach", order.session, incoming.peer.proven)
        return False
    return True
