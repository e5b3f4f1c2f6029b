# SPDX-License-Identifier: Apache-2.0
"""Facts of a GPU that CuPy's own structures lack: all attributes, and the whole UUID."""

from __future__ import annotations

from typing import Any

from flyt.errors import DeviceError


def attributes(runtime: Any, ordinal: int) -> dict[str, int]:
    """Every attribute that CUDA's header names and this driver knows."""
    # Imported here: a machine without a GPU has no use for it.
    from cuda.bindings.runtime import cudaDeviceAttr

    values = {}
    for attribute in cudaDeviceAttr:
        name = attribute.name.removeprefix("cudaDevAttr")
        if name.startswith("Reserved"):
            continue
        try:
            values[name] = int(runtime.deviceGetAttribute(int(attribute), ordinal))
        except runtime.CUDARuntimeError:
            continue  # newer than the driver
    return values


def uuid(ordinal: int) -> bytes:
    """From the driver: CuPy reads a UUID as C text, which ends at its first zero byte."""
    # Imported here: a machine without a GPU has no use for it, and no driver to load.
    from cuda.bindings import driver

    code, device = driver.cuDeviceGet(ordinal)  # CUDA is initialised: the ordinals are CuPy's
    if not code:
        code, found = driver.cuDeviceGetUuid(device)
    if code:
        raise DeviceError(int(code), f"the UUID of device {ordinal}")
    return bytes(found.bytes)
