# SPDX-License-Identifier: Apache-2.0
"""The constants of ``cupy.cuda.runtime``: plain ints, by CuPy's names, with CUDA's values."""

from __future__ import annotations

from cuda.bindings.runtime import cudaDeviceAttr

SHORT = {
    "memcpyHostToHost": 0,
    "memcpyHostToDevice": 1,
    "memcpyDeviceToHost": 2,
    "memcpyDeviceToDevice": 3,
    "memcpyDefault": 4,
    "hostAllocDefault": 0,
    "hostAllocPortable": 1,
    "hostAllocMapped": 2,
    "hostAllocWriteCombined": 4,
    "streamDefault": 0,
    "streamNonBlocking": 1,
    "streamLegacy": 1,
    "streamPerThread": 2,
    "eventDefault": 0,
    "eventBlockingSync": 1,
    "eventDisableTiming": 2,
    "eventInterprocess": 4,
    "streamCaptureModeGlobal": 0,
    "streamCaptureModeThreadLocal": 1,
    "streamCaptureModeRelaxed": 2,
    "streamCaptureStatusNone": 0,
    "streamCaptureStatusActive": 1,
    "streamCaptureStatusInvalidated": 2,
    "memoryTypeUnregistered": 0,
    "memoryTypeHost": 1,
    "memoryTypeDevice": 2,
    "memoryTypeManaged": 3,
}
"""Without the prefix ``cuda``."""

LONG = {
    "cudaMemoryTypeHost": 1,
    "cudaMemoryTypeDevice": 2,
    "cudaIpcMemLazyEnablePeerAccess": 1,
    "cudaMemAttachGlobal": 1,
    "cudaMemAttachHost": 2,
    "cudaMemAttachSingle": 4,
    "cudaCpuDeviceId": -1,
    "cudaInvalidDeviceId": -2,
    "cudaMemAdviseSetReadMostly": 1,
    "cudaMemAdviseUnsetReadMostly": 2,
    "cudaMemAdviseSetPreferredLocation": 3,
    "cudaMemAdviseUnsetPreferredLocation": 4,
    "cudaMemAdviseSetAccessedBy": 5,
    "cudaMemAdviseUnsetAccessedBy": 6,
    "CUDA_R_32F": 0,
    "CUDA_R_64F": 1,
    "CUDA_R_16F": 2,
    "CUDA_R_8I": 3,
    "CUDA_C_32F": 4,
    "CUDA_C_64F": 5,
    "CUDA_C_16F": 6,
    "CUDA_C_8I": 7,
    "CUDA_R_8U": 8,
    "CUDA_C_8U": 9,
    "CUDA_R_16BF": 14,
    "cudaLimitStackSize": 0,
    "cudaLimitPrintfFifoSize": 1,
    "cudaLimitMallocHeapSize": 2,
    "cudaLimitDevRuntimeSyncDepth": 3,
    "cudaLimitDevRuntimePendingLaunchCount": 4,
    "cudaLimitMaxL2FetchGranularity": 5,
    "cudaMemPoolReuseFollowEventDependencies": 1,
    "cudaMemPoolReuseAllowOpportunistic": 2,
    "cudaMemPoolReuseAllowInternalDependencies": 3,
    "cudaMemPoolAttrReleaseThreshold": 4,
    "cudaMemPoolAttrReservedMemCurrent": 5,
    "cudaMemPoolAttrReservedMemHigh": 6,
    "cudaMemPoolAttrUsedMemCurrent": 7,
    "cudaMemPoolAttrUsedMemHigh": 8,
    "cudaMemAllocationTypePinned": 1,
    "cudaMemHandleTypeNone": 0,
    "cudaMemHandleTypePosixFileDescriptor": 1,
    "cudaMemLocationTypeInvalid": 0,
    "cudaMemLocationTypeDevice": 1,
    "cudaMemLocationTypeHost": 2,
    "cudaMemLocationTypeHostNuma": 3,
    "cudaMemLocationTypeHostNumaCurrent": 4,
}
"""With it."""

_KNOWN = frozenset({*range(1, 102), 106, *range(111, 120)} - {75, 76})
_RENAMED = {
    96: "cudaDevAttrCooperativeMultiDeviceLaunch",
    114: "cudaDevAttrMaxTimelineSemaphoreInteropSupported",
}
"""CUDA 13 has other names for them."""

ATTRIBUTES = {
    _RENAMED.get(int(attribute), attribute.name): int(attribute)
    for attribute in cudaDeviceAttr
    if int(attribute) in _KNOWN
}
"""cudaDevAttr*, those that CuPy has."""

CONSTANTS = {**SHORT, **LONG, **ATTRIBUTES}
