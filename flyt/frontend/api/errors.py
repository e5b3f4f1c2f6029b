# SPDX-License-Identifier: Apache-2.0
"""Last errors, error names and strings."""

from __future__ import annotations

from typing import Any

from cuda.bindings import runtime as cudart

from flyt.frontend import current
from flyt.frontend.api.convention import Answer, error_of
from flyt.frontend.current import thread


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
    """The name of an error code, as bytes."""
    return tuple(cudart.cudaGetErrorName(error))


def cudaGetErrorString(error: Any) -> Answer:
    """What an error code means, as bytes."""
    return tuple(cudart.cudaGetErrorString(error))
