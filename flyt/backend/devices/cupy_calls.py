# SPDX-License-Identifier: Apache-2.0
"""What all calls of a `CupyDevice` pass through: the current device, and CUDA's errors as ours."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from flyt.backend.devices import codes
from flyt.errors import DeviceError

_thread = threading.local()  # .ordinal: the device that is current in this thread

P = ParamSpec("P")
R = TypeVar("R")


class CupyCalls(Protocol):
    """A device that the decorator below can serve."""

    runtime: Any
    ordinal: int


C = TypeVar("C", bound=CupyCalls)


def cuda(
    method: Callable[Concatenate[C, P], R],
) -> Callable[Concatenate[C, P], R]:
    """The one place that makes a device current in a thread and CuPy's errors our own."""

    @functools.wraps(method)
    def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if getattr(_thread, "ordinal", None) != self.ordinal:
                self.runtime.setDevice(self.ordinal)
                _thread.ordinal = self.ordinal
            return method(self, *args, **kwargs)
        except self.runtime.CUDARuntimeError as exc:
            raise DeviceError(int(exc.status), f"{method.__name__}: {exc}") from exc
        except OverflowError as exc:  # CuPy takes addresses below 2**63, sizes below 2**64
            raise DeviceError(codes.INVALID_VALUE, f"{method.__name__}: {exc}") from exc

    return call
