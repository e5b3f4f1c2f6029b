# SPDX-License-Identifier: Apache-2.0
"""The process's current session: made by the first CUDA call, replaced by `connect`.

Also what belongs to a thread rather than a session: last error and current device, as in CUDA.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading

from flyt.errors import DeviceError, FlytError, SessionLost
from flyt.frontend import garbage
from flyt.frontend.express import Express
from flyt.frontend.lost import Lost
from flyt.frontend.session import Session
from flyt.frontend.settings import Settings

log = logging.getLogger("flyt")

NO_DEVICE = 100
INITIALIZATION_ERROR = 3
NOT_PERMITTED = 800


class _ThreadState(threading.local):
    """CUDA keeps these per host thread."""

    last_error = 0
    last_failure = ""
    _chosen = (0, 0)

    @property
    def device(self) -> int:
        """The current one; 0 again after a `connect`, in whatever thread: the new backend may have
        fewer."""
        device, of = self._chosen  # one look: each is a search of this thread's dictionary
        return device if of == _connects else 0

    @device.setter
    def device(self, ordinal: int) -> None:
        self._chosen = ordinal, _connects


thread = _ThreadState()

_connects = 0
"""Calls of `connect` so far. A session after `reset` has the devices of the one before."""

_lock = threading.Lock()
_session: Session | None = None
_again: Settings | None = None
"""After `reset`: what the next session is made from."""
_unavailable: str | None = None
_forked = False


def connect(
    endpoint: str | None = None,
    region: str | None = None,
    *,
    key: str | None = None,
    server_key: str | None = None,
) -> Session:
    """Make a new session and let all further calls of this process use it.

    Parameters
    ----------
    endpoint : str, optional
        ``ipc:///path``, ``tcp://host:port`` or ``emulated:``; default ``FLYT_BACKEND``, else the
        local default endpoint.
    region : str, optional
        Path of the shared region in this process; default ``FLYT_REGION``, else what the backend
        names.
    key : str, optional
        Path of this client's secret CURVE key (``flyt keygen client``), for TCP; default
        ``FLYT_KEY``.
    server_key : str, optional
        Path of the backend's public key; default ``FLYT_SERVER_KEY``. With keys, nothing is ever
        sent to a backend that has not proven to hold this one.

    Returns
    -------
    Session
        A context manager; ``close()`` gives everything back. An earlier session is closed first:
        its device pointers end with it.

    Raises
    ------
    FlytError
        There is no backend, or it refused; the message says why and what to do.
    """
    global _session, _again, _unavailable, _forked, _connects  # noqa: PLW0603 - a new start
    with _lock:
        old, _session = _session, None
        if old is not None:
            old.close()
        _again, _unavailable, _forked = None, None, False
        _connects += 1
        thread.last_error = 0
        try:
            _session = _made(Settings.read(endpoint, region, key, server_key))
        except FlytError as exc:
            _unavailable = f"{exc} (flyt.connect() tries again)"
            raise
        return _session


def current() -> Session:
    """The session of this process, made now if there is none.

    Raises
    ------
    DeviceError
        cudaErrorNoDevice without a backend, cudaErrorInitializationError in a forked child,
        cudaErrorNotPermitted in a host function.
    Lost
        The session ended; `connect` makes a new one.
    """
    global _session, _unavailable  # noqa: PLW0603 - the one place that sets them
    session = _session
    if session is not None:
        helper = session.host_calls.thread
        if helper is not None and threading.current_thread() is helper:
            raise DeviceError(NOT_PERMITTED, "a host function may not call CUDA")
        if session.garbage:
            garbage.collect(session)
        return session
    with _lock:
        if _forked:
            raise DeviceError(
                INITIALIZATION_ERROR,
                "this process was forked after its parent's first CUDA call; use spawn, or call "
                "flyt.connect() here",
            )
        if _session is None:
            if _unavailable is not None:
                raise DeviceError(NO_DEVICE, _unavailable)
            try:
                _session = _made(_again or Settings.read())
            except FlytError as exc:
                _unavailable = f"{exc} (flyt.connect() tries again)"
                log.error("no CUDA device: %s", exc)
                raise DeviceError(NO_DEVICE, _unavailable) from exc
        return _session


def _made(settings: Settings) -> Session:
    """A new session; what the system refuses, descriptors for one, is a FlytError too."""
    try:
        return Session(settings)
    except OSError as exc:
        raise SessionLost(f"this process can't make a session: {exc}") from exc


def reset() -> None:
    """End the current session; the next call makes one from the same settings.

    Raises
    ------
    DeviceError, Lost
        What the session's asynchronous work ended with, or why it had ended already; it is over
        all the same. Also what `current` raises where there is no session to end.
    """
    global _session, _again
    session = current()
    with _lock:
        if _session is session:
            _session, _again = None, session.settings
        ended = session.connection.lost
        session.close()
    if ended is not None:
        raise ended
    session.connection.raise_deferred()


def express() -> Express | None:
    """The short way of the session there is, where nothing has to be seen to before a call."""
    session = _session
    if session is None or session.garbage or session.host_calls.thread is not None:
        return None
    return session.express


def existing() -> Session | None:
    """The session if there is one; never makes one."""
    return _session


def lost() -> Lost | None:
    """Why the current session ended, if it did."""
    return _session.connection.lost if _session is not None else None


def _after_fork_in_child() -> None:
    global _session, _forked, _lock, _left_to_parent  # noqa: PLW0603 - a fresh process
    _lock = threading.Lock()
    if _session is not None:
        _session.forget_in_child()
        # Kept for ever: finalizers of its sockets must not run in this process.
        _left_to_parent = _session
        _session = None
        _forked = True


_left_to_parent: Session | None = None


def _at_exit() -> None:
    if _session is not None:
        _session.leave_at_exit()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
