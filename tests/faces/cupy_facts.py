# SPDX-License-Identifier: Apache-2.0
"""What is true of ``cupy.cuda.runtime``, and of whatever stands in for it.

A program: ``cupy_facts.py MODULE`` prints, for each fact, "" or what was seen instead. It runs in a
process of its own, since CUDA and Flyt can't share one.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import json
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

FACTS: dict[str, Callable[[Any], None]] = {}
N = 65_536
LIMIT = 30.0


def fact(function: Callable[[Any], None]) -> Callable[[Any], None]:
    FACTS[function.__name__] = function
    return function


def fails(rt: Any, status: int, function: Any, *arguments: Any) -> None:
    with pytest.raises(rt.CUDARuntimeError) as caught:
        function(*arguments)
    assert caught.value.status == status, f"status {caught.value.status}, not {status}"


def to_host(rt: Any, address: int, size: int) -> np.ndarray[Any, Any]:
    back = np.zeros(size, np.uint8)
    rt.memcpy(back.ctypes.data, address, size, rt.memcpyDeviceToHost)
    return back


@fact
def values_come_out_as_ints(rt: Any) -> None:
    address = rt.malloc(N)
    stream, event = rt.streamCreateWithFlags(rt.streamNonBlocking), rt.eventCreate()
    for value in (address, stream, event, rt.getDeviceCount(), rt.getDevice()):
        assert type(value) is int
    assert address > 0
    assert rt.free(address) is None
    assert rt.streamDestroy(stream) is None
    assert rt.eventDestroy(event) is None
    free, total = rt.memGetInfo()
    assert 0 < free <= total


@fact
def errors_are_raised_with_their_status(rt: Any) -> None:
    fails(rt, 1, rt.free, 0xDEAD_BEEF_0000)
    fails(rt, 2, rt.malloc, 1 << 60)
    fails(rt, 101, rt.setDevice, 1000)
    fails(rt, 101, rt.deviceGetAttribute, rt.cudaDevAttrWarpSize, 1000)
    fails(rt, 400, rt.eventElapsedTime, rt.eventCreate(), rt.eventCreate())
    with pytest.raises(RuntimeError, match=r"^cudaErrorInvalidValue: invalid argument$"):
        rt.free(0xDEAD_BEEF_0000)


@fact
def errors_pickle(rt: Any) -> None:
    for status in (1, 2, 700):
        again = pickle.loads(pickle.dumps(rt.CUDARuntimeError(status)))
        assert type(again) is rt.CUDARuntimeError
        assert again.status == status
        assert str(again) == str(rt.CUDARuntimeError(status))


@fact
def check_status_raises_what_is_not_success(rt: Any) -> None:
    assert rt.check_status(0) is None
    fails(rt, 35, rt.check_status, 35)


@fact
def a_failure_leaves_no_last_error(rt: Any) -> None:
    fails(rt, 2, rt.malloc, 1 << 60)
    event = rt.eventCreate()
    rt.eventRecord(event, 0)
    rt.eventSynchronize(event)
    assert rt.eventQuery(event) == 0
    rt.deviceSynchronize()


@fact
def copies_and_fills(rt: Any) -> None:
    data = np.random.default_rng(1).integers(0, 256, N, dtype=np.uint8)
    first, second, stream = rt.malloc(N), rt.malloc(N), rt.streamCreate()
    assert rt.memcpy(first, data.ctypes.data, N, rt.memcpyHostToDevice) is None
    assert rt.memcpyAsync(second, first, N, rt.memcpyDeviceToDevice, stream) is None
    rt.streamSynchronize(stream)
    assert np.array_equal(to_host(rt, second, N), data)
    rt.memset(second, 7, 16)
    rt.memsetAsync(second + 16, 8, 16, stream)
    rt.streamSynchronize(stream)
    seen = to_host(rt, second, 33)
    assert seen.tolist() == [7] * 16 + [8] * 16 + [int(data[32])]
    device = rt.getDevice()
    rt.memcpyPeer(second, device, first, device, N)
    rt.memcpyPeerAsync(second, device, first, device, N, stream)
    rt.streamSynchronize(stream)
    assert np.array_equal(to_host(rt, second, N), data)
    fails(rt, 21, rt.memcpy, first, data.ctypes.data, 16, 99)
    for address in (first, second):
        rt.free(address)
    rt.streamDestroy(stream)


@fact
def rows(rt: Any) -> None:
    data = np.arange(60, dtype=np.uint8)
    device, stream = rt.malloc(16 * 6), rt.streamCreate()
    rt.memset(device, 0xEE, 96)
    rt.memcpy2D(device, 16, data.ctypes.data, 10, 8, 6, rt.memcpyHostToDevice)
    seen = to_host(rt, device, 96).reshape(6, 16)
    assert np.array_equal(seen[:, :8], data.reshape(6, 10)[:, :8])
    assert (seen[:, 8:] == 0xEE).all()
    back = np.zeros(48, np.uint8)
    rt.memcpy2DAsync(back.ctypes.data, 8, device, 16, 8, 6, rt.memcpyDeviceToHost, stream)
    rt.streamSynchronize(stream)
    assert np.array_equal(back.reshape(6, 8), seen[:, :8])
    fails(rt, 12, rt.memcpy2D, device, 7, data.ctypes.data, 10, 8, 6, rt.memcpyHostToDevice)
    rt.free(device)


@fact
def boxes_by_the_address_of_their_parameters(rt: Any) -> None:
    class Parameters(ctypes.Structure):  # struct cudaMemcpy3DParms of driver_types.h
        _fields_ = [
            ("srcArray", ctypes.c_void_p), ("srcPos", ctypes.c_size_t * 3),
            ("srcPtr", ctypes.c_size_t * 4), ("dstArray", ctypes.c_void_p),
            ("dstPos", ctypes.c_size_t * 3), ("dstPtr", ctypes.c_size_t * 4),
            ("extent", ctypes.c_size_t * 3), ("kind", ctypes.c_int),
        ]  # fmt: skip

    data, device = np.arange(60, dtype=np.uint8), rt.malloc(60)
    p = Parameters()
    p.srcPtr[:] = (data.ctypes.data, 5, 5, 4)
    p.dstPtr[:] = (device, 5, 5, 4)
    p.extent[:] = (5, 4, 3)
    p.kind = rt.memcpyHostToDevice
    rt.memcpy3D(ctypes.addressof(p))
    assert np.array_equal(to_host(rt, device, 60), data)
    rt.memset(device, 0, 60)
    rt.memcpy3DAsync(ctypes.addressof(p), rt.streamCreate())
    rt.deviceSynchronize()
    assert np.array_equal(to_host(rt, device, 60), data)
    rt.free(device)


@fact
def pinned_and_registered_memory(rt: Any) -> None:
    pinned = rt.hostAlloc(N, rt.hostAllocPortable)
    found = rt.pointerGetAttributes(pinned)
    assert (found.type, found.hostPointer, found.devicePointer) == (1, pinned, pinned)
    assert found.device == rt.getDevice()
    rt.freeHost(pinned)
    fails(rt, 1, rt.freeHost, pinned)
    page = np.zeros(4 * N, np.uint8)
    start = page.ctypes.data + -page.ctypes.data % N
    rt.hostRegister(start, N, 0)
    fails(rt, 712, rt.hostRegister, start, N, 0)
    rt.hostUnregister(start)
    fails(rt, 713, rt.hostUnregister, start)


@fact
def attributes_of_pointers(rt: Any) -> None:
    address, host = rt.malloc(N), np.zeros(16, np.uint8)
    found = rt.pointerGetAttributes(address + 5)
    assert type(found) is rt.PointerAttributes
    assert (found.type, found.device) == (rt.memoryTypeDevice, rt.getDevice())
    assert (found.devicePointer, found.hostPointer) == (address + 5, 0)
    found = rt.pointerGetAttributes(host.ctypes.data)
    assert (found.type, found.device) == (rt.memoryTypeUnregistered, -2)
    assert rt.pointerGetMemoryType(address + 5) == rt.memoryTypeDevice
    assert rt.pointerGetMemoryType(host.ctypes.data) == rt.memoryTypeUnregistered
    rt.free(address)
    made = rt.PointerAttributes(0, 1, 2)
    assert (made.device, made.devicePointer, made.hostPointer, made.type) == (0, 1, 2, -1)


@fact
def queries_answer_and_never_raise(rt: Any) -> None:
    stream, event = rt.streamCreate(), rt.eventCreateWithFlags(rt.eventDisableTiming)
    assert rt.streamQuery(stream) == 0
    assert rt.eventQuery(event) == 0
    go = threading.Event()
    rt.launchHostFunc(stream, lambda _: go.wait(LIMIT), 0)
    rt.eventRecord(event, stream)
    assert rt.streamQuery(stream) == 600
    assert rt.eventQuery(event) == 600
    go.set()
    rt.eventSynchronize(event)
    rt.streamSynchronize(stream)
    assert rt.streamQuery(stream) == 0
    assert rt.eventQuery(event) == 0


@fact
def streams(rt: Any) -> None:
    flags = rt.streamNonBlocking
    stream = rt.streamCreateWithPriority(flags, -1)
    assert rt.streamGetFlags(stream) == flags
    assert rt.streamGetPriority(stream) == -1
    assert rt.streamIsCapturing(stream) is False
    other, event = rt.streamCreate(), rt.eventCreate()
    rt.eventRecord(event, stream)
    rt.streamWaitEvent(other, event)
    rt.streamWaitEvent(stream=other, event=event, flags=0)
    fails(rt, 1, rt.streamCreateWithFlags, 2)
    fails(rt, 400, rt.streamDestroy, 0)
    end = rt.eventCreate()
    rt.eventRecord(end, stream)
    rt.eventSynchronize(end)
    elapsed = rt.eventElapsedTime(event, end)
    assert type(elapsed) is float
    assert elapsed >= 0
    rt.streamDestroy(stream)
    rt.streamDestroy(other)


@fact
def host_functions(rt: Any) -> None:
    stream, seen = rt.streamCreate(), list[Any]()
    rt.launchHostFunc(stream, seen.append, 12)
    rt.streamAddCallback(stream, lambda *arguments: seen.append(arguments), 34)
    rt.streamAddCallback(stream, lambda *arguments: seen.append(arguments), 35, flags=0)
    rt.streamSynchronize(stream)
    gc.collect()
    assert seen == [12, (stream, 0, 34), (stream, 0, 35)], seen
    fails(rt, 1, rt.streamAddCallback, stream, print, 0, 1)


@fact
def pools(rt: Any) -> None:
    device, stream = rt.getDevice(), rt.streamCreate()
    props = rt.MemPoolProps(
        rt.cudaMemAllocationTypePinned,
        rt.cudaMemHandleTypeNone,
        rt.cudaMemLocationTypeDevice,
        device,
    )
    pool = rt.memPoolCreate(props)
    default = rt.deviceGetDefaultMemPool(device)
    assert type(pool) is type(default) is int
    assert rt.deviceGetMemPool(device) == default
    rt.deviceSetMemPool(device, pool)
    assert rt.deviceGetMemPool(device) == pool
    address = rt.mallocAsync(N, stream)
    assert rt.memPoolGetAttribute(pool, rt.cudaMemPoolAttrUsedMemCurrent) >= N
    rt.freeAsync(address, stream)
    other = rt.mallocFromPoolAsync(N, default, stream)
    rt.freeAsync(other, stream)
    rt.deviceSetMemPool(device, default)
    rt.memPoolSetAttribute(pool, rt.cudaMemPoolAttrReleaseThreshold, 1 << 33)
    assert rt.memPoolGetAttribute(pool, rt.cudaMemPoolAttrReleaseThreshold) == 1 << 33
    assert rt.memPoolGetAttribute(pool, rt.cudaMemPoolReuseAllowOpportunistic) == 1
    fails(rt, 1, rt.memPoolSetAttribute, pool, rt.cudaMemPoolAttrUsedMemHigh, 5)
    rt.streamSynchronize(stream)
    rt.memPoolTrimTo(pool, 0)
    rt.memPoolDestroy(pool)
    fails(rt, 1, rt.memPoolDestroy, default)


@fact
def devices(rt: Any) -> None:
    device = rt.getDevice()
    rt.setDevice(device)
    assert rt.deviceGetAttribute(rt.cudaDevAttrWarpSize, device) == 32
    major = rt.deviceGetAttribute(75, device)  # cudaDevAttrComputeCapabilityMajor
    found = rt.getDeviceProperties(device)
    assert found["warpSize"] == 32
    assert found["major"] == major
    assert type(found["name"]) is bytes
    assert found["name"]
    assert found["maxThreadsDim"] == (1024, 1024, 64)
    assert found["totalGlobalMem"] >= rt.memGetInfo()[1] * 0.9
    text = rt.deviceGetPCIBusId(device)
    assert type(text) is str
    assert rt.deviceGetByPCIBusId(text.rstrip("\0")) == device
    fails(rt, 101, rt.getDeviceProperties, 1000)
    assert rt.deviceCanAccessPeer(device, device) == 0
    assert rt.runtimeGetVersion() >= 13_000
    assert rt.driverGetVersion() >= 13_000


@fact
def handles_between_processes(rt: Any) -> None:
    address = rt.malloc(N)
    event = rt.eventCreateWithFlags(rt.eventDisableTiming | rt.eventInterprocess)
    for handle in (rt.ipcGetMemHandle(address), rt.ipcGetEventHandle(event)):
        assert type(handle) is bytes
        assert len(handle) == 64
    assert rt.ipcGetMemHandle(address) == rt.ipcGetMemHandle(address)
    rt.free(address)


@fact
def arguments_are_c_integers(rt: Any) -> None:
    for wrong in ("4", None, 4.5, b"4"):
        with pytest.raises(TypeError):
            rt.free(wrong)
    address = rt.malloc(np.int64(N))
    rt.free(ptr=address)
    for arguments in ((), (1, 2, 3)):
        with pytest.raises(TypeError):
            rt.memset(*arguments, bad=1)


@fact
def constants(rt: Any) -> None:
    assert (rt.memcpyHostToDevice, rt.memcpyDeviceToHost, rt.memcpyDefault) == (1, 2, 4)
    assert (rt.streamLegacy, rt.streamPerThread, rt.eventInterprocess) == (1, 2, 4)
    assert rt.cudaDevAttrWarpSize == 10
    assert bool(rt.is_hip) is False


def public(rt: Any) -> list[str]:
    """Names that are neither private nor modules that happen to be imported."""
    return sorted(
        name
        for name in dir(rt)
        if not name.startswith("_") and not inspect.ismodule(getattr(rt, name))
    )


def main(face: str) -> None:
    rt = importlib.import_module(face) if face.startswith("flyt") else _cupy()
    seen = {}
    for name, check in FACTS.items():
        try:
            check(rt)
            seen[name] = ""
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - whatever it is breaks the fact
            seen[name] = traceback.format_exc(limit=-2)
    names = [name for name in public(rt) if name != "annotations"]
    print(json.dumps({"facts": seen, "names": names}))  # noqa: T201 - the program's answer


def _cupy() -> Any:
    return importlib.import_module("cupy").cuda.runtime


if __name__ == "__main__":
    main(sys.argv[1])
