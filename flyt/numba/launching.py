# SPDX-License-Identifier: Apache-2.0
"""Launches as numba-cuda makes them: cuda.core's ``launch`` and ``LaunchConfig``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from flyt import driver
from flyt.driver.contexts import in_context
from flyt.driver.convention import result_of
from flyt.driver.launches import COOPERATIVE
from flyt.driver.modules import function_of
from flyt.errors import DeviceError
from flyt.frontend import params
from flyt.frontend.api.handles import stream_of
from flyt.frontend.current import thread
from flyt.numba.objects import Buffer, CUDAError

Extent = int | Sequence[int] | None

_CLUSTER = int(driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)


class LaunchConfig:
    """Grid, block and what else a launch has; ``cooperative_launch`` is the name of
    ``is_cooperative`` before cuda.core 1.0."""

    def __init__(
        self,
        grid: Extent = None,
        cluster: Extent = None,
        block: Extent = None,
        shmem_size: int | None = None,
        is_cooperative: bool = False,
        programmatic_stream_serialization: bool = False,
        cooperative_launch: bool = False,
    ) -> None:
        if grid is None or block is None:
            raise ValueError("a launch wants a grid and a block")
        if programmatic_stream_serialization:
            raise NotImplementedError("Flyt passes no programmatic stream serialization")
        self.grid, self.block = _three(grid), _three(block)
        self.cluster = None if cluster is None else _three(cluster)
        self.shmem_size = shmem_size or 0
        self.is_cooperative = bool(is_cooperative or cooperative_launch)


def _three(extent: Extent) -> tuple[int, int, int]:
    given = (extent,) if isinstance(extent, int) else tuple(extent or ())
    if not 1 <= len(given) <= 3:
        raise ValueError(f"{extent!r} is no extent of one to three dimensions")
    x, y, z = (*(int(n) for n in given), 1, 1)[:3]
    return x, y, z


def launch(stream: Any, config: LaunchConfig, kernel: Any, *kernel_args: Any) -> None:
    """Launch a kernel with cuda.core's idea of arguments: an int is a pointer's size."""
    handle = stream.__cuda_stream__()[1] if hasattr(stream, "__cuda_stream__") else stream
    attributes: tuple[tuple[int, int, int, int], ...] = ()
    if config.is_cooperative:
        attributes += (COOPERATIVE,)
    if config.cluster is not None:
        attributes += ((_CLUSTER, *config.cluster),)
    try:
        session = in_context()
        session.connection.raise_deferred()
        function = function_of(kernel.handle, thread.device)
        data = params.pack([_argument(one) for one in kernel_args], function.facts)
        session.kernels.launch(
            function,
            config.grid,
            config.block,
            config.shmem_size,
            stream_of(session, handle),
            data,
            attributes,
        )
    except DeviceError as exc:
        raise CUDAError(f"{result_of(exc.code).name}: {exc.detail}") from exc


def _argument(value: Any) -> bytes:
    if isinstance(value, (bool, np.bool_)):
        return bytes([bool(value)])
    if isinstance(value, int):
        return (value % (1 << 64)).to_bytes(8, "little")
    if isinstance(value, float):
        return bytes(ctypes.c_double(value))
    if isinstance(value, complex):
        return np.complex128(value).tobytes()
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, Buffer):
        return int(value.handle).to_bytes(8, "little")
    if isinstance(value, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)):  # noqa: SLF001
        return bytes(value)
    if hasattr(value, "getPtr"):
        return ctypes.string_at(value.getPtr(), 8)
    raise TypeError(f"the argument is of unsupported type: {type(value)}")
