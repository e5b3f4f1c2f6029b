# SPDX-License-Identifier: Apache-2.0
"""getDeviceProperties of ``cupy.cuda.runtime``: a dict with CuPy's keys."""

from __future__ import annotations

from typing import Any

from cuda.bindings.runtime import cudaDeviceAttr

from flyt.frontend.api.devices import cudaDeviceGetAttribute, cudaGetDeviceProperties
from flyt.frontend.api.errors import cudaGetLastError
from flyt.frontend.cupy_errors import check_status

_KEYS = """
name totalGlobalMem sharedMemPerBlock regsPerBlock warpSize maxThreadsPerBlock maxThreadsDim
maxGridSize clockRate totalConstMem major minor textureAlignment texturePitchAlignment
multiProcessorCount kernelExecTimeoutEnabled integrated canMapHostMemory computeMode maxTexture1D
maxTexture2D maxTexture3D concurrentKernels ECCEnabled pciBusID pciDeviceID pciDomainID tccDriver
memoryClockRate memoryBusWidth l2CacheSize maxThreadsPerMultiProcessor isMultiGpuBoard
cooperativeLaunch cooperativeMultiDeviceLaunch deviceOverlap maxTexture1DMipmap maxTexture1DLinear
maxTexture1DLayered maxTexture2DMipmap maxTexture2DLinear maxTexture2DLayered maxTexture2DGather
maxTexture3DAlt maxTextureCubemap maxTextureCubemapLayered maxSurface1D maxSurface1DLayered
maxSurface2D maxSurface2DLayered maxSurface3D maxSurfaceCubemap maxSurfaceCubemapLayered
surfaceAlignment asyncEngineCount unifiedAddressing streamPrioritiesSupported
globalL1CacheSupported localL1CacheSupported sharedMemPerMultiprocessor regsPerMultiprocessor
managedMemory multiGpuBoardGroupID hostNativeAtomicSupported singleToDoublePrecisionPerfRatio
pageableMemoryAccess concurrentManagedAccess computePreemptionSupported
canUseHostPointerForRegisteredMem sharedMemPerBlockOptin pageableMemoryAccessUsesHostPageTables
directManagedMemAccessFromHost uuid luid luidDeviceNodeMask persistingL2CacheMaxSize
maxBlocksPerMultiProcessor accessPolicyMaxWindowSize reservedSharedMemPerBlock
"""

PROPERTIES = tuple(_KEYS.split())
"""The keys."""

_NO_FIELDS = {
    "clockRate": "ClockRate",
    "kernelExecTimeoutEnabled": "KernelExecTimeout",
    "computeMode": "ComputeMode",
    "memoryClockRate": "MemoryClockRate",
    "cooperativeMultiDeviceLaunch": "CooperativeMultiDeviceLaunch",
    "deviceOverlap": "GpuOverlap",
    "maxTexture1DLinear": "MaxTexture1DLinear",
    "singleToDoublePrecisionPerfRatio": "SingleToDoublePrecisionPerfRatio",
}
"""Those that CUDA 13's cudaDeviceProp has no longer, and the attributes that tell them."""


def getDeviceProperties(device: int) -> dict[str, Any]:
    """What is known of a device, by the names of cudaDeviceProp's fields."""
    error, found = cudaGetDeviceProperties(device)
    check_status(int(error))
    return {name: _property(found, name, device) for name in PROPERTIES}


def _property(found: Any, name: str, device: int) -> Any:
    if name == "uuid":
        return bytes(found.uuid.bytes)
    value = getattr(found, name, None)
    if value is None:
        attribute = getattr(cudaDeviceAttr, f"cudaDevAttr{_NO_FIELDS.get(name, name)}", None)
        error, value = cudaDeviceGetAttribute(attribute or -1, device)
        cudaGetLastError()
        return 0 if error else int(value)
    if isinstance(value, bytes):
        return value.partition(b"\0")[0] if name == "name" else value
    return tuple(map(int, value)) if isinstance(value, list) else int(value)
