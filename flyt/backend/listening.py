# SPDX-License-Identifier: Apache-2.0
"""`Doors`: the endpoints of the daemon, each taken by no other daemon.

libzmq silently takes over the path of an ipc socket, also one that another process serves, so
each path is guarded by a lock file beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator, Sequence

import zmq

from flyt.backend.visitors import VISITOR_LIMITS
from flyt.backend.wire import SOCKET_LIMITS
from flyt.errors import ConfigurationError
from flyt.rpc.endpoints import Endpoint, unlink_socket
from flyt.rpc.keys import KeyPair
from flyt.rpc.sockets import Listener

log = logging.getLogger(__name__)

_LOCK_TRIES = 10
"""Each failed try means that another daemon was just removing the same file."""


class PathLock:
    """``path`` exists and is locked by this process until `close`, which removes it.

    Raises
    ------
    ConfigurationError
        When another process has it, or it can't be made.
    """

    def __init__(self, path: str, what: str, option: str = "--listen") -> None:
        self._path = path
        for _ in range(_LOCK_TRIES):
            self._fd = _open(path, what)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                os.close(self._fd)
                raise ConfigurationError(
                    f"another flyt-backend listens on {what} (it holds {path}): "
                    f"stop it or choose another {option}"
                ) from exc
            if self._is_current():
                return
            os.close(self._fd)
        raise ConfigurationError(f"can't lock {path}: other processes keep removing it")

    def _is_current(self) -> bool:
        """Whether the path still names the file that we locked."""
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._fd))

    def close(self) -> None:
        """Remove the file, then let go of the lock: nobody can lock the file in between."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        os.close(self._fd)


def _open(path: str, what: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as exc:
        raise ConfigurationError(
            f"can't listen on {what}: there is no folder {os.path.dirname(path)}; make it first"
        ) from exc
    except OSError as exc:
        raise ConfigurationError(f"can't listen on {what}: {path}: {exc.strerror}") from exc


def _remove_sessions(path: str) -> None:
    """Remove the session sockets that a killed daemon left at this endpoint. Only for who holds its
    lock, before there is a session."""
    folder, name = os.path.split(path)
    session = re.compile(re.escape(name) + r"\.[0-9a-f]{16}")
    try:
        for one in filter(session.fullmatch, os.listdir(folder)):
            unlink_socket(os.path.join(folder, one))
    except OSError as exc:  # they are in nobody's way
        log.warning("sockets that a dead daemon left at %s stay there: %s", path, exc)


class Doors:
    """All listeners of the daemon.

    Parameters
    ----------
    context : zmq.Context
    addresses : sequence of str
        Checked by `flyt.backend.options`.
    heartbeat_ms : int
    relays : bool
        Whether sessions pass through the TCP endpoints, which then take what a session may say.
    key : KeyPair, optional
        Of the TCP endpoints.

    Raises
    ------
    ConfigurationError
        When one of them can't be had; then none is open.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: Sequence[str],
        heartbeat_ms: int,
        *,
        relays: bool = False,
        key: KeyPair | None = None,
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._listeners: list[Listener] = []
        with contextlib.ExitStack() as undo:
            for address in addresses:
                endpoint = Endpoint.parse(address)
                if endpoint.scheme == "ipc":
                    lock = PathLock(f"{endpoint.path}.lock", address)
                    undo.callback(lock.close)
                    _remove_sessions(endpoint.path)
                limits = SOCKET_LIMITS if relays and endpoint.scheme == "tcp" else VISITOR_LIMITS
                listener = Listener(context, address, heartbeat_ms=heartbeat_ms, key=key, **limits)
                undo.callback(listener.close)
                self._listeners.append(listener)
            self._stack = undo.pop_all()

    def __iter__(self) -> Iterator[Listener]:
        return iter(self._listeners)

    @property
    def endpoints(self) -> list[str]:
        """As bound, so with real port numbers."""
        return [str(listener.endpoint) for listener in self._listeners]

    def close(self) -> None:
        """Close the sockets, remove the files. May be called again."""
        self._listeners.clear()
        self._stack.close()
