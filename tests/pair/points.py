# SPDX-License-Identifier: Apache-2.0
"""A call in the middle of others, wherever CPython lets a signal's handler run."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_BEHIND = {"RESUME", "JUMP_BACKWARD", "CALL", "PRECALL", "CALL_FUNCTION_EX", "CALL_KW"} | {
    "CALL_FUNCTION", "CALL_METHOD", "CALL_FUNCTION_KW", "JUMP_ABSOLUTE",
}  # fmt: skip
"""Instructions behind which, or in which, the interpreter looks for signals."""


class Points:
    """Makes ``call`` behind the ``at``-th of these instructions; ``where`` is that place.

    Parameters
    ----------
    files : set of str
        Of which modules instructions count.
    """

    def __init__(self, at: int, files: set[str], call: Callable[[], object]) -> None:
        self._left, self._files, self._call = at, files, call
        self._names: dict[CodeType, dict[int, str]] = {}
        self._last: dict[FrameType, str] = {}
        self.where = ""

    def run(self, function: Callable[[], Any]) -> Any:
        """What the function returns."""
        sys.settrace(self)
        try:
            return function()
        finally:
            sys.settrace(None)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event != "opcode" or self.where:
            return self._step
        code = frame.f_code
        if code not in self._names:
            self._names[code] = {one.offset: one.opname for one in dis.get_instructions(code)}
        before = self._last.get(frame, "")
        self._last[frame] = self._names[code].get(frame.f_lasti, "")
        if before in _BEHIND:
            self._left -= 1
            if not self._left:
                name = Path(code.co_filename).name
                self.where = f"{name}, line {frame.f_lineno}, behind {before}"
                sys.settrace(None)
                self._call()
        return self._step
