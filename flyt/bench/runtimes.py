# SPDX-License-Identifier: Apache-2.0
"""What is measured, behind one interface: a module that speaks CUDA's runtime API, or plain memcpy.

A case builds the argument tuples before the clock starts and calls `Runtime.copy` itself, so all
contenders run the very same loop: nothing of this file lies between the clock and the call.
"""

from __future__ import annotations

import abc
import ctypes
import mmap
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

from cuda.bindings.runtime import cudaError_t, cudaMemcpyKind

from flyt.errors import ConfigurationError, FlytError

H2D, D2H = cudaMemcpyKind.cudaMemcpyHostToDevice, cudaMemcpyKind.cudaMemcpyDeviceToHost
OUT_OF_MEMORY = int(cudaError_t.cudaErrorMemoryAllocation)
NON_BLOCKING = 1
"""cudaStreamNonBlocking."""

Arguments = tuple[Any, ...]


class BenchFailed(FlytError):
    """A contender failed, or moved wrong bytes; the text says which, where and how."""


class NoRoom(FlytError):
    """A contender can't have as much memory as a case wants: the case goes on without it."""


class Runtime(abc.ABC):
    """One way to move bytes.

    Attributes
    ----------
    copy : callable
        Takes what `copy_arguments` gives; its answers go to `check`.
    """

    copy: Callable[..., Any]

    @abc.abstractmethod
    def copy_arguments(self, dst: int, src: int, size: int, *, to_device: bool) -> Arguments: ...

    @abc.abstractmethod
    def malloc(self, size: int) -> int: ...

    @abc.abstractmethod
    def free(self, address: int) -> None: ...

    @abc.abstractmethod
    def host_alloc(self, size: int) -> int:
        """Pinned memory; `NoRoom` if there is none left."""

    @abc.abstractmethod
    def free_host(self, address: int) -> None: ...

    @abc.abstractmethod
    def synchronize(self) -> None: ...

    def check(self, answers: Iterable[Any]) -> None:  # noqa: B027 - nothing to check is a choice
        """Raise `BenchFailed` for the first answer that is no success."""

    def notes(self) -> dict[str, int]:
        """Counters that say which way the bytes went; empty where there is only one way."""
        return {}


class Asynchronous(Runtime):
    """A runtime with streams.

    Attributes
    ----------
    fill : callable
        memsetAsync(address, value, size, stream).
    """

    fill: Callable[..., Any]

    @abc.abstractmethod
    def create_stream(self) -> Any: ...

    @abc.abstractmethod
    def destroy_stream(self, stream: Any) -> None: ...


class Memcpy(Runtime):
    """A plain memcpy by one thread; "device" memory is ordinary memory."""

    def __init__(self) -> None:
        self.copy = ctypes.memmove
        self._blocks: dict[int, mmap.mmap] = {}

    def copy_arguments(self, dst: int, src: int, size: int, *, to_device: bool) -> Arguments:  # noqa: ARG002 - both ways are one
        return dst, src, size

    def malloc(self, size: int) -> int:
        address, block = pageable(size)
        self._blocks[address] = block
        return address

    def free(self, address: int) -> None:
        self._blocks.pop(address).close()

    def host_alloc(self, size: int) -> int:
        return self.malloc(size)

    def free_host(self, address: int) -> None:
        self.free(address)

    def synchronize(self) -> None:
        """Nothing is ever under way."""


class TupleRuntime(Asynchronous):
    """A module whose functions are CUDA's own names and answer ``(error, value)``: ``flyt``,
    ``cuda.bindings.runtime``."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.copy = module.cudaMemcpy
        self.fill = module.cudaMemsetAsync

    def copy_arguments(self, dst: int, src: int, size: int, *, to_device: bool) -> Arguments:
        return dst, src, size, H2D if to_device else D2H

    def malloc(self, size: int) -> int:
        return int(self._value("cudaMalloc", self.module.cudaMalloc(size)))

    def free(self, address: int) -> None:
        self._value("cudaFree", self.module.cudaFree(address))

    def host_alloc(self, size: int) -> int:
        return int(self._value("cudaHostAlloc", self.module.cudaHostAlloc(size, 0)))

    def free_host(self, address: int) -> None:
        self._value("cudaFreeHost", self.module.cudaFreeHost(address))

    def create_stream(self) -> Any:
        answer = self.module.cudaStreamCreateWithFlags(NON_BLOCKING)
        return self._value("cudaStreamCreateWithFlags", answer)

    def destroy_stream(self, stream: Any) -> None:
        self._value("cudaStreamDestroy", self.module.cudaStreamDestroy(stream))

    def synchronize(self) -> None:
        self._value("cudaDeviceSynchronize", self.module.cudaDeviceSynchronize())

    def check(self, answers: Iterable[Any]) -> None:
        for answer in answers:
            if answer[0]:
                self._value("a copy", answer)

    def notes(self) -> dict[str, int]:
        statistics = getattr(self.module, "statistics", None)
        return {} if statistics is None else dict(statistics())

    def _value(self, what: str, answer: Arguments) -> Any:
        error = answer[0]
        if error:
            last_failure = getattr(self.module, "last_failure", str)  # Flyt says more than a code
            text = f"{what}: {error!r} {last_failure()}".rstrip()
            raise NoRoom(text) if int(error) == OUT_OF_MEMORY else BenchFailed(text)
        return answer[1] if len(answer) > 1 else None


class CupyRuntime(Asynchronous):
    """A module with CuPy's names (``cupy.cuda.runtime``): values as they are, errors raised."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.copy = module.memcpy
        self.fill = module.memsetAsync

    def copy_arguments(self, dst: int, src: int, size: int, *, to_device: bool) -> Arguments:
        return dst, src, size, int(H2D if to_device else D2H)

    def malloc(self, size: int) -> int:
        return self._allocate(self.module.malloc, size)

    def free(self, address: int) -> None:
        self.module.free(address)

    def host_alloc(self, size: int) -> int:
        return self._allocate(self.module.hostAlloc, size, 0)

    def free_host(self, address: int) -> None:
        self.module.freeHost(address)

    def create_stream(self) -> Any:
        return self.module.streamCreateWithFlags(NON_BLOCKING)

    def destroy_stream(self, stream: Any) -> None:
        self.module.streamDestroy(stream)

    def synchronize(self) -> None:
        self.module.deviceSynchronize()

    def _allocate(self, call: Callable[..., Any], *arguments: int) -> int:
        try:
            return int(call(*arguments))
        except self.module.CUDARuntimeError as exc:
            if int(exc.status) == OUT_OF_MEMORY:
                raise NoRoom(f"{call.__name__}{arguments}: {exc}") from exc
            raise


def runtime_of(name: str) -> Runtime:
    """Load a runtime by the name of its module; "memcpy" is the plain one.

    Raises
    ------
    ConfigurationError
        There is no such module here, or it speaks neither form of CUDA's runtime API.
    """
    if name == "memcpy":
        return Memcpy()
    try:
        module = pkgutil.resolve_name(name)  # cupy.cuda.runtime is an attribute, not a module
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigurationError(
            f"{name} can't be imported ({exc}): install it (CuPy: pip install '.[gpu]' in Flyt's "
            "checkout) or name another module with --native"
        ) from exc
    if hasattr(module, "cudaMemcpy"):
        return TupleRuntime(module)
    if hasattr(module, "memcpy"):
        return CupyRuntime(module)
    raise ConfigurationError(
        f"{name} has neither cudaMemcpy nor memcpy: --native wants a module like "
        "cupy.cuda.runtime or cuda.bindings.runtime"
    )


def pageable(size: int) -> tuple[int, mmap.mmap]:
    """Private memory that is really there: its address, and what keeps it."""
    block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = ctypes.c_char.from_buffer(block)
    address = ctypes.addressof(view)
    del view  # it would forbid close()
    ctypes.memset(address, 0x5A, size)
    return address, block
