# SPDX-License-Identifier: Apache-2.0
"""What Flyt does not offer answers cudaErrorNotSupported at once; nothing is silently wrong.

The table goes by patterns of names, so that it holds for every release of ``cuda.bindings``; the
README shows the same one, and a test that nothing is left out.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from cuda.bindings import runtime as cudart

from flyt.errors import DeviceError
from flyt.frontend.api.convention import Answer, cuda

NOT_SUPPORTED = 801


class Group(NamedTuple):
    """Functions that are left out for one reason."""

    patterns: str
    reason: str


GROUPS = {
    "managed memory": Group(
        "cudaMallocManaged cudaMemAdvise cudaMemPrefetch* cudaMemDiscard* cudaMemRangeGet* "
        "cudaStreamAttachMemAsync",
        "pages would have to migrate through the region: use cudaMalloc or cudaHostAlloc",
    ),
    "CUDA arrays, textures, surfaces": Group(
        "cuda*Array* cuda*Mipmapped* cuda*Texture* cuda*Surface* *ChannelDesc",
        "linear memory alone is there",
    ),
    "graphs and capture": Group(
        "cudaGraph[A-Z]* cudaUserObject* cudaStream*[Cc]apture* cudaDevice*GraphMem* "
        "cudaThreadExchangeStreamCaptureMode",
        "streams are not captured",
    ),
    "graphics, external resources": Group(
        "cudaGL* cudaEGL* cudaVDPAU* cudaGraphics* cudaEventCreateFromEGLSync cudaImportExternal* "
        "cudaExternalMemory* cudaDestroyExternal* cuda*ExternalSemaphoresAsync "
        "cudaDeviceGetNvSciSyncAttributes",
        "they belong to APIs of the GPU's host",
    ),
    "kernels through the runtime API": Group(
        "cudaLibrary* cudaKernel* cudaGetKernel cudaFunc* cudaOccupancy*",
        "not there yet",
    ),
    "pools that others open, their access": Group(
        "cudaMemPoolExport* cudaMemPoolImport* cudaMemPool?etAccess cudaMem?etMemPool "
        "cudaMemGetDefaultMemPool cudaMemGetLocationInfo",
        "memory of cudaMalloc can be shared: cudaIpcGetMemHandle; pools of the host there are none",
    ),
    "copies with hints": Group(
        "cudaMemcpy3DBatchAsync cudaMemcpy*WithAttributesAsync cudaLaunchHostFunc_v2",
        "the forms without hints do the same",
    ),
    "what belongs to the whole device": Group(
        "cudaDeviceEnablePeerAccess cudaDeviceDisablePeerAccess cudaDevice?etLimit "
        "cudaDevice?etCacheConfig cudaDevice?etSharedMemConfig cudaCtxResetPersistingL2Cache "
        "cudaDeviceFlushGPUDirectRDMAWrites cuda?etDeviceFlags cudaInitDevice cudaChooseDevice "
        "cudaDeviceGetP2P* cudaDeviceGetHostAtomicCapabilities cudaDevice*AsyncNotification",
        "other clients share it",
    ),
    "green contexts, stream attributes": Group(
        "cudaExecutionCtx* cudaGreenCtxCreate cudaDev*Resource* cudaDeviceGetExecutionCtx "
        "cudaStreamGetDevResource cudaStream?etAttribute cudaStreamCopyAttributes cudaStreamGetId "
        "cudaStreamGetDevice",
        "not there",
    ),
    "the driver's own insides": Group(
        "cudaGetDriverEntryPoint* cudaGetExportTable cudaLogs* cudaProfiler* "
        "getLocalRuntimeVersion",
        "they mean a driver or a runtime in this process",
    ),
}
"""What it is, which functions those are, and why."""


def group_of(name: str) -> str | None:
    """The first group that a function belongs to."""
    for group, (patterns, _) in GROUPS.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split()):
            return group
    return None


@functools.cache
def unsupported(name: str) -> Callable[..., Answer] | None:
    """The function of ``cuda.bindings.runtime`` with this name, as one that is refused; None if the
    table has no such."""
    native, group = getattr(cudart, name, None), group_of(name)
    if group is None or not callable(native) or isinstance(native, type):
        return None
    reason = GROUPS[group].reason

    def refuse(*_: Any, **__: Any) -> Answer:
        raise DeviceError(NOT_SUPPORTED, f"Flyt has no {name} ({group}): {reason}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Not supported, as all of {group}: {reason}."
    return cuda(values_of(native))(refuse)


def values_of(native: Any) -> int:
    """How many values a function answers beside its error, by its documentation."""
    returns = (native.__doc__ or "").partition("Returns\n-------\n")[2]
    section = re.split(r"\n\n?[A-Z][A-Za-z ]+\n-+\n", returns)[0]
    told = [line for line in section.splitlines() if re.match(r"\w+( : |$)", line)]
    return max(0, len(told) - 1)
