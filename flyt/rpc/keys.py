# SPDX-License-Identifier: Apache-2.0
"""Files of CURVE keys, in the form of pyzmq's certificates: ``NAME.key`` and ``NAME.key_secret``.

A secret that others can read is no secret, so such a file is refused, as OpenSSH does it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import stat
import struct
import tempfile

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.utils import z85

from flyt.errors import ConfigurationError

log = logging.getLogger(__name__)

PUBLIC, SECRET = ".key", ".key_secret"
"""Ends of the files' names."""

KEY_CHARACTERS = 40
"""Of a key in Z85."""

KEY_BYTES = 32

_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")

OTHERS = stat.S_IRWXG | stat.S_IRWXO
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclasses.dataclass(frozen=True, slots=True)
class KeyPair:
    """A key of one's own, in Z85."""

    public: bytes
    secret: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client needs: its own key, and the public key of the server that it trusts."""

    own: KeyPair
    server: bytes


def read_pair(path: str, setting: str) -> KeyPair:
    """The key in a ``.key_secret`` file.

    Parameters
    ----------
    path : str
    setting : str
        The option or variable that named it, for messages.

    Raises
    ------
    ConfigurationError
        It can't be read, holds no secret key, or others can read it.
    """
    public, secret = _read(path, setting)
    if secret is None:
        raise ConfigurationError(
            f"{setting} {path}: holds no secret key; it wants the file that ends in {SECRET}"
        )
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & OTHERS:
        raise ConfigurationError(
            f"{setting} {path}: mode {mode:o} lets others read the secret key: chmod 600 it, and "
            "if somebody may have read it, make a new one (flyt keygen)"
        )
    return KeyPair(public, secret)


def read_public(path: str, setting: str) -> bytes:
    """The public key in a ``.key`` file; see `read_pair`."""
    return _read(path, setting)[0]


def _read(path: str, setting: str) -> tuple[bytes, bytes | None]:
    try:
        os.stat(path)  # pyzmq calls a file that is not there an invalid one
        public, secret = load_certificate(path)
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"{setting} {path}: {_reason(exc)}") from exc
    if not zmq.has("curve"):
        raise ConfigurationError(
            f"{setting}: this libzmq was built without CURVE; install pyzmq's own wheel"
        )
    for key in (public, secret):
        if key is not None and not _is_key(key):
            raise ConfigurationError(
                f"{setting} {path}: what it holds is no key of {KEY_CHARACTERS} characters in Z85; "
                "make one with flyt keygen"
            )
    if secret is not None and zmq.curve_public(secret) != public:
        raise ConfigurationError(
            f"{setting} {path}: its public key is not that of its secret key; make one with flyt "
            "keygen"
        )
    return public, secret


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == KEY_CHARACTERS and len(z85.decode(text)) == KEY_BYTES
    except (KeyError, struct.error):  # a character, or five of them, that stand for nothing
        return False


def _reason(exc: OSError | ValueError) -> str:
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc)


class AuthorizedKeys:
    """A folder with the public keys of all clients that may connect, looked at again and again.

    Parameters
    ----------
    folder : str
        Holds ``NAME.key`` files; others are left alone.

    Raises
    ------
    ConfigurationError
        It is no folder that can be read, or others may write there.
    """

    def __init__(self, folder: str, setting: str) -> None:
        self._folder = folder
        self._seen: object = None
        self._keys: frozenset[bytes] = frozenset()
        try:
            mode = stat.S_IMODE(os.stat(folder).st_mode)
            os.listdir(folder)
        except OSError as exc:
            raise ConfigurationError(f"{setting} {folder}: {exc.strerror}") from exc
        if mode & OTHERS_WRITE:
            raise ConfigurationError(
                f"{setting} {folder}: mode {mode:o} lets others add keys: chmod 700 it"
            )

    def current(self) -> frozenset[bytes]:
        """All keys that are in the folder now; none when it can't be read any more."""
        try:
            seen = self._look()
            if seen != self._seen:
                self._keys = frozenset(self._load(name) for name, *_ in seen) - {b""}
                self._seen = seen
        except OSError as exc:
            log.error("no client may connect: %s: %s", self._folder, exc.strerror)
            self._seen, self._keys = None, frozenset()
        return self._keys

    def _look(self) -> list[tuple[str, int, int, int]]:
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(PUBLIC):
                    about = entry.stat()
                    found.append((entry.name, about.st_mtime_ns, about.st_size, about.st_ino))
        return sorted(found)

    def _load(self, name: str) -> bytes:
        try:
            return read_public(os.path.join(self._folder, name), "an authorized key:")
        except ConfigurationError as exc:
            log.warning("%s", exc)
            return b""


def make(folder: str, name: str) -> tuple[str, str, bytes]:
    """Make a key pair: paths of its public and its secret file, and the public key.

    Both files have mode 0600, and the folder, which is made if need be, 0700.

    Raises
    ------
    ConfigurationError
        The folder is open to others, or there is a key of that name.
    """
    if _NAME.fullmatch(name) is None:
        raise ConfigurationError(f"name {name!r}: wants up to 64 letters, digits and _ . @ -")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        mode = stat.S_IMODE(os.stat(folder).st_mode)
        if mode & OTHERS:
            raise ConfigurationError(
                f"{folder}: mode {mode:o} opens it to others: chmod 700 it, or name another folder"
            )
        with tempfile.TemporaryDirectory(dir=folder) as private:
            made = create_certificates(private, name)
            kept = [os.path.join(folder, os.path.basename(path)) for path in made]
            for path, final in zip(made, kept, strict=True):
                os.chmod(path, 0o600)
                os.link(path, final)  # unlike a rename, never over an older key
    except FileExistsError as exc:
        raise ConfigurationError(
            f"{exc.filename2 or folder}: exists; choose another name, or remove it first: whoever "
            "knows the old key has to get the new one"
        ) from exc
    except OSError as exc:
        raise ConfigurationError(f"{folder}: {exc.strerror}") from exc
    public, secret = kept
    return public, secret, read_public(public, "key")
