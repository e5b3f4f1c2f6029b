# SPDX-License-Identifier: Apache-2.0
"""What the driver API answers in corner cases: ``driver_facts.py MODULE`` prints a JSON object.

MODULE is ``cuda.bindings.driver`` (on a GPU) or ``flyt.driver``. The same program for both, so that
what Flyt answers can be held against CUDA itself. With ``--no-kernels`` only what needs none.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from typing import Any

PTX = """
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .u32 variable = 7;
.visible .entry store(.param .u64 p, .param .u32 v)
{
    .reg .u64 %rd<3>;
    .reg .u32 %r<2>;
    ld.param.u64 %rd1, [p];
    ld.param.u32 %r1, [v];
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u32 [%rd2], %r1;
    ret;
}
.visible .entry small(.param .u8 a, .param .u64 b, .param .u16 c)
{
    ret;
}
.visible .entry empty()
{
    ret;
}
.visible .entry fault()
{
    .reg .u64 %rd<2>;
    .reg .u32 %r<2>;
    mov.u64 %rd1, 16;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace").split("\0")[0]
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (bool, float, str)):
        return value
    return int(value)


class Facts:
    def __init__(self, module: str) -> None:
        self.d = importlib.import_module(module)
        self.told: dict[str, Any] = {}

    def note(self, name: str, answer: tuple[Any, ...], *, values: bool = True) -> Any:
        """The code, and the values if they are comparable; returns the value."""
        told = [answer[0].name]
        if values and not int(answer[0]):
            told += [_plain(one) for one in answer[1:]]
        self.told[name] = told
        return answer[1] if len(answer) > 1 else None

    def memory(self) -> None:
        d, note = self.d, self.note
        note("before_init", d.cuDeviceGetCount())
        note("init_flags", d.cuInit(1))
        note("init", d.cuInit(0))
        note("device_7777", d.cuDeviceGet(7777))
        note("device_minus_1", d.cuDeviceGet(-1))
        device = note("device_0", d.cuDeviceGet(0))
        note("no_context_current", d.cuCtxGetCurrent())
        note("no_context_device", d.cuCtxGetDevice())
        note("no_context_alloc", d.cuMemAlloc(16))
        note("no_context_pop", d.cuCtxPopCurrent())
        note("no_context_sync", d.cuCtxSynchronize())
        context = note("retain", d.cuDevicePrimaryCtxRetain(device), values=False)
        note("push", d.cuCtxPushCurrent(context))
        note("context_device", d.cuCtxGetDevice())
        self.told["context_is_primary"] = int(d.cuCtxGetCurrent()[1]) == int(context)
        note("push_again", d.cuCtxPushCurrent(context))
        note("pop", d.cuCtxPopCurrent(), values=False)
        self.told["context_after_pop"] = int(d.cuCtxGetCurrent()[1]) == int(context)
        note("state", d.cuDevicePrimaryCtxGetState(device))
        note("alloc_0", d.cuMemAlloc(0))
        note("free_0", d.cuMemFree(0))
        block = note("alloc", d.cuMemAlloc(4096), values=False)
        base = int(block)
        note("free_interior", d.cuMemFree(base + 256))
        found = d.cuMemGetAddressRange(base + 100)
        self.told["range"] = [found[0].name, int(found[1]) - base, int(found[2])]
        note("range_unknown", d.cuMemGetAddressRange(0x1234_5678))
        for width, count in ((8, 4096), (16, 2048), (32, 1024)):
            fill = getattr(d, f"cuMemsetD{width}")
            note(f"memset_{width}", fill(block, 0x8182_8384 % (1 << width), count))
        out = (ctypes.c_uint32 * 1024)()
        note("d2h", d.cuMemcpyDtoH(ctypes.addressof(out), block, 4096))
        self.told["filled"] = [out[0], out[1023]]
        note("memset_32_unaligned", d.cuMemsetD32(base + 2, 0x0102_0304, 1))
        note("memset_16_unaligned", d.cuMemsetD16(base + 1, 0x0102, 1))
        note("h2d_0_bytes", d.cuMemcpyHtoD(block, ctypes.addressof(out), 0))
        kinds = d.CUpointer_attribute
        for name in ("MEMORY_TYPE", "IS_MANAGED", "DEVICE_ORDINAL", "RANGE_SIZE", "MAPPED"):
            kind = getattr(kinds, f"CU_POINTER_ATTRIBUTE_{name}")
            note(f"pointer_{name}", d.cuPointerGetAttribute(kind, block))
            note(f"pageable_{name}", d.cuPointerGetAttribute(kind, ctypes.addressof(out)))
        note("host_alloc_0", d.cuMemHostAlloc(0, 0))
        host = note("host_alloc", d.cuMemHostAlloc(4096, 0), values=False)
        self.told["host_is_device"] = int(d.cuMemHostGetDevicePointer(host, 0)[1]) == int(host)
        note("host_free", d.cuMemFreeHost(host))
        note("free", d.cuMemFree(block))
        note("free_twice", d.cuMemFree(block))
        note("stream_bad_flags", d.cuStreamCreate(77))
        stream = note("stream", d.cuStreamCreate(0), values=False)
        note("stream_query", d.cuStreamQuery(stream))
        event = note("event", d.cuEventCreate(0), values=False)
        note("event_query", d.cuEventQuery(event))
        note("elapsed_unrecorded", d.cuEventElapsedTime(event, event))
        note("record", d.cuEventRecord(event, stream))
        note("event_sync", d.cuEventSynchronize(event))
        note("stream_destroy", d.cuStreamDestroy(stream))
        note("event_destroy", d.cuEventDestroy(event))
        note("error_name", d.cuGetErrorName(d.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS))

    def code(self) -> None:
        d, note = self.d, self.note
        note("image_garbage", d.cuModuleLoadData(b"no image at all, and long enough to be read"))
        note("image_bad_ptx", d.cuModuleLoadData(PTX.replace("ret;", "rot;").encode()))
        module = note("load", d.cuModuleLoadData(PTX.encode()), values=False)
        note("function_missing", d.cuModuleGetFunction(module, b"nobody"))
        note("variable_missing", d.cuModuleGetGlobal(module, b"nobody"))
        store = note("function", d.cuModuleGetFunction(module, b"store"), values=False)
        small = d.cuModuleGetFunction(module, b"small")[1]
        empty = d.cuModuleGetFunction(module, b"empty")[1]
        for n in range(4):
            note(f"param_{n}", d.cuFuncGetParamInfo(small, n))
        note("param_of_none", d.cuFuncGetParamInfo(empty, 0))
        attributes = d.CUfunction_attribute
        for name in ("MAX_THREADS_PER_BLOCK", "SHARED_SIZE_BYTES", "NUM_REGS", "PTX_VERSION"):
            kind = getattr(attributes, f"CU_FUNC_ATTRIBUTE_{name}")
            note(f"attribute_{name}", d.cuFuncGetAttribute(kind, store))
        shared = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        note("set_shared", d.cuFuncSetAttribute(empty, shared, 64 << 10))
        note("set_shared_too_much", d.cuFuncSetAttribute(empty, shared, 1 << 30))
        note("set_read_only", d.cuFuncSetAttribute(empty, attributes(0), 8))
        note("cache_config", d.cuFuncSetCacheConfig(empty, d.CUfunc_cache(1)))
        for block in (32, 1024):
            name = f"occupancy_{block}"
            note(name, d.cuOccupancyMaxActiveBlocksPerMultiprocessor(empty, block, 0))
        note("occupancy_0", d.cuOccupancyMaxActiveBlocksPerMultiprocessor(empty, 0, 0))
        note("occupancy_2048", d.cuOccupancyMaxActiveBlocksPerMultiprocessor(empty, 2048, 0))
        note("best_block", d.cuOccupancyMaxPotentialBlockSize(empty, None, 0, 0))
        note("best_block_128", d.cuOccupancyMaxPotentialBlockSize(empty, None, 0, 128))
        address, size = d.cuModuleGetGlobal(module, b"variable")[1:]
        out = (ctypes.c_uint32 * 1)()
        note("variable_read", d.cuMemcpyDtoH(ctypes.addressof(out), address, 4))
        self.told["variable"] = [size, out[0]]
        note("variable_free", d.cuMemFree(address))
        types = ctypes.c_void_p, ctypes.c_uint32
        values = ((int(address), 4711), types)
        note("launch", d.cuLaunchKernel(store, 1, 1, 1, 1, 1, 1, 0, 0, values, 0))
        note("sync", d.cuCtxSynchronize())
        d.cuMemcpyDtoH(ctypes.addressof(out), address, 4)
        self.told["variable_after"] = out[0]
        self._launches(empty)
        note("unload", d.cuModuleUnload(module))

    def _launches(self, empty: Any) -> None:
        d, note = self.d, self.note
        shapes = {
            "grid_0": (0, 1, 1, 1, 1, 1, 0),
            "block_0": (1, 1, 1, 0, 1, 1, 0),
            "grid_y_65536": (1, 65_536, 1, 1, 1, 1, 0),
            "grid_z_65535": (1, 1, 65_535, 1, 1, 1, 0),
            "grid_x_beyond": (1 << 31, 1, 1, 1, 1, 1, 0),
            "block_1025": (1, 1, 1, 1025, 1, 1, 0),
            "block_z_65": (1, 1, 1, 1, 1, 65, 0),
            "block_32_32_2": (1, 1, 1, 32, 32, 2, 0),
            "shared_64k": (1, 1, 1, 1, 1, 1, 64 << 10),
            "shared_too_much": (1, 1, 1, 1, 1, 1, 1 << 20),
        }
        for name, (*shape, shared) in shapes.items():
            note(f"launch_{name}", d.cuLaunchKernel(empty, *shape, shared, 0, 0, 0))
        cooperative = d.cuLaunchCooperativeKernel
        note("cooperative", cooperative(empty, 1, 1, 1, 32, 1, 1, 0, 0, 0))
        note("cooperative_too_large", cooperative(empty, 1 << 20, 1, 1, 1024, 1, 1, 0, 0, 0))
        for name, size in (("cluster_2", 2), ("cluster_3", 3), ("cluster_64", 64)):
            note(name, d.cuLaunchKernelEx(self._clustered(size), empty, 0, 0))
        note("sync_after", d.cuCtxSynchronize())

    def _clustered(self, size: int) -> Any:
        d = self.d
        config = d.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = 64, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
        value = d.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = size, 1, 1
        attribute = d.CUlaunchAttribute()
        attribute.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value = value
        config.attrs, config.numAttrs = [attribute], 1
        return config

    def fault(self) -> None:
        """The last: the context is gone after it."""
        d, note = self.d, self.note
        module = d.cuModuleLoadData(PTX.encode())[1]
        function = d.cuModuleGetFunction(module, b"fault")[1]
        note("fault_launch", d.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
        note("fault_sync", d.cuCtxSynchronize())
        note("fault_alloc", d.cuMemAlloc(16))
        note("fault_launch_again", d.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))


def main() -> None:
    facts = Facts(sys.argv[1])
    facts.memory()
    if "--no-kernels" not in sys.argv:
        facts.code()
        facts.fault()
    sys.stdout.write(json.dumps(facts.told))


if __name__ == "__main__":
    main()
