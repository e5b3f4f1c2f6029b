# SPDX-License-Identifier: Apache-2.0
"""What finalizers, which never send, left for the session's next call to give back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from flyt.errors import CommandTimeout, DeviceError, SessionLost

if TYPE_CHECKING:
    from flyt.frontend.session import Session

log = logging.getLogger("flyt")

Release = Callable[["Session", int], None]
"""Gives something of a session back by its address or handle."""


def collect(session: Session) -> None:
    """Give it back. What goes wrong is not the answer of the call that happens to come next: the
    log says it."""
    while session.garbage:
        try:
            release, handle = session.garbage.popleft()
        except IndexError:
            return  # another thread was faster
        try:
            release(session, handle)
        except DeviceError as exc:
            log.warning("what was dropped could not be given back: %s", exc)
        except (SessionLost, CommandTimeout):
            continue  # what a lost session had is given back already
