# SPDX-License-Identifier: Apache-2.0
"""Devices and versions: answered from what WELCOME told, they never cross.

Properties and attributes are the device's own; they don't say what Flyt offers of it
(``managedMemory`` may be 1, and still cudaMallocManaged is cudaErrorNotSupported).
"""

from __future__ import annotations

import ctypes
import operator
import re
from typing import Any

from cuda.bindings.runtime import cudaDeviceAttr, cudaDeviceProp

from flyt.errors import DeviceError
from flyt.frontend import current
from flyt.frontend.api.convention import INVALID_VALUE, Answer, cuda
from flyt.frontend.current import thread

NAME_BYTES = 256
"""``char name[256]`` of cudaDeviceProp."""

INVALID_DEVICE = 101

_BUS_ID = r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?"
"""domain:bus:device.function, of which the first and the last may be left out."""

_INT_BITS = 32


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
    ordinal = c_int(device)
    thread.device = current.current().check_device(ordinal)
    return ()


@cuda(0)
def cudaDeviceSynchronize() -> Answer:
    """Wait for all work of this process on the current device, not for other processes'."""
    express = current.express()
    if express is None or not express.synchronize_device(thread.device):
        current.current().synchronize(thread.device)
    return ()


@cuda(0)
def cudaDeviceReset() -> Answer:
    """End this process's session: its memory, pinned memory, streams and events are gone.

    Notes
    -----
    The next call makes a fresh session with the same settings, also those of `flyt.connect`. The
    error of earlier asynchronous work, or of a session that was lost, is returned here and over
    with that. The thread's last error and current device stay. Unlike CUDA's, it resets all
    devices, not the current one alone.
    """
    current.reset()
    return ()


@cuda(1)
def cudaGetDeviceProperties(device: int) -> Answer:
    """A ``cudaDeviceProp``; fields that the backend's device can't tell are 0."""
    properties = cudaDeviceProp()
    for field, value in _device(c_int(device))["properties"].items():
        if field == "name":
            properties.name = value[: NAME_BYTES - 1].ljust(NAME_BYTES, b"\0")
        elif field == "uuid":  # cuda-bindings lets nobody write it
            ctypes.memmove(properties.uuid.getPtr(), value, len(properties.uuid.bytes))
        elif hasattr(properties, field):  # the backend's CUDA may be newer
            setattr(properties, field, value)
    return (properties,)


@cuda(1)
def cudaDeviceGetAttribute(attr: Any, device: int) -> Answer:
    """An attribute; cudaErrorInvalidValue for one that the backend's driver does not know."""
    wanted, ordinal = int(attr), c_int(device)
    known = _device(ordinal)["attributes"]
    try:
        name = cudaDeviceAttr(wanted).name.removeprefix("cudaDevAttr")
        return (int(known[name]),)
    except (ValueError, KeyError):
        raise DeviceError(INVALID_VALUE, f"device {ordinal} has no attribute {attr!r}") from None


@cuda(1)
def cudaDeviceGetPCIBusId(length: int, device: int) -> Answer:
    """``domain:bus:device.function`` and a zero byte, then blanks up to ``length`` bytes.

    Notes
    -----
    cudaErrorInvalidValue when ``length`` is less than the 13 bytes of text and zero byte.
    """
    room, ordinal = c_int(length), c_int(device)
    text = _device(ordinal)["pci_bus_id"].encode() + b"\0"
    if room < len(text):
        raise DeviceError(INVALID_VALUE, f"a PCI bus id does not fit in {room} bytes")
    return (text.ljust(room),)


@cuda(1)
def cudaDeviceGetByPCIBusId(pciBusId: bytes) -> Answer:
    """The device with a PCI bus id (bytes, hexadecimal, with or without the domain).

    Notes
    -----
    cudaErrorInvalidDevice where there is none, cudaErrorInvalidValue for what is no bus id.
    """
    wanted = _bus_id(pciBusId.rstrip(b"\0").decode("ascii", "replace"))
    for ordinal, device in enumerate(current.current().devices):
        if _bus_id(device["pci_bus_id"]) == wanted:
            return (ordinal,)
    raise DeviceError(INVALID_DEVICE, f"no device has the PCI bus id {pciBusId!r}")


def _bus_id(text: str) -> list[int]:
    parts = re.fullmatch(_BUS_ID, text.lower())
    if parts is None:
        raise DeviceError(INVALID_VALUE, f"{text!r} is no PCI bus id")
    return [int(part or "0", 16) for part in parts.groups()]


@cuda(1)
def cudaDeviceCanAccessPeer(device: int, peerDevice: int) -> Answer:
    """Whether kernels of ``device`` can reach the memory of ``peerDevice``; 0 for itself."""
    ordinal, peer = c_int(device), c_int(peerDevice)
    current.current().check_device(peer)
    return (int(peer in _device(ordinal)["peers"]),)


@cuda(1)
def cudaRuntimeGetVersion() -> Answer:
    """The backend's CUDA runtime version."""
    return (int(current.current().welcome.snapshot["runtime_version"]),)


@cuda(1)
def cudaDriverGetVersion() -> Answer:
    """The backend's CUDA driver version."""
    return (int(current.current().welcome.snapshot["driver_version"]),)


def c_int(value: Any) -> int:
    """An argument that is a C ``int``; TypeError or OverflowError as ``cuda.bindings`` raises."""
    number = operator.index(value)
    if not -(1 << _INT_BITS - 1) <= number < 1 << _INT_BITS - 1:
        raise OverflowError("value too large to convert to int")
    return number


def _device(ordinal: int) -> dict[str, Any]:
    """What WELCOME told of a device; cudaErrorInvalidDevice if there is none."""
    session = current.current()
    return session.devices[session.check_device(ordinal)]
