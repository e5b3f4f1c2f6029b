# SPDX-License-Identifier: Apache-2.0
"""``--sm-limit``: kernels of a capped stream run on so many SMs. Needs a GPU and CuPy."""

from __future__ import annotations

from typing import Any

import pytest

from flyt.errors import ConfigurationError

SMS = 32
"""A quarter of an H100's; every architecture since Pascal splits so."""

BLOCKS = 4096

WHERE = r"""
extern "C" __global__ void where(unsigned* sm) {
    unsigned id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    long long start = clock64();
    while (clock64() - start < 20000) {}  // so that the blocks spread
    sm[blockIdx.x] = id;
}
"""


@pytest.mark.emulated_only(reason="a GPU can do it")
def test_the_emulated_device_refuses(bench: Any) -> None:
    with pytest.raises(ConfigurationError, match="no SMs to limit"):
        bench.device.limit_sms(SMS)


def sms_of(stream: int) -> set[int]:
    """The SMs on which a kernel of many blocks ran."""
    import cupy

    with cupy.cuda.ExternalStream(stream):
        out = cupy.zeros(BLOCKS, cupy.uint32)
        cupy.RawKernel(WHERE, "where")((BLOCKS,), (32,), (out,))
        return set(out.get().tolist())


@pytest.mark.filterwarnings("ignore:ExternalStream is deprecated:DeprecationWarning")
def test_kernels_run_on_so_many_sms(bench: Any, device_kind: str) -> None:
    if device_kind != "cupy":
        pytest.skip("runs a kernel: needs --device cupy")
    whole = sms_of(bench.stream)
    assert len(whole) > SMS
    bench.device.limit_sms(SMS)
    capped = bench.device.create_stream()
    assert len(sms_of(capped)) <= SMS
    data, address = bench.random(1 << 20), bench.allocate(1 << 20)
    bench.device.copy(address, data.ctypes.data, data.nbytes, capped)
    assert bench.wait(capped) == 0
    assert bench.read(address, data.nbytes) == data.tobytes()
    bench.device.destroy_stream(capped)


@pytest.mark.parametrize("count", [1, 100_000])
def test_what_a_gpu_can_not_do_is_refused(bench: Any, device_kind: str, count: int) -> None:
    if device_kind != "cupy":
        pytest.skip("splits a GPU: needs --device cupy")
    with pytest.raises(ConfigurationError, match="--sm-limit"):
        bench.device.limit_sms(count)
