# SPDX-License-Identifier: Apache-2.0
"""The process of one contender: takes orders as JSON lines on stdin, answers on stdout.

It holds cases open between their rounds, so that the contenders can take turns. The end of its
input ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

from flyt.bench.cases import CASES, Case, Reference
from flyt.bench.runtimes import BenchFailed, NoRoom, runtime_of
from flyt.bench.together import TOGETHER, Threads, Together
from flyt.errors import FlytError

Reply = dict[str, Any]


class Worker:
    """The open cases of one process."""

    def __init__(self, module: str) -> None:
        self._runtime = runtime_of(module)
        self._reference = Reference()
        self._open: dict[int, Case | Threads] = {}

    def answer(self, order: dict[str, Any]) -> Reply:
        """Carry out one order; what went wrong is in the reply."""
        what = order.pop("do")
        try:
            return self._ORDERS[what](self, **order)
        except NoRoom as exc:
            return {"no_room": str(exc)}
        except FlytError as exc:
            return {"failed": str(exc)}

    def _begin_case(
        self, number: int, case: str, pinned: bool, size: int, calls: int, threads: int
    ) -> Reply:
        if threads:
            self._open[number] = Threads(
                self._runtime, pinned=pinned, size=size, calls=calls, threads=threads
            )
        else:
            kind = {**CASES, **TOGETHER}[case]
            self._open[number] = kind(
                self._runtime, self._reference, pinned=pinned, size=size, calls=calls
            )
        return {}

    def _round(self, number: int) -> Reply:
        case = self._open[number]
        if isinstance(case, Threads):
            raise BenchFailed("threads are run part by part")
        return {"samples": case.round()}

    def _together(self, number: int) -> Together | Threads:
        case = self._open[number]
        if isinstance(case, Together | Threads):
            return case
        raise BenchFailed("only cases of several clients are run part by part")

    def _begin(self, number: int) -> Reply:
        self._together(number).begin()
        return {}

    def _ready(self, number: int, part: str) -> Reply:
        self._together(number).ready(part)
        return {}

    def _times(self, number: int, part: str, at: float) -> Reply:
        return {"times": self._together(number).times(part, at)}

    def _end(self, number: int) -> Reply:
        self._together(number).end()
        return {}

    def _close_case(self, number: int) -> Reply:
        self._open.pop(number).close()
        return {}

    def _notes(self) -> Reply:
        return {"notes": self._runtime.notes()}

    _ORDERS: ClassVar[dict[str, Callable[..., Reply]]] = {
        "begin_case": _begin_case,
        "round": _round,
        "begin": _begin,
        "ready": _ready,
        "times": _times,
        "end": _end,
        "close_case": _close_case,
        "notes": _notes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help='"memcpy", or a module that speaks the runtime API')
    module = parser.parse_args().module
    # Replies go where nothing else prints: a library's message on stdout would break a line.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("default")  # they belong to the log

    def reply(answer: Reply) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    try:
        worker = Worker(module)
    except FlytError as exc:
        reply({"failed": str(exc)})
        return 1
    reply({})
    for line in sys.stdin:
        reply(worker.answer(json.loads(line)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
