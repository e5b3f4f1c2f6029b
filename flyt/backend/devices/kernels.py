# SPDX-License-Identifier: Apache-2.0
"""`Kernels`: what a device does with code; as it stands here, nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from flyt.errors import DeviceError
from flyt.rpc.kernel_commands import FunctionFacts

NOT_SUPPORTED = 801

Handle = Any
"""An opaque module or function; what it is only the device knows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How a kernel is launched.

    Attributes
    ----------
    attributes : tuple of (id, values)
        CUlaunchAttributeID and three numbers, of which the attribute uses what it needs.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    attributes: tuple[tuple[int, tuple[int, int, int]], ...] = ()


class Kernels:
    """Modules and functions of one device; a device that runs no kernels refuses everything.

    Every method may be called from any thread and raises `flyt.errors.DeviceError` with CUDA's
    code. All but `launch` may take long: the driver compiles PTX, and waits for the context's work.
    """

    def _refuse(self) -> DeviceError:
        return DeviceError(
            NOT_SUPPORTED, "the emulated device runs no kernels; the backend needs a GPU for them"
        )

    def architecture(self) -> str:
        """What NVRTC calls it: ``sm_90``."""
        raise self._refuse()

    def load(self, image: bytes) -> Handle:
        """A module from a checked image (`flyt.backend.images`)."""
        raise self._refuse()

    def unload(self, module: Handle) -> None:
        raise self._refuse()

    def function(self, module: Handle, name: str) -> Handle:
        raise self._refuse()

    def facts(self, function: Handle) -> FunctionFacts:
        raise self._refuse()

    def set_attribute(self, function: Handle, attribute: int, value: int) -> None:
        """Also `flyt.rpc.kernel_commands.CACHE_CONFIG`."""
        raise self._refuse()

    def variable(self, module: Handle, name: str) -> tuple[int, int]:
        """Address and size of a global variable."""
        raise self._refuse()

    def occupancy(self, function: Handle, block: int, shared: int, flags: int) -> int:
        """Blocks that one multiprocessor holds."""
        raise self._refuse()

    def flush(self, event: Any) -> None:
        """Have the driver write what kernels have printed: a wait for ``event`` does that, and it
        is reached, so there is no wait. Nothing where no kernel runs."""

    def launch(self, function: Handle, shape: Shape, stream: Any, params: int) -> None:
        """Puts the kernel on a stream; ``params`` is the address of the pointers to its parameters,
        which are taken before the return."""
        raise self._refuse()
