# SPDX-License-Identifier: Apache-2.0
"""The ``FLYT_*`` variables that say how Flyt works here: one table, with what each of them takes.

Whoever begins something (a session, the daemon) checks all of them first: a slip of the pen is told
then, by name, and nothing goes on without what was asked for. An empty variable counts as unset.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from flyt.errors import ConfigurationError
from flyt.sizes import parse_size

T = TypeVar("T")

MAX_COPY_THREADS = 64

LONGEST_SPIN_US = 1_000_000
"""Whoever spins for more than a second burns a processor for nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """One of them.

    Attributes
    ----------
    name : str
    default : T
        What it is where it is not set.
    parse : callable
        Its value from its text; None for a text that it does not take.
    takes : str
        What it takes, for messages.
    """

    name: str
    default: T
    parse: Callable[[str], T | None]
    takes: str

    def read(self, environ: Mapping[str, str] = os.environ) -> T:
        """Its value.

        Raises
        ------
        ConfigurationError
            Names it, and says what it takes.
        """
        text = environ.get(self.name)
        if not text:
            return self.default
        value = self.parse(text)
        if value is None:
            raise ConfigurationError(f"{self.name}={text!r}: takes {self.takes}")
        return value


def _number(name: str, low: int, high: int, what: str = "") -> Variable[int]:
    def parse(text: str) -> int | None:
        fits = text.isascii() and text.isdigit() and len(text) <= len(str(high))
        return int(text) if fits and low <= int(text) <= high else None

    return Variable(name, 0, parse, f"a whole number{what} from {low} to {high}")


def _size(name: str, high: int) -> Variable[int]:
    def parse(text: str) -> int | None:
        try:
            size = parse_size(text)
        except ConfigurationError:
            return None
        return size if size <= high else None

    return Variable(name, 0, parse, f"bytes from 0 to {high}, also written as 64K, 8M, 1G")


def _switch(name: str, *, default: bool) -> Variable[bool]:
    return Variable(name, default, {"0": False, "1": True}.get, "0 or 1")


def _text(name: str, takes: str) -> Variable[str]:
    return Variable(name, "", str, takes)


BACKEND = _text("FLYT_BACKEND", "ipc:///path, tcp://host:port or emulated:")
KEY = _text("FLYT_KEY", "the path of a secret key")
SERVER_KEY = _text("FLYT_SERVER_KEY", "the path of a public key")
REGION = _text("FLYT_REGION", "a path, or pci: and a slot or a size")
RUNTIME_DIR = _text("FLYT_RUNTIME_DIR", "the absolute path of a folder")
STAGING_SLOTS = _number("FLYT_STAGING_SLOTS", 2, 64)
SLOT_SIZE = _size("FLYT_SLOT_SIZE", 1 << 30)
COPY_THREADS = _number("FLYT_COPY_THREADS", 0, MAX_COPY_THREADS)
SPIN_US: Variable[int | None] = Variable(
    "FLYT_SPIN_US",
    None,
    _number("", 0, LONGEST_SPIN_US).parse,
    f"a whole number of microseconds from 0 to {LONGEST_SPIN_US}",
)
RING = _switch("FLYT_RING", default=True)
NATIVE = _switch("FLYT_NATIVE", default=True)
NVRTC_UNCONFINED = _switch("FLYT_NVRTC_UNCONFINED", default=False)

VARIABLES: tuple[Variable[Any], ...] = (
    BACKEND,
    KEY,
    SERVER_KEY,
    REGION,
    RUNTIME_DIR,
    STAGING_SLOTS,
    SLOT_SIZE,
    COPY_THREADS,
    SPIN_US,
    RING,
    NATIVE,
    NVRTC_UNCONFINED,
)


def check(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse what one of them does not take; what a text names is looked at where it is used.

    Raises
    ------
    ConfigurationError
        Names the first of them.
    """
    for variable in VARIABLES:
        variable.read(environ)
