# SPDX-License-Identifier: Apache-2.0
"""The driver's own functions for the compiled loop of a session (`flyt.backend.plain`)."""

from __future__ import annotations

import ctypes
import functools
import logging

from flyt.backend.devices.base import Direct

DRIVER = "libcuda.so.1"
NAMES = (
    "cuMemcpyAsync",
    "cuMemsetD8Async",
    "cuStreamQuery",
    "cuLaunchKernel",
    "cuEventRecord",
    "cuEventQuery",
)

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
def _functions(library: str) -> list[int] | None:
    """Addresses of the functions; None where the driver lacks one."""
    try:
        driver = ctypes.CDLL(library)
        found = [getattr(driver, name) for name in NAMES]
    except (OSError, AttributeError) as exc:
        log.warning("small copies and launches take the long way: %s", exc)
        return None
    return [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in found]
