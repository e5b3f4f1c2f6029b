# SPDX-License-Identifier: Apache-2.0
"""All that ``import flyt`` offers, and CUDA's own types beside it."""

from __future__ import annotations

from typing import Any

from cuda.bindings import runtime as _cudart

from flyt._version import __version__
from flyt.errors import (
    AddressTaken,
    CommandTimeout,
    ConfigurationError,
    DeviceError,
    FlytError,
    HandshakeError,
    ProtocolError,
    RegionError,
    RegionFull,
    SessionLost,
)
from flyt.frontend.api.callbacks import (
    cudaLaunchHostFunc,
    cudaStreamAddCallback,
)
from flyt.frontend.api.copies import (
    cudaMemcpy,
    cudaMemcpyAsync,
    cudaMemcpyBatchAsync,
    cudaMemcpyPeer,
    cudaMemcpyPeerAsync,
    cudaMemset,
    cudaMemsetAsync,
)
from flyt.frontend.api.devices import (
    cudaDeviceCanAccessPeer,
    cudaDeviceGetAttribute,
    cudaDeviceGetByPCIBusId,
    cudaDeviceGetPCIBusId,
    cudaDeviceReset,
    cudaDeviceSynchronize,
    cudaDriverGetVersion,
    cudaGetDevice,
    cudaGetDeviceCount,
    cudaGetDeviceProperties,
    cudaRuntimeGetVersion,
    cudaSetDevice,
)
from flyt.frontend.api.errors import (
    cudaGetErrorName,
    cudaGetErrorString,
    cudaGetLastError,
    cudaPeekAtLastError,
)
from flyt.frontend.api.events import (
    cudaEventCreate,
    cudaEventCreateWithFlags,
    cudaEventDestroy,
    cudaEventElapsedTime,
    cudaEventQuery,
    cudaEventRecord,
    cudaEventRecordWithFlags,
    cudaEventSynchronize,
)
from flyt.frontend.api.memory import (
    cudaFree,
    cudaFreeHost,
    cudaHostAlloc,
    cudaHostGetDevicePointer,
    cudaHostGetFlags,
    cudaHostRegister,
    cudaHostUnregister,
    cudaMalloc,
    cudaMallocHost,
    cudaMemGetInfo,
    cudaPointerGetAttributes,
)
from flyt.frontend.api.pools import (
    cudaDeviceGetDefaultMemPool,
    cudaDeviceGetMemPool,
    cudaDeviceSetMemPool,
    cudaFreeAsync,
    cudaMallocAsync,
    cudaMallocFromPoolAsync,
    cudaMemPoolCreate,
    cudaMemPoolDestroy,
    cudaMemPoolGetAttribute,
    cudaMemPoolSetAttribute,
    cudaMemPoolTrimTo,
)
from flyt.frontend.api.rows import (
    cudaMalloc3D,
    cudaMallocPitch,
    cudaMemcpy2D,
    cudaMemcpy2DAsync,
    cudaMemcpy3D,
    cudaMemcpy3DAsync,
    cudaMemcpy3DPeer,
    cudaMemcpy3DPeerAsync,
    cudaMemset2D,
    cudaMemset2DAsync,
    cudaMemset3D,
    cudaMemset3DAsync,
)
from flyt.frontend.api.sharing import (
    cudaIpcCloseMemHandle,
    cudaIpcGetEventHandle,
    cudaIpcGetMemHandle,
    cudaIpcOpenEventHandle,
    cudaIpcOpenMemHandle,
)
from flyt.frontend.api.streams import (
    cudaDeviceGetStreamPriorityRange,
    cudaStreamCreate,
    cudaStreamCreateWithFlags,
    cudaStreamCreateWithPriority,
    cudaStreamDestroy,
    cudaStreamGetFlags,
    cudaStreamGetPriority,
    cudaStreamIsCapturing,
    cudaStreamQuery,
    cudaStreamSynchronize,
    cudaStreamWaitEvent,
)
from flyt.frontend.api.unsupported import unsupported
from flyt.frontend.arrays import DeviceArray, to_device
from flyt.frontend.current import connect
from flyt.frontend.inflight import InflightCommand
from flyt.frontend.objects import Event, Stream
from flyt.frontend.pinned import pinned_empty
from flyt.frontend.raw import CompileException, RawKernel, RawModule
from flyt.frontend.session import Session
from flyt.frontend.state import inflight, last_failure, statistics
from flyt.frontend.statistics import FlytWarning

__all__ = [
    "AddressTaken",
    "CommandTimeout",
    "CompileException",
    "ConfigurationError",
    "DeviceArray",
    "DeviceError",
    "Event",
    "FlytError",
    "FlytWarning",
    "HandshakeError",
    "InflightCommand",
    "ProtocolError",
    "RawKernel",
    "RawModule",
    "RegionError",
    "RegionFull",
    "Session",
    "SessionLost",
    "Stream",
    "__version__",
    "connect",
    "cudaDeviceCanAccessPeer",
    "cudaDeviceGetAttribute",
    "cudaDeviceGetByPCIBusId",
    "cudaDeviceGetDefaultMemPool",
    "cudaDeviceGetMemPool",
    "cudaDeviceGetPCIBusId",
    "cudaDeviceGetStreamPriorityRange",
    "cudaDeviceReset",
    "cudaDeviceSetMemPool",
    "cudaDeviceSynchronize",
    "cudaDriverGetVersion",
    "cudaEventCreate",
    "cudaEventCreateWithFlags",
    "cudaEventDestroy",
    "cudaEventElapsedTime",
    "cudaEventQuery",
    "cudaEventRecord",
    "cudaEventRecordWithFlags",
    "cudaEventSynchronize",
    "cudaFree",
    "cudaFreeAsync",
    "cudaFreeHost",
    "cudaGetDevice",
    "cudaGetDeviceCount",
    "cudaGetDeviceProperties",
    "cudaGetErrorName",
    "cudaGetErrorString",
    "cudaGetLastError",
    "cudaHostAlloc",
    "cudaHostGetDevicePointer",
    "cudaHostGetFlags",
    "cudaHostRegister",
    "cudaHostUnregister",
    "cudaIpcCloseMemHandle",
    "cudaIpcGetEventHandle",
    "cudaIpcGetMemHandle",
    "cudaIpcOpenEventHandle",
    "cudaIpcOpenMemHandle",
    "cudaLaunchHostFunc",
    "cudaMalloc",
    "cudaMalloc3D",
    "cudaMallocAsync",
    "cudaMallocFromPoolAsync",
    "cudaMallocHost",
    "cudaMallocPitch",
    "cudaMemGetInfo",
    "cudaMemPoolCreate",
    "cudaMemPoolDestroy",
    "cudaMemPoolGetAttribute",
    "cudaMemPoolSetAttribute",
    "cudaMemPoolTrimTo",
    "cudaMemcpy",
    "cudaMemcpy2D",
    "cudaMemcpy2DAsync",
    "cudaMemcpy3D",
    "cudaMemcpy3DAsync",
    "cudaMemcpy3DPeer",
    "cudaMemcpy3DPeerAsync",
    "cudaMemcpyAsync",
    "cudaMemcpyBatchAsync",
    "cudaMemcpyPeer",
    "cudaMemcpyPeerAsync",
    "cudaMemset",
    "cudaMemset2D",
    "cudaMemset2DAsync",
    "cudaMemset3D",
    "cudaMemset3DAsync",
    "cudaMemsetAsync",
    "cudaPeekAtLastError",
    "cudaPointerGetAttributes",
    "cudaRuntimeGetVersion",
    "cudaSetDevice",
    "cudaStreamAddCallback",
    "cudaStreamCreate",
    "cudaStreamCreateWithFlags",
    "cudaStreamCreateWithPriority",
    "cudaStreamDestroy",
    "cudaStreamGetFlags",
    "cudaStreamGetPriority",
    "cudaStreamIsCapturing",
    "cudaStreamQuery",
    "cudaStreamSynchronize",
    "cudaStreamWaitEvent",
    "inflight",
    "last_failure",
    "pinned_empty",
    "statistics",
    "to_device",
]


PASSED_ON = frozenset({"make_cudaExtent", "make_cudaPitchedPtr", "make_cudaPos", "sizeof"})
"""Functions of ``cuda.bindings.runtime`` that need neither a driver nor a device."""


def cuda_name(name: str) -> Any:
    """CUDA's own enums, structs and constants, under their own names; its functions that Flyt does
    not offer, which say so.

    Raises
    ------
    AttributeError
    """
    refused = unsupported(name)
    if refused is not None:
        return refused
    found = getattr(_cudart, name, None)
    if name in PASSED_ON or (name.startswith("cuda") and isinstance(found, (type, int))):
        return found
    raise AttributeError(f"module 'flyt' has no attribute {name!r}")
