# SPDX-License-Identifier: Apache-2.0
"""Last errors, error names and strings."""

from __future__ import annotations

from typing import Any

from cuda.bindings.runtime import cudaError_t

from flyt.frontend import current
from flyt.frontend.api.convention import Answer, error_of
from flyt.frontend.api.error_texts import TEXTS
from flyt.frontend.current import thread

UNKNOWN = "unrecognized error code"
"""What CUDA calls codes that it doesn't know, name and text alike."""


def cudaGetLastError() -> Answer:
    """The last error of this thread, which is reset to cudaSuccess; a lost session's stays."""
    code = _last()
    thread.last_error = 0
    return (error_of(code),)


def cudaPeekAtLastError() -> Answer:
    """The last error of this thread; it stays."""
    return (error_of(_last()),)


def _last() -> int:
    lost = current.lost()
    return lost.code if lost is not None else thread.last_error


def cudaGetErrorName(error: Any) -> Answer:
    """The name of an error code, as bytes. Asks no driver: works where there is none."""
    code = _code(error)
    names = (e.name for e in cudaError_t if e == code)
    return error_of(0), next(names, UNKNOWN).encode()


def cudaGetErrorString(error: Any) -> Answer:
    """What an error code means, as bytes. Asks no driver: works where there is none."""
    return error_of(0), TEXTS.get(_code(error), UNKNOWN).encode()


def _code(error: Any) -> int:
    if error is None:
        raise TypeError("Argument 'error' must not be None")
    return int(error)
