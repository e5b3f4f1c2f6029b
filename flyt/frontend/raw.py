# SPDX-License-Identifier: Apache-2.0
"""`RawModule` and `RawKernel`: CUDA source in a string, with CuPy's signatures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, SupportsInt

from flyt.errors import DeviceError, FlytError
from flyt.frontend import current
from flyt.frontend.api.handles import stream_of
from flyt.frontend.current import thread
from flyt.frontend.kernels import Function, LaunchAttribute, Module
from flyt.frontend.params import from_arguments
from flyt.frontend.plain_kernel import MAX_DYNAMIC_SHARED, Three
from flyt.frontend.session import Session

TOGETHER: tuple[LaunchAttribute, ...] = ((2, 1, 0, 0),)
"""CU_LAUNCH_ATTRIBUTE_COOPERATIVE, of a launch whose blocks may wait for each other."""

FUNCTION_ATTRIBUTES = {
    "max_threads_per_block": 0,
    "shared_size_bytes": 1,
    "const_size_bytes": 2,
    "local_size_bytes": 3,
    "num_regs": 4,
    "ptx_version": 5,
    "binary_version": 6,
    "cache_mode_ca": 7,
    "max_dynamic_shared_size_bytes": MAX_DYNAMIC_SHARED,
    "preferred_shared_memory_carveout": 9,
}
"""Names of CUfunction_attribute's values, CuPy's and cuda.core's alike."""

Extent = int | Sequence[int]

_FILE = "kernel.cu"
"""What the compiler calls the source."""

COMPILE_TRIES = 2
"""The worker may forget what it has compiled before it is loaded: it is compiled again once."""


class CompileException(FlytError):
    """A source that NVRTC refuses.

    Parameters
    ----------
    log : str
        The compiler's.
    name, options
        What was compiled, and how.
    """

    def __init__(self, log: str, name: str = "", options: Sequence[str] = ()) -> None:
        super().__init__(log, name, tuple(options))
        self.log = log
        self.name = name
        self.options = tuple(options)

    def __str__(self) -> str:
        return f"{self.name}: {self.log}"


class RawModule:
    """Code of CUDA C++, or an image.

    Parameters
    ----------
    code : str, optional
        The source; this or ``path``.
    path : str or Path, optional
        A cubin, fatbin or PTX file.
    options : sequence of str
        NVRTC's. ``-std=c++17`` and the device's architecture unless they are given.
    backend : {"nvrtc"}
    translate_cucomplex, enable_cooperative_groups, jitify : bool
        CuPy's; only ``enable_cooperative_groups`` means something: launches are cooperative.
    name_expressions : sequence of str, optional
        C++ names of templates' instances, for `get_function`.

    Raises
    ------
    CompileException
        At the first use, or in `compile`, if the source is at fault.
    DeviceError
        With CUDA's code; cudaErrorNotSupported on a backend that runs no kernels.

    Notes
    -----
    Compiled by the backend, loaded for each device that uses it.
    """

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | Path | None = None,
        options: Sequence[str] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Sequence[str] | None = None,
        jitify: bool = False,
    ) -> None:
        if (code is None) == (path is None):
            raise TypeError("Exactly one of `code` and `path` should be given")
        if path is not None and name_expressions is not None:
            raise TypeError("name_expressions are for code")
        if backend != "nvrtc":
            raise ValueError(f"backend {backend!r}: Flyt has NVRTC's compiler only")
        if translate_cucomplex or jitify:
            raise NotImplementedError("translate_cucomplex and jitify are CuPy's own")
        self.code = code
        self.options = tuple(options)
        self.file_path = None if path is None else str(path)
        self.enable_cooperative_groups = enable_cooperative_groups
        self.name_expressions = tuple(name_expressions or ())
        self._image = None if path is None else Path(path).read_bytes()
        self._loaded: dict[int, tuple[Session, Module, dict[str, str]]] = {}

    def compile(self, log_stream: Any = None) -> None:
        """Compile and load it for the current device; the log goes to ``log_stream.write``."""
        self._module(log_stream)

    def get_function(self, name: str) -> RawKernel:
        """A kernel, by its name or one of the ``name_expressions``."""
        self._function(name)
        return RawKernel._of(self, name)  # noqa: SLF001 - its own other half

    def get_global(self, name: str) -> int:
        """The address of a global variable; CuPy's is a MemoryPointer."""
        session, module, names = self._module()
        return session.kernels.variable(module, names.get(name, name)).address

    def _function(self, name: str) -> tuple[Session, Function]:
        session, module, names = self._module()
        return session, session.kernels.get_function(module, names.get(name, name))

    def _module(self, log_stream: Any = None) -> tuple[Session, Module, dict[str, str]]:
        """The module on the current device, in the current session."""
        session, device = current.current(), thread.device
        known = self._loaded.get(device)
        if known is not None and known[0] is session:
            return known
        if self._image is not None:
            names: dict[str, str] = {}
            module = session.kernels.load(self._image, device)
        else:
            module, names = self._build(session, device, log_stream)
        self._loaded[device] = (session, module, names)
        return self._loaded[device]

    def _build(
        self, session: Session, device: int, log_stream: Any
    ) -> tuple[Module, dict[str, str]]:
        options = list(self.options)
        if not any("-std" in option for option in options):
            options.append("-std=c++17")
        for _ in range(COMPILE_TRIES):
            source, expressions = (self.code or "").encode(), list(self.name_expressions)
            compiled = session.kernels.compile(source, _FILE, options, expressions, device)
            if log_stream is not None and compiled.log:
                log_stream.write(compiled.log)
            if not compiled.image:
                raise CompileException(compiled.log, _FILE, options)
            module = session.kernels.load_compiled(compiled.image, device)
            if module is not None:
                return module, dict(zip(self.name_expressions, compiled.names, strict=True))
        raise DeviceError(2, "the backend has no room to keep what it compiled")


class RawKernel:
    """One kernel of a source.

    Parameters
    ----------
    code : str
        CUDA C++.
    name : str
        The kernel's; ``extern "C"``, or a C++ name expression.
    options : sequence of str
    backend, translate_cucomplex, enable_cooperative_groups, jitify
        See `RawModule`.

    Notes
    -----
    ``kernel(grid, block, args, *, shared_mem=0, stream=None)`` is a post: it returns once all that
    CUDA checks at a launch has been checked.
    """

    def __init__(
        self,
        code: str,
        name: str,
        options: Sequence[str] = (),
        backend: str = "nvrtc",
        *,
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        jitify: bool = False,
    ) -> None:
        self._module = RawModule(
            code,
            options=options,
            backend=backend,
            translate_cucomplex=translate_cucomplex,
            enable_cooperative_groups=enable_cooperative_groups,
            name_expressions=[name] if "<" in name or "::" in name else None,
            jitify=jitify,
        )
        self.name = name
        self._known: dict[int, tuple[Session, Function]] = {}

    @classmethod
    def _of(cls, module: RawModule, name: str) -> RawKernel:
        made = cls.__new__(cls)
        made._module, made.name, made._known = module, name, {}  # noqa: SLF001 - its own
        return made

    @property
    def code(self) -> str | None:
        """The source."""
        return self._module.code

    @property
    def options(self) -> tuple[str, ...]:
        """The compiler's options."""
        return self._module.options

    @property
    def enable_cooperative_groups(self) -> bool:
        """Whether launches are cooperative."""
        return self._module.enable_cooperative_groups

    @property
    def kernel(self) -> int:
        """The function's handle on the current device."""
        return self._module._function(self.name)[1].number  # noqa: SLF001 - its own other half

    def compile(self, log_stream: Any = None) -> None:
        """Compile and load it now."""
        self._module.compile(log_stream)

    @property
    def attributes(self) -> dict[str, int]:
        """CUfunction_attribute, by CuPy's names."""
        _, function = self._module._function(self.name)  # noqa: SLF001 - its own other half
        known = function.facts.attributes
        return {name: known[code] for name, code in FUNCTION_ATTRIBUTES.items() if code in known}

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Dynamic shared memory that a launch may ask for; may be set."""
        return self.attributes["max_dynamic_shared_size_bytes"]

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, value: int) -> None:
        session, function = self._module._function(self.name)  # noqa: SLF001
        session.kernels.set_attribute(function, MAX_DYNAMIC_SHARED, value)

    def __call__(
        self,
        grid: Extent,
        block: Extent,
        args: Sequence[Any] = (),
        *,
        shared_mem: int = 0,
        stream: SupportsInt | None = None,
    ) -> None:
        """Launch it.

        Parameters
        ----------
        grid, block : int or sequence of up to three ints
            Blocks, and threads of each.
        args : sequence
            See `flyt.frontend.params.from_arguments`.
        shared_mem : int
            Bytes of dynamic shared memory.
        stream : Stream or int, optional
            Default: the legacy default stream.
        """
        session, device = current.current(), thread.device
        known = self._known.get(device)
        if known is None or known[0] is not session:
            known = self._module._function(self.name)  # noqa: SLF001
            self._known[device] = known
        function = known[1]
        if session.connection.deferred is not None:
            session.connection.raise_deferred()
        session.kernels.launch(
            function,
            _three(grid),
            _three(block),
            shared_mem,
            session.scheduler.stream(0, device) if stream is None else stream_of(session, stream),
            from_arguments(args, function.facts),
            TOGETHER if self._module.enable_cooperative_groups else (),
        )


def _three(extent: Extent) -> Three:
    if type(extent) is tuple and len(extent) == 1 and type(extent[0]) is int:
        return extent[0], 1, 1  # the commonest
    given = tuple(int(n) for n in ((extent,) if isinstance(extent, int) else extent))
    if not 1 <= len(given) <= 3:
        raise ValueError(f"{extent!r} is no grid or block of one to three dimensions")
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z
