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
from flyt.frontend.api.copies import (
    cudaMemcpy,
    cudaMemcpyAsync,
    cudaMemset,
    cudaMemsetAsync,
)
from flyt.frontend.api.devices import (
    cudaDeviceCanAccessPeer,
    cudaDeviceGetAttribute,
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
from flyt.frontend.api.streams import (
    cudaDeviceGetStreamPriorityRange,
    cudaStreamCreate,
    cudaStreamCreateWithFlags,
    cudaStreamCreateWithPriority,
    cudaStreamDestroy,
    cudaStreamGetFlags,
    cudaStreamGetPriority,
    cudaStreamQuery,
    cudaStreamSynchronize,
    cudaStreamWaitEvent,
)
from flyt.frontend.api.unsupported import (
    cudaMallocManaged,
)
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
    "cudaDeviceGetPCIBusId",
    "cudaDeviceGetStreamPriorityRange",
    "cudaDeviceReset",
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
    "cudaMalloc",
    "cudaMallocHost",
    "cudaMallocManaged",
    "cudaMemGetInfo",
    "cudaMemcpy",
    "cudaMemcpyAsync",
    "cudaMemset",
    "cudaMemsetAsync",
    "cudaPeekAtLastError",
    "cudaPointerGetAttributes",
    "cudaRuntimeGetVersion",
    "cudaSetDevice",
    "cudaStreamCreate",
    "cudaStreamCreateWithFlags",
    "cudaStreamCreateWithPriority",
    "cudaStreamDestroy",
    "cudaStreamGetFlags",
    "cudaStreamGetPriority",
    "cudaStreamQuery",
    "cudaStreamSynchronize",
    "cudaStreamWaitEvent",
    "inflight",
    "last_failure",
    "pinned_empty",
    "statistics",
    "to_device",
]


def cuda_type(name: str) -> Any:
    """CUDA's own enums, structs and constants, under their own names; never its functions.

    Raises
    ------
    AttributeError
    """
    found = getattr(_cudart, name, None) if name.startswith("cuda") else None
    if found is None:
        raise AttributeError(f"module 'flyt' has no attribute {name!r}")
    if isinstance(found, (type, int)):
        return found
    raise AttributeError(f"flyt does not offer {name} yet; see the table in its README")
