# SPDX-License-Identifier: Apache-2.0
"""Modules, libraries, functions and kernels.

A library is loaded for the current device at once, and for another at its first use there. A
kernel's handle is that of its function on the current device.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from cuda.bindings.driver import (
    CUdeviceptr,
    CUfunction,
    CUfunctionLoadingState,
    CUkernel,
    CUlibrary,
    CUmodule,
    CUmoduleLoadingMode,
)

from flyt.driver.code import image_of
from flyt.driver.contexts import in_context, ordinal_of
from flyt.driver.convention import INVALID_VALUE, Answer, driver, initialized
from flyt.errors import DeviceError
from flyt.frontend.current import thread
from flyt.frontend.kernels import Function, Module
from flyt.frontend.session import Session

FILE_NOT_FOUND = 301
INVALID_HANDLE = 400

_FIRST_LIBRARY, _STEP = 1 << 16, 16
"""Below the handles of `flyt.frontend.kernels`: a library's is never a module's."""


@dataclasses.dataclass(slots=True, eq=False)
class _Library:
    session: Session
    image: bytes
    modules: dict[int, Module] = dataclasses.field(default_factory=dict)

    def module(self, device: int) -> Module:
        """The library's module on a device."""
        if device not in self.modules:
            self.modules[device] = self.session.kernels.load(self.image, device)
        return self.modules[device]


_numbers = itertools.count(_FIRST_LIBRARY, _STEP)
_libraries: dict[int, _Library] = {}


def _library(handle: Any) -> _Library:
    library = _libraries.get(int(handle or 0))
    if library is None or library.session is not initialized():
        raise DeviceError(INVALID_HANDLE, "no library of this session")
    return library


def _module(handle: Any) -> Module:
    return initialized().kernels.module(int(handle or 0))


def function_of(handle: Any, device: int | None = None) -> Function:
    """The function behind a CUfunction or CUkernel; a kernel's on ``device``."""
    kernels = initialized().kernels
    function = kernels.function(int(handle or 0))
    if device is None or function.device == device:
        return function
    for library in _libraries.values():
        if function.module in library.modules.values():
            return kernels.get_function(library.module(device), function.name)
    return function  # of a module: it has one device


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, (bytes, bytearray)) else str(name)


def _read(path: Any) -> bytes:
    try:
        return Path(_text(path)).read_bytes()
    except OSError as exc:
        raise DeviceError(FILE_NOT_FOUND, str(exc)) from exc


# --- modules ---


def _load(image: bytes) -> Answer:
    session = in_context()
    session.connection.raise_deferred()
    return (CUmodule(session.kernels.load(image, thread.device).number),)


@driver
def cuModuleLoad(fname: Any) -> Answer:
    """A module from a file: cubin, fatbin or PTX."""
    return _load(_read(fname))


@driver
def cuModuleLoadData(image: Any) -> Answer:
    """A module from a cubin, fatbin or PTX in memory."""
    return _load(image_of(image))


@driver
def cuModuleLoadDataEx(image: Any, numOptions: int, options: Any, optionValues: Any) -> Answer:  # noqa: ARG001
    """`cuModuleLoadData`; the options of the just-in-time compiler are the backend's own, and
    flyt.last_failure() has its words."""
    return _load(image_of(image))


@driver
def cuModuleLoadFatBinary(fatCubin: Any) -> Answer:
    """A module from a fatbin in memory."""
    return _load(image_of(fatCubin))


@driver
def cuModuleUnload(hmod: Any) -> Answer:
    """Unload a module; waits for this process's work on its device."""
    session = in_context()
    session.kernels.unload(_module(hmod))
    return ()


@driver
def cuModuleGetFunction(hmod: Any, name: Any) -> Answer:
    """A function by its (mangled) name."""
    session = in_context()
    return (CUfunction(session.kernels.get_function(_module(hmod), _text(name)).number),)


@driver
def cuModuleGetGlobal(hmod: Any, name: Any) -> Answer:
    """Address and size of a global variable."""
    known = in_context().kernels.variable(_module(hmod), _text(name))
    return CUdeviceptr(known.address), known.size


@driver
def cuModuleGetLoadingMode() -> Answer:
    """Functions are loaded when they are asked for."""
    initialized()
    return (CUmoduleLoadingMode.CU_MODULE_LAZY_LOADING,)


# --- libraries ---


def _load_library(image: bytes) -> Answer:
    session = initialized()
    session.connection.raise_deferred()
    library = _Library(session, image)
    library.module(thread.device)
    for other in [n for n, one in _libraries.items() if one.session is not session]:
        del _libraries[other]  # they went with their session
    number = next(_numbers)
    _libraries[number] = library
    return (CUlibrary(number),)


@driver
def cuLibraryLoadData(
    code: Any,
    jitOptions: Any,  # noqa: ARG001 - the backend's compiler has its own
    jitOptionsValues: Any,  # noqa: ARG001
    numJitOptions: int,  # noqa: ARG001
    libraryOptions: Any,  # noqa: ARG001 - the image is copied in any case
    libraryOptionValues: Any,  # noqa: ARG001
    numLibraryOptions: int,  # noqa: ARG001
) -> Answer:
    """A library from a cubin, fatbin or PTX in memory."""
    return _load_library(image_of(code))


@driver
def cuLibraryLoadFromFile(
    fileName: Any,
    jitOptions: Any,  # noqa: ARG001 - as above
    jitOptionsValues: Any,  # noqa: ARG001
    numJitOptions: int,  # noqa: ARG001
    libraryOptions: Any,  # noqa: ARG001
    libraryOptionValues: Any,  # noqa: ARG001
    numLibraryOptions: int,  # noqa: ARG001
) -> Answer:
    """A library from a file."""
    return _load_library(_read(fileName))


@driver
def cuLibraryUnload(library: Any) -> Answer:
    """Unload a library on all devices."""
    known = _library(library)
    del _libraries[int(library)]
    for module in known.modules.values():
        known.session.kernels.unload(module)
    return ()


@driver
def cuLibraryGetKernel(library: Any, name: Any) -> Answer:
    """A kernel by its (mangled) name."""
    known = _library(library)
    module = known.module(thread.device)
    return (CUkernel(known.session.kernels.get_function(module, _text(name)).number),)


@driver
def cuLibraryGetModule(library: Any) -> Answer:
    """The library's module on the current device."""
    in_context()
    return (CUmodule(_library(library).module(thread.device).number),)


@driver
def cuLibraryGetGlobal(library: Any, name: Any) -> Answer:
    """Address and size of a global variable on the current device."""
    in_context()
    known = _library(library)
    found = known.session.kernels.variable(known.module(thread.device), _text(name))
    return CUdeviceptr(found.address), found.size


# --- functions and kernels ---


@driver
def cuKernelGetFunction(kernel: Any) -> Answer:
    """The kernel's function on the current device."""
    in_context()
    return (CUfunction(function_of(kernel, thread.device).number),)


@driver
def cuKernelGetLibrary(kernel: Any) -> Answer:
    """The library of a kernel."""
    function = function_of(kernel)
    for number, library in _libraries.items():
        if function.module in library.modules.values():
            return (CUlibrary(number),)
    raise DeviceError(INVALID_HANDLE, "a function of a module, no kernel")


@driver
def cuKernelGetName(hfunc: Any) -> Answer:
    """The name of a kernel, as bytes."""
    return (function_of(hfunc).name.encode(),)


@driver
def cuFuncGetName(hfunc: Any) -> Answer:
    """The name of a function, as bytes."""
    return (function_of(hfunc).name.encode(),)


@driver
def cuFuncGetModule(hfunc: Any) -> Answer:
    """The module of a function."""
    return (CUmodule(function_of(hfunc).module.number),)


def _attribute(function: Function, attribute: Any) -> Answer:
    known = function.facts.attributes.get(int(attribute))
    if known is None:
        raise DeviceError(INVALID_VALUE, f"a function has no attribute {attribute!r}")
    return (known,)


@driver
def cuFuncGetAttribute(attrib: Any, hfunc: Any) -> Answer:
    """An attribute of a function; sends nothing."""
    return _attribute(function_of(hfunc), attrib)


@driver
def cuKernelGetAttribute(attrib: Any, kernel: Any, dev: Any) -> Answer:
    """An attribute of a kernel on a device."""
    return _attribute(function_of(kernel, ordinal_of(dev)), attrib)


@driver
def cuFuncSetAttribute(hfunc: Any, attrib: Any, value: int) -> Answer:
    """Set an attribute, such as how much dynamic shared memory a launch may ask for."""
    in_context().kernels.set_attribute(function_of(hfunc), int(attrib), value)
    return ()


@driver
def cuKernelSetAttribute(attrib: Any, val: int, kernel: Any, dev: Any) -> Answer:
    """`cuFuncSetAttribute` on a device."""
    function = function_of(kernel, ordinal_of(dev))
    initialized().kernels.set_attribute(function, int(attrib), val)
    return ()


@driver
def cuFuncSetCacheConfig(hfunc: Any, config: Any) -> Answer:
    """Prefer shared memory or cache."""
    in_context().kernels.set_cache_config(function_of(hfunc), int(config))
    return ()


@driver
def cuKernelSetCacheConfig(kernel: Any, config: Any, dev: Any) -> Answer:
    """`cuFuncSetCacheConfig` on a device."""
    initialized().kernels.set_cache_config(function_of(kernel, ordinal_of(dev)), int(config))
    return ()


def _parameter(function: Function, index: int) -> Answer:
    if not 0 <= index < len(function.facts.params):
        raise DeviceError(INVALID_VALUE, f"the kernel has no parameter {index}")
    return function.facts.params[index]


@driver
def cuFuncGetParamInfo(func: Any, paramIndex: int) -> Answer:
    """Offset and size of a parameter."""
    return _parameter(function_of(func), paramIndex)


@driver
def cuKernelGetParamInfo(kernel: Any, paramIndex: int) -> Answer:
    """Offset and size of a parameter."""
    return _parameter(function_of(kernel), paramIndex)


@driver
def cuFuncLoad(function: Any) -> Answer:
    """It is loaded: its attributes were asked for."""
    function_of(function)
    return ()


@driver
def cuFuncIsLoaded(function: Any) -> Answer:
    """Always: see `cuFuncLoad`."""
    function_of(function)
    return (CUfunctionLoadingState.CU_FUNCTION_LOADING_STATE_LOADED,)
