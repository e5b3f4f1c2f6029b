# SPDX-License-Identifier: Apache-2.0
"""What an emulated device claims to be, by the names of ``cudaDeviceAttr``.

It copies and runs no kernels; the figures that programs size their work by are an H100's, and what
it can't do it does not claim.
"""

from __future__ import annotations

import uuid

from flyt.backend.devices.base import DeviceSnapshot
from flyt.backend.devices.properties import describe

_ATTRIBUTES = {
    "MaxThreadsPerBlock": 1024,
    "MaxBlockDimX": 1024,
    "MaxBlockDimY": 1024,
    "MaxBlockDimZ": 64,
    "MaxGridDimX": 2**31 - 1,
    "MaxGridDimY": 65535,
    "MaxGridDimZ": 65535,
    "MaxSharedMemoryPerBlock": 49152,
    "TotalConstantMemory": 65536,
    "WarpSize": 32,
    "MaxPitch": 2**31 - 1,
    "MaxRegistersPerBlock": 65536,
    "ClockRate": 1_000_000,
    "TextureAlignment": 512,
    "GpuOverlap": 1,
    "MultiProcessorCount": 1,
    "KernelExecTimeout": 0,
    "Integrated": 0,
    "CanMapHostMemory": 1,
    "ComputeMode": 0,
    "ConcurrentKernels": 0,
    "EccEnabled": 0,
    "TccDriver": 0,
    "MaxThreadsPerMultiProcessor": 2048,
    "AsyncEngineCount": 2,
    "UnifiedAddressing": 1,
    "ComputeCapabilityMajor": 9,
    "ComputeCapabilityMinor": 0,
    "StreamPrioritiesSupported": 1,
    "ManagedMemory": 0,
    "IsMultiGpuBoard": 0,
    "PageableMemoryAccess": 0,
    "ConcurrentManagedAccess": 0,
    "CanUseHostPointerForRegisteredMem": 1,
    "CooperativeLaunch": 0,
    "HostRegisterSupported": 1,
    "MemoryPoolsSupported": 1,
    "IpcEventSupport": 0,
    "MaxTexture1DWidth": 131072,
    "MaxTexture1DMipmappedWidth": 32768,
    "MaxTexture1DLayeredWidth": 32768,
    "MaxTexture1DLayeredLayers": 2048,
    "MaxTexture2DWidth": 131072,
    "MaxTexture2DHeight": 65536,
    "MaxTexture2DMipmappedWidth": 32768,
    "MaxTexture2DMipmappedHeight": 32768,
    "MaxTexture2DLinearWidth": 131072,
    "MaxTexture2DLinearHeight": 65000,
    "MaxTexture2DLinearPitch": 2097120,
    "MaxTexture2DGatherWidth": 32768,
    "MaxTexture2DGatherHeight": 32768,
    "MaxTexture2DLayeredWidth": 32768,
    "MaxTexture2DLayeredHeight": 32768,
    "MaxTexture2DLayeredLayers": 2048,
    "MaxTexture3DWidth": 16384,
    "MaxTexture3DHeight": 16384,
    "MaxTexture3DDepth": 16384,
    "MaxTexture3DWidthAlt": 8192,
    "MaxTexture3DHeightAlt": 8192,
    "MaxTexture3DDepthAlt": 32768,
    "MaxTextureCubemapWidth": 32768,
    "MaxTextureCubemapLayeredWidth": 32768,
    "MaxTextureCubemapLayeredLayers": 2046,
    "MaxSurface1DWidth": 32768,
    "MaxSurface1DLayeredWidth": 32768,
    "MaxSurface1DLayeredLayers": 2048,
    "MaxSurface2DWidth": 131072,
    "MaxSurface2DHeight": 65536,
    "MaxSurface2DLayeredWidth": 32768,
    "MaxSurface2DLayeredHeight": 32768,
    "MaxSurface2DLayeredLayers": 2048,
    "MaxSurface3DWidth": 16384,
    "MaxSurface3DHeight": 16384,
    "MaxSurface3DDepth": 16384,
    "MaxSurfaceCubemapWidth": 32768,
    "MaxSurfaceCubemapLayeredWidth": 32768,
    "MaxSurfaceCubemapLayeredLayers": 2046,
    "TexturePitchAlignment": 32,
    "SurfaceAlignment": 512,
    "MemoryClockRate": 1_000_000,
    "GlobalMemoryBusWidth": 5120,
    "L2CacheSize": 50 << 20,
    "MaxPersistingL2CacheSize": 0,
    "MaxAccessPolicyWindowSize": 0,
    "GlobalL1CacheSupported": 1,
    "LocalL1CacheSupported": 1,
    "MaxSharedMemoryPerMultiprocessor": 233472,
    "MaxSharedMemoryPerBlockOptin": 232448,
    "ReservedSharedMemoryPerBlock": 1024,
    "MaxRegistersPerMultiprocessor": 65536,
    "MaxBlocksPerMultiprocessor": 32,
    "SingleToDoublePrecisionPerfRatio": 2,
    "HostNativeAtomicSupported": 0,
    "ComputePreemptionSupported": 0,
    "CanFlushRemoteWrites": 0,
    "PageableMemoryAccessUsesHostPageTables": 0,
    "DirectManagedMemAccessFromHost": 0,
    "HostRegisterReadOnlySupported": 1,
    "SparseCudaArraySupported": 0,
    "TimelineSemaphoreInteropSupported": 0,
    "GPUDirectRDMASupported": 0,
    "GPUDirectRDMAFlushWritesOptions": 0,
    "GPUDirectRDMAWritesOrdering": 0,
    "MemoryPoolSupportedHandleTypes": 0,
    "DeferredMappingCudaArraySupported": 0,
    "ClusterLaunch": 0,
    "NumaConfig": 0,
    "NumaId": -1,
    "HostNumaId": 0,
    "HostNumaMultinodeIpcSupported": 0,
    "MpsEnabled": 0,
    "GpuPciDeviceId": 0,
    "GpuPciSubsystemId": 0,
}

_UUIDS = uuid.UUID("5d0f1b3e-8f0e-4f0c-9a55-0f1fe5d2c001")
"""Of no meaning but to be ours: what emulated devices' UUIDs are derived from."""


def attributes(ordinal: int) -> dict[str, int]:
    """All attributes of one device: a PCI bus has a place for each."""
    return {
        **_ATTRIBUTES,
        "PciDomainId": 0,
        "PciBusId": ordinal + 1,
        "PciDeviceId": 0,
        "MultiGpuBoardGroupID": ordinal,
    }


def pci_bus_id(ordinal: int) -> str:
    """domain:bus:device.function, as `attributes` has them."""
    found = attributes(ordinal)
    return f"{found['PciDomainId']:04X}:{found['PciBusId']:02X}:{found['PciDeviceId']:02X}.0"


def identity(ordinal: int) -> bytes:
    """The UUID of a device: the same in each process, as a GPU's is."""
    return uuid.uuid5(_UUIDS, str(ordinal)).bytes


def snapshot(name: str, ordinal: int, memory: int, count: int) -> DeviceSnapshot:
    """What one of ``count`` devices with ``memory`` bytes tells of itself."""
    found = attributes(ordinal)
    return DeviceSnapshot(
        name=name,
        total_memory=memory,
        kind="emulated",
        attributes=found,
        properties=describe(found, name=name, memory=memory, uuid=identity(ordinal)),
        pci_bus_id=pci_bus_id(ordinal),
        # They lie in one address space: each reads the others' memory.
        peers=[n for n in range(count) if n != ordinal],
        stream_priorities=[0, -5],  # read off an H100
    )
