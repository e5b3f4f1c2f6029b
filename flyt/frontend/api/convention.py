# SPDX-License-Identifier: Apache-2.0
"""How a function of CUDA answers: a tuple with a ``cudaError_t`` first, then the values.

Names, argument names and order are those of ``cuda.bindings.runtime``; on failure the values are
None. Where CUDA's own answer to a corner case was recorded, it decides (``tests/data``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

from cuda.bindings.runtime import cudaError_t

from flyt.errors import DeviceError, FlytError
from flyt.frontend.current import thread
from flyt.frontend.lost import Lost
from flyt.frontend.scheduling import NotReady

P = ParamSpec("P")
Answer = tuple[Any, ...]

SUCCESS = cudaError_t.cudaSuccess
DONE = (SUCCESS,)
"""Success, and no values."""
INVALID_VALUE = 1
DEVICES_UNAVAILABLE = 46


def failed(code: int, text: str, values: int) -> Answer:
    thread.last_error = code
    thread.last_failure = text
    return (error_of(code), *[None] * values)


def error_of(code: int) -> Any:
    try:
        return cudaError_t(code)
    except ValueError:
        return cudaError_t.cudaErrorUnknown


def cuda(values: int) -> Callable[[Callable[P, Answer]], Callable[P, Answer]]:
    """Turn a function that raises into one that answers as CUDA does.

    Parameters
    ----------
    values : int
        How many values follow the error code.
    """

    def wrap(function: Callable[P, Answer]) -> Callable[P, Answer]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Answer:
            try:
                answer = function(*args, **kwargs) if kwargs else function(*args)  # type: ignore[call-arg]
                return (SUCCESS, *answer) if answer else DONE
            except NotReady:
                return (cudaError_t.cudaErrorNotReady, *[None] * values)
            except (DeviceError, Lost) as exc:
                return failed(exc.code, str(exc), values)
            except FlytError as exc:
                return failed(DEVICES_UNAVAILABLE, str(exc), values)

        return call

    return wrap
