# SPDX-License-Identifier: Apache-2.0
"""Linear memory of a GPU: pools, copies, fills, and streams that wait for the host.

What CuPy's binding lacks is asked of the driver itself, which has the same current context.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flyt.backend.devices import codes, cupy_direct
from flyt.backend.devices.base import Device, Direct, Handle, Row
from flyt.backend.devices.cupy_calls import cuda
from flyt.backend.devices.cupy_gates import Gates
from flyt.errors import DeviceError

# Values of CUDA's header driver_types.h.
_MEMCPY_DEFAULT = 4
_HOST_REGISTER_PORTABLE_MAPPED = 1 | 2
_MEM_ALLOCATION_TYPE_PINNED = 1
_MEM_HANDLE_TYPE_NONE = 0
_MEM_LOCATION_TYPE_DEVICE = 1


class CupyLinear(Device):
    """See `flyt.backend.devices.cupy.CupyDevice`."""

    def __init__(self, runtime: Any, ordinal: int) -> None:
        self.runtime = runtime
        self.ordinal = ordinal
        self._gates = Gates(self._pin)

    @cuda
    def create_pool(self) -> int:
        properties = self.runtime.MemPoolProps(
            _MEM_ALLOCATION_TYPE_PINNED,
            _MEM_HANDLE_TYPE_NONE,
            _MEM_LOCATION_TYPE_DEVICE,
            self.ordinal,
        )
        return int(self.runtime.memPoolCreate(properties))

    @cuda
    def destroy_pool(self, pool: Handle) -> None:
        self.runtime.memPoolDestroy(pool)

    @cuda
    def allocate(self, size: int, pool: Handle, stream: Handle) -> int:
        return int(self.runtime.mallocFromPoolAsync(size, pool, stream))

    @cuda
    def free(self, address: int, stream: Handle) -> None:
        self.runtime.freeAsync(address, stream)

    @cuda
    def trim_pool(self, pool: Handle, keep: int) -> None:
        self.runtime.memPoolTrimTo(pool, keep)

    @cuda
    def settle(self, streams: Iterable[Handle]) -> None:
        # CUDA: freed memory whose completion the host has not observed, "e.g. by a synchronize",
        # may count as outstanding (cuMemPoolTrimTo), and a pool gives memory back when the host
        # synchronises. cudaEventQuery is not enough: seen on an H200.
        for stream in streams:
            if int(self.runtime.streamQuery(stream)) == codes.SUCCESS:
                self.runtime.streamSynchronize(stream)

    @cuda
    def pool_attribute(self, pool: Handle, attribute: int) -> int:
        return int(self.runtime.memPoolGetAttribute(pool, attribute))

    @cuda
    def set_pool_attribute(self, pool: Handle, attribute: int, value: int) -> None:
        self.runtime.memPoolSetAttribute(pool, attribute, value)

    @cuda
    def copy(self, destination: int, source: int, size: int, stream: Handle) -> None:
        self.runtime.memcpyAsync(destination, source, size, _MEMCPY_DEFAULT, stream)

    @cuda
    def fill(self, address: int, value: int, size: int, stream: Handle) -> None:
        self.runtime.memsetAsync(address, value, size, stream)

    @cuda
    def direct(self, stream: Handle) -> Direct | None:
        return cupy_direct.direct(stream, self.runtime.getDeviceCount())

    @cuda
    def copy_rows(
        self, destination: Row, source: Row, width: int, height: int, stream: Handle
    ) -> None:
        self.runtime.memcpy2DAsync(*destination, *source, width, height, _MEMCPY_DEFAULT, stream)

    @cuda
    def fill_rows(self, rows: Row, value: int, width: int, height: int, stream: Handle) -> None:
        driver = _driver()
        (code,) = driver.cuMemsetD2D8Async(
            rows.address, rows.pitch, value & 0xFF, width, height, stream
        )
        _check(code, "fill_rows")

    @cuda
    def gate(self, stream: Handle) -> tuple[int, int]:
        driver, (address, value) = _driver(), self._gates.take()
        (code,) = driver.cuStreamWaitValue32(
            stream, address, value, int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        )
        if code:
            self._gates.open(address, value)  # nobody waits for it
        _check(code, "gate")
        return address, value

    def open_gate(self, gate: Handle) -> None:
        self._gates.open(*gate)

    @cuda
    def _pin(self, address: int, size: int) -> None:
        self.runtime.hostRegister(address, size, _HOST_REGISTER_PORTABLE_MAPPED)


def _driver() -> Any:
    # Imported here: a machine without a GPU has no use for it, and no driver to load.
    from cuda.bindings import driver

    return driver


def _check(code: Any, what: str) -> None:
    if code:
        raise DeviceError(int(code), f"{what}: {code!r}")
