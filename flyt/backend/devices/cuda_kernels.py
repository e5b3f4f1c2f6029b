# SPDX-License-Identifier: Apache-2.0
"""`CudaKernels`: code on a real GPU, through ``cuda.bindings.driver``.

The contexts are the primary ones that CuPy's runtime holds: a thread makes them current as every
other method of `flyt.backend.devices.cupy.CupyDevice` does.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver

from flyt.backend.devices.cupy_calls import cuda
from flyt.backend.devices.kernels import Handle, Kernels, Shape
from flyt.errors import DeviceError
from flyt.rpc.kernel_commands import CACHE_CONFIG, MAX_PARAMETERS, FunctionFacts

INVALID_VALUE = 1
NOT_SUPPORTED = 801

JIT_LOG_BYTES = 4000
"""Of the driver's words about an image: what fits into an answer's text."""


def _took(answer: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call; its error raised."""
    code = int(answer[0])
    if code:
        raise DeviceError(code, f"{what}: {answer[0].name}")
    return answer[1] if len(answer) == 2 else answer[1:]


class CudaKernels(Kernels):
    """Modules and functions of one GPU.

    Parameters
    ----------
    runtime : module
        ``cupy.cuda.runtime``.
    ordinal : int
    """

    def __init__(self, runtime: Any, ordinal: int) -> None:
        self.runtime = runtime
        self.ordinal = ordinal
        self._architecture = ""

    def architecture(self) -> str:
        if not self._architecture:
            self._architecture = self._ask_architecture()
        return self._architecture

    @cuda
    def _ask_architecture(self) -> str:
        known = self.runtime.getDeviceProperties(self.ordinal)
        return f"sm_{known['major']}{known['minor']}"

    @cuda
    def load(self, image: bytes) -> Handle:
        data = ctypes.create_string_buffer(image)  # with a zero byte, which ends PTX
        log = bytearray(JIT_LOG_BYTES)
        options = driver.CUjit_option
        answer = driver.cuModuleLoadDataEx(
            ctypes.addressof(data),
            2,
            [options.CU_JIT_ERROR_LOG_BUFFER, options.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES],
            [log, len(log)],
        )
        words = bytes(log).split(b"\0", 1)[0].decode(errors="replace").strip()
        return _took(answer, f"loading a module{': ' + words if words else ''}")

    @cuda
    def unload(self, module: Handle) -> None:
        _took(driver.cuModuleUnload(module), "unloading a module")

    @cuda
    def function(self, module: Handle, name: str) -> Handle:
        return _took(driver.cuModuleGetFunction(module, name.encode()), f"function {name!r}")

    @cuda
    def facts(self, function: Handle) -> FunctionFacts:
        attributes = {}
        for one in driver.CUfunction_attribute:
            code, value = driver.cuFuncGetAttribute(one, function)
            if not int(code):  # else it is newer than the driver, or only the end of the enum
                attributes[int(one)] = int(value)
        params: list[tuple[int, int]] = []
        while len(params) < MAX_PARAMETERS:
            code, offset, size = driver.cuFuncGetParamInfo(function, len(params))
            if int(code) == INVALID_VALUE:  # there are no more
                break
            _took((code, offset, size), "the layout of a kernel's parameters")
            params.append((int(offset), int(size)))
        return FunctionFacts(attributes, tuple(params))

    @cuda
    def set_attribute(self, function: Handle, attribute: int, value: int) -> None:
        try:
            if attribute == CACHE_CONFIG:
                answer = driver.cuFuncSetCacheConfig(function, driver.CUfunc_cache(value))
            else:
                answer = driver.cuFuncSetAttribute(
                    function, driver.CUfunction_attribute(attribute), value
                )
        except ValueError as exc:
            raise DeviceError(INVALID_VALUE, f"no attribute of a function: {exc}") from exc
        _took(answer, f"setting attribute {attribute} of a function to {value}")

    @cuda
    def variable(self, module: Handle, name: str) -> tuple[int, int]:
        address, size = _took(driver.cuModuleGetGlobal(module, name.encode()), f"variable {name!r}")
        return int(address), int(size)

    @cuda
    def occupancy(self, function: Handle, block: int, shared: int, flags: int) -> int:
        answer = driver.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
            function, block, shared, flags
        )
        return int(_took(answer, "the occupancy of a function"))

    @cuda
    def flush(self, event: Any) -> None:
        self.runtime.eventSynchronize(event)

    @cuda
    def launch(self, function: Handle, shape: Shape, stream: Any, params: int) -> None:
        if shape.attributes:
            answer = driver.cuLaunchKernelEx(_config(shape, stream), function, params, 0)
        else:
            answer = driver.cuLaunchKernel(
                function, *shape.grid, *shape.block, shape.shared, stream, params, 0
            )
        if answer[0]:
            raise DeviceError(int(answer[0]), f"launching a kernel: {answer[0].name}")


def _config(shape: Shape, stream: Any) -> Any:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.block
    config.sharedMemBytes = shape.shared
    config.hStream = driver.CUstream(stream)
    config.attrs = [_attribute(kind, values) for kind, values in shape.attributes]
    config.numAttrs = len(shape.attributes)
    return config


def _attribute(kind: int, values: tuple[int, int, int]) -> Any:
    """One launch attribute; only those that reach no memory of the host's."""
    ids = driver.CUlaunchAttributeID
    attribute = driver.CUlaunchAttribute()
    value = driver.CUlaunchAttributeValue()
    if kind == ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        value.cooperative = values[0]
    elif kind == ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = values
    elif kind == ids.CU_LAUNCH_ATTRIBUTE_PRIORITY:
        value.priority = values[0]
    else:
        raise DeviceError(NOT_SUPPORTED, f"Flyt passes no launch attribute {kind}")
    attribute.id = ids(kind)
    attribute.value = value
    return attribute
