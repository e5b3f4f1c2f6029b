# SPDX-License-Identifier: Apache-2.0
"""``cudaDeviceProp`` from attributes: almost every field of it is a ``cudaDeviceAttr`` as well.

One table for all devices, so that cudaGetDeviceProperties and cudaDeviceGetAttribute can't
disagree, and so that fields which CuPy's binding is too old for are there all the same.
"""

from __future__ import annotations

from collections.abc import Mapping

Value = int | bytes | list[int]

FIELDS: dict[str, str | tuple[str, ...]] = {
    "sharedMemPerBlock": "MaxSharedMemoryPerBlock",
    "regsPerBlock": "MaxRegistersPerBlock",
    "warpSize": "WarpSize",
    "memPitch": "MaxPitch",
    "maxThreadsPerBlock": "MaxThreadsPerBlock",
    "maxThreadsDim": ("MaxBlockDimX", "MaxBlockDimY", "MaxBlockDimZ"),
    "maxGridSize": ("MaxGridDimX", "MaxGridDimY", "MaxGridDimZ"),
    "totalConstMem": "TotalConstantMemory",
    "major": "ComputeCapabilityMajor",
    "minor": "ComputeCapabilityMinor",
    "textureAlignment": "TextureAlignment",
    "texturePitchAlignment": "TexturePitchAlignment",
    "multiProcessorCount": "MultiProcessorCount",
    "integrated": "Integrated",
    "canMapHostMemory": "CanMapHostMemory",
    "maxTexture1D": "MaxTexture1DWidth",
    "maxTexture1DMipmap": "MaxTexture1DMipmappedWidth",
    "maxTexture2D": ("MaxTexture2DWidth", "MaxTexture2DHeight"),
    "maxTexture2DMipmap": ("MaxTexture2DMipmappedWidth", "MaxTexture2DMipmappedHeight"),
    "maxTexture2DLinear": (
        "MaxTexture2DLinearWidth",
        "MaxTexture2DLinearHeight",
        "MaxTexture2DLinearPitch",
    ),
    "maxTexture2DGather": ("MaxTexture2DGatherWidth", "MaxTexture2DGatherHeight"),
    "maxTexture3D": ("MaxTexture3DWidth", "MaxTexture3DHeight", "MaxTexture3DDepth"),
    "maxTexture3DAlt": ("MaxTexture3DWidthAlt", "MaxTexture3DHeightAlt", "MaxTexture3DDepthAlt"),
    "maxTextureCubemap": "MaxTextureCubemapWidth",
    "maxTexture1DLayered": ("MaxTexture1DLayeredWidth", "MaxTexture1DLayeredLayers"),
    "maxTexture2DLayered": (
        "MaxTexture2DLayeredWidth",
        "MaxTexture2DLayeredHeight",
        "MaxTexture2DLayeredLayers",
    ),
    "maxTextureCubemapLayered": ("MaxTextureCubemapLayeredWidth", "MaxTextureCubemapLayeredLayers"),
    "maxSurface1D": "MaxSurface1DWidth",
    "maxSurface2D": ("MaxSurface2DWidth", "MaxSurface2DHeight"),
    "maxSurface3D": ("MaxSurface3DWidth", "MaxSurface3DHeight", "MaxSurface3DDepth"),
    "maxSurface1DLayered": ("MaxSurface1DLayeredWidth", "MaxSurface1DLayeredLayers"),
    "maxSurface2DLayered": (
        "MaxSurface2DLayeredWidth",
        "MaxSurface2DLayeredHeight",
        "MaxSurface2DLayeredLayers",
    ),
    "maxSurfaceCubemap": "MaxSurfaceCubemapWidth",
    "maxSurfaceCubemapLayered": ("MaxSurfaceCubemapLayeredWidth", "MaxSurfaceCubemapLayeredLayers"),
    "surfaceAlignment": "SurfaceAlignment",
    "concurrentKernels": "ConcurrentKernels",
    "ECCEnabled": "EccEnabled",
    "pciBusID": "PciBusId",
    "pciDeviceID": "PciDeviceId",
    "pciDomainID": "PciDomainId",
    "tccDriver": "TccDriver",
    "asyncEngineCount": "AsyncEngineCount",
    "unifiedAddressing": "UnifiedAddressing",
    "memoryBusWidth": "GlobalMemoryBusWidth",
    "l2CacheSize": "L2CacheSize",
    "persistingL2CacheMaxSize": "MaxPersistingL2CacheSize",
    "maxThreadsPerMultiProcessor": "MaxThreadsPerMultiProcessor",
    "streamPrioritiesSupported": "StreamPrioritiesSupported",
    "globalL1CacheSupported": "GlobalL1CacheSupported",
    "localL1CacheSupported": "LocalL1CacheSupported",
    "sharedMemPerMultiprocessor": "MaxSharedMemoryPerMultiprocessor",
    "regsPerMultiprocessor": "MaxRegistersPerMultiprocessor",
    "managedMemory": "ManagedMemory",
    "isMultiGpuBoard": "IsMultiGpuBoard",
    "multiGpuBoardGroupID": "MultiGpuBoardGroupID",
    "hostNativeAtomicSupported": "HostNativeAtomicSupported",
    "pageableMemoryAccess": "PageableMemoryAccess",
    "concurrentManagedAccess": "ConcurrentManagedAccess",
    "computePreemptionSupported": "ComputePreemptionSupported",
    "canUseHostPointerForRegisteredMem": "CanUseHostPointerForRegisteredMem",
    "cooperativeLaunch": "CooperativeLaunch",
    "sharedMemPerBlockOptin": "MaxSharedMemoryPerBlockOptin",
    "pageableMemoryAccessUsesHostPageTables": "PageableMemoryAccessUsesHostPageTables",
    "directManagedMemAccessFromHost": "DirectManagedMemAccessFromHost",
    "maxBlocksPerMultiProcessor": "MaxBlocksPerMultiprocessor",
    "accessPolicyMaxWindowSize": "MaxAccessPolicyWindowSize",
    "reservedSharedMemPerBlock": "ReservedSharedMemoryPerBlock",
    "hostRegisterSupported": "HostRegisterSupported",
    "sparseCudaArraySupported": "SparseCudaArraySupported",
    "hostRegisterReadOnlySupported": "HostRegisterReadOnlySupported",
    "timelineSemaphoreInteropSupported": "TimelineSemaphoreInteropSupported",
    "memoryPoolsSupported": "MemoryPoolsSupported",
    "gpuDirectRDMASupported": "GPUDirectRDMASupported",
    "gpuDirectRDMAFlushWritesOptions": "GPUDirectRDMAFlushWritesOptions",
    "gpuDirectRDMAWritesOrdering": "GPUDirectRDMAWritesOrdering",
    "memoryPoolSupportedHandleTypes": "MemoryPoolSupportedHandleTypes",
    "deferredMappingCudaArraySupported": "DeferredMappingCudaArraySupported",
    "ipcEventSupported": "IpcEventSupport",
    "clusterLaunch": "ClusterLaunch",
    "deviceNumaConfig": "NumaConfig",
    "deviceNumaId": "NumaId",
    "mpsEnabled": "MpsEnabled",
    "hostNumaId": "HostNumaId",
    "gpuPciDeviceID": "GpuPciDeviceId",
    "gpuPciSubsystemID": "GpuPciSubsystemId",
    "hostNumaMultinodeIpcSupported": "HostNumaMultinodeIpcSupported",
}
"""Fields of ``cudaDeviceProp`` (CUDA 13), and the attributes that hold them.

Not here, since no attribute tells them: name, uuid, totalGlobalMem, luid and luidDeviceNodeMask
(both 0 outside Windows), unifiedFunctionPointers."""


def describe(
    attributes: Mapping[str, int], *, name: str, memory: int, uuid: bytes
) -> dict[str, Value]:
    """What cudaGetDeviceProperties fills, by field; fields whose attributes are unknown are left
    out.

    Parameters
    ----------
    attributes : mapping of str to int
        As in `flyt.backend.devices.base.DeviceSnapshot`.
    name : str
    memory : int
        totalGlobalMem, bytes.
    uuid : bytes
        16 of them.
    """
    found: dict[str, Value] = {"name": name.encode(), "totalGlobalMem": memory, "uuid": uuid}
    for field, source in FIELDS.items():
        names = (source,) if isinstance(source, str) else source
        values = [attributes[n] for n in names if n in attributes]
        if len(values) == len(names):
            found[field] = values[0] if isinstance(source, str) else values
    return found
