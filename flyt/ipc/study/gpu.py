# SPDX-License-Identifier: Apache-2.0
"""`Gpu`: one device for an experiment's kernels: its context, memory, streams, times.

A process of the study has one, on one thread; what it allocates the process's end gives back.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from typing import Any

from cuda.bindings import driver as cu

from flyt.errors import ConfigurationError, DeviceError
from flyt.ipc.cuda_driver import _call as call

HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE."""

NVRTC_MISSING = "kernels need NVRTC: pip install nvidia-cuda-nvrtc"

LAZY_LOADING = "CUDA_MODULE_LOADING"
"""Environment variable of the driver. A kernel that is loaded at its first launch may wait for
kernels that run, and one of ours may run until the other has begun."""

HEAD_START = 300_000
HEAD_START_EACH = 20_000
"""Nanoseconds that the GPU waits so that all launches are queued before the first one runs: Python
launches more slowly than small kernels run."""

WAIT = r"""
extern "C" __global__ void wait_ns(unsigned long long ns)
{
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - start < ns);
}
"""


def compile_kernels(source: str, architecture: str) -> bytes:
    """CUDA C to a cubin, which an older driver loads too; without headers.

    Raises
    ------
    ConfigurationError
        There is no NVRTC, or it refuses the source.
    """
    from cuda.bindings import nvrtc

    try:
        _nvrtc(nvrtc.nvrtcVersion)  # loads the library
    except (RuntimeError, OSError) as exc:
        raise ConfigurationError(f"{NVRTC_MISSING} ({exc})") from exc
    program = _nvrtc(nvrtc.nvrtcCreateProgram, source.encode(), b"study.cu", 0, [], [])
    options = [b"--gpu-architecture=" + architecture.encode(), b"--std=c++17"]
    code = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    if int(code):
        log = b" " * _nvrtc(nvrtc.nvrtcGetProgramLogSize, program)
        _nvrtc(nvrtc.nvrtcGetProgramLog, program, log)
        raise ConfigurationError(f"NVRTC: {code.name}: {log.decode(errors='replace')[:2000]}")
    cubin: bytes = b" " * _nvrtc(nvrtc.nvrtcGetCUBINSize, program)
    _nvrtc(nvrtc.nvrtcGetCUBIN, program, cubin)
    return cubin


def _nvrtc(function: Callable[..., Any], *arguments: Any) -> Any:
    code, *values = function(*arguments)
    if int(code):
        raise ConfigurationError(f"{function.__name__}: {code.name}")
    return values[0] if len(values) == 1 else tuple(values)


class Gpu:
    """A device, its primary context current in this thread.

    Parameters
    ----------
    source : str
        CUDA C with the kernels that will be launched; "" for none.
    device : int
        Ordinal in this process.
    """

    def __init__(self, source: str = "", device: int = 0) -> None:
        os.environ[LAZY_LOADING] = "EAGER"
        call(cu.cuInit, 0)
        self._device = call(cu.cuDeviceGet, device)
        call(cu.cuCtxSetCurrent, call(cu.cuDevicePrimaryCtxRetain, self._device))
        self.processors = self.attribute("MULTIPROCESSOR_COUNT")
        self._functions: dict[str, Any] = {}
        self._module: Any = None
        self._image = b""
        if source:
            major, minor = (
                self.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR")
            )
            self._image = compile_kernels(WAIT + source, f"sm_{major}{minor}")
            self._module = call(cu.cuModuleLoadData, self._image)

    def attribute(self, name: str) -> int:
        """``CU_DEVICE_ATTRIBUTE_...``"""
        which = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call(cu.cuDeviceGetAttribute, which, self._device))

    def used_memory(self) -> int:
        """Bytes in use on the device, by everybody."""
        free, total = call(cu.cuMemGetInfo)
        return int(total) - int(free)

    def free_memory(self) -> int:
        return int(call(cu.cuMemGetInfo)[0])

    def allocate(self, size: int) -> int:
        return int(call(cu.cuMemAlloc, size))

    def free(self, address: int) -> None:
        call(cu.cuMemFree, cu.CUdeviceptr(address))

    def fill(self, address: int, octet: int, size: int) -> None:
        """Set bytes, and wait for that."""
        call(cu.cuMemsetD8, cu.CUdeviceptr(address), octet, size)
        self.synchronize()

    def read(self, address: int, size: int) -> bytes:
        target = ctypes.create_string_buffer(size)
        call(cu.cuMemcpyDtoH, ctypes.addressof(target), cu.CUdeviceptr(address), size)
        return target.raw

    def words(self, address: int, count: int) -> tuple[int, ...]:
        """Unsigned 64-bit words of the device."""
        return tuple(memoryview(self.read(address, 8 * count)).cast("Q"))

    def synchronize(self) -> None:
        call(cu.cuCtxSynchronize)

    def stream(self) -> Any:
        """A stream that waits for no other."""
        return call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value)

    def launch(
        self, name: str, grid: int, block: int, arguments: Iterable[int], stream: Any = 0
    ) -> None:
        """Launch a kernel all of whose parameters are 64 bits wide."""
        if name not in self._functions:
            self._functions[name] = call(cu.cuModuleGetFunction, self._module, name.encode())
        values = tuple(arguments)
        parameters = (values, (ctypes.c_uint64,) * len(values))
        call(
            cu.cuLaunchKernel,
            self._functions[name], grid, 1, 1, block, 1, 1, 0, stream, parameters, 0,
        )  # fmt: skip

    def timed(self, launch: Callable[[Any], None], count: int, stream: Any) -> float:
        """Microseconds of one of ``count`` launches in a row, by events of this process."""
        default = cu.CUevent_flags.CU_EVENT_DEFAULT.value
        start, end = call(cu.cuEventCreate, default), call(cu.cuEventCreate, default)
        try:
            self.launch("wait_ns", 1, 1, (HEAD_START + HEAD_START_EACH * count,), stream)
            call(cu.cuEventRecord, start, stream)
            for _ in range(count):
                launch(stream)
            call(cu.cuEventRecord, end, stream)
            call(cu.cuStreamSynchronize, stream)
            return float(call(cu.cuEventElapsedTime, start, end)) * 1e3 / count
        finally:
            for event in (start, end):
                call(cu.cuEventDestroy, event)


def export_legacy(address: int) -> bytes:
    """cuIpcGetMemHandle, which cudaIpcGetMemHandle calls."""
    handle = call(cu.cuIpcGetMemHandle, cu.CUdeviceptr(address))
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def open_legacy(octets: bytes) -> int:
    """The address of another process's memory."""
    if len(octets) != HANDLE_BYTES:
        raise DeviceError(1, f"a handle has {HANDLE_BYTES} bytes, not {len(octets)}")
    handle = cu.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), octets, HANDLE_BYTES)
    lazily = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
    return int(call(cu.cuIpcOpenMemHandle, handle, lazily))


def close_legacy(address: int) -> None:
    call(cu.cuIpcCloseMemHandle, cu.CUdeviceptr(address))
