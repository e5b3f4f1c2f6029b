# SPDX-License-Identifier: Apache-2.0
"""The runtime API: CUDA's own answers, signatures and tuple shapes."""

from __future__ import annotations

import ast
import ctypes
import inspect
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import runtime as real

import flyt
import flyt as cudart

DATA = Path(__file__).parent.parent / "data"
ORACLE = json.loads((DATA / "cudart-h100-13.0.json").read_text())
KINDS = json.loads((DATA / "cudart-h200-13.0-kinds.json").read_text())
K = cudart.cudaMemcpyKind

FUNCTIONS = [name for name in flyt.__all__ if name.startswith("cuda")]
"""Everything CUDA that this version offers."""


def code(answer: tuple[Any, ...]) -> int:
    return int(answer[0])


@pytest.fixture
def memory(session: flyt.Session) -> dict[str, Any]:
    """One block of each kind, as the recordings had them."""
    facts = {"device": [], "pinned": [], "pageable": []}
    for _ in range(2):
        facts["device"].append(cudart.cudaMalloc(4096)[1])
        facts["pinned"].append(cudart.cudaHostAlloc(4096, 0)[1])
        facts["pageable"].append(np.zeros(4096, np.uint8))
    return facts


def address(place: Any) -> int:
    return int(place.ctypes.data) if isinstance(place, np.ndarray) else int(place)


WITH_FLAGS: dict[str, tuple[Any, ...]] = {
    "cudaHostAlloc": (4096,),
    "cudaHostRegister": (4096, 4096),
    "cudaHostGetDevicePointer": (4096,),
    "cudaEventCreateWithFlags": (),
    "cudaEventRecordWithFlags": (0, 0),
    "cudaStreamCreateWithFlags": (),
    "cudaStreamWaitEvent": (0, 0),
    "cudaStreamAddCallback": (0, 0, 0),
    "cudaIpcOpenMemHandle": (real.cudaIpcMemHandle_t(),),
}


@pytest.mark.parametrize("value", [-1, 1 << 32, "x"])
@pytest.mark.parametrize("name", WITH_FLAGS)
def test_flags_that_no_c_int_holds(session: flyt.Session, name: str, value: Any) -> None:
    for runtime in (real, cudart):  # the bindings convert before they ask for a driver
        with pytest.raises(TypeError if value == "x" else OverflowError):
            getattr(runtime, name)(*WITH_FLAGS[name], value)


# --- the recordings ---


def test_every_pair_of_places_and_kinds(memory: dict[str, Any]) -> None:
    for key, wanted in KINDS["memcpy_kinds"].items():
        kind, _, pair = key.partition(":")
        to, _, origin = pair.partition("<-")
        answer = cudart.cudaMemcpy(
            address(memory[to][0]), address(memory[origin][1]), 4096, getattr(K, kind)
        )
        assert code(answer) == wanted, key


def test_memset_of_every_place(memory: dict[str, Any]) -> None:
    for place, wanted in KINDS["memset"].items():
        assert code(cudart.cudaMemset(address(memory[place][0]), 0, 4096)) == wanted, place


def test_host_alloc_flags(session: flyt.Session) -> None:
    for flags, (wanted, *shown) in KINDS["host_alloc_flags"].items():
        error, pinned = cudart.cudaHostAlloc(64, int(flags))
        assert error == wanted, flags
        if shown:
            assert cudart.cudaHostGetFlags(pinned) == (0, shown[0])
            assert cudart.cudaFreeHost(pinned) == (0,)


def test_codes_of_corner_cases(memory: dict[str, Any]) -> None:
    device, pinned = memory["device"][0], memory["pinned"][0]
    host, n = memory["pageable"][0], 4096
    answers = {
        "freeHost_device": cudart.cudaFreeHost(device),
        "hostGetDevicePointer_interior": cudart.cudaHostGetDevicePointer(pinned + 5, 0),
        "hostGetDevicePointer_pageable": cudart.cudaHostGetDevicePointer(address(host), 0),
        "hostGetDevicePointer_flags1": cudart.cudaHostGetDevicePointer(pinned, 1),
        "hostGetDevicePointer_device": cudart.cudaHostGetDevicePointer(device, 0),
        "hostGetDevicePointer_null": cudart.cudaHostGetDevicePointer(0, 0),
        "hostAlloc_huge": cudart.cudaHostAlloc(1 << 60, 0),
        "mallocHost_0": cudart.cudaMallocHost(0),
        "hostGetFlags_interior": cudart.cudaHostGetFlags(pinned + 5),
        "hostGetFlags_pageable": cudart.cudaHostGetFlags(address(host)),
        "hostGetFlags_device": cudart.cudaHostGetFlags(device),
        "hostGetFlags_null": cudart.cudaHostGetFlags(0),
        "setDevice_-1": cudart.cudaSetDevice(-1),
        "setDevice_0": cudart.cudaSetDevice(0),
        "memset_value_300": cudart.cudaMemset(device, 300, 4),
        "memset_value_-1": cudart.cudaMemset(device, -1, 4),
        "pinned_src_oob": cudart.cudaMemcpy(device, pinned + n - 8, 16, K.cudaMemcpyHostToDevice),
        "d2d_partial": cudart.cudaMemcpy(
            memory["device"][1] + 8, device, n, K.cudaMemcpyDeviceToDevice
        ),
        "default_oob": cudart.cudaMemcpy(memory["device"][1], device, n + 1, K.cudaMemcpyDefault),
        "h2h_oob_dev": cudart.cudaMemcpy(address(host), device + 1, n, K.cudaMemcpyHostToHost),
        "free_none": cudart.cudaFree(None),
        "memcpy_none": cudart.cudaMemcpy(None, device, 4, K.cudaMemcpyDeviceToHost),
        "memcpy_kind_int": cudart.cudaMemcpy(device, address(host), 4, 1),
    }
    assert set(answers) == set(KINDS["codes"])
    for name, answer in answers.items():
        assert code(answer) == KINDS["codes"][name], name
    interior = answers["hostGetDevicePointer_interior"]
    assert interior == (0, pinned + 5)  # host and device pointer are equal


def _attributes(pointer: int, answer: tuple[Any, ...]) -> dict[str, Any]:
    error, found = answer
    return {
        "rc": int(error),
        "name": error.name,
        "type": int(found.type),
        "device": found.device,
        "dptr_is_p": int(found.devicePointer) == pointer and pointer != 0,
        "hptr_is_p": int(found.hostPointer) == pointer and pointer != 0,
        "dptr_null": int(found.devicePointer) == 0,
        "hptr_null": int(found.hostPointer) == 0,
    }


def test_pointer_attributes_as_recorded(memory: dict[str, Any]) -> None:
    device = cudart.cudaMalloc(2 << 20)[1]  # ends on a granule, as the recorded block did
    pinned, host = memory["pinned"][0], address(memory["pageable"][0])
    cases = {
        "attrs_device_base": device,
        "attrs_device_interior": device + 100,
        "attrs_device_end": device + (2 << 20),
        "attrs_host_unregistered": host,
        "attrs_null": 0,
        "attrs_garbage": 0xDEAD_BEEF_0000,
        "attrs_pinned": pinned,
        "attrs_pinned_interior": pinned + 17,
    }
    for name, pointer in cases.items():
        wanted = ORACLE[name]
        assert _attributes(pointer, cudart.cudaPointerGetAttributes(pointer)) == wanted, name
    assert cudart.cudaFree(device) == (0,)


def test_oracle_of_allocation_and_copies(session: flyt.Session) -> None:
    host, n = np.zeros(8192, np.uint8), 4096
    error, device = cudart.cudaMalloc(n)
    assert error == 0
    assert device % 512 == 0
    garbage = 0xDEAD_BEEF_0000
    pinned = cudart.cudaHostAlloc(64, 0)[1]
    h2d, d2h = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost
    answers = {
        "setDevice_bad": cudart.cudaSetDevice(99),
        "malloc_0": cudart.cudaMalloc(0),
        "malloc_huge_1<<60": cudart.cudaMalloc(1 << 60),
        "malloc_sizemax": cudart.cudaMalloc((1 << 64) - 1),
        "hostAlloc_0": cudart.cudaHostAlloc(0, 0),
        "free_null": cudart.cudaFree(0),
        "freeHost_null": cudart.cudaFreeHost(0),
        "memcpy_size0_H2D": cudart.cudaMemcpy(device, host, 0, h2d),
        "memcpy_size0_null_null": cudart.cudaMemcpy(0, 0, 0, h2d),
        "memcpy_size0_null_dst_H2D": cudart.cudaMemcpy(0, host, 0, h2d),
        "memcpy_size0_bad_ptrs_H2D": cudart.cudaMemcpy(garbage, garbage, 0, h2d),
        "memset_size0_null": cudart.cudaMemset(0, 0, 0),
        "memcpy_H2D": cudart.cudaMemcpy(device, host, n, h2d),
        "memcpy_D2H": cudart.cudaMemcpy(host, device, n, d2h),
        "memcpy_default_h2d": cudart.cudaMemcpy(device, host, n, K.cudaMemcpyDefault),
        "memcpy_default_d2h": cudart.cudaMemcpy(host, device, n, K.cudaMemcpyDefault),
        "memcpy_default_h2h": cudart.cudaMemcpy(host, host.copy(), n, K.cudaMemcpyDefault),
        "memcpy_null_src": cudart.cudaMemcpy(device, 0, n, h2d),
        "memcpy_null_dst": cudart.cudaMemcpy(0, host, n, h2d),
        "memcpy_interior_odd": cudart.cudaMemcpy(device + 1, host, 4095, h2d),
        "memcpy_last_byte": cudart.cudaMemcpy(device + 4095, host, 1, h2d),
        "memcpy_H2D_oob_by_1": cudart.cudaMemcpy(device, host, n + 1, h2d),
        "memcpy_D2H_oob_by_1": cudart.cudaMemcpy(host, device, n + 1, d2h),
        "memset_oob_len4097": cudart.cudaMemset(device, 0, 4097),
        "memset_oob_len2097152": cudart.cudaMemset(device, 0, 2097152),
        "memset_oob_len2097153": cudart.cudaMemset(device, 0, 2097153),
        "memset_oob_len1073741824": cudart.cudaMemset(device, 0, 1073741824),
        "sync_after_oob": cudart.cudaDeviceSynchronize(),
        "memcpy_D2D_same": cudart.cudaMemcpy(device, device, n, K.cudaMemcpyDeviceToDevice),
        "memcpy_D2D_overlap": cudart.cudaMemcpy(
            device + 1, device, n - 1, K.cudaMemcpyDeviceToDevice
        ),
        **{f"memcpy_kind_{kind}": cudart.cudaMemcpy(device, host, n, kind) for kind in (-1, 5, 99)},
        "hostGetFlags_of_0": cudart.cudaHostGetFlags(pinned),
        "free_of_pinned": cudart.cudaFree(pinned),
        "freeHost_interior": cudart.cudaFreeHost(pinned + 1),
        "freeHost": cudart.cudaFreeHost(pinned),
        "freeHost_twice": cudart.cudaFreeHost(pinned),
        "free_interior": cudart.cudaFree(device + 256),
        "free_host_ptr": cudart.cudaFree(host.ctypes.data),
        "free_garbage": cudart.cudaFree(garbage),
        "free": cudart.cudaFree(device),
        "free_twice": cudart.cudaFree(device),
        "memcpy_D2H_after_free": cudart.cudaMemcpy(host, device, n, d2h),
        "memcpy_H2D_after_free": cudart.cudaMemcpy(device, host, n, h2d),
        "sync_after_uaf": cudart.cudaDeviceSynchronize(),
    }
    for name, answer in answers.items():
        recorded = ORACLE[name]
        assert (code(answer), answer[0].name) == (recorded["rc"], recorded["name"]), name
    assert answers["malloc_0"] == (0, ORACLE["malloc_0"]["ptr"])
    assert answers["hostGetFlags_of_0"] == (0, ORACLE["hostGetFlags_of_0"]["flags"])


def test_last_error_protocol(session: flyt.Session) -> None:
    cudart.cudaGetLastError()
    assert code(cudart.cudaMemcpy(0, 0, 1, 0)) == 1
    recorded = ORACLE["last_error_protocol"]
    assert code(cudart.cudaPeekAtLastError()) == recorded["peek"]
    assert code(cudart.cudaGetLastError()) == recorded["get1"]
    assert code(cudart.cudaGetLastError()) == recorded["get2"]
    cudart.cudaMalloc(1 << 60)
    assert code(cudart.cudaGetLastError()) == ORACLE["last_error_after_oom"]


# --- a drop-in ---


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_signature_as_cuda_python(name: str) -> None:
    ours = inspect.signature(getattr(flyt, name)).parameters
    theirs = inspect.signature(getattr(real, name)).parameters
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]
    assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]


SHAPES = """
import inspect, json, sys
from importlib import import_module
from cuda.bindings.runtime import cudaError_t as E
module, shapes = import_module(sys.argv[1]), {}
from cuda.bindings import runtime as r
sample = {
    "error": E.cudaErrorUnknown, "kind": 1, "pciBusId": b"0000:01:00.0", "extent": r.cudaExtent(),
    "pitchedDevPtr": r.cudaPitchedPtr(), "poolProps": r.cudaMemPoolProps(), "dsts": [1],
    "srcs": [1], "sizes": [1], "attrs": [r.cudaMemcpyAttributes()], "attrsIdxs": [0],
}
for name in sys.argv[2:]:
    function = getattr(module, name)
    sample["p"] = r.cudaMemcpy3DPeerParms() if "Peer" in name else r.cudaMemcpy3DParms()
    sample["handle"] = r.cudaIpcMemHandle_t() if "Mem" in name else r.cudaIpcEventHandle_t()
    sample["attr"] = r.cudaMemPoolAttr(1) if "MemPool" in name else 1
    answer = function(*[sample.get(p, 1) for p in inspect.signature(function).parameters])
    shapes[name] = [isinstance(answer[0], E), len(answer)]
print(json.dumps(shapes))
"""


def test_the_same_number_of_values_on_failure() -> None:
    """Without a driver cuda-python fails too: its tuples have the same length and Nones."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "FLYT_BACKEND": "ipc:///nowhere"}
    flyts, theirs = (
        subprocess.run(
            [sys.executable, "-c", SHAPES, module, *FUNCTIONS],
            capture_output=True, text=True, check=True, env=env, timeout=60,
        ).stdout
        for module in ("flyt", "cuda.bindings.runtime")
    )  # fmt: skip
    assert json.loads(flyts) == json.loads(theirs)


def test_enums_and_constants_are_cudas_own() -> None:
    for name in ("cudaError_t", "cudaMemcpyKind", "cudaMemoryType", "cudaPointerAttributes"):
        assert getattr(flyt, name) is getattr(real, name)
    assert flyt.cudaHostAllocPortable == real.cudaHostAllocPortable
    assert flyt.make_cudaExtent is real.make_cudaExtent
    with pytest.raises(AttributeError, match="has no attribute"):
        _ = flyt.nothing


NAMES_AND_TEXTS = """
from cuda.bindings import runtime
codes = [int(e) for e in runtime.cudaError_t] + [11, 77777]
print([(c, runtime.cudaGetErrorName(c)[1], runtime.cudaGetErrorString(c)[1]) for c in codes])
"""


def test_error_names_and_strings_are_cudas() -> None:
    """Read in a process of its own: CUDA opens the GPU for it where there is one."""
    native = subprocess.run(
        [sys.executable, "-c", NAMES_AND_TEXTS], capture_output=True, check=True, timeout=60
    )
    told = ast.literal_eval(native.stdout.decode())
    assert len(told) > 130
    for code, name, text in told:
        assert cudart.cudaGetErrorName(code) == (0, name)
        assert cudart.cudaGetErrorString(code) == (0, text)
    assert cudart.cudaGetErrorName(real.cudaError_t(2)) == (0, b"cudaErrorMemoryAllocation")
    for call in (cudart.cudaGetErrorName, cudart.cudaGetErrorString):
        with pytest.raises(TypeError):
            call(None)


def test_host_arguments_like_cuda_python(session: flyt.Session) -> None:
    device = cudart.cudaMalloc(64)[1]
    h2d = K.cudaMemcpyHostToDevice
    for bad, error in ((-5, TypeError), (1 << 70, TypeError), ("x", TypeError)):
        with pytest.raises(error):
            cudart.cudaMemcpy(bad, device, 4, h2d)
    for bad in (-1, 1 << 64):
        with pytest.raises(OverflowError):
            cudart.cudaMemcpy(device, b"1234", bad, h2d)
        with pytest.raises(OverflowError):
            cudart.cudaMalloc(bad)
    assert cudart.cudaMalloc(np.int64(8))[0] == 0
    for source in (bytes(4), bytearray(4), memoryview(bytes(4)), np.zeros(4, np.uint8)):
        assert cudart.cudaMemcpy(device, source, 4, h2d) == (0,)
    keyword = (ctypes.c_ubyte * 4)()
    assert cudart.cudaMemcpy(dst=device, src=keyword, count=4, kind=h2d) == (0,)


DIGITS = np.zeros(8, np.uint8)

REFUSED: dict[str, tuple[type[Exception], Callable[[Any], Any]]] = {
    "a value of 32 bits": (OverflowError, lambda rt: rt.cudaMemset(4096, 1 << 31, 8)),
    "a small value": (OverflowError, lambda rt: rt.cudaMemset(4096, -(1 << 31) - 1, 8)),
    "a value of rows": (OverflowError, lambda rt: rt.cudaMemset2D(4096, 8, 1 << 31, 8, 1)),
    "a text for a value": (TypeError, lambda rt: rt.cudaMemset(4096, "1", 8)),
    "a kind of 41 bits": (OverflowError, lambda rt: rt.cudaMemcpy(4096, DIGITS, 8, 1 << 40)),
    "a kind of nothing": (OverflowError, lambda rt: rt.cudaMemcpy(4096, DIGITS, 0, 1 << 40)),
    "a negative kind": (OverflowError, lambda rt: rt.cudaMemcpy(4096, DIGITS, 8, -(1 << 31) - 1)),
    "no kind": (TypeError, lambda rt: rt.cudaMemcpy(4096, DIGITS, 0, None)),
    "a negative stream": (OverflowError, lambda rt: rt.cudaStreamSynchronize(-1)),
    "a NumPy stream": (OverflowError, lambda rt: rt.cudaStreamSynchronize(np.int64(-1))),
    "a stream of 65 bits": (OverflowError, lambda rt: rt.cudaStreamQuery(1 << 64)),
    "a stream of digits": (TypeError, lambda rt: rt.cudaStreamQuery("1")),
    "a copy's stream": (OverflowError, lambda rt: rt.cudaMemcpyAsync(4096, DIGITS, 0, 1, -1)),
    "a negative event": (OverflowError, lambda rt: rt.cudaEventQuery(-1)),
    "an event of 65 bits": (OverflowError, lambda rt: rt.cudaEventRecord(1 << 64, 0)),
    "an event of digits": (TypeError, lambda rt: rt.cudaEventRecord(b"5", 0)),
}


@pytest.mark.parametrize(("error", "call"), REFUSED.values(), ids=REFUSED.keys())
def test_numbers_that_c_can_not_hold(
    session: flyt.Session, error: type[Exception], call: Callable[[Any], Any]
) -> None:
    for runtime in (real, cudart):  # CUDA's own refuses them before it looks for a driver
        with pytest.raises(error):
            call(runtime)


def test_numbers_that_c_holds(session: flyt.Session) -> None:
    device, back = cudart.cudaMalloc(8)[1], bytearray(8)
    for value in (np.int8(-1), -(1 << 31) + 255, (1 << 31) - 1, np.int64(255)):
        assert cudart.cudaMemset(device, 0, 8) == (0,)
        assert cudart.cudaMemset(device, value, 8) == (0,)
        assert cudart.cudaMemcpy(back, device, 8, K.cudaMemcpyDeviceToHost) == (0,)
        assert back == b"\xff" * 8
    assert code(cudart.cudaMemcpy(device, back, 8, (1 << 32) - 1)) == 21
    assert code(cudart.cudaStreamSynchronize((1 << 64) - 1)) == 400
    assert code(cudart.cudaEventSynchronize((1 << 64) - 1)) == 400


def test_versions_and_devices(session: flyt.Session) -> None:
    error, count = cudart.cudaGetDeviceCount()
    assert (error, count >= 1) == (0, True)
    assert cudart.cudaGetDevice() == (0, 0)
    assert cudart.cudaSetDevice(count - 1) == (0,)
    assert cudart.cudaGetDevice() == (0, count - 1)
    assert cudart.cudaSetDevice(count)[0] == 101
    assert cudart.cudaSetDevice(0) == (0,)
    error, version = cudart.cudaRuntimeGetVersion()
    assert (error, version >= 13000) == (0, True)
    assert cudart.cudaDriverGetVersion()[0] == 0


@pytest.mark.alone
def test_memory_info_follows_allocations(session: flyt.Session) -> None:
    error, free, total = cudart.cudaMemGetInfo()
    assert error == 0
    assert 0 < free <= total
    device = cudart.cudaMalloc(64 << 20)[1]
    assert cudart.cudaMemGetInfo()[1] <= free - (64 << 20)
    assert cudart.cudaFree(device) == (0,)


# --- Flyt's own ---


def test_without_a_backend_there_is_no_device(run_client: Callable[..., Any]) -> None:
    done = run_client(
        "import flyt, pickle\n"
        "print([int(f()[0]) for f in (flyt.cudaGetDeviceCount, flyt.cudaDeviceSynchronize)])\n"
        "print(flyt.cudaMalloc(4), flyt.cudaGetLastError())\n"
        "print(flyt.last_failure())\n",
        "ipc:///nowhere/at/all.sock",
    )
    assert done.returncode == 0, done.stderr
    first, second, reason = done.stdout.splitlines()
    assert first == "[100, 100]"
    assert "cudaErrorNoDevice: 100>, None)" in second
    assert "/nowhere/at/all.sock" in reason
    assert "flyt-backend" in reason
    assert "no CUDA device" in done.stderr  # and in the log


def test_pinned_empty(session: flyt.Session) -> None:
    array = flyt.pinned_empty((3, 5), np.float32)
    assert (array.shape, array.dtype, array.flags.c_contiguous) == ((3, 5), np.float32, True)
    assert (array == 0).all()
    attributes = cudart.cudaPointerGetAttributes(array)[1]
    assert attributes.type == cudart.cudaMemoryType.cudaMemoryTypeHost
    assert flyt.pinned_empty((0, 4)).shape == (0, 4)
    with pytest.raises(TypeError, match="Python objects"):
        flyt.pinned_empty(3, object)


def test_a_dropped_pinned_array_goes_back_at_the_next_call(session: flyt.Session) -> None:
    """Finalizers never send (numba#9507: never freed)."""
    for _ in range(40):
        view = flyt.pinned_empty(4 << 20, np.uint8)[5:]
        view[:] = 1
        del view
        assert cudart.cudaDeviceSynchronize() == (0,)
    assert not session.arrays


def test_a_pinned_array_outlives_its_session(
    one_backend: Any, connect: Callable[..., flyt.Session]
) -> None:
    session = connect(one_backend)
    array = flyt.pinned_empty(100_000, np.uint8)
    array[:] = 7
    session.close()
    assert (array == 7).all()
    array[:] = 8
    connect(one_backend)
    assert (array == 8).all()
    assert code(cudart.cudaDeviceSynchronize()) == 0


def test_after_close_calls_say_so(one_backend: Any, connect: Callable[..., flyt.Session]) -> None:
    with connect(one_backend):
        assert cudart.cudaDeviceSynchronize() == (0,)
    assert code(cudart.cudaDeviceSynchronize()) == 46
    assert "closed" in flyt.last_failure()
    assert code(cudart.cudaGetLastError()) == 46


def test_inflight_is_empty_after_synchronous_calls(session: flyt.Session) -> None:
    device = cudart.cudaMalloc(4096)[1]
    cudart.cudaMemcpy(device, bytes(4096), 4096, K.cudaMemcpyHostToDevice)
    assert cudart.cudaDeviceSynchronize() == (0,)
    assert flyt.inflight() == []
    assert flyt.statistics()["inflight"] == 0
    assert flyt.statistics()["staged_h2d_bytes"] == 4096


def test_public_exceptions_pickle() -> None:
    public = [getattr(flyt, name) for name in flyt.__all__]
    errors = [e for e in public if isinstance(e, type) and issubclass(e, flyt.FlytError)]
    assert len(errors) >= 9
    for error in errors:
        one = error(2, "why") if error is flyt.DeviceError else error("why")
        again = pickle.loads(pickle.dumps(one))
        assert (type(again), again.args, str(again)) == (error, one.args, str(one))


@pytest.mark.parametrize(
    ("width", "height"), [(1 << 40, 1 << 40), ((1 << 64) - 1, 1), (1 << 33, 1 << 31), (1 << 62, 1)]
)
def test_pitched_memory_that_can_not_be(session: flyt.Session, width: int, height: int) -> None:
    """Also where its size is no number of 64 bits."""
    refused = cudart.cudaError_t.cudaErrorMemoryAllocation
    assert cudart.cudaMallocPitch(width, height) == (refused, None, None)
    assert cudart.cudaMalloc3D(cudart.make_cudaExtent(width, height, 1)) == (refused, None)
    assert cudart.cudaMalloc3D(cudart.make_cudaExtent(width, 1, height)) == (refused, None)
    error, address, pitch = cudart.cudaMallocPitch(100, 10)
    assert (int(error), pitch >= 100) == (0, True)
    assert int(cudart.cudaFree(address)[0]) == 0


TOO_MUCH = """
from flyt import driver as d
d.cuInit(0)
d.cuCtxPushCurrent(d.cuDevicePrimaryCtxRetain(0)[1])
print(d.cuMemAllocPitch(1 << 40, 1 << 40, 4)[0].name)
print(d.cuMemAllocPitch((1 << 64) - 1, 1, 4)[0].name)
"""


def test_the_driver_face_has_no_such_memory(one_backend: Any, run_client: Any) -> None:
    done = run_client(TOO_MUCH, one_backend)
    assert done.stdout.split() == ["CUDA_ERROR_OUT_OF_MEMORY"] * 2, done.stderr
