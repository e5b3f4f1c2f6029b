# SPDX-License-Identifier: Apache-2.0
"""Endpoints as people write them: ``ipc:///path``, ``tcp://host:port``, ``emulated:``."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import stat

from flyt.errors import ConfigurationError

SUN_PATH_LIMIT = 107
"""Linux's limit for the path of a UNIX socket, without the closing zero."""

_PORT_DIGITS = 5
"""65535 has five; ``int`` itself refuses texts of thousands of digits with a ValueError."""


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """One parsed endpoint; ``path`` is set for ipc, ``host`` and ``port`` for tcp."""

    scheme: str
    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse what a user wrote.

        Raises
        ------
        ConfigurationError
            Names the text and the three forms that are understood.
        """
        scheme, colon, rest = text.partition(":")
        if scheme == "emulated" and colon:
            return cls("emulated", path=rest)
        if scheme == "ipc" and rest.startswith("//") and len(rest) > 2:
            return cls("ipc", path=_checked_path(rest[2:]))
        if scheme == "tcp" and rest.startswith("//"):
            return _tcp(text, rest[2:])
        raise ConfigurationError(
            f"endpoint {text!r} is not understood; "
            "use ipc:///path/of/socket, tcp://host:port or emulated:"
        )

    def __str__(self) -> str:
        if self.scheme == "ipc":
            return f"ipc://{self.path}"
        if self.scheme == "tcp":
            host = f"[{self.host}]" if ":" in self.host else self.host
            return f"tcp://{host}:{self.port or '*'}"
        return f"{self.scheme}:{self.path}"

    def session(self, port: int, path: str) -> Endpoint:
        """Where a WELCOME's session socket is, seen from this dialled endpoint.

        Only the port or file name comes from the backend: behind NAT or in a container the
        client knows better than the backend how to reach it. Port 0 is the one that was dialled.
        """
        if self.scheme == "tcp":
            return dataclasses.replace(self, port=port or self.port)
        return Endpoint(
            "ipc", path=os.path.join(os.path.dirname(self.path), os.path.basename(path))
        )

    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.scheme != "tcp":
            return True
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _checked_path(path: str) -> str:
    if len(os.fsencode(path)) > SUN_PATH_LIMIT:
        raise ConfigurationError(
            f"socket path {path!r} is longer than the {SUN_PATH_LIMIT} bytes Linux allows; "
            "use a shorter folder (FLYT_RUNTIME_DIR)"
        )
    return path


def _tcp(text: str, rest: str) -> Endpoint:
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    number = 0 if port == "*" else _digits(port)
    if not host or not 0 <= number <= 0xFFFF:
        raise ConfigurationError(f"endpoint {text!r} needs the form tcp://host:port")
    return Endpoint("tcp", host=host, port=number)


def port_range(text: str) -> tuple[int, int]:
    """Parse ``A-B`` of ``--session-ports``."""
    low, dash, high = text.partition("-")
    if not (dash and 0 < _digits(low) <= _digits(high) <= 0xFFFF):
        raise ConfigurationError(
            f"port range {text!r} needs the form A-B with 1 <= A <= B <= 65535"
        )
    return int(low), int(high)


def _digits(text: str) -> int:
    """A number of ASCII digits, few enough for a port; -1 for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _PORT_DIGITS else -1


def unlink_socket(path: str) -> None:
    """Remove a socket's name; anything else of that name stays."""
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        return  # libzmq, or a worker that is just ending, removed it itself
