# SPDX-License-Identifier: Apache-2.0
"""The driver's own functions for the compiled loop of a session (`flyt.backend.plain`)."""

from __future__ import annotations

import ctypes
import functools
import logging

from flyt.backend.devices.base import Direct

DRIVER = "libcuda.so.1"

log = logging.getLogger(__name__)


def direct(stream: int, devices: int) -> Direct | None:
    """How compiled code uses a stream of the context that is current in this thread.

    Parameters
    ----------
    stream : int
        cudaStream_t, which is a CUstream.
    devices : int
        How many the process has: with several, another's context may be current when the loop runs.
    """
    if devices != 1:
        return None
    functions = _functions(DRIVER)
    return None if functions is None else Direct(stream, *functions)


@functools.cache
def _functions(library: str) -> tuple[int, int, int, int] | None:
    """Addresses of the four functions; None where the driver lacks one."""
    try:
        driver = ctypes.CDLL(library)
        found = (
            driver.cuMemcpyAsync,
            driver.cuMemsetD8Async,
            driver.cuStreamQuery,
            driver.cuLaunchKernel,
        )
    except (OSError, AttributeError) as exc:
        log.warning("small copies and launches take the long way: %s", exc)
        return None
    move, fill, query, launch = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in found)
    return move, fill, query, launch
