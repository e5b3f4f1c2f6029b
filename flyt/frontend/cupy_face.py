# SPDX-License-Identifier: Apache-2.0
"""The face of ``cupy.cuda.runtime``: ints in, values out, errors raised; one table, no logic.

Each row names CuPy's function, its parameters, and the function of `flyt` that does the work.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from cuda.bindings.runtime import (
    cudaIpcEventHandle_t,
    cudaIpcMemHandle_t,
    cudaMemAllocationHandleType,
    cudaMemAllocationType,
    cudaMemcpy3DParms,
    cudaMemLocationType,
    cudaMemPoolProps,
)

from flyt.errors import DeviceError
from flyt.frontend import public as f
from flyt.frontend.api import sharing
from flyt.frontend.api.callbacks import launch
from flyt.frontend.api.convention import DONE, INVALID_VALUE, SUCCESS, Answer, cuda
from flyt.frontend.api.unsupported import unsupported
from flyt.frontend.cupy_constants import CONSTANTS
from flyt.frontend.cupy_errors import CUDARuntimeError, check_status
from flyt.frontend.cupy_properties import getDeviceProperties
from flyt.frontend.sharing import HANDLE_BYTES


class PointerAttributes:
    """What `pointerGetAttributes` tells; ``type`` is a cudaMemoryType."""

    def __init__(self, device: int, devicePointer: int, hostPointer: int, type: int = -1) -> None:  # noqa: A002
        self.device = device
        self.devicePointer = devicePointer
        self.hostPointer = hostPointer
        self.type = type


class MemPoolProps:
    """What `memPoolCreate` takes."""

    def __init__(self, allocType: int, handleType: int, locationType: int, devId: int) -> None:
        self.allocType = allocType
        self.handleType = handleType
        self.locationType = locationType
        self.devId = devId


# --- what becomes of an answer ---


def _plain(value: Any) -> Any:
    return value if type(value) in (int, float) else int(value)


def _values(answer: Answer) -> Any:
    if answer is DONE:
        return None
    if answer[0] is not SUCCESS:
        check_status(int(answer[0]))
    count = len(answer)
    if count == 1:
        return None
    return _plain(answer[1]) if count == 2 else tuple(map(_plain, answer[1:]))


def _status(answer: Answer) -> int:
    return int(answer[0])


def _flag(answer: Answer) -> bool:
    return bool(_values(answer))


def _text(answer: Answer) -> str:
    check_status(int(answer[0]))
    return str(answer[1].partition(b"\0")[0].decode("ascii"))


def _handle(answer: Answer) -> bytes:
    check_status(int(answer[0]))
    return sharing.content(answer[1])


def _attributes(answer: Answer) -> PointerAttributes:
    check_status(int(answer[0]))
    found = answer[1]
    places = (int(found.devicePointer), int(found.hostPointer))
    return PointerAttributes(int(found.device), *places, int(found.type))


# --- functions whose arguments are of other kinds ---

BUS_ID_BYTES = 13
"""domain:bus:device.function and a zero byte."""


def _opened(kind: Any, content: Any) -> Any:
    if not isinstance(content, bytes) or len(content) != HANDLE_BYTES:
        raise ValueError(f"a handle is {HANDLE_BYTES} bytes")
    return sharing.struct(kind, content)


def _pool_properties(props: Any) -> Any:
    made = cudaMemPoolProps()
    made.allocType = cudaMemAllocationType(props.allocType)
    made.handleTypes = cudaMemAllocationHandleType(props.handleType)
    location = made.location
    location.type, location.id = cudaMemLocationType(props.locationType), props.devId
    made.location = location
    return made


@cuda(0)
def _add_callback(stream: int, callback: Any, arg: int, flags: int) -> Answer:
    if flags:
        raise DeviceError(INVALID_VALUE, "streamAddCallback takes flags 0")
    launch(stream, lambda status: callback(stream, status, arg))
    return ()


@cuda(0)
def _launch_host_function(stream: int, callback: Any, arg: int) -> Answer:
    launch(stream, lambda status: None if status else callback(arg))
    return ()


# --- the table ---


class Row(NamedTuple):
    """One function. Its parameters are ints but for those with a star; ``function`` is None where
    Flyt refuses CUDA's function of this name; ``answer`` makes the result."""

    parameters: str
    function: Callable[..., Answer] | None = None
    answer: Callable[[Answer], Any] = _values


TABLE = {
    "driverGetVersion": Row("", f.cudaDriverGetVersion),
    "runtimeGetVersion": Row("", f.cudaRuntimeGetVersion),
    "getDevice": Row("", f.cudaGetDevice),
    "getDeviceCount": Row("", f.cudaGetDeviceCount),
    "setDevice": Row("device", f.cudaSetDevice),
    "deviceSynchronize": Row("", f.cudaDeviceSynchronize),
    "deviceGetAttribute": Row("attrib device", f.cudaDeviceGetAttribute),
    "deviceGetByPCIBusId": Row(
        "*pci_bus_id", lambda text: f.cudaDeviceGetByPCIBusId(text.encode("ascii"))
    ),
    "deviceGetPCIBusId": Row(
        "device", lambda device: f.cudaDeviceGetPCIBusId(BUS_ID_BYTES, device), _text
    ),
    "deviceCanAccessPeer": Row("device peerDevice", f.cudaDeviceCanAccessPeer),
    "deviceEnablePeerAccess": Row("peerDevice"),
    "deviceDisablePeerAccess": Row("peerDevice"),
    "deviceGetLimit": Row("limit"),
    "deviceSetLimit": Row("limit value"),
    "ipcCloseMemHandle": Row("devPtr", f.cudaIpcCloseMemHandle),
    "ipcGetEventHandle": Row("event", f.cudaIpcGetEventHandle, _handle),
    "ipcGetMemHandle": Row("devPtr", f.cudaIpcGetMemHandle, _handle),
    "ipcOpenEventHandle": Row(
        "*handle", lambda h: f.cudaIpcOpenEventHandle(_opened(cudaIpcEventHandle_t, h))
    ),
    "ipcOpenMemHandle": Row(
        "*handle flags=1",
        lambda h, flags: f.cudaIpcOpenMemHandle(_opened(cudaIpcMemHandle_t, h), flags),
    ),
    "malloc": Row("size", f.cudaMalloc),
    "mallocManaged": Row("size flags=1"),
    "malloc3DArray": Row("descPtr width height depth flags=0"),
    "mallocArray": Row("descPtr width height flags=0"),
    "mallocAsync": Row("size stream", f.cudaMallocAsync),
    "mallocFromPoolAsync": Row("size pool stream", f.cudaMallocFromPoolAsync),
    "hostAlloc": Row("size flags", f.cudaHostAlloc),
    "hostRegister": Row("ptr size flags", f.cudaHostRegister),
    "hostUnregister": Row("ptr", f.cudaHostUnregister),
    "free": Row("ptr", f.cudaFree),
    "freeHost": Row("ptr", f.cudaFreeHost),
    "freeArray": Row("ptr"),
    "freeAsync": Row("ptr stream", f.cudaFreeAsync),
    "memGetInfo": Row("", f.cudaMemGetInfo),
    "memcpy": Row("dst src size kind", f.cudaMemcpy),
    "memcpyAsync": Row("dst src size kind stream", f.cudaMemcpyAsync),
    "memcpyPeer": Row("dst dstDevice src srcDevice size", f.cudaMemcpyPeer),
    "memcpyPeerAsync": Row("dst dstDevice src srcDevice size stream", f.cudaMemcpyPeerAsync),
    "memcpy2D": Row("dst dpitch src spitch width height kind", f.cudaMemcpy2D),
    "memcpy2DAsync": Row("dst dpitch src spitch width height kind stream", f.cudaMemcpy2DAsync),
    "memcpy2DFromArray": Row("dst dpitch src wOffset hOffset width height kind"),
    "memcpy2DFromArrayAsync": Row("dst dpitch src wOffset hOffset width height kind stream"),
    "memcpy2DToArray": Row("dst wOffset hOffset src spitch width height kind"),
    "memcpy2DToArrayAsync": Row("dst wOffset hOffset src spitch width height kind stream"),
    "memcpy3D": Row("Memcpy3DParmsPtr", lambda at: f.cudaMemcpy3D(cudaMemcpy3DParms(at))),
    "memcpy3DAsync": Row(
        "Memcpy3DParmsPtr stream",
        lambda at, stream: f.cudaMemcpy3DAsync(cudaMemcpy3DParms(at), stream),
    ),
    "memset": Row("ptr value size", f.cudaMemset),
    "memsetAsync": Row("ptr value size stream", f.cudaMemsetAsync),
    "memPrefetchAsync": Row("devPtr count dstDevice stream"),
    "memAdvise": Row("devPtr count advice device"),
    "pointerGetAttributes": Row("ptr", f.cudaPointerGetAttributes, _attributes),
    "pointerGetMemoryType": Row("ptr", f.cudaPointerGetAttributes, lambda a: _attributes(a).type),
    "deviceGetDefaultMemPool": Row("device", f.cudaDeviceGetDefaultMemPool),
    "deviceGetMemPool": Row("device", f.cudaDeviceGetMemPool),
    "deviceSetMemPool": Row("device pool", f.cudaDeviceSetMemPool),
    "memPoolCreate": Row("*props", lambda p: f.cudaMemPoolCreate(_pool_properties(p))),
    "memPoolDestroy": Row("pool", f.cudaMemPoolDestroy),
    "memPoolTrimTo": Row("pool size", f.cudaMemPoolTrimTo),
    "memPoolGetAttribute": Row("pool attr", f.cudaMemPoolGetAttribute),
    "memPoolSetAttribute": Row("pool attr value", f.cudaMemPoolSetAttribute),
    "streamCreate": Row("", f.cudaStreamCreate),
    "streamCreateWithFlags": Row("flags", f.cudaStreamCreateWithFlags),
    "streamCreateWithPriority": Row("flags priority", f.cudaStreamCreateWithPriority),
    "streamGetFlags": Row("stream", f.cudaStreamGetFlags),
    "streamGetPriority": Row("stream", f.cudaStreamGetPriority),
    "streamDestroy": Row("stream", f.cudaStreamDestroy),
    "streamSynchronize": Row("stream", f.cudaStreamSynchronize),
    "streamAddCallback": Row("stream *callback arg flags=0", _add_callback),
    "launchHostFunc": Row("stream *callback arg", _launch_host_function),
    "streamQuery": Row("stream", f.cudaStreamQuery, _status),
    "streamWaitEvent": Row("stream event flags=0", f.cudaStreamWaitEvent),
    "streamBeginCapture": Row("stream mode=2"),
    "streamEndCapture": Row("stream"),
    "streamIsCapturing": Row("stream", f.cudaStreamIsCapturing, _flag),
    "eventCreate": Row("", f.cudaEventCreate),
    "eventCreateWithFlags": Row("flags", f.cudaEventCreateWithFlags),
    "eventDestroy": Row("event", f.cudaEventDestroy),
    "eventElapsedTime": Row("start end", f.cudaEventElapsedTime),
    "eventQuery": Row("event", f.cudaEventQuery, _status),
    "eventRecord": Row("event stream", f.cudaEventRecord),
    "eventSynchronize": Row("event", f.cudaEventSynchronize),
    "createTextureObject": Row("ResDescPtr TexDescPtr"),
    "destroyTextureObject": Row("texObject"),
    "createSurfaceObject": Row("ResDescPtr"),
    "destroySurfaceObject": Row("surfObject"),
    "graphDestroy": Row("graph"),
    "graphExecDestroy": Row("graphExec"),
    "graphInstantiate": Row("graph"),
    "graphLaunch": Row("graphExec stream"),
    "graphUpload": Row("graphExec stream"),
    "graphDebugDotPrint": Row("graph *path flags"),
    "profilerStart": Row(""),
    "profilerStop": Row(""),
}
"""CuPy's functions, but for those that are written out above."""


def _made(name: str, row: Row) -> Callable[..., Any]:
    """The function of one row. Python itself binds its arguments, as in a function that is written
    out: a wrapper of ``*args`` costs three times as much, a fifth of a whole call."""
    native = f"cuda{name[0].upper()}{name[1:]}"
    function = row.function or unsupported(native)
    if function is None:
        raise AttributeError(f"cuda.bindings.runtime has no {native} that could be refused")
    parameters = row.parameters.split()
    given = [p[1:] if p.startswith("*") else f"index({p.partition('=')[0]})" for p in parameters]
    signature = ", ".join(p.lstrip("*") for p in parameters)
    names = {"answer": row.answer, "work": function, "index": operator.index}
    call = eval(f"lambda {signature}: answer(work({', '.join(given)}))", names)
    call.__name__ = call.__qualname__ = name
    call.__module__ = __name__
    call.__doc__ = f"See `flyt.{native}`."
    made: Callable[..., Any] = call
    return made


NAMES: dict[str, Any] = {
    **CONSTANTS,
    **{name: _made(name, row) for name, row in TABLE.items()},
    **{
        one.__name__: one
        for one in (
            CUDARuntimeError, MemPoolProps, PointerAttributes, check_status, getDeviceProperties,
        )
    },
    "is_hip": False,
}  # fmt: skip
"""All that ``flyt.runtime`` offers."""
