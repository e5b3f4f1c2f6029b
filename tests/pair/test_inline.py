# SPDX-License-Identifier: Apache-2.0
"""Where no memory is shared, payloads travel inline: slower, said so, and right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart

K = cudart.cudaMemcpyKind
H2D, D2H = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost


def round_trip(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    device, back = cudart.cudaMalloc(size + 2)[1], np.zeros(size + 2, np.uint8)
    assert cudart.cudaMemcpy(device + 1, data, size, H2D) == (0,), flyt.last_failure()
    assert cudart.cudaMemcpy(back, device, size + 2, D2H) == (0,), flyt.last_failure()
    assert (back[1:-1] == data).all()
    assert (back[0], back[-1]) == (0, 0)
    assert cudart.cudaFree(device) == (0,)


def check_everything() -> None:
    chunk = 1 << 20
    for size in (1, 4095, 4097, chunk - 1, chunk, chunk + 1, 9 * chunk + 5):
        round_trip(size)
    pinned = flyt.pinned_empty(3 * chunk + 7, np.uint8)
    assert (pinned == 0).all()
    attributes = cudart.cudaPointerGetAttributes(pinned)[1]
    assert attributes.type == cudart.cudaMemoryType.cudaMemoryTypeHost
    pinned[:] = 5
    device = cudart.cudaMalloc(pinned.nbytes)[1]
    assert cudart.cudaMemcpy(device, pinned, pinned.nbytes, H2D) == (0,)
    pinned[:] = 0
    assert cudart.cudaMemcpy(pinned, device, pinned.nbytes, D2H) == (0,)
    assert (pinned == 5).all()
    block = cudart.cudaHostAlloc(100, 0)[1]
    assert cudart.cudaFreeHost(block) == (0,)
    facts = flyt.statistics()
    assert facts["fallback_inline"] == 1
    assert facts["inline_h2d_bytes"] > 9 * chunk
    assert facts["staged_h2d_bytes"] == facts["pinned_h2d_bytes"] == 0


@pytest.mark.parametrize("listen", [None, ["tcp://127.0.0.1:0"]], ids=["ipc", "tcp"])
def test_a_backend_without_a_region(
    listen: list[str] | None,
    backend: Callable[..., Any],
    connect: Callable[..., flyt.Session],
) -> None:
    daemon = backend(extra=["--no-region"], listen=listen)
    with pytest.warns(flyt.FlytWarning, match="without a region"):
        connect(daemon)
    check_everything()


def test_another_region_under_the_name_given(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    """The epoch tells: FLYT_REGION names a region that is not the backend's."""
    mine, other = backend(size="16M"), backend(size="16M")
    with pytest.warns(flyt.FlytWarning, match="epoch"):
        connect(mine, FLYT_REGION=other.region)
    check_everything()


def test_a_copy_of_the_region_fails_the_proof(
    backend: Callable[..., Any],
    connect: Callable[..., flyt.Session],
    tmp_path: Any,
) -> None:
    """Same superblock, same epoch, other memory: what a guest without share=on sees."""
    daemon = backend(size="16M")
    private = tmp_path / "copy"
    with open(daemon.region, "rb") as region:
        private.write_bytes(region.read())
    with pytest.warns(flyt.FlytWarning, match="share=on"):
        connect(daemon, FLYT_REGION=str(private))
    check_everything()


def test_tcp_shares_the_region_on_the_same_host(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    connect(backend(listen=["tcp://127.0.0.1:0"], extra=["--session-ports", "24100-24140"]))
    round_trip(5_000_000)
    facts = flyt.statistics()
    assert facts["fallback_inline"] == 0
    assert facts["staged_h2d_bytes"] == 5_000_000
