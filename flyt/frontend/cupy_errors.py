# SPDX-License-Identifier: Apache-2.0
"""How functions of ``cupy.cuda.runtime`` fail: they raise, and clear the last error."""

from __future__ import annotations

from flyt.frontend.api.convention import error_of
from flyt.frontend.api.errors import cudaGetErrorName, cudaGetErrorString, cudaGetLastError


class CUDARuntimeError(RuntimeError):
    """A call that failed; ``status`` is its cudaError_t, an int."""

    def __init__(self, status: int) -> None:
        self.status = status
        error = error_of(status)
        name, text = cudaGetErrorName(error)[1], cudaGetErrorString(error)[1]
        super().__init__(f"{name.decode()}: {text.decode()}")

    def __reduce__(self) -> tuple[type[CUDARuntimeError], tuple[int]]:
        return type(self), (self.status,)


def check_status(status: int) -> None:
    """Raise `CUDARuntimeError` for a status that is not 0, and clear the last error."""
    if status:
        cudaGetLastError()
        raise CUDARuntimeError(int(status))
