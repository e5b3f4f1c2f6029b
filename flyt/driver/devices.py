# SPDX-License-Identifier: Apache-2.0
"""Devices, versions and names of errors: answered from what the backend told at the beginning."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import runtime as cudart
from cuda.bindings.driver import CUdevice, CUdevice_attribute, CUresult, CUuuid

from flyt.driver.contexts import INVALID_DEVICE, ordinal_of
from flyt.driver.convention import INVALID_VALUE, SUCCESS, Answer, core, driver, initialized
from flyt.errors import DeviceError
from flyt.frontend.api import devices
from flyt.frontend.api.devices import c_int


@driver
def cuDriverGetVersion() -> Answer:
    """The backend's driver version."""
    return core(devices.cudaDriverGetVersion)()


@driver
def cuDeviceGetCount() -> Answer:
    """How many devices the backend offers."""
    return (len(initialized().devices),)


@driver
def cuDeviceGet(ordinal: int) -> Answer:
    """A device by its number."""
    return (CUdevice(ordinal_of(c_int(ordinal))),)


@driver
def cuDeviceGetName(length: int, dev: Any) -> Answer:
    """The device's name and a zero byte, then blanks up to ``length`` bytes."""
    room, device = c_int(length), ordinal_of(dev)
    text = str(initialized().devices[device]["name"]).encode() + b"\0"
    if room < 1:
        raise DeviceError(INVALID_VALUE, "a name wants at least one byte")
    return ((text if len(text) <= room else text[: room - 1] + b"\0").ljust(room),)


@driver
def cuDeviceTotalMem(dev: Any) -> Answer:
    """Bytes of the device's memory."""
    return (int(initialized().devices[ordinal_of(dev)]["total_memory"]),)


@driver
def cuDeviceGetUuid(dev: Any) -> Answer:
    """The GPU's own identity."""
    uuid = CUuuid()
    known = initialized().devices[ordinal_of(dev)]["properties"].get("uuid", bytes(16))
    ctypes.memmove(uuid.getPtr(), known, len(uuid.bytes))  # cuda-bindings lets nobody write it
    return (uuid,)


@driver
def cuDeviceGetAttribute(attrib: Any, dev: Any) -> Answer:
    """An attribute of the device's; 0 for what only the driver API names and Flyt has not."""
    ordinal, wanted = ordinal_of(dev), int(attrib)
    try:
        return core(devices.cudaDeviceGetAttribute)(wanted, ordinal)
    except DeviceError:
        try:
            known = CUdevice_attribute(wanted)
        except ValueError:
            known = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX
        if known == CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX:
            raise
        return (0,)


@driver
def cuDeviceComputeCapability(dev: Any) -> Answer:
    """Major and minor."""
    known = initialized().devices[ordinal_of(dev)]["attributes"]
    return known["ComputeCapabilityMajor"], known["ComputeCapabilityMinor"]


@driver
def cuDeviceGetPCIBusId(length: int, dev: Any) -> Answer:
    """See flyt.cudaDeviceGetPCIBusId."""
    return core(devices.cudaDeviceGetPCIBusId)(length, ordinal_of(dev))


@driver
def cuDeviceGetByPCIBusId(pciBusId: bytes) -> Answer:
    """The device with this PCI bus id."""
    wanted = pciBusId.rstrip(b"\0 ").decode().lower()
    for ordinal, device in enumerate(initialized().devices):
        if device["pci_bus_id"].lower() == wanted:
            return (CUdevice(ordinal),)
    raise DeviceError(INVALID_DEVICE, f"no device has the PCI bus id {wanted}")


@driver
def cuDeviceCanAccessPeer(dev: Any, peerDev: Any) -> Answer:
    """Whether kernels of one device reach the other's memory."""
    return core(devices.cudaDeviceCanAccessPeer)(ordinal_of(dev), ordinal_of(peerDev))


def cuGetErrorName(error: Any) -> Answer:
    """The name of a result, as bytes."""
    try:
        return (SUCCESS, CUresult(int(error)).name.encode())
    except ValueError:
        return (CUresult.CUDA_ERROR_INVALID_VALUE, None)


def cuGetErrorString(error: Any) -> Answer:
    """What a result means, as bytes: the runtime's words for the same code."""
    try:
        return (
            SUCCESS,
            cudart.cudaGetErrorString(cudart.cudaError_t(int(CUresult(int(error)))))[1],
        )
    except ValueError:
        return (CUresult.CUDA_ERROR_INVALID_VALUE, None)


@driver
def cuProfilerStart() -> Answer:
    """Nothing: no profiler looks at this process's GPU, and CUDA without one does nothing too."""
    return ()


@driver
def cuProfilerStop() -> Answer:
    """As `cuProfilerStart`."""
    return ()
