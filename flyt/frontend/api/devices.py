# SPDX-License-Identifier: Apache-2.0
"""Devices and versions: answered from what WELCOME told, they never cross."""

from __future__ import annotations

from flyt.frontend import current
from flyt.frontend.api.convention import Answer, cuda
from flyt.frontend.current import thread


@cuda(1)
def cudaGetDeviceCount() -> Answer:
    """How many devices the backend offers."""
    return (len(current.current().devices),)


@cuda(1)
def cudaGetDevice() -> Answer:
    """The current device of this thread."""
    current.current()
    return (thread.device,)


@cuda(0)
def cudaSetDevice(device: int) -> Answer:
    """Make a device this thread's current one; cudaErrorInvalidDevice if it does not exist."""
    thread.device = current.current().check_device(device)
    return ()


@cuda(0)
def cudaDeviceSynchronize() -> Answer:
    """Wait for all work of this process on the current device, not for other processes'."""
    current.current().synchronize(thread.device)
    return ()


@cuda(1)
def cudaRuntimeGetVersion() -> Answer:
    """The backend's CUDA runtime version."""
    return (int(current.current().welcome.snapshot["runtime_version"]),)


@cuda(1)
def cudaDriverGetVersion() -> Answer:
    """The backend's CUDA driver version."""
    return (int(current.current().welcome.snapshot["driver_version"]),)
