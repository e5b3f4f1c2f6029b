# SPDX-License-Identifier: Apache-2.0
"""Kernels on a real GPU: ``--device cupy``. Expected values are arithmetic, or the driver's own."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flyt

pytestmark = pytest.mark.usefixtures("gpu")

FACTS = Path(__file__).with_name("driver_facts.py")
LIMIT = 100.0

SOURCE = r"""
extern "C" {
__device__ int counters[4] = {1, 2, 3, 4};
__constant__ float factor = 2.0f;
__global__ void saxpy(float a, const float *x, float *y, int n) {
    int i = blockDim.x * blockIdx.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
__global__ void mixed(signed char a, double b, short c, long long d, double *out) {
    out[0] = a; out[1] = b; out[2] = c; out[3] = (double)d;
}
__global__ void count() { atomicAdd(&counters[0], 10); }
__global__ void scale(float *x) { x[threadIdx.x] *= factor; }
__global__ void wait_for(long long cycles) {
    long long began = clock64();
    while (clock64() - began < cycles);
}
__global__ void dynamic(int *out) {
    extern __shared__ int room[];
    room[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = room[blockDim.x - 1 - threadIdx.x];
}
__global__ void empty() {}
}
template <class T> __global__ void twice(T *x) { x[threadIdx.x] += x[threadIdx.x]; }
"""

CLIENT = """
import sys
import numpy as np
import flyt
kernel = flyt.RawKernel('extern "C" __global__ void one_more(int *x) { *x += 1; }', "one_more")
array = flyt.to_device(np.zeros(1, np.int32))
for line in sys.stdin:
    for _ in range(int(line)):
        kernel(1, 1, (array,))
    print(int(array.copy_to_host()[0]), flush=True)
"""

FAULTY = """
import numpy as np
import flyt
kernel = flyt.RawKernel('extern "C" __global__ void fault(int *x) { *x = 1; }', "fault")
kernel(1, 1, (16,))
print(*[int(answer[0]) for answer in (
    flyt.cudaDeviceSynchronize(), flyt.cudaMalloc(16), flyt.cudaStreamSynchronize(0),
    flyt.cudaGetLastError(), flyt.cudaGetLastError())])
try:
    kernel(1, 1, (16,))
except flyt.FlytError as exc:
    print(exc.code)
with flyt.connect():
    fresh = flyt.to_device(np.arange(4))
    print(fresh.copy_to_host().sum())
"""

BYSTANDER = """
import sys
import time
import numpy as np
import flyt
error, block = flyt.cudaMalloc(4)
for line in sys.stdin:
    if line == "connect\\n":
        began = time.monotonic()
        with flyt.connect():
            total = flyt.to_device(np.arange(4)).copy_to_host().sum()
        print(total, time.monotonic() - began < 5, flush=True)
        break
    print(*[int(flyt.cudaMemset(block, 0, 4)[0]), int(flyt.cudaDeviceSynchronize()[0])], flush=True)
"""


@pytest.fixture
def module(gpu_session: flyt.Session) -> flyt.RawModule:
    return flyt.RawModule(SOURCE, name_expressions=["twice<int>", "twice<double>"])


def test_a_launch_computes(module: flyt.RawModule) -> None:
    n = 100_003
    x, y = np.arange(n, dtype=np.float32), np.ones(n, np.float32)
    on_x, on_y = flyt.to_device(x), flyt.to_device(y)
    module.get_function("saxpy")((-(-n // 256),), (256,), (np.float32(3), on_x, on_y, n))
    assert np.array_equal(on_y.copy_to_host(), 3 * x + y)


def test_parameters_of_every_size_find_their_place(module: flyt.RawModule) -> None:
    out = flyt.to_device(np.zeros(4))
    module.get_function("mixed")(1, 1, (-5, 2.5, -300, -(1 << 40), out))
    assert out.copy_to_host().tolist() == [-5, 2.5, -300, -(1 << 40)]


def test_wrong_arguments_are_refused_before_the_launch(module: flyt.RawModule) -> None:
    mixed = module.get_function("mixed")
    out = flyt.to_device(np.zeros(4))
    with pytest.raises(flyt.DeviceError) as caught:
        mixed(1, 1, (1, 2.0, 3, 4))
    assert caught.value.code == 1
    with pytest.raises(OverflowError):
        mixed(1, 1, (1000, 2.0, 3, 4, out))
    with pytest.raises(TypeError):
        mixed(1, 1, (np.float64(1), 2.0, 3, 4, out))


def test_launches_are_ordered_with_copies_and_each_other(module: flyt.RawModule) -> None:
    twice = module.get_function("twice<int>")
    on_device = flyt.to_device(np.arange(8, dtype=np.int32))
    for _ in range(20):
        twice(1, 8, (on_device,))
    assert on_device.copy_to_host().tolist() == [n << 20 for n in range(8)]


def test_more_launches_than_a_client_may_have_in_flight(module: flyt.RawModule) -> None:
    kernel, stream = module.get_function("count"), flyt.Stream()
    for _ in range(3000):
        kernel(1, 1, (), stream=stream)
    stream.sync()
    address = module.get_global("counters")
    host = np.zeros(4, np.int32)
    assert not flyt.cudaMemcpy(host, address, 16, flyt.cudaMemcpyKind(2))[0]
    assert host.tolist() == [30_001, 2, 3, 4]


def test_global_variables_are_read_and_written(module: flyt.RawModule) -> None:
    address = module.get_global("factor")
    assert not flyt.cudaMemcpy(address, np.float32([5]), 4, flyt.cudaMemcpyKind(1))[0]
    x = flyt.to_device(np.ones(4, np.float32))
    module.get_function("scale")(1, 4, (x,))
    assert x.copy_to_host().tolist() == [5.0] * 4
    assert int(flyt.cudaFree(address)[0]) == 1
    with pytest.raises(flyt.DeviceError) as caught:
        module.get_global("nobody")
    assert caught.value.code == 500


def test_kernels_read_and_write_pinned_memory(module: flyt.RawModule) -> None:
    pinned = flyt.pinned_empty(1024, np.float32)
    pinned[:] = 7
    module.get_function("scale")(1, 1024, (pinned.ctypes.data,))
    assert not flyt.cudaDeviceSynchronize()[0]
    assert (pinned == 14).all()


def test_a_busy_stream_is_seen_and_waited_for(module: flyt.RawModule) -> None:
    stream = flyt.Stream(non_blocking=True)
    module.get_function("wait_for")(1, 1, (300_000_000,), stream=stream)
    assert not stream.is_done
    mark = stream.record()
    started = time.monotonic()
    mark.sync()
    assert time.monotonic() - started > 0.02  # 300 million cycles at 2 GHz or so
    assert stream.is_done


def test_dynamic_shared_memory(module: flyt.RawModule) -> None:
    kernel = module.get_function("dynamic")
    out = flyt.to_device(np.zeros(256, np.int32))
    kernel(1, 256, (out,), shared_mem=1024)
    assert out.copy_to_host().tolist() == list(range(255, -1, -1))
    with pytest.raises(flyt.DeviceError) as caught:
        kernel(1, 256, (out,), shared_mem=64 << 10)
    assert caught.value.code == 1
    kernel.max_dynamic_shared_size_bytes = 64 << 10
    assert kernel.max_dynamic_shared_size_bytes == 64 << 10
    kernel(1, 256, (out,), shared_mem=64 << 10)
    assert not flyt.cudaDeviceSynchronize()[0]


@pytest.mark.parametrize(
    ("grid", "block"), [(0, 1), (1, 0), (1, 1025), ((1, 65_536), 1), (1, (1, 1, 65)), (1 << 31, 1)]
)
def test_bad_shapes_are_refused_at_the_call(module: flyt.RawModule, grid: Any, block: Any) -> None:
    kernel = module.get_function("empty")
    with pytest.raises(flyt.DeviceError) as caught:
        kernel(grid, block, ())
    assert caught.value.code in (1, 9)
    kernel(1, 1, ())
    assert not flyt.cudaDeviceSynchronize()[0]


def test_missing_symbols_and_broken_images(gpu_session: flyt.Session, tmp_path: Path) -> None:
    module = flyt.RawModule(SOURCE, name_expressions=["twice<int>"])
    with pytest.raises(flyt.DeviceError) as caught:
        module.get_function("nobody")
    assert caught.value.code == 500
    broken = tmp_path / "broken.cubin"
    for image in (b"\x7fELF" + bytes(100), b"no image", b".version 7.0\n.target sm_75\nrubbish"):
        broken.write_bytes(image)
        with pytest.raises(flyt.DeviceError) as caught:
            flyt.RawModule(path=broken).compile()
        assert caught.value.code in (200, 218)
    assert module.get_function("twice<int>").attributes["max_threads_per_block"] == 1024


def test_the_compiler_s_words_come_back(gpu_session: flyt.Session) -> None:
    with pytest.raises(flyt.CompileException, match="nothing_like_that") as caught:
        flyt.RawKernel('extern "C" __global__ void f() { nothing_like_that(); }', "f").compile()
    assert pickle.loads(pickle.dumps(caught.value)).log == caught.value.log
    log = io.StringIO()
    flyt.RawKernel('extern "C" __global__ void f() { int unused; }', "f").compile(log)
    assert "unused" in log.getvalue()


def test_the_compiler_reads_no_files_of_the_backend(gpu_session: flyt.Session) -> None:
    with pytest.raises(flyt.CompileException) as caught:
        flyt.RawModule('#include "/etc/passwd"\n').compile()
    assert "root:" not in str(caught.value)


def test_options_and_headers(gpu_session: flyt.Session) -> None:
    source = '#include <cuda_fp16.h>\nextern "C" __global__ void f(__half *x) { *x = VALUE; }'
    kernel = flyt.RawKernel(source, "f", options=("-DVALUE=3",))
    x = flyt.to_device(np.zeros(1, np.float16))
    kernel(1, 1, (x,))
    assert x.copy_to_host()[0] == 3


def test_an_image_crosses_once(one_backend: Any, connect: Callable[..., flyt.Session]) -> None:
    source = SOURCE + f"// {time.time()}"
    for expected in (len(source), 0):
        with connect(one_backend):
            flyt.RawModule(source).compile()
            assert flyt.statistics()["image_bytes"] == expected


def test_a_module_goes_with_its_session(one_backend: Any, connect: Callable[..., Any]) -> None:
    with connect(one_backend):
        kernel = flyt.RawKernel('extern "C" __global__ void f() {}', "f")
        kernel(1, 1, ())
    with connect(one_backend):
        kernel(1, 1, ())  # compiled and loaded anew
        assert not flyt.cudaDeviceSynchronize()[0]


def test_a_cooperative_launch(gpu_session: flyt.Session) -> None:
    source = """
#include <cooperative_groups.h>
extern "C" __global__ void f(int *x) {
    atomicAdd(x, 1);
    cooperative_groups::this_grid().sync();
    if (blockIdx.x == 0) x[1] = x[0];
}"""
    kernel = flyt.RawKernel(source, "f", enable_cooperative_groups=True)
    x = flyt.to_device(np.zeros(2, np.int32))
    kernel(32, 1, (x,))
    assert x.copy_to_host().tolist() == [32, 32]
    with pytest.raises(flyt.DeviceError) as caught:
        kernel(1 << 20, 1024, (x,))
    assert caught.value.code == 720  # cudaErrorCooperativeLaunchTooLarge


def test_the_driver_face_answers_as_the_driver(
    one_backend: Any, run_client: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    native = subprocess.run(
        [sys.executable, str(FACTS), "cuda.bindings.driver"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert native.returncode == 0, native.stderr
    code = f"import runpy; runpy.run_path({str(FACTS)!r}, run_name='__main__')"
    ours = run_client(code, one_backend, "flyt.driver", env={"CUDA_VISIBLE_DEVICES": ""})
    assert ours.returncode == 0, ours.stderr
    expected, found = json.loads(native.stdout), json.loads(ours.stdout)
    sys.stdout.write(json.dumps(expected))  # the recording, in the report of a failure
    differ = {name: (expected[name], found.get(name)) for name in expected}
    assert not {n: pair for n, pair in differ.items() if pair[0] != pair[1]}


def test_a_fault_is_sticky_and_hurts_nobody_else(
    backend: Callable[..., Any],
    run_client: Callable[..., Any],
    start_client: Callable[..., subprocess.Popen[str]],
) -> None:
    served = backend(extra=["--isolation", "process"])
    other = start_client(CLIENT, served)
    assert other.stdin is not None
    assert other.stdout is not None

    def counted(times: int) -> str:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(f"{times}\n")
        other.stdin.flush()
        return other.stdout.readline()

    assert counted(5) == "5\n"
    done = run_client(FAULTY, served)
    assert done.returncode == 0, done.stderr + served.log
    assert done.stdout.splitlines() == ["700 700 700 700 700", "700", "6"], done.stdout
    assert counted(7) == "12\n"


def test_a_fault_under_shared_ends_all_sessions_of_its_worker_and_no_later_ones(
    backend: Callable[..., Any],
    run_client: Callable[..., Any],
    start_client: Callable[..., subprocess.Popen[str]],
) -> None:
    served = backend()
    other = start_client(BYSTANDER, served)

    def said(line: str) -> str:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(line + "\n")
        other.stdin.flush()
        return other.stdout.readline().strip()

    assert said("") == "0 0"
    done = run_client(FAULTY, served)
    assert done.returncode == 0, done.stderr + served.log
    assert done.stdout.splitlines() == ["700 700 700 700 700", "700", "6"], done.stdout
    assert said("").endswith(" 700")  # a post may be back before the error of others is known
    assert said("") == "700 700"
    assert said("connect") == "6 True"


def test_numba_runs_unmodified(
    numba_compiles: None,
    one_backend: Any,
    run_client: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    example = Path(__file__).parents[2] / "examples" / "vector_add.py"
    code = (
        "import runpy, warnings; warnings.simplefilter('ignore'); import flyt.numba;"
        f"flyt.numba.install(); runpy.run_path({str(example)!r}, run_name='__main__')"
    )
    done = run_client(code, one_backend, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("right")


def test_new_memory_is_clear_for_a_kernel_on_another_stream(module: flyt.RawModule) -> None:
    """cudaMallocAsync clears on one stream; a launch on another must not write before that."""
    other = flyt.Stream(non_blocking=True)
    size = 256 << 20
    for _ in range(5):
        error, address = flyt.cudaMallocAsync(size, 0)
        assert not error, flyt.last_failure()
        x, last = flyt.to_device(np.ones(1, np.float32)), address + size - 4
        module.get_function("saxpy")(1, 1, (np.float32(1), x, last, 1), stream=other)
        other.sync()
        host = np.zeros(1, np.float32)
        assert not flyt.cudaMemcpy(host, last, 4, flyt.cudaMemcpyKind(2))[0]
        assert host[0] == 1
        assert not flyt.cudaFreeAsync(address, 0)[0]


PRINTING = r"""
import sys
import numpy as np
import flyt, flyt as cudart
source = 'extern "C" __global__ void hop(int n) { printf("hop %d\\n", n); }'
kernel = flyt.RawKernel(source, "hop")
host = np.zeros(1, np.int32)
stream, array = flyt.Stream(), flyt.to_device(host)
to_host = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
CALLS = {
    "device": lambda: cudart.cudaDeviceSynchronize(),
    "stream": lambda: cudart.cudaStreamSynchronize(int(stream)),
    "event": lambda: cudart.cudaEventSynchronize(int(event)),
    "copy": lambda: cudart.cudaMemcpy(host, array.ptr, host.nbytes, to_host),
}
for n, call in enumerate(sys.argv[1:]):
    kernel(1, 1, (np.int32(n),), stream=None if call == "copy" else stream)
    event = stream.record()
    assert not CALLS[call]()[0]
    print("after", n, flush=True)
"""


def test_what_kernels_print_comes_out_at_calls_that_synchronise(
    backend: Callable[..., Any], run_client: Callable[..., Any]
) -> None:
    served = backend(extra=["--isolation", "process"])
    calls = ("device", "stream", "event", "copy")
    done = run_client(PRINTING, served, *calls)
    assert done.returncode == 0, done.stderr + served.log
    lines = [line for n in range(len(calls)) for line in (f"hop {n}", f"after {n}")]
    assert done.stdout.splitlines() == lines
