# SPDX-License-Identifier: Apache-2.0
"""What a fact is: a clause of CUDA's, and a function that an implementation passes or breaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from flyt.errors import FlytError
from flyt.testing._lab import Lab

Check = Callable[[Lab], None]


class FactSkipped(FlytError):
    """A fact can't be observed here; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """One thing that is true of every CUDA runtime.

    Attributes
    ----------
    name : str
        ``subject.what_is_true``.
    clause : str
        The function of CUDA's documentation that says so, or "recorded" where a GPU's answer was
        read, and what it says.
    check : callable
        Takes a `Lab`; raises `FactBroken` or `FactSkipped`.
    """

    name: str
    clause: str
    check: Check


class Facts:
    """The facts of one subject, in the order in which they are told."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._facts: list[Fact] = []

    def __iter__(self) -> Iterator[Fact]:
        return iter(self._facts)

    def fact(self, clause: str) -> Callable[[Check], Check]:
        """Add the decorated function under its own name."""

        def add(check: Check) -> Check:
            self._facts.append(Fact(f"{self._subject}.{check.__name__}", clause, check))
            return check

        return add
