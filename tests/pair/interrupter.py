# SPDX-License-Identifier: Apache-2.0
"""KeyboardInterrupt at a chosen line, as a handler raises it whose signal another thread got."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

Lines = dict[str | None, set[str] | None]
"""Files, and of each the functions that are meant; None for all."""


class Interrupter:
    """Raises KeyboardInterrupt at the ``at``-th of these lines; ``where`` is that line."""

    def __init__(self, at: int, lines: Lines) -> None:
        self._left = at
        self._lines = lines
        self.where = ""

    def interrupt(self, call: Callable[[], Any]) -> Any:
        """What the call returns, or None when it was interrupted."""
        sys.settrace(self)
        try:
            return call()
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(None)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        functions = self._lines.get(code.co_filename, ())
        return self._line if functions is None or code.co_name in functions else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        # At a `try:`, and between the end of a `with` and its __exit__, the interpreter runs no
        # handler, and its tables of exceptions have gaps.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not self.where and not text.startswith(("with ", "try:")):
            self._left -= 1
            if not self._left:
                self.where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line
