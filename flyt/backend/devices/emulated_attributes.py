# SPDX-License-Identifier: Apache-2.0
"""What the emulated device claims, by the names of ``cudaDeviceAttr``.

It copies and runs no kernels; the figures that programs size their launches by are an H100's.
"""

from __future__ import annotations

ATTRIBUTES = {
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
    "PciBusId": 0,
    "PciDomainId": 0,
    "TccDriver": 0,
    "MaxThreadsPerMultiProcessor": 2048,
    "AsyncEngineCount": 2,
    "UnifiedAddressing": 1,
    "ComputeCapabilityMajor": 9,
    "ComputeCapabilityMinor": 0,
    "StreamPrioritiesSupported": 0,
    "ManagedMemory": 0,
    "IsMultiGpuBoard": 0,
    "PageableMemoryAccess": 0,
    "ConcurrentManagedAccess": 0,
    "CanUseHostPointerForRegisteredMem": 1,
    "CooperativeLaunch": 0,
    "HostRegisterSupported": 1,
    "MemoryPoolsSupported": 1,
    "IpcEventSupport": 0,
}
