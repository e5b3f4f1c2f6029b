# SPDX-License-Identifier: Apache-2.0
"""What `flyt.backend.plain` has checked, as its compiled loop reads it (``plain_t`` of plain.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from typing import Any

BLOCKS, SEGMENTS, STREAMS, MARKS, FUNCTIONS = 64, 16, 16, 16, 64
"""How many of each are noted; a program seldom uses more in turns, and each is looked for in
nanoseconds. One more takes the place of the oldest."""


class Range(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
    )


class Stream(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
        ("handle", ctypes.c_void_p),
        ("move", ctypes.c_void_p),
        ("fill", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("launch", ctypes.c_void_p),
    )


class Function(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
        ("handle", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("bytes", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
    )


OF_A_STREAM = len(Stream._fields_) - 2


class Table(ctypes.Structure):
    """``plain_t`` of plain.c."""

    _fields_ = (
        ("commands", ctypes.c_void_p),
        ("replies", ctypes.c_void_p),
        ("commands_read", ctypes.c_void_p),
        ("replies_written", ctypes.c_void_p),
        ("command_places", ctypes.c_uint32),
        ("reply_places", ctypes.c_uint32),
        ("base", ctypes.c_uint64),
        ("pid", ctypes.c_uint64),
        ("largest", ctypes.c_uint64),
        ("blocks", ctypes.c_uint32),
        ("segments", ctypes.c_uint32),
        ("streams", ctypes.c_uint32),
        ("functions", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("launches", ctypes.c_uint32),
        ("first", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("taken", ctypes.c_uint64),
        ("moved", ctypes.c_uint64),
        ("woken", ctypes.c_uint64),
        ("slow", ctypes.c_uint64),
        ("marks", ctypes.c_uint32),
        ("oldest", ctypes.c_uint32),
        ("marked", ctypes.c_uint64),
        ("since", ctypes.c_uint64),
        ("record", ctypes.c_void_p),
        ("reached", ctypes.c_void_p),
        ("mark", ctypes.c_void_p * MARKS),
        ("block", Range * BLOCKS),
        ("segment", Range * SEGMENTS),
        ("queue", Stream * STREAMS),
        ("function", Function * FUNCTIONS),
    )


class Notes:
    """Rows of one kind in the table; one too many takes the place of the oldest."""

    def __init__(self, rows: ctypes.Array[Any]) -> None:
        self._rows = rows
        self._keys: dict[Hashable, None] = {}
        self._next = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: Hashable, *values: int) -> None:
        if len(self._keys) == len(self._rows):
            del self._keys[next(iter(self._keys))]
        self._keys[key] = None
        row = self._rows[self._next]
        for (name, _), value in zip(row._fields_, values, strict=True):
            setattr(row, name, value)
        self._next = (self._next + 1) % len(self._rows)

    def clear(self) -> None:
        self._keys.clear()
        self._next = 0
