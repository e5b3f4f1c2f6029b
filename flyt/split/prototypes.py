# SPDX-License-Identifier: Apache-2.0
"""A table of prototypes: the one place that says what a lower half answers.

A file of C prototypes, one a line, and four kinds of other lines::

    half mpi                                 the lower half's name
    library libflytmpi.so                    its stub library (more than one: one per soname)
    include "mpi.h"                          where the stubs find the types
    callback int visit(int value, void *at)  a type of function that may be passed to it
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from flyt.errors import ConfigurationError

PROTOTYPE = re.compile(r"^(?P<result>[\w\s*]+?[\s*])(?P<name>\w+)\s*\((?P<parameters>[^()]*)\);?$")
PARAMETER = re.compile(r"^(?P<type>[\w\s*]+?[\s*])(?P<name>\w+)$")

NAME_LIMIT = 15
"""Characters of a half's name: the record that the halves share has room for these."""


@dataclass(frozen=True)
class Prototype:
    """A C function's name, the type of its result, types and names of its parameters."""

    result: str
    name: str
    parameters: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> Prototype:
        found = PROTOTYPE.match(text)
        if found is None:
            raise ValueError("it is no prototype")
        listed = found["parameters"].strip()
        if not listed:
            raise ValueError("empty parentheses: write (void)")
        parameters = []
        for one in [] if listed == "void" else listed.split(","):
            parts = PARAMETER.match(one.strip())
            if parts is None:
                raise ValueError(f"parameter {one.strip()!r} needs a plain type and a name")
            parameters.append((parts["type"].strip(), parts["name"]))
        return cls(found["result"].strip(), found["name"], tuple(parameters))

    def __str__(self) -> str:
        listed = ", ".join(f"{kind} {name}" for kind, name in self.parameters)
        return f"{self.result} {self.name}({listed or 'void'})"


@dataclass
class Table:
    """What a lower half answers, in the order of its function table."""

    half: str = ""
    libraries: list[str] = field(default_factory=list)
    includes: list[str] = field(default_factory=list)
    callbacks: dict[str, Prototype] = field(default_factory=dict)
    functions: list[Prototype] = field(default_factory=list)

    @property
    def digest(self) -> int:
        """Tells tables apart: stubs of one don't fit a lower half of another."""
        text = "\n".join(map(str, [*self.callbacks.values(), *self.functions]))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _take(table: Table, line: str) -> None:
    word, _, rest = line.partition(" ")
    if word == "half":
        table.half = rest.strip()
    elif word == "library":
        table.libraries.append(rest.strip())
    elif word == "include":
        table.includes.append(rest.strip())
    elif word == "callback":
        callback = Prototype.parse(rest.strip())
        table.callbacks[callback.name] = callback
    else:
        table.functions.append(Prototype.parse(line))


def read(path: Path) -> Table:
    """Read a table of prototypes.

    Raises
    ------
    ConfigurationError
        The file can't be read, or a line of it is none of the above; the message names the line.
    """
    table = Table()
    try:
        lines = path.read_text().splitlines()
    except OSError as exc:
        raise ConfigurationError(f"the table of prototypes can't be read: {exc}") from exc
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            _take(table, text)
        except ValueError as exc:
            raise ConfigurationError(f"{path}:{number}: {text!r}: {exc}") from exc
    if not 0 < len(table.half) <= NAME_LIMIT or not table.libraries or not table.functions:
        raise ConfigurationError(
            f"{path}: it must name its half (at most {NAME_LIMIT} characters), a library and "
            "at least one function"
        )
    names = [function.name for function in table.functions]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"{path}: a function is named twice")
    return table
