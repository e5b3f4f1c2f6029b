# SPDX-License-Identifier: Apache-2.0
"""Who comes in over TCP: the daemon's own key, and the keys of the clients it lets in.

Each process of the daemon has a gate of its own for its sockets. At the main endpoint all
authorized keys come in; in a worker only those of the principal that it serves. Workers get the
daemon's secret key through an inherited descriptor: no command line or environment shows it.
"""

from __future__ import annotations

import logging
import os
import threading

import zmq

from flyt.errors import ConfigurationError
from flyt.rpc.curve import Gate
from flyt.rpc.keys import KEY_CHARACTERS, AuthorizedKeys, KeyPair, read_pair

log = logging.getLogger(__name__)


class Authentication:
    """The daemon's: knows its key and who is authorized.

    Parameters
    ----------
    context : zmq.Context
        The supervisor's; its guarded sockets are closed before `close`.
    server_key, authorized_keys : str
        As the options name them.

    Raises
    ------
    ConfigurationError
        Key or folder can't be used.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], server_key: str, authorized_keys: str
    ) -> None:
        self.key = read_pair(server_key, "--server-key")
        authorized = AuthorizedKeys(authorized_keys, "--authorized-keys")
        if not authorized.current():
            log.warning("no client can connect over TCP yet: %s holds no key", authorized_keys)
        self._gate = Gate(context, lambda key: key in authorized.current())
        self.descriptor = os.memfd_create("flyt-server-key", os.MFD_CLOEXEC)
        os.write(self.descriptor, self.key.public + self.key.secret)

    def worker_arguments(self) -> tuple[str, str]:
        """For a worker's command line; `descriptor` is to be inherited."""
        return "--server-key-fd", str(self.descriptor)

    def close(self) -> None:
        self._gate.close()
        os.close(self.descriptor)


class WorkerAuthentication:
    """A worker's: the same key, and the keys of the clients whose sessions it was asked for."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], descriptor: int) -> None:
        self.key = inherited_key(descriptor)
        self._lock = threading.Lock()
        self._expected: set[bytes] = set()
        self._gate = Gate(context, self._admits)

    def expect(self, peer: str) -> None:
        """A session is opened for this key."""
        with self._lock:
            self._expected.add(peer.encode("ascii"))

    def _admits(self, key: bytes) -> bool:
        with self._lock:
            return key in self._expected


def inherited_key(descriptor: int) -> KeyPair:
    """What `Authentication` wrote for a child."""
    data = os.pread(descriptor, 2 * KEY_CHARACTERS, 0)
    if len(data) != 2 * KEY_CHARACTERS:
        raise ConfigurationError(f"descriptor {descriptor} holds no key pair")
    return KeyPair(data[:KEY_CHARACTERS], data[KEY_CHARACTERS:])
