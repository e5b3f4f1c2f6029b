# SPDX-License-Identifier: Apache-2.0
"""How a function of the driver API answers: a tuple with a ``CUresult`` first, then the values.

Names, argument names and order are those of ``cuda.bindings.driver``; on failure the values are
None. What a function does is an operation of `flyt.frontend`, the same that stands behind the
runtime API's function: `core` is that, without the runtime's convention around it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from cuda.bindings import driver as _driver
from cuda.bindings.driver import CUresult

from flyt.errors import DeviceError, FlytError
from flyt.frontend import current
from flyt.frontend.lost import Lost
from flyt.frontend.scheduling import NotReady
from flyt.frontend.session import Session

P = ParamSpec("P")
R = TypeVar("R")
Answer = tuple[Any, ...]

SUCCESS = CUresult.CUDA_SUCCESS
INVALID_VALUE = 1
NOT_INITIALIZED = 3
DEVICES_UNAVAILABLE = 46
INVALID_CONTEXT = 201
NOT_FOUND = 500
NOT_SUPPORTED = 801

_ONLY_RUNTIME = {21: INVALID_VALUE}
"""cudaError_t's values that the driver has no name for, and what it answers there: a wrong kind of
copy can't be asked for. All others are equal in both."""

_RETURNED = re.compile(r"^\s*\w+ : ", re.MULTILINE)


class _State:
    initialized = False


state = _State()


def result_of(code: int) -> Any:
    """The CUresult of a code of the core."""
    try:
        return CUresult(_ONLY_RUNTIME.get(code, code))
    except ValueError:
        return CUresult.CUDA_ERROR_UNKNOWN


@functools.cache
def values_of(name: str) -> int:
    """How many values a function of ``cuda.bindings.driver`` returns after its result."""
    documented = getattr(_driver, name).__doc__ or ""
    returns = documented.partition("Returns\n")[2].partition("See Also")[0]
    return len(_RETURNED.findall(returns))


def driver(function: Callable[P, Answer]) -> Callable[P, Answer]:
    """Turn a function that raises into one that answers as the driver API does."""
    values = values_of(function.__name__)
    nothing = (None,) * values

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Answer:
        try:
            return (SUCCESS, *function(*args, **kwargs))
        except NotReady:
            return (CUresult.CUDA_ERROR_NOT_READY, *nothing)
        except (DeviceError, Lost) as exc:
            current.thread.last_failure = str(exc)
            return (result_of(exc.code), *nothing)
        except FlytError as exc:
            current.thread.last_failure = str(exc)
            return (result_of(DEVICES_UNAVAILABLE), *nothing)

    return call


def core(function: Callable[P, Answer]) -> Callable[P, Answer]:
    """The operation behind a function of the runtime API, which raises what that answers."""
    operation: Callable[P, Answer] = function.__wrapped__  # type: ignore[attr-defined]
    return operation


def initialized() -> Session:
    """The session, after cuInit.

    Raises
    ------
    DeviceError
        CUDA_ERROR_NOT_INITIALIZED before; the runtime API initialises too.
    """
    if not state.initialized and current.existing() is None:
        raise DeviceError(NOT_INITIALIZED, "cuInit has not been called")
    return current.current()


def refused(name: str) -> Callable[..., Answer]:
    """A function of the driver API that Flyt does not offer: it says so, whatever it is given."""
    values = values_of(name)

    def call(*args: Any, **kwargs: Any) -> Answer:  # noqa: ARG001 - CUDA's, whatever they are
        current.thread.last_failure = f"flyt.driver does not offer {name}"
        return (CUresult.CUDA_ERROR_NOT_SUPPORTED, *[None] * values)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = "Not offered: CUDA_ERROR_NOT_SUPPORTED."
    return call
