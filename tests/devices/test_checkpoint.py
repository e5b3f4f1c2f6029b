# SPDX-License-Identifier: Apache-2.0
"""A suspended process: its memory is free, and all of it comes back to the same addresses.

Emulated only, since the process would be this very one: what a driver does to a worker is shown by
``tests/pair/test_suspend.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flyt.errors import DeviceError

pytestmark = pytest.mark.emulated_only(
    reason="a driver that failed would leave the process of all these tests locked"
)

NOT_READY, NOT_PERMITTED, NO_MEMORY = 600, 800, 2


def test_bytes_come_back_to_their_addresses(bench: Any) -> None:
    sizes = (1, 4096, 700_001, 64 << 20)
    blocks = [(bench.allocate(size), bench.random(size, seed)) for seed, size in enumerate(sizes)]
    for address, data in blocks:
        bench.device.copy(address, data.ctypes.data, data.nbytes, bench.stream)
    assert bench.wait() == 0
    event = bench.device.create_event(0)
    bench.device.record(event, bench.stream)
    assert bench.wait() == 0
    bench.device.suspend()
    bench.device.resume()
    assert bench.device.query(event), "events are as they were"
    for address, data in blocks:
        assert bench.read(address, data.nbytes) == data.tobytes()
    # Registrations stand, too: the sources are read by DMA once more.
    copy = bench.allocate(sizes[-1])
    bench.device.copy(copy, blocks[-1][1].ctypes.data, sizes[-1], bench.stream)
    assert bench.read(copy, sizes[-1]) == blocks[-1][1].tobytes()
    for address, _ in (*blocks, (copy, None)):
        bench.device.free(address, bench.stream)
    assert bench.wait() == 0
    bench.device.destroy_event(event)


def test_a_suspended_device_is_free(bench: Any) -> None:
    free, total = bench.device.memory()
    bench.allocate(100 << 20)
    assert bench.device.memory() == (free - (100 << 20), total)
    bench.device.suspend()
    assert bench.device.memory() == (total, total)
    bench.device.resume()
    assert bench.device.memory() == (free - (100 << 20), total)


def test_its_pages_are_given_back(bench: Any) -> None:
    size = 64 << 20
    address = bench.allocate(size)
    bench.device.fill(address, 0x5A, size, bench.stream)
    assert bench.wait() == 0
    assert resident(address) >= size
    bench.device.suspend()
    assert resident(address) == 0
    bench.device.resume()
    assert bench.read(address, 4096) == b"\x5a" * 4096


def resident(address: int) -> int:
    """Bytes of the mapping at an address that have pages, by the kernel's word."""
    inside, found = False, 0
    with open("/proc/self/smaps") as maps:
        for line in maps:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                start, end = (int(part, 16) for part in first.split("-"))
                inside = start <= address < end
            elif inside and first == "Rss:":
                found = int(line.split()[1]) << 10
    return found


@pytest.mark.parametrize("call", ["allocate", "copy", "create_stream", "suspend"])
def test_nothing_else_is_asked_of_it(bench: Any, call: str) -> None:
    address, host = bench.allocate(4096), bench.pinned(4096)
    bench.device.suspend()
    arguments = {
        "allocate": (1, bench.pool, bench.stream),
        "copy": (address, host.ctypes.data, 4096, bench.stream),
        "create_stream": (),
        "suspend": (),
    }[call]
    with pytest.raises(DeviceError) as refused:
        getattr(bench.device, call)(*arguments)
    assert refused.value.code == NOT_PERMITTED
    bench.device.resume()
    with pytest.raises(DeviceError):
        bench.device.resume()


def test_work_in_flight_forbids_it(bench: Any) -> None:
    gate = bench.hold()
    with pytest.raises(DeviceError) as refused:
        bench.device.suspend()
    assert refused.value.code == NOT_READY
    gate.set()
    assert bench.wait() == 0
    bench.device.suspend()
    bench.device.resume()


def test_a_failure_leaves_it_as_it_was(open_bench: Callable[..., Any]) -> None:
    bench = open_bench(f"memory=64M,fault=suspend:{NOT_READY}:1,fault=resume:{NO_MEMORY}:1")
    address = bench.allocate(4096)
    data = bench.random(4096)
    bench.device.copy(address, data.ctypes.data, 4096, bench.stream)
    assert bench.wait() == 0
    with pytest.raises(DeviceError):
        bench.device.suspend()
    assert bench.read(address, 4096) == data.tobytes(), "it runs"
    bench.device.suspend()
    with pytest.raises(DeviceError) as refused:
        bench.device.resume()
    assert refused.value.code == NO_MEMORY
    bench.device.resume()
    assert np.frombuffer(bench.read(address, 4096), np.uint8).tolist() == data.tolist()


def test_all_devices_of_the_process_are_suspended(open_bench: Callable[..., Any]) -> None:
    bench = open_bench("memory=64M,devices=2")
    other = bench.devices[1]
    pool, stream = other.create_pool(), other.create_stream()
    address = other.allocate(4096, pool, stream)
    other.fill(address, 7, 4096, stream)
    bench.device.suspend()
    assert other.memory() == (64 << 20, 64 << 20)
    bench.device.resume()
    host = bench.pinned(4096)
    other.copy(host.ctypes.data, address, 4096, stream)
    assert bench.wait(stream, other) == 0
    assert host.tolist() == [7] * 4096
