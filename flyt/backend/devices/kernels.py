# SPDX-License-Identifier: Apache-2.0
"""`Kernels`: what a device does with code. A device without an implementation runs no kernels."""

from __future__ import annotations

import abc
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


class Kernels(abc.ABC):
    """Modules and functions of one device.

    Every method may be called from any thread and raises `flyt.errors.DeviceError` with CUDA's
    code. All but `launch` may take long: the driver compiles PTX, and waits for the context's work.
    """

    @abc.abstractmethod
    def architecture(self) -> str:
        """What NVRTC calls it: ``sm_90``."""

    @abc.abstractmethod
    def load(self, image: bytes) -> Handle:
        """A module from a checked image (`flyt.backend.images`)."""

    @abc.abstractmethod
    def unload(self, module: Handle) -> None: ...

    @abc.abstractmethod
    def function(self, module: Handle, name: str) -> Handle: ...

    @abc.abstractmethod
    def facts(self, function: Handle) -> FunctionFacts: ...

    @abc.abstractmethod
    def set_attribute(self, function: Handle, attribute: int, value: int) -> None:
        """Also `flyt.rpc.kernel_commands.CACHE_CONFIG`."""

    @abc.abstractmethod
    def variable(self, module: Handle, name: str) -> tuple[int, int]:
        """Address and size of a global variable."""

    @abc.abstractmethod
    def occupancy(self, function: Handle, block: int, shared: int, flags: int) -> int:
        """Blocks that one multiprocessor holds."""

    @abc.abstractmethod
    def launch(self, function: Handle, shape: Shape, stream: Any, params: int) -> None:
        """Puts the kernel on a stream; ``params`` is the address of the pointers to its parameters,
        which are taken before the return."""


class NoKernels(Kernels):
    """Of a device that runs no kernels: everything is cudaErrorNotSupported."""

    @staticmethod
    def _refuse() -> DeviceError:
        return DeviceError(
            NOT_SUPPORTED, "the emulated device runs no kernels; the backend needs a GPU for them"
        )

    def architecture(self) -> str:
        raise self._refuse()

    def load(self, image: bytes) -> Handle:
        raise self._refuse()

    def unload(self, module: Handle) -> None:
        raise self._refuse()

    def function(self, module: Handle, name: str) -> Handle:
        raise self._refuse()

    def facts(self, function: Handle) -> FunctionFacts:
        raise self._refuse()

    def set_attribute(self, function: Handle, attribute: int, value: int) -> None:
        raise self._refuse()

    def variable(self, module: Handle, name: str) -> tuple[int, int]:
        raise self._refuse()

    def occupancy(self, function: Handle, block: int, shared: int, flags: int) -> int:
        raise self._refuse()

    def launch(self, function: Handle, shape: Shape, stream: Any, params: int) -> None:
        raise self._refuse()


NO_KERNELS = NoKernels()
