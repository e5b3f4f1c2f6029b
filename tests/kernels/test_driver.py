# SPDX-License-Identifier: Apache-2.0
"""`flyt.driver` against ``cuda.bindings.driver``: names, signatures, tuples; and what it answers
without a kernel. What a GPU's driver answers to the same program is held against it in
``test_on_gpu.py``."""

from __future__ import annotations

import inspect
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from flyt import driver
from flyt.driver.convention import values_of

FACTS = Path(__file__).with_name("driver_facts.py")
OFFERED = sorted(
    name
    for name in dir(driver)
    if name.startswith("cu")
    and callable(getattr(driver, name))
    and not isinstance(getattr(driver, name), type)
    and name not in driver.not_offered()
)
NUMBA = {
    "cuCtxEnablePeerAccess",
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPopCurrent",
    "cuCtxPushCurrent",
    "cuCtxSynchronize",
    "cuDeviceCanAccessPeer",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxReset",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuInit",
    "cuKernelSetAttribute",
    "cuKernelSetCacheConfig",
    "cuLibraryGetGlobal",
    "cuLibraryUnload",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemFreeHost",
    "cuMemGetAddressRange",
    "cuMemGetInfo",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemcpyDtoD",
    "cuMemcpyDtoDAsync",
    "cuMemcpyDtoH",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoD",
    "cuMemcpyHtoDAsync",
    "cuMemsetD8",
    "cuMemsetD8Async",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags",
    "cuPointerGetAttribute",
    "cuProfilerStart",
    "cuProfilerStop",
    "cuStreamCreate",
    "cuStreamDestroy",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
}
"""What numba-cuda 0.30.4 calls, but for managed memory, IPC and stream callbacks."""

NOT_YET = {"cuCtxEnablePeerAccess"}


@pytest.mark.parametrize("name", OFFERED)
def test_signatures_are_cuda_s(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)) for module in (driver, cuda))
    assert list(ours.parameters) == list(theirs.parameters)


def test_enough_is_offered() -> None:
    assert len(OFFERED) > 100
    assert set(OFFERED) >= NUMBA - NOT_YET


def test_types_and_constants_are_cuda_s_own() -> None:
    assert driver.CUresult is cuda.CUresult
    assert driver.CUdeviceptr is cuda.CUdeviceptr
    assert driver.CU_STREAM_LEGACY == cuda.CU_STREAM_LEGACY
    with pytest.raises(AttributeError):
        driver.cuNoSuchThing  # noqa: B018 - the look-up is what is tested
    with pytest.raises(AttributeError):
        driver.nothing  # noqa: B018 - likewise


@pytest.mark.parametrize(
    ("name", "values"),
    [("cuGraphCreate", 1), ("cuMemAllocManaged", 1), ("cuGraphDestroy", 0)],
)
def test_what_is_not_offered_says_so(name: str, values: int) -> None:
    assert name in driver.not_offered()
    answer = getattr(driver, name)(1, 2, 3)
    assert answer == (cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED, *[None] * values)


@pytest.mark.parametrize(
    ("name", "values"),
    [("cuInit", 0), ("cuMemAlloc", 1), ("cuMemGetInfo", 2), ("cuFuncGetParamInfo", 2)],
)
def test_how_many_values_a_function_returns(name: str, values: int) -> None:
    assert values_of(name) == values


RECORDED = json.loads((FACTS.parents[1] / "data" / "driver-h200-13.0.json").read_text())
"""What the driver itself answered, on a GPU."""


def test_what_it_answers_without_a_kernel(
    one_backend: Any, run_client: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    code = f"import runpy; runpy.run_path({str(FACTS)!r}, run_name='__main__')"
    done = run_client(code, one_backend, "flyt.driver", "--no-kernels")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told) > 50
    assert told == {name: RECORDED[name] for name in told}


NO_BACKEND = """
from flyt import driver
print(driver.cuInit(0)[0].name, driver.cuDeviceGetCount()[0].name)
"""


def test_without_a_backend_there_is_no_device(run_client: Callable[..., Any]) -> None:
    done = run_client(NO_BACKEND, "ipc:///tmp/flyt-nobody-listens.sock")
    assert done.stdout.split() == ["CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_NOT_INITIALIZED"]


CONTEXTS = """
from flyt import driver as d
d.cuInit(0)
made = d.cuCtxCreate(None, 0, 0)[1]
print(int(d.cuCtxGetCurrent()[1]) == int(made), int(d.cuCtxGetDevice()[1]))
primary = d.cuDevicePrimaryCtxRetain(0)[1]
print(int(primary) == int(made), d.cuCtxPushCurrent(primary)[0].name)
print(int(d.cuCtxPopCurrent()[1]) == int(primary), d.cuMemAlloc(64)[0].name)
print(d.cuCtxDestroy(made)[0].name, int(d.cuCtxGetCurrent()[1]), d.cuCtxDestroy(made)[0].name)
print(d.cuCtxDestroy(primary)[0].name, d.cuCtxPushCurrent(made)[0].name)
"""


def test_contexts_of_the_program_s_own(one_backend: Any, run_client: Callable[..., Any]) -> None:
    done = run_client(CONTEXTS, one_backend)
    assert done.stdout.splitlines() == [
        "True 0",
        "False CUDA_SUCCESS",
        "True CUDA_SUCCESS",
        "CUDA_SUCCESS 0 CUDA_ERROR_INVALID_CONTEXT",
        "CUDA_ERROR_INVALID_CONTEXT CUDA_ERROR_INVALID_CONTEXT",
    ], done.stderr


FEWER_DEVICES = """
import sys, flyt
from flyt import driver as d
d.cuInit(0)
made = d.cuCtxCreate(None, 0, 1)[1]
print(d.cuStreamCreate(0)[0].name, int(d.cuCtxGetDevice()[1]))
flyt.connect(sys.argv[1])
print(d.cuStreamCreate(0)[0].name, d.cuCtxPushCurrent(made)[0].name, d.cuCtxDestroy(made)[0].name)
"""


@pytest.mark.emulated_only(reason="takes a backend with two devices and one with one")
def test_a_context_of_a_device_that_is_gone(
    backend: Callable[..., Any], run_client: Callable[..., Any]
) -> None:
    two, one = backend(device_options="devices=2,memory=64M"), backend()
    done = run_client(FEWER_DEVICES, two, one.endpoint)
    assert done.stdout.splitlines() == [
        "CUDA_SUCCESS 1",
        "CUDA_ERROR_INVALID_CONTEXT CUDA_ERROR_INVALID_CONTEXT CUDA_SUCCESS",
    ], done.stderr


LINEAR = """
import ctypes
from flyt import driver as d
d.cuInit(0)
d.cuCtxPushCurrent(d.cuDevicePrimaryCtxRetain(0)[1])
def told(answer):
    assert answer[0] == d.CUresult.CUDA_SUCCESS, answer
    return answer[1] if len(answer) > 1 else None
stream = told(d.cuStreamCreate(0))
block = told(d.cuMemAllocAsync(4096, stream))
told(d.cuMemsetD32Async(block, 0x01020304, 1024, stream))
out = (ctypes.c_uint32 * 1024)()
told(d.cuMemcpyDtoHAsync(ctypes.addressof(out), block, 4096, stream))
told(d.cuStreamSynchronize(stream))
told(d.cuMemFreeAsync(block, stream))
props = d.CUmemPoolProps()
props.allocType = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
props.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
pool = told(d.cuMemPoolCreate(props))
told(d.cuMemFreeAsync(told(d.cuMemAllocFromPoolAsync(64, pool, 0)), 0))
told(d.cuMemPoolDestroy(pool))
seen = []
note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(seen.append)
where = ctypes.cast(note, ctypes.c_void_p).value
told(d.cuLaunchHostFunc(stream, d.CUhostFn(where), 77))
told(d.cuStreamSynchronize(stream))
rows, pitch = d.cuMemAllocPitch(100, 10, 4)[1:]
told(d.cuMemsetD2D8(rows, pitch, 5, 100, 10))
handle = told(d.cuIpcGetMemHandle(told(d.cuMemAlloc(4096))))
print(out[0] == out[1023] == 0x01020304, seen, pitch >= 100, type(handle).__name__)
print(d.cuMemAllocAsync(0, 0)[0].name, d.cuMemAllocPitch(100, 10, 3)[0].name)
"""


def test_memory_beyond_the_plain(one_backend: Any, run_client: Callable[..., Any]) -> None:
    done = run_client(LINEAR, one_backend)
    assert done.stdout.splitlines() == [
        "True [77] True CUipcMemHandle",
        "CUDA_ERROR_INVALID_VALUE CUDA_ERROR_INVALID_VALUE",
    ], done.stderr
