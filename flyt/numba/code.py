# SPDX-License-Identifier: Apache-2.0
"""What numba-cuda takes of cuda.core's code objects: ObjectCode, Kernel, Program, Linker.

Compiling and linking need NVIDIA's libraries (NVRTC, nvJitLink), not a GPU: they run in this
process where its packages are installed. Options are cuda.core's own objects.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flyt import driver
from flyt.frontend.raw import FUNCTION_ATTRIBUTES
from flyt.numba.objects import NVRTCError, took


class KernelAttributes:
    """CUfunction_attribute, by cuda.core's names. ``named()`` works too: before cuda.core 1.0 they
    were methods."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        code = FUNCTION_ATTRIBUTES.get(name)
        if code is None:
            raise AttributeError(name)
        attribute = driver.CUfunction_attribute(code)
        value = took(driver.cuFuncGetAttribute(attribute, self._handle))
        return value if _core_is_new() else lambda device_id=None: value  # noqa: ARG005


@functools.cache
def _core_is_new() -> bool:
    from cuda.core import __version__

    return int(__version__.split(".")[0]) >= 1


class Kernel:
    """A kernel of an `ObjectCode`."""

    def __init__(self, handle: Any, code: ObjectCode) -> None:
        self.handle = self._handle = handle
        self._code = code

    @property
    def attributes(self) -> KernelAttributes:
        return KernelAttributes(self.handle)

    @property
    def num_arguments(self) -> int:
        from flyt.driver.modules import function_of

        return len(function_of(self.handle).facts.params)


class ObjectCode:
    """Code of any kind; loaded when its handle or a kernel is asked for."""

    def __init__(
        self,
        module: Any,
        code_type: str,
        *,
        name: str = "",
        symbol_mapping: dict[str, str] | None = None,
    ) -> None:
        self._module = module
        self.code_type = self._code_type = code_type
        self.name = name or ""
        self.symbol_mapping = dict(symbol_mapping or {})
        self._handle: Any = None

    @property
    def code(self) -> Any:
        """What it was made of, read if that was a path."""
        if isinstance(self._module, (str, os.PathLike)) and self.code_type != "ptx":
            self._module = Path(self._module).read_bytes()
        return self._module

    @property
    def handle(self) -> Any:
        """The loaded library."""
        if self._handle is None:
            code = self.code
            image = code.encode() if isinstance(code, str) else bytes(code)
            self._handle = took(driver.cuLibraryLoadData(image, [], [], 0, [], [], 0))
        return self._handle

    def get_kernel(self, name: str | bytes) -> Kernel:
        """A kernel by its name."""
        text = name.decode() if isinstance(name, bytes) else name
        mangled = self.symbol_mapping.get(text, text)
        return Kernel(took(driver.cuLibraryGetKernel(self.handle, mangled.encode())), self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._module, self.code_type, self.name, self.symbol_mapping)


def _rebuilt(module: Any, code_type: str, name: str, mapping: dict[str, str]) -> ObjectCode:
    return ObjectCode(module, code_type, name=name, symbol_mapping=mapping)


def _maker(code_type: str) -> Any:
    def make(
        module: Any, *, name: str = "", symbol_mapping: dict[str, str] | None = None
    ) -> ObjectCode:
        return ObjectCode(module, code_type, name=name, symbol_mapping=symbol_mapping)

    return staticmethod(make)


for _kind in ("cubin", "ptx", "ltoir", "fatbin", "object", "library"):
    setattr(ObjectCode, f"from_{_kind}", _maker(_kind))


# --- compiling ---


def _options(options: Any, backend: str) -> list[bytes]:
    """cuda.core's options as the library takes them, whatever the version calls that."""
    for name in ("as_bytes", "_as_bytes"):
        make = getattr(options, name, None)
        if make is not None:
            try:
                return [bytes(option) for option in make(backend)]
            except TypeError:
                return [bytes(option) for option in make()]
    plain = getattr(options, "_formatted_options", None) or options.formatted_options
    return [one if isinstance(one, bytes) else one.encode() for one in plain]


class Program:
    """CUDA C++ for NVRTC."""

    def __init__(self, code: str, code_type: str, options: Any = None) -> None:
        if code_type != "c++":
            raise NotImplementedError(f"flyt.numba compiles C++, not {code_type}")
        self._code = code
        self._options = options

    def compile(
        self, target_type: str, name_expressions: Sequence[str] = (), logs: Any = None
    ) -> ObjectCode:
        """PTX, LTO IR or a cubin; the compiler's words go to ``logs.write``."""
        from cuda.bindings import nvrtc

        get = {
            "ptx": (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX),
            "cubin": (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN),
            "ltoir": (nvrtc.nvrtcGetLTOIRSize, nvrtc.nvrtcGetLTOIR),
        }[target_type]
        name = str(getattr(self._options, "name", None) or "program")
        options = _options(self._options, "nvrtc") if self._options is not None else []
        _, program = nvrtc.nvrtcCreateProgram(self._code.encode(), name.encode(), 0, [], [])
        try:
            for expression in name_expressions:
                nvrtc.nvrtcAddNameExpression(program, expression.encode())
            (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
            log = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            words = log.rstrip(b"\0 ").decode(errors="replace")
            if int(code):
                raise NVRTCError(f"{code.name}: {words}")
            if logs is not None and words:
                logs.write(words)
            names = {
                one: bytes(nvrtc.nvrtcGetLoweredName(program, one.encode())[1]).decode()
                for one in name_expressions
            }
            data = _read(program, *get)
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        return ObjectCode(data, target_type, name=name, symbol_mapping=names)

    def close(self) -> None:
        """Nothing is held."""


def _read(program: Any, size_of: Any, get: Any) -> bytes:
    _, size = size_of(program)
    data: bytes = b" " * size
    get(program, data)
    return data


# --- linking ---

_INPUTS = {
    "cubin": "CUBIN",
    "ptx": "PTX",
    "ltoir": "LTOIR",
    "fatbin": "FATBIN",
    "object": "OBJECT",
    "library": "LIBRARY",
}


class Linker:
    """Code objects for nvJitLink."""

    def __init__(self, *object_codes: ObjectCode, options: Any = None) -> None:
        from cuda.bindings import nvjitlink

        self._link = nvjitlink
        self._logs = ("", "")
        given = [one.decode() for one in _options(options, "nvjitlink")] if options else []
        self._handle: int | None = nvjitlink.create(len(given), given)
        try:
            for number, code in enumerate(object_codes):
                data = code.code
                data = data.encode() if isinstance(data, str) else bytes(data)
                kind = getattr(nvjitlink.InputType, _INPUTS[code.code_type])
                name = code.name or f"object {number}"
                nvjitlink.add_data(self._handle, int(kind), data, len(data), name)
        except nvjitlink.nvJitLinkError as exc:
            raise self._failed(exc) from exc

    def link(self, target_type: str) -> ObjectCode:
        """A cubin, or PTX where the inputs are LTO IR."""
        link, handle = self._link, self._handle
        try:
            link.complete(handle)
            if target_type == "cubin":
                data = bytearray(link.get_linked_cubin_size(handle))
                link.get_linked_cubin(handle, data)
            else:
                data = bytearray(link.get_linked_ptx_size(handle))
                link.get_linked_ptx(handle, data)
        except link.nvJitLinkError as exc:
            raise self._failed(exc) from exc
        return ObjectCode(bytes(data), target_type)

    def _failed(self, exc: Exception) -> LinkError:
        return LinkError(f"{exc}\nLinker error log: {self.get_error_log()}")

    def _log(self, size_of: Any, get: Any) -> str:
        size = size_of(self._handle)
        if not size:
            return ""
        data = bytearray(size)
        get(self._handle, data)
        return data.rstrip(b"\0").decode(errors="replace")

    def get_info_log(self) -> str:
        """The linker's remarks."""
        if self._handle is None:
            return self._logs[0]
        return self._log(self._link.get_info_log_size, self._link.get_info_log)

    def get_error_log(self) -> str:
        """The linker's complaints."""
        if self._handle is None:
            return self._logs[1]
        return self._log(self._link.get_error_log_size, self._link.get_error_log)

    def close(self) -> None:
        """Let go of the linker; the logs stay."""
        if self._handle is not None:
            self._logs = (self.get_info_log(), self.get_error_log())
            self._link.destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            self._link.destroy(handle)
            self._handle = None


class LinkError(Exception):
    """Objects that nvJitLink refuses."""
