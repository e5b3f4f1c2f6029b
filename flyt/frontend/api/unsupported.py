# SPDX-License-Identifier: Apache-2.0
"""What Flyt does not offer answers cudaErrorNotSupported at once; nothing is silently wrong."""

from __future__ import annotations

from typing import Any

from flyt.errors import DeviceError
from flyt.frontend.api.convention import Answer, cuda

NOT_SUPPORTED = 801


@cuda(1)
def cudaMallocManaged(size: int, flags: Any) -> Answer:  # noqa: ARG001 - CUDA's signature
    """Managed memory needs page faults across the link; not supported."""
    raise DeviceError(NOT_SUPPORTED, "Flyt has no managed memory; use cudaMalloc or cudaHostAlloc")
