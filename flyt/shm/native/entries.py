# SPDX-License-Identifier: Apache-2.0
"""The short way's calls as builtins, without ctypes in between: see entries.c.

Half a microsecond of each call was ctypes, which turns every argument over; a builtin with
METH_FASTCALL takes them as they are. CPython's stable ABI has all of this since 3.10, so one
library still serves every Python, and is built without its headers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

_FUNCTIONS = (
    "PyLong_AsUnsignedLongLong",
    "PyLong_AsSsize_t",
    "PyLong_FromLongLong",
    "PyBytes_Size",
    "PyBytes_AsString",
    "PyTuple_Size",
    "PyTuple_GetItem",
    "PyErr_Occurred",
    "PyErr_Clear",
)
"""``python_t`` of entries.c."""

Entry = Callable[..., int]


def entries(library: ctypes.PyDLL, address: int) -> dict[str, Entry]:
    """Builtins for one ``express_t``, by name.

    Parameters
    ----------
    library : ctypes.PyDLL
    address : int
        Of the ``express_t``. It must outlive them.
    """
    python = ctypes.pythonapi
    found = (ctypes.c_void_p * len(_FUNCTIONS))(
        *(ctypes.cast(getattr(python, name), ctypes.c_void_p).value for name in _FUNCTIONS)
    )
    entry = library.flyt_entry
    entry.restype, entry.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_uint64)
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
        ("PyCFunction_NewEx", python)
    )
    made: dict[str, Any] = {}
    while method := entry(found, len(made)):
        builtin = make(method, address, None)
        made[builtin.__name__] = builtin
    return made
