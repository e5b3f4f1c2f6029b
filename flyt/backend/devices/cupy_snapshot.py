# SPDX-License-Identifier: Apache-2.0
"""What a GPU says of itself, read once when it is opened."""

from __future__ import annotations

import re
from typing import Any

from flyt.backend.devices.base import DeviceSnapshot
from flyt.backend.devices.properties import describe
from flyt.errors import DeviceError

_RESERVED = re.compile(r"Reserved\d+")
"""Attributes of CUDA's header that have no meaning."""


def take_snapshot(runtime: Any, ordinal: int) -> DeviceSnapshot:
    """Everything that clients are told of a GPU; it has to be the thread's current device."""
    known = runtime.getDeviceProperties(ordinal)
    name, memory = known["name"].decode(), int(known["totalGlobalMem"])
    attributes = _attributes(runtime, ordinal)
    others = (n for n in range(runtime.getDeviceCount()) if n != ordinal)
    return DeviceSnapshot(
        name=name,
        total_memory=memory,
        kind="cupy",
        attributes=attributes,
        properties=describe(attributes, name=name, memory=memory, uuid=_uuid(ordinal)),
        pci_bus_id=str(runtime.deviceGetPCIBusId(ordinal)).rstrip("\0"),
        peers=[n for n in others if runtime.deviceCanAccessPeer(ordinal, n)],
        stream_priorities=_stream_priorities(),
    )


def _attributes(runtime: Any, ordinal: int) -> dict[str, int]:
    """Every attribute that CUDA's header names and this driver knows."""
    # Imported here: a machine without a GPU has no use for it.
    from cuda.bindings.runtime import cudaDeviceAttr

    values = {}
    for attribute in cudaDeviceAttr:
        name = attribute.name.removeprefix("cudaDevAttr")
        if _RESERVED.fullmatch(name):
            continue
        try:
            values[name] = int(runtime.deviceGetAttribute(int(attribute), ordinal))
        except runtime.CUDARuntimeError:
            continue  # newer than the driver
    return values


def _stream_priorities() -> list[int]:
    """Of the current device; CuPy has no name for it."""
    # Imported here, as below.
    from cuda.bindings.runtime import cudaDeviceGetStreamPriorityRange

    code, least, greatest = cudaDeviceGetStreamPriorityRange()
    if code:
        raise DeviceError(int(code), "the range of stream priorities")
    return [int(least), int(greatest)]


def _uuid(ordinal: int) -> bytes:
    """From the driver: CuPy reads a UUID as C text, which ends at its first zero byte."""
    # Imported here: a machine without a GPU has no use for it, and no driver to load.
    from cuda.bindings import driver

    code, device = driver.cuDeviceGet(ordinal)  # CUDA is initialised: the ordinals are CuPy's
    if not code:
        code, uuid = driver.cuDeviceGetUuid(device)
    if code:
        raise DeviceError(int(code), f"the UUID of device {ordinal}")
    return bytes(uuid.bytes)
