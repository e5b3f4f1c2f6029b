# SPDX-License-Identifier: Apache-2.0
"""`Fields`: a peer's map, taken apart field by field, each with its check."""

from __future__ import annotations

from typing import Any

from flyt.errors import ProtocolError
from flyt.ipc.buffer import MAX_SIZE

MAX_TEXT = 400
"""Characters of a reason; longer ones are cut."""


class Fields:
    """Takes the fields out of a peer's map one by one, each with its check; none may be left."""

    def __init__(self, what: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise ProtocolError(f"the peer's {what} is no map")
        self._what, self._map = what, dict(value)

    def _take(self, name: str) -> Any:
        if name not in self._map:
            raise ProtocolError(f"the peer's {self._what} lacks {name}")
        return self._map.pop(name)

    def integer(self, name: str, low: int = 0, high: int = MAX_SIZE) -> int:
        return self._bounded(name, self._take(name), low, high)

    def _bounded(self, name: str, value: Any, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ProtocolError(f"the peer's {self._what}.{name} is no integer in {low}..{high}")
        return value

    def integers(self, name: str, count: int, low: int, high: int = MAX_SIZE) -> tuple[int, ...]:
        value = self._take(name)
        if not isinstance(value, list) or len(value) > count:
            raise ProtocolError(f"the peer's {self._what}.{name} is no list of up to {count}")
        # Without Python code for each item: a Release names many.
        if value and (set(map(type, value)) != {int} or min(value) < low or max(value) > high):
            raise ProtocolError(f"the peer's {self._what}.{name} has no integers in {low}..{high}")
        return tuple(value)

    def packed(self, name: str) -> bytes:
        """Bytes of any length, which a frame bounds."""
        value = self._take(name)
        if not isinstance(value, bytes):
            raise ProtocolError(f"the peer's {self._what}.{name} is no bytes")
        return value

    def octets(self, name: str, *lengths: int) -> bytes:
        value = self._take(name)
        if not isinstance(value, bytes) or len(value) not in lengths:
            raise ProtocolError(f"the peer's {self._what}.{name} has not {lengths} bytes")
        return value

    def names(self, name: str, count: int, length: int) -> tuple[bytes, ...]:
        value = self._take(name)
        if (
            not isinstance(value, list)
            or len(value) > count
            or not all(isinstance(item, bytes) and len(item) == length for item in value)
        ):
            raise ProtocolError(
                f"the peer's {self._what}.{name} is no list of up to {count} times {length} bytes"
            )
        return tuple(value)

    def text(self, name: str, allowed: tuple[str, ...] = ()) -> str:
        value = self._take(name)
        if not isinstance(value, str) or (allowed and value not in allowed):
            raise ProtocolError(f"the peer's {self._what}.{name} is none of {', '.join(allowed)}")
        return value[:MAX_TEXT]

    def truth(self, name: str) -> bool:
        value = self._take(name)
        if not isinstance(value, bool):
            raise ProtocolError(f"the peer's {self._what}.{name} is neither true nor false")
        return value

    def part(self, name: str) -> Fields | None:
        value = self._take(name)
        return None if value is None else Fields(f"{self._what}.{name}", value)

    def end(self) -> None:
        if self._map:
            raise ProtocolError(f"the peer's {self._what} has unknown fields")
