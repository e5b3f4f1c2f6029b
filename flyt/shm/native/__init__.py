# SPDX-License-Identifier: Apache-2.0
"""The compiled library: what needs threads without the GIL, or loads and stores with an order.

It is built at install where there is a C compiler (`flyt.shm.native.build`). Without it copies run
on Python's threads and commands go by ZeroMQ: the same bytes, slower.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path
from typing import Any

from flyt.shm.native.entries import Entry, entries

ABI = 16
"""What ``flyt_abi`` of a matching library answers."""

LIBRARY = Path(__file__).resolve().parent / "libflyt.so"

_ADDRESS, _U32, _U64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
_POSITION = ctypes.POINTER(ctypes.c_uint64)

_QUICK = {
    "flyt_ring_room": (ctypes.c_int64, (_ADDRESS, _POSITION, _U32)),
    "flyt_ring_write": (
        ctypes.c_int64,
        (_ADDRESS, _POSITION, _U32, _U32, ctypes.c_char_p, _U32),
    ),
    "flyt_ring_read": (ctypes.c_int64, (_ADDRESS, _POSITION, _U32, _U32, ctypes.c_char_p)),
    "flyt_ring_peek": (ctypes.c_int64, (_ADDRESS, _POSITION, _U32, _U32, ctypes.c_char_p)),
    "flyt_ring_drop": (ctypes.c_int, (_ADDRESS, _POSITION, _U64, ctypes.c_int)),
    "flyt_ring_sleep": (ctypes.c_int, (_ADDRESS, _POSITION, _U64)),
    "flyt_ring_wake": (None, (_ADDRESS,)),
    "flyt_engine_job_size": (ctypes.c_size_t, ()),
    "flyt_engine_post": (
        ctypes.c_int,
        (*[_ADDRESS] * 4, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int),
    ),
    "flyt_express_size": (ctypes.c_size_t, ()),
    "flyt_express_add": (ctypes.c_int, (_ADDRESS, *[_U64] * 5)),
    "flyt_express_remove": (None, (_ADDRESS, _U64)),
    "flyt_express_end": (None, (_ADDRESS,)),
    "flyt_express_state": (ctypes.c_int, (_ADDRESS, _U64)),
    "flyt_express_kernel_size": (ctypes.c_size_t, ()),
    "flyt_express_read": (ctypes.c_int, (_ADDRESS,)),
    "flyt_express_heard": (None, (_ADDRESS,)),
    "flyt_express_answered": (None, (_ADDRESS, _U64, _U64)),
    "flyt_plain_size": (ctypes.c_size_t, ()),
    "flyt_shield_size": (ctypes.c_size_t, ()),
    "flyt_shield_init": (None, (_ADDRESS, ctypes.POINTER(ctypes.c_int), ctypes.c_int, _ADDRESS)),
    "flyt_shield_enter": (None, (_ADDRESS,)),
    "flyt_shield_leave": (None, (_ADDRESS,)),
}
"""Done in less time than giving the GIL away and getting it back takes; and so are the short way's
calls, which are builtins (`flyt.shm.native.entries`)."""

_LONG = {
    "flyt_ring_wait": (ctypes.c_int, (_ADDRESS, _POSITION, _U64, ctypes.c_int)),
    "flyt_express_wait": (None, (_ADDRESS, _U64, _U64, ctypes.c_int)),
    "flyt_plain_serve": (ctypes.c_int, (_ADDRESS, _U64, _U64, _U64, ctypes.c_int)),
    "flyt_stream": (None, (_ADDRESS, _ADDRESS, ctypes.c_size_t)),
    "flyt_engine_open": (_ADDRESS, (ctypes.c_int, _U64)),
    "flyt_engine_wait": (None, (_ADDRESS, _ADDRESS)),
    "flyt_engine_close": (None, (_ADDRESS,)),
}
"""These give the GIL away."""

log = logging.getLogger("flyt")


class Native:
    """The library's functions, by their C names without the ``flyt_``."""

    def __init__(self, path: Path) -> None:
        quick, long = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        abi = int(quick.flyt_abi())
        if abi != ABI:
            raise OSError(f"it was built for another version of Flyt (ABI {abi}, not {ABI})")
        for library, functions in ((quick, _QUICK), (long, _LONG)):
            for name, (result, arguments) in functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        self._quick = quick
        self.ring_room = quick.flyt_ring_room
        self.ring_write = quick.flyt_ring_write
        self.ring_read = quick.flyt_ring_read
        self.ring_peek = quick.flyt_ring_peek
        self.ring_drop = quick.flyt_ring_drop
        self.ring_sleep = quick.flyt_ring_sleep
        self.ring_wake = quick.flyt_ring_wake
        self.shield_size = quick.flyt_shield_size
        self.shield_init = quick.flyt_shield_init
        self.shield_enter = quick.flyt_shield_enter
        self.shield_leave = quick.flyt_shield_leave
        self.express_size = int(quick.flyt_express_size())
        self.express_add = quick.flyt_express_add
        self.express_remove = quick.flyt_express_remove
        self.express_end = quick.flyt_express_end
        self.express_state = quick.flyt_express_state
        self.express_kernel_size = int(quick.flyt_express_kernel_size())
        self.express_read = quick.flyt_express_read
        self.express_wait = long.flyt_express_wait
        self.express_heard = quick.flyt_express_heard
        self.express_answered = quick.flyt_express_answered
        self.plain_size = int(quick.flyt_plain_size())
        self.plain_serve = long.flyt_plain_serve
        self.plain_move = _address_of(long.flyt_plain_move)
        self.plain_fill = _address_of(long.flyt_plain_fill)
        self.engine_post = quick.flyt_engine_post
        self.engine_job_size = int(quick.flyt_engine_job_size())
        self.ring_wait = long.flyt_ring_wait
        self.stream = long.flyt_stream
        self.engine_open = long.flyt_engine_open
        self.engine_wait = long.flyt_engine_wait
        self.engine_close = long.flyt_engine_close

    def entries(self, address: int) -> dict[str, Entry]:
        """The short way's calls for the ``express_t`` there, which must outlive them, by name: see
        `flyt.shm.native.entries`."""
        return entries(self._quick, address)


def _address_of(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


@functools.cache
def native() -> Native | None:
    """The library; None where it was not built, does not fit, or ``FLYT_NATIVE=0`` forbids it."""
    if os.environ.get("FLYT_NATIVE", "1") == "0":
        return None
    if not LIBRARY.exists():
        log.info("the compiled library was not built: install Flyt where there is a C compiler")
        return None
    try:
        return Native(LIBRARY)
    except (OSError, AttributeError) as exc:
        log.warning("%s can't be used, install Flyt again: %s", LIBRARY, exc)
        return None
