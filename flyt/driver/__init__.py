# SPDX-License-Identifier: Apache-2.0
"""``from flyt import driver`` replaces ``from cuda.bindings import driver``.

The same names, enum types, argument order and tuple returns. It sits on the same core as the
runtime API's face. CUDA's own enums, structs and constants are passed on; a function that Flyt does
not offer answers CUDA_ERROR_NOT_SUPPORTED (`not_offered` names them all).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from cuda.bindings import driver as _driver

from flyt.driver import contexts, devices, launches, memory, modules, shared, streams
from flyt.driver.convention import refused

_PARTS: tuple[ModuleType, ...] = (contexts, devices, memory, shared, streams, modules, launches)

_offered = {
    name: found
    for part in _PARTS
    for name, found in vars(part).items()
    if name.startswith("cu") and callable(found) and not isinstance(found, type)
}
globals().update(_offered)


def _is_function(name: str) -> bool:
    return name.startswith("cu") and not isinstance(getattr(_driver, name), (type, int))


def not_offered() -> list[str]:
    """The functions of ``cuda.bindings.driver`` that answer CUDA_ERROR_NOT_SUPPORTED here."""
    return [name for name in dir(_driver) if _is_function(name) and name not in _offered]


def __getattr__(name: str) -> Any:
    """CUDA's types and constants; and what is not offered."""
    found = getattr(_driver, name, None) if name.lower().startswith("cu") else None
    if found is None:
        raise AttributeError(f"module 'flyt.driver' has no attribute {name!r}")
    if not _is_function(name):
        return found
    made = globals()[name] = refused(name)
    return made


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for name in dir(_driver) if name.lower().startswith("cu"))})
