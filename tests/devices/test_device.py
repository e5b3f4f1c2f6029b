# SPDX-License-Identifier: Apache-2.0
"""What every device does, emulated or not."""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import os
import queue
import re
import threading
import time

import msgpack
import numpy as np
import pytest
from cuda.bindings.runtime import cudaDeviceAttr, cudaDeviceProp

from flyt.backend.devices import versions
from flyt.errors import DeviceError

LIMIT = 30.0
MIB = 1 << 20


def refused(code, call, *arguments):
    with pytest.raises(DeviceError) as caught:
        call(*arguments)
    assert caught.value.code == code, str(caught.value)


# --- what a device says of itself ---


def test_snapshot(bench, device_kind):
    snapshot = bench.device.snapshot()
    assert snapshot.kind == device_kind
    assert snapshot.name
    # The programming guide: 32 threads to a warp, on every device so far.
    assert snapshot.attributes["WarpSize"] == 32
    # The design stands on these three.
    assert snapshot.attributes["UnifiedAddressing"] == 1
    assert snapshot.attributes["CanUseHostPointerForRegisteredMem"] == 1
    assert snapshot.attributes["MemoryPoolsSupported"] == 1
    assert not [name for name in snapshot.attributes if name.startswith("cudaDevAttr")]


def test_attributes_are_cudas(bench):
    known = {attribute.name.removeprefix("cudaDevAttr") for attribute in cudaDeviceAttr}
    assert set(bench.device.snapshot().attributes) <= known


def test_properties_are_cudas_and_agree(bench):
    snapshot, properties = bench.device.snapshot(), bench.device.snapshot().properties
    blank = cudaDeviceProp()
    for name, value in properties.items():
        assert hasattr(blank, name), name
        if isinstance(value, list):  # an array field of the same length
            assert len(value) == len(getattr(blank, name)), name
    assert properties["name"] == snapshot.name.encode()
    assert properties["totalGlobalMem"] == snapshot.total_memory
    assert properties["warpSize"] == snapshot.attributes["WarpSize"]
    assert properties["maxThreadsDim"] == [
        snapshot.attributes[f"MaxBlockDim{axis}"] for axis in "XYZ"
    ]
    assert len(properties["uuid"]) == 16


def test_identities(bench):
    snapshots = [device.snapshot() for device in bench.devices]
    assert len({s.properties["uuid"] for s in snapshots}) == len(snapshots)
    assert len({s.pci_bus_id for s in snapshots}) == len(snapshots)
    for ordinal, snapshot in enumerate(snapshots):
        # CUDA's documentation of cudaDeviceGetPCIBusId: domain:bus:device.function, hexadecimal
        assert re.fullmatch(r"[0-9A-F]{4}:[0-9A-F]{2}:[0-9A-F]{2}\.0", snapshot.pci_bus_id)
        numbers = [int(part, 16) for part in re.split("[:.]", snapshot.pci_bus_id)[:3]]
        fields = ("pciDomainID", "pciBusID", "pciDeviceID")
        assert numbers == [snapshot.properties[field] for field in fields]
        assert set(snapshot.peers) <= set(range(len(snapshots))) - {ordinal}


def test_stream_priorities(bench):
    """CUDA's documentation: greater priorities are lower numbers, and the least is 0."""
    for device in bench.devices:
        least, greatest = device.snapshot().stream_priorities
        assert (least, greatest <= 0) == (0, True)
        for priority in range(greatest, 1):
            device.destroy_stream(device.create_stream(1, priority))


def test_a_snapshot_travels_in_a_message(bench):
    document = dataclasses.asdict(bench.device.snapshot())
    assert msgpack.unpackb(msgpack.packb(document)) == document


def test_ordinals_are_indices(bench):
    assert [device.ordinal for device in bench.devices] == list(range(len(bench.devices)))


def test_versions(bench):
    runtime, driver = versions(bench.devices)
    assert 12_000 <= runtime < 100_000
    assert driver // 1000 >= runtime // 1000


@pytest.mark.alone
def test_memory_comes_and_goes(bench):
    size = 256 * MIB
    bench.wait()
    free, total = bench.device.memory()
    assert 0 < free <= total
    assert total == pytest.approx(bench.device.snapshot().total_memory, rel=0.1)
    address = bench.allocate(size)
    assert bench.wait() == 0
    assert bench.device.memory()[0] <= free - size
    bench.device.free(address, bench.stream)
    assert bench.wait() == 0
    # Another process may use the same GPU.
    assert bench.device.memory()[0] > free - size // 2


# --- blocks ---


def test_addresses_are_aligned_and_apart(bench):
    sizes = [1, 511, 512, 513, 3, 4096]
    addresses = [bench.allocate(size) for size in sizes]
    assert all(address % 512 == 0 for address in addresses)
    spans = sorted(zip(addresses, sizes, strict=True))
    for (low, size), (high, _) in itertools.pairwise(spans):
        assert low + size <= high


def test_too_large(bench):
    refused(2, bench.allocate, 1 << 60)
    assert bench.wait() == 0  # no error sticks


def test_free_of_what_is_no_block(bench):
    address = bench.allocate(4096)
    host = bench.pinned(4096)
    refused(1, bench.device.free, host.ctypes.data, bench.stream)
    refused(1, bench.device.free, address + 512, bench.stream)
    refused(1, bench.device.free, 0x123456789000, bench.stream)
    bench.device.free(address, bench.stream)
    refused(1, bench.device.free, address, bench.stream)


def test_work_before_a_free_is_done(bench):
    source, sink = bench.random(8 * MIB), bench.pinned(8 * MIB)
    for _ in range(4):
        sink[:] = 0
        address = bench.allocate(source.nbytes)
        bench.device.copy(address, source.ctypes.data, source.nbytes, bench.stream)
        bench.device.copy(sink.ctypes.data, address, sink.nbytes, bench.stream)
        bench.device.free(address, bench.stream)
        assert bench.wait() == 0
        assert np.array_equal(source, sink)


@pytest.mark.alone
def test_a_pool_goes_with_its_memory(bench):
    free, _ = bench.device.memory()
    pool = bench.device.create_pool()
    addresses = [bench.device.allocate(64 * MIB, pool, bench.stream) for _ in range(3)]
    for address in addresses:
        bench.device.free(address, bench.stream)
    assert bench.wait() == 0
    bench.device.destroy_pool(pool)
    assert bench.device.memory()[0] > free - 64 * MIB


# --- copies ---


@pytest.mark.parametrize("size", [1, 3, 511, 512, 513, 4095, 4096, 4097, MIB, 16 * MIB + 1])
def test_round_trip(bench, size):
    source, sink = bench.random(size), bench.pinned(size)
    address = bench.allocate(size)
    bench.device.copy(address, source.ctypes.data, size, bench.stream)
    bench.device.copy(sink.ctypes.data, address, size, bench.stream)
    assert bench.wait() == 0
    assert np.array_equal(source, sink)


def test_odd_offsets_touch_nothing_else(bench):
    source = bench.random(1024)
    address = bench.allocate(4096)
    bench.device.fill(address, 0x55, 4096, bench.stream)
    bench.device.copy(address + 1237, source.ctypes.data + 7, 101, bench.stream)
    bench.device.copy(address + 4095, source.ctypes.data, 1, bench.stream)
    expected = np.full(4096, 0x55, dtype=np.uint8)
    expected[1237 : 1237 + 101] = source[7 : 7 + 101]
    expected[4095] = source[0]
    assert bench.read(address, 4096) == expected.tobytes()


def test_device_to_device(bench):
    source = bench.random(MIB)
    first, second = bench.allocate(MIB), bench.allocate(MIB)
    bench.device.copy(first, source.ctypes.data, MIB, bench.stream)
    bench.device.copy(second + 5, first + 3, MIB - 5, bench.stream)
    bench.device.copy(second, second, 4096, bench.stream)
    assert bench.read(second + 5, MIB - 5) == source[3 : MIB - 2].tobytes()


def test_host_to_host(bench):
    source, sink = bench.random(4097), bench.pinned(4097)
    bench.device.copy(sink.ctypes.data, source.ctypes.data, 4097, bench.stream)
    assert bench.wait() == 0
    assert np.array_equal(source, sink)


def test_size_zero_looks_at_nothing(bench):
    bench.device.copy(0, 0, 0, bench.stream)
    bench.device.copy(0xDEAD, 0xBEEF, 0, bench.stream)
    bench.device.fill(0, 0, 0, bench.stream)
    assert bench.wait() == 0


@pytest.mark.parametrize("value", [0, 1, 0x7F, 0x80, 0xFF])
def test_fill(bench, value):
    address = bench.allocate(4097)
    bench.device.fill(address, 0x33, 4097, bench.stream)
    bench.device.fill(address + 1, value, 4095, bench.stream)
    expected = b"\x33" + bytes([value]) * 4095 + b"\x33"
    assert bench.read(address, 4097) == expected


def test_fill_of_pinned_memory(bench):
    host = bench.pinned(4096)
    bench.device.fill(host.ctypes.data + 1, 0x77, 4094, bench.stream)
    assert bench.wait() == 0
    assert host.tobytes() == b"\0" + b"\x77" * 4094 + b"\0"


def test_null_pointers(bench):
    address = bench.allocate(4096)
    refused(1, bench.device.copy, 0, address, 1, bench.stream)
    refused(1, bench.device.copy, address, 0, 1, bench.stream)
    refused(1, bench.device.fill, 0, 0, 1, bench.stream)
    assert bench.wait() == 0


def test_addresses_beyond_63_bits(bench):
    address = bench.allocate(4096)
    for wild in (1 << 63, (1 << 64) - 1):
        refused(1, bench.device.copy, wild, address, 1, bench.stream)
        refused(1, bench.device.copy, address, wild, 1, bench.stream)
        refused(1, bench.device.fill, wild, 0, 1, bench.stream)
        refused(1, bench.device.free, wild, bench.stream)
    assert bench.wait() == 0


# --- pinned host memory ---


def test_registrations(bench):
    host = bench.pageable(64 * 1024)
    start = host.ctypes.data
    refused(1, bench.device.register, start, 0)
    bench.device.register(start, 32 * 1024)
    for address, size in ((start, 4096), (start + 4096, 4096), (start, 64 * 1024)):
        refused(712, bench.device.register, address, size)
    refused(1, bench.device.unregister, start + 4096)
    bench.device.register(start + 32 * 1024, 32 * 1024)
    bench.device.unregister(start + 32 * 1024)
    bench.device.unregister(start)
    refused(713, bench.device.unregister, start)


def test_a_copy_across_two_registrations(bench):
    host = bench.pageable(128 * 1024)
    start, half = host.ctypes.data, 64 * 1024
    address = bench.allocate(128 * 1024)
    bench.device.register(start, half)
    bench.device.register(start + half, half)
    try:
        refused(1, bench.device.copy, address, start, 2 * half, bench.stream)
        refused(1, bench.device.copy, start + half - 1, address, 2, bench.stream)
        bench.device.copy(address, start, half, bench.stream)
        bench.device.copy(address + half, start + half, half, bench.stream)
        assert bench.wait() == 0
    finally:
        bench.device.unregister(start)
        bench.device.unregister(start + half)


def test_registered_again_elsewhere_the_frames_are_the_same(bench):
    """The same pages may be registered under two addresses (measured)."""
    fd = os.memfd_create("flyt-test")
    try:
        os.ftruncate(fd, 64 * 1024)
        first = np.frombuffer(mmap.mmap(fd, 64 * 1024), dtype=np.uint8)
        second = np.frombuffer(mmap.mmap(fd, 64 * 1024), dtype=np.uint8)
    finally:
        os.close(fd)
    address = bench.allocate(64 * 1024)
    for view in (first, second):
        bench.device.register(view.ctypes.data, view.nbytes)
    first[:] = 0x21
    bench.device.copy(address, second.ctypes.data, 64 * 1024, bench.stream)
    assert bench.read(address, 64 * 1024) == b"\x21" * 64 * 1024
    for view in (first, second):
        bench.device.unregister(view.ctypes.data)


# --- streams, events, notifications ---


def test_an_event_that_was_never_recorded(bench):
    event = bench.device.create_event(0)
    assert bench.device.query(event) is True
    refused(400, bench.device.elapsed, event, event)
    bench.device.wait_event(bench.stream, event)
    assert bench.wait() == 0
    bench.device.destroy_event(event)


def test_events_without_timing(bench):
    first, second = bench.device.create_event(), bench.device.create_event(2)
    bench.device.record(first, bench.stream)
    bench.device.record(second, bench.stream)
    assert bench.wait() == 0
    assert bench.device.query(second) is True
    refused(400, bench.device.elapsed, first, second)
    bench.device.destroy_event(first)
    bench.device.destroy_event(second)


def test_events_with_timing(bench):
    source = bench.random(16 * MIB)
    address = bench.allocate(source.nbytes)
    first, second = bench.device.create_event(0), bench.device.create_event(1)
    bench.device.record(first, bench.stream)
    bench.device.copy(address, source.ctypes.data, source.nbytes, bench.stream)
    bench.device.record(second, bench.stream)
    assert bench.wait() == 0
    forwards = bench.device.elapsed(first, second)
    assert forwards > 0  # 16 MiB take longer than the clock's step
    assert bench.device.elapsed(first, first) == 0
    bench.device.record(first, bench.stream)  # the latest record counts
    assert bench.wait() == 0
    assert bench.device.elapsed(second, first) >= 0
    bench.device.destroy_event(first)
    bench.device.destroy_event(second)


def test_unknown_flags(bench):
    refused(1, bench.device.create_event, 0x80)
    refused(1, bench.device.create_stream, 0x80)


def test_a_stream_waits_for_an_event_of_another(bench):
    source, sink = bench.random(16 * MIB), bench.pinned(16 * MIB)
    other, event = bench.device.create_stream(), bench.device.create_event()
    address = bench.allocate(source.nbytes)
    for turn in range(8):
        source[::4096] = turn
        bench.device.copy(address, source.ctypes.data, source.nbytes, bench.stream)
        bench.device.record(event, bench.stream)
        bench.device.wait_event(other, event)
        bench.device.copy(sink.ctypes.data, address, sink.nbytes, other)
        assert bench.wait(other) == 0
        assert np.array_equal(source, sink)
    bench.device.destroy_event(event)
    bench.device.destroy_stream(other)


def test_an_event_may_go_before_its_time(bench):
    source = bench.random(16 * MIB)
    address, other = bench.allocate(source.nbytes), bench.device.create_stream()
    bench.device.copy(address, source.ctypes.data, source.nbytes, bench.stream)
    event = bench.device.create_event()
    bench.device.record(event, bench.stream)
    bench.device.wait_event(other, event)
    bench.device.destroy_event(event)
    assert bench.wait(other) == 0
    bench.device.destroy_stream(other)


def test_notifications_come_once_in_order_from_another_thread(bench):
    calls, done = [], threading.Event()

    def note(number):
        def call(code):
            calls.append((number, code, threading.get_ident()))
            if number == 199:
                done.set()

        return call

    for number in range(200):
        bench.device.notify(bench.stream, note(number))
    assert done.wait(LIMIT)
    assert [(number, code) for number, code, _ in calls] == [(n, 0) for n in range(200)]
    assert threading.get_ident() not in {thread for _, _, thread in calls}


def test_a_notification_follows_the_bytes(bench):
    source, sink = bench.random(16 * MIB), bench.pinned(16 * MIB)
    address = bench.allocate(source.nbytes)
    seen, done = [], threading.Event()
    bench.device.copy(address, source.ctypes.data, source.nbytes, bench.stream)
    bench.device.copy(sink.ctypes.data, address, sink.nbytes, bench.stream)
    bench.device.notify(
        bench.stream, lambda code: (seen.append(np.array_equal(source, sink)), done.set())
    )
    assert done.wait(LIMIT)
    assert seen == [True]


def test_a_notification_that_raises_stops_nothing(bench, caplog):
    def broken(code):
        raise ValueError("a bug of the caller")

    bench.device.notify(bench.stream, broken)
    assert bench.wait() == 0
    assert "a bug of the caller" in caplog.text


def test_a_destroyed_stream_finishes_its_work(bench):
    source, sink = bench.random(16 * MIB), bench.pinned(16 * MIB)
    address, stream = bench.allocate(source.nbytes), bench.device.create_stream()
    assert bench.wait() == 0
    done = threading.Event()
    bench.device.copy(address, source.ctypes.data, source.nbytes, stream)
    bench.device.copy(sink.ctypes.data, address, sink.nbytes, stream)
    bench.device.notify(stream, lambda code: done.set())
    bench.device.destroy_stream(stream)
    assert done.wait(LIMIT)
    assert np.array_equal(source, sink)
    refused(400, bench.device.notify, stream, lambda code: None)
    refused(400, bench.device.destroy_stream, stream)


def test_an_unused_stream_goes(bench):
    for _ in range(100):
        bench.device.destroy_stream(bench.device.create_stream())


def test_many_threads_at_once(bench):
    size, faults = MIB + 3, []

    def client(seed, source, sink):
        stream, pool = bench.device.create_stream(), bench.device.create_pool()
        for _ in range(5):
            address = bench.device.allocate(size, pool, stream)
            bench.device.copy(address, source.ctypes.data, size, stream)
            bench.device.copy(sink.ctypes.data, address, size, stream)
            bench.device.free(address, stream)
            if bench.wait(stream) or not np.array_equal(source, sink):
                faults.append(seed)
            sink[:] = 0
        bench.device.destroy_pool(pool)
        bench.device.destroy_stream(stream)

    memory = [(seed, bench.random(size, seed), bench.pinned(size)) for seed in range(8)]
    threads = [threading.Thread(target=client, args=arguments) for arguments in memory]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert faults == []


def test_close_lets_work_finish(bench):
    source, sink = bench.random(16 * MIB), bench.pinned(16 * MIB)
    address = bench.allocate(source.nbytes)
    codes = []
    bench.device.copy(address, source.ctypes.data, source.nbytes, bench.stream)
    bench.device.copy(sink.ctypes.data, address, sink.nbytes, bench.stream)
    bench.device.notify(bench.stream, codes.append)
    bench.device.close()
    assert codes == [0]
    assert np.array_equal(source, sink)
    bench.device.close()


def test_a_mark_can_be_asked_for(bench):
    deadline = time.monotonic() + LIMIT
    mark = bench.device.mark(bench.stream)
    while (code := bench.device.reached(mark)) is None:
        assert time.monotonic() < deadline
    assert code == 0


def test_a_mark_is_reached_behind_the_work_before_it(bench):
    size = 64 * MIB
    source, target = bench.random(size), bench.pinned(size)
    address = bench.allocate(size)
    bench.device.copy(address, source.ctypes.data, size, bench.stream)
    bench.device.copy(target.ctypes.data, address, size, bench.stream)
    mark = bench.device.mark(bench.stream)
    deadline = time.monotonic() + LIMIT
    while bench.device.reached(mark) is None:
        assert time.monotonic() < deadline
    assert (target == source).all()
    bench.device.free(address, bench.stream)


def test_a_mark_can_be_watched(bench):
    for _ in range(100):
        told = queue.SimpleQueue()
        bench.device.watch(bench.device.mark(bench.stream), told.put)
        assert told.get(timeout=LIMIT) == 0
        assert told.empty()
