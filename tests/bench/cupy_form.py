# SPDX-License-Identifier: Apache-2.0
"""Flyt with CuPy's names, so that the native contender runs where there is no GPU.

The names, arguments and the error are those that CuPy documents for ``cupy.cuda.runtime``: errors
are raised with their code in ``status``, values come as they are.
"""

from __future__ import annotations

from typing import Any

import flyt


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"CUDA error {status}")


def _checked(answer: tuple[Any, ...]) -> Any:
    if answer[0]:
        raise CUDARuntimeError(int(answer[0]))
    return answer[1] if len(answer) > 1 else None


def malloc(size: int) -> int:
    return int(_checked(flyt.cudaMalloc(size)))


def free(ptr: int) -> None:
    _checked(flyt.cudaFree(ptr))


def hostAlloc(size: int, flags: int) -> int:
    return int(_checked(flyt.cudaHostAlloc(size, flags)))


def freeHost(ptr: int) -> None:
    _checked(flyt.cudaFreeHost(ptr))


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    _checked(flyt.cudaMemcpy(dst, src, size, kind))


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
    _checked(flyt.cudaMemsetAsync(ptr, value, size, stream))


def streamCreateWithFlags(flags: int) -> int:
    return int(_checked(flyt.cudaStreamCreateWithFlags(flags)))


def streamDestroy(stream: int) -> None:
    _checked(flyt.cudaStreamDestroy(stream))


def deviceSynchronize() -> None:
    _checked(flyt.cudaDeviceSynchronize())
