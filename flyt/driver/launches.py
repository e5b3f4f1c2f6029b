# SPDX-License-Identifier: Apache-2.0
"""Launches and occupancy."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from cuda.bindings.driver import CUlaunchAttributeID

from flyt.driver.contexts import in_context
from flyt.driver.convention import INVALID_VALUE, NOT_SUPPORTED, Answer, driver
from flyt.driver.modules import function_of
from flyt.errors import DeviceError
from flyt.frontend import params
from flyt.frontend.api.handles import stream_of
from flyt.frontend.current import thread
from flyt.frontend.hostmem import pointer
from flyt.frontend.kernels import Function, LaunchAttribute
from flyt.frontend.plain_kernel import MAX_THREADS_PER_BLOCK, Three

_IDS = CUlaunchAttributeID
COOPERATIVE: LaunchAttribute = (int(_IDS.CU_LAUNCH_ATTRIBUTE_COOPERATIVE), 1, 0, 0)

_PASSED: dict[int, Callable[[Any], tuple[int, int, int]]] = {
    int(_IDS.CU_LAUNCH_ATTRIBUTE_COOPERATIVE): lambda value: (value.cooperative, 0, 0),
    int(_IDS.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION): lambda value: (
        value.clusterDim.x,
        value.clusterDim.y,
        value.clusterDim.z,
    ),
}
"""Launch attributes that are passed on, and what of their values."""

_IGNORED = int(_IDS.CU_LAUNCH_ATTRIBUTE_IGNORE)


_SHAPE = struct.Struct("7I")


def _unsigned(*values: int) -> tuple[int, ...]:
    """Seven C ``unsigned int``; this way costs a third of looking at each."""
    try:
        return _SHAPE.unpack(_SHAPE.pack(*values))
    except struct.error as exc:
        raise OverflowError(f"can't convert to unsigned int: {exc}") from None


def _packed(function: Function, kernelParams: Any, extra: Any) -> bytes:
    facts = function.facts
    if extra:
        return params.from_extra(int(extra), facts)
    if kernelParams is None or isinstance(kernelParams, int):
        return params.from_pointers(kernelParams or 0, facts)
    if isinstance(kernelParams, (tuple, list)):
        if len(kernelParams) != 2:
            raise TypeError("kernelParams as a tuple is a pair: values, ctypes")
        values, types = kernelParams
        if not isinstance(values, (tuple, list)):
            values, types = (values,), (types,)
        return params.pack(params.from_typed(values, types), facts)
    return params.from_pointers(pointer(kernelParams).address, facts)  # an array of pointers


def _launch(
    f: Any,
    grid: Three,
    block: Three,
    shared: int,
    hStream: Any,
    kernelParams: Any,
    extra: Any,
    attributes: tuple[LaunchAttribute, ...],
) -> Answer:
    session = in_context()
    session.connection.raise_deferred()
    function = function_of(f, thread.device)
    data = _packed(function, kernelParams, extra)
    stream = stream_of(session, hStream)
    session.kernels.launch(function, grid, block, shared, stream, data, attributes)
    return ()


@driver
def cuLaunchKernel(
    f: Any,
    gridDimX: int,
    gridDimY: int,
    gridDimZ: int,
    blockDimX: int,
    blockDimY: int,
    blockDimZ: int,
    sharedMemBytes: int,
    hStream: Any,
    kernelParams: Any,
    extra: Any,
) -> Answer:
    """Launch a function.

    Parameters
    ----------
    kernelParams : int, None, or pair of tuples
        The address of C's ``void *[]``, or values and their ctypes.
    extra : int
        The address of C's ``extra``, or 0.
    """
    x, y, z, i, j, k, shared = _unsigned(
        gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes
    )
    return _launch(f, (x, y, z), (i, j, k), shared, hStream, kernelParams, extra, ())


@driver
def cuLaunchCooperativeKernel(
    f: Any,
    gridDimX: int,
    gridDimY: int,
    gridDimZ: int,
    blockDimX: int,
    blockDimY: int,
    blockDimZ: int,
    sharedMemBytes: int,
    hStream: Any,
    kernelParams: Any,
) -> Answer:
    """Launch a function whose blocks wait for each other."""
    x, y, z, i, j, k, shared = _unsigned(
        gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes
    )
    attributes = (COOPERATIVE,)
    return _launch(f, (x, y, z), (i, j, k), shared, hStream, kernelParams, 0, attributes)


@driver
def cuLaunchKernelEx(config: Any, f: Any, kernelParams: Any, extra: Any) -> Answer:
    """Launch a function with attributes: cooperative launches and clusters."""
    if config is None:
        raise DeviceError(INVALID_VALUE, "no launch configuration")
    attributes = []
    for attribute in list(config.attrs or ())[: config.numAttrs]:
        kind = int(attribute.id)
        if kind == _IGNORED:
            continue
        read = _PASSED.get(kind)
        if read is None:
            raise DeviceError(NOT_SUPPORTED, f"Flyt passes no launch attribute {attribute.id!r}")
        attributes.append((kind, *read(attribute.value)))
    return _launch(
        f,
        (config.gridDimX, config.gridDimY, config.gridDimZ),
        (config.blockDimX, config.blockDimY, config.blockDimZ),
        config.sharedMemBytes,
        config.hStream,
        kernelParams,
        extra,
        tuple(attributes),
    )


# --- occupancy ---


@driver
def cuOccupancyMaxActiveBlocksPerMultiprocessor(
    func: Any, blockSize: int, dynamicSMemSize: int
) -> Answer:
    """Blocks of a function that one multiprocessor holds."""
    return (in_context().kernels.occupancy(function_of(func), blockSize, dynamicSMemSize),)


@driver
def cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    func: Any, blockSize: int, dynamicSMemSize: int, flags: int
) -> Answer:
    """`cuOccupancyMaxActiveBlocksPerMultiprocessor` with flags."""
    return (in_context().kernels.occupancy(function_of(func), blockSize, dynamicSMemSize, flags),)


def _best_block(func: Any, shared_of: Any, shared: int, limit: int, flags: int) -> Answer:
    """The block size that keeps most threads of a multiprocessor busy, and the grid that fills the
    device with it: the larger of equals, as CUDA's own calculator has it."""
    session = in_context()
    if shared_of is not None and int(shared_of):
        raise DeviceError(NOT_SUPPORTED, "a C function for the shared memory can't be called here")
    function = function_of(func)
    known = session.devices[function.device]["attributes"]
    most = function.facts.attributes.get(MAX_THREADS_PER_BLOCK, 0)
    largest = min(limit, most) if limit else most
    warp = known["WarpSize"]
    best = (0, 0, 0)
    size = -(-largest // warp) * warp
    while size > 0:
        block = min(size, largest)
        blocks = session.kernels.occupancy(function, block, shared, flags)
        if blocks * block > best[0]:
            best = (blocks * block, blocks, block)
        size -= warp
    return best[1] * known["MultiProcessorCount"], best[2]


@driver
def cuOccupancyMaxPotentialBlockSize(
    func: Any, blockSizeToDynamicSMemSize: Any, dynamicSMemSize: int, blockSizeLimit: int
) -> Answer:
    """A grid and a block size that fill the device."""
    return _best_block(func, blockSizeToDynamicSMemSize, dynamicSMemSize, blockSizeLimit, 0)


@driver
def cuOccupancyMaxPotentialBlockSizeWithFlags(
    func: Any,
    blockSizeToDynamicSMemSize: Any,
    dynamicSMemSize: int,
    blockSizeLimit: int,
    flags: int,
) -> Answer:
    """`cuOccupancyMaxPotentialBlockSize` with flags."""
    return _best_block(func, blockSizeToDynamicSMemSize, dynamicSMemSize, blockSizeLimit, flags)
