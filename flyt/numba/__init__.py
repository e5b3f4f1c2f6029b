# SPDX-License-Identifier: Apache-2.0
"""numba-cuda through Flyt, unmodified: ``flyt.numba.install()`` before the first use.

Or ``python -m flyt.numba script.py``, or ``pytest -p flyt.numba``; or `SITE` on ``PYTHONPATH``,
for programs that start others. What numba-cuda takes from
``cuda.bindings.driver`` and from ``cuda.core`` is replaced by `flyt.driver` and by objects on it,
in this process and under those modules' own names. numba compiles here, with NVIDIA's libraries,
which need no GPU; Flyt loads and launches there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import warnings
from multiprocessing import spawn
from typing import Any

from flyt.errors import ConfigurationError

TESTED_VERSION = "0.30.4"
"""numba-cuda's; others may take other things from cuda.core."""

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
"""A folder for ``PYTHONPATH``: Python processes that have it there call `install` by themselves
when they import ``numba.cuda``."""

_installed = False


class UntestedVersionWarning(RuntimeWarning):
    """numba-cuda is of another version than the one that was tested."""


def install() -> None:
    """Point numba-cuda at Flyt; a second call does nothing.

    Raises
    ------
    ConfigurationError
        numba-cuda or cuda-core is not installed, or was in use with a driver of its own.
    """
    global _installed  # noqa: PLW0603 - once a process
    if _installed:
        return
    try:
        version = importlib.metadata.version("numba-cuda")
        core = importlib.import_module("cuda.core")
        bindings = importlib.import_module("cuda.bindings")
        importlib.import_module("numba.cuda")  # with `SITE` on the path this installs, too: no harm
        parts = {name: importlib.import_module(f"numba.cuda.{name}") for name in _REPLACED}
    except ImportError as exc:
        raise ConfigurationError(
            f"flyt.numba needs numba-cuda {TESTED_VERSION} and cuda-core ({exc}): "
            f"pip install numba-cuda[cu13]=={TESTED_VERSION}"
        ) from exc
    if version != TESTED_VERSION:
        warnings.warn(
            f"flyt.numba was tested with numba-cuda {TESTED_VERSION}, this is {version}",
            UntestedVersionWarning,
            stacklevel=2,
        )
    numba_driver = parts["cudadrv.driver"].driver
    if numba_driver.is_initialized and numba_driver.initialization_error is None:
        raise ConfigurationError(
            "numba-cuda has used this machine's own GPU already: call flyt.numba.install() first"
        )
    replacements = _replacements()
    for part, names in _REPLACED.items():
        for theirs, ours in names.items():
            if hasattr(parts[part], theirs):
                setattr(parts[part], theirs, replacements[ours])
    for name in _PUBLIC:
        setattr(core, name, replacements[name])
    sys.modules["cuda.bindings.driver"] = replacements["driver"]
    vars(bindings)["driver"] = replacements["driver"]
    if not parts["cudadrv.driver"].config.DISABLE_CUDA:
        _restart(numba_driver)
    _reach_children()
    _installed = True


_REPLACED: dict[str, dict[str, str]] = {
    "cudadrv.driver": {
        "binding": "driver",
        "Linker": "Linker",
        "ObjectCode": "ObjectCode",
        "ExperimentalStream": "Stream",
        "ExperimentalDevice": "Device",
    },
    "cudadrv.nvrtc": {"Program": "Program"},
    "cudadrv.devicearray": {"StridedMemoryView": "View", "Buffer": "Buffer"},
    "dispatcher": {"launch": "launch", "LaunchConfig": "LaunchConfig"},
    "memory_management.nrt": {"launch": "launch", "LaunchConfig": "LaunchConfig"},
}
"""numba-cuda's modules, and what stands for each of the names that they imported."""

_PUBLIC = (
    "Device",
    "Stream",
    "Event",
    "ObjectCode",
    "Kernel",
    "Program",
    "Linker",
    "LaunchConfig",
    "launch",
)
"""Names of ``cuda.core`` that programs import themselves."""


def _replacements() -> dict[str, Any]:
    from flyt import driver
    from flyt.numba import code, launching, objects, views

    found: dict[str, Any] = {"driver": driver}
    for module in (code, objects, launching, views):
        found.update({name: one for name, one in vars(module).items() if not name.startswith("_")})
    return found


def _restart(numba_driver: Any) -> None:
    """numba's driver object looked for libcuda when it was made, and may have found none."""
    numba_driver.is_initialized = False
    numba_driver.initialization_error = None
    numba_driver.lib = None
    for name in [name for name in vars(numba_driver) if name.startswith("cu")]:
        delattr(numba_driver, name)  # functions it has looked up


class _Installer:
    """What installs in the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return install, ()


def _reach_children() -> None:
    """Let processes that multiprocessing spawns install too, before they import the program: what
    it tells them of the program is a pickled table, and takes one entry more."""
    prepare = spawn.get_preparation_data

    def prepared(name: str) -> dict[str, object]:
        return {**prepare(name), "flyt.numba": _Installer()}

    spawn.get_preparation_data = prepared


def pytest_configure(config: Any) -> None:  # noqa: ARG001 - pytest's
    """``pytest -p flyt.numba``."""
    install()
