# SPDX-License-Identifier: Apache-2.0
"""What only the emulated device can show: exact bounds, order under a held stream, faults."""

from __future__ import annotations

import math
import random
import threading
import time

import numpy as np
import pytest
from cuda.bindings.runtime import cudaDeviceProp

from flyt.backend.devices import emulated, emulated_options, open_devices
from flyt.backend.devices.codes import STICKY
from flyt.errors import DeviceError

pytestmark = pytest.mark.emulated_only(
    reason="exact bounds, held streams, slowed copies and faults can't be had of a real GPU"
)

LIMIT = 30.0
MIB = 1 << 20


def refused(code, call, *arguments):
    with pytest.raises(DeviceError) as caught:
        call(*arguments)
    assert caught.value.code == code, str(caught.value)


def mappings():
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps]
    return [(int(low, 16), int(high, 16)) for low, high in spans]


# --- what it claims ---


def test_several_devices_have_identities_and_reach_each_other(open_bench):
    snapshots = [d.snapshot() for d in open_bench("memory=96M,devices=3").devices]
    assert len({s.properties["uuid"] for s in snapshots}) == 3
    assert len({s.pci_bus_id for s in snapshots}) == 3
    assert [s.peers for s in snapshots] == [[1, 2], [0, 2], [0, 1]]
    assert [s.properties["totalGlobalMem"] for s in snapshots] == [96 * MIB] * 3


def test_an_identity_stays(open_bench):
    """A UUID names a device across processes, as a GPU's does."""
    first, second = (open_bench("memory=64M").device.snapshot() for _ in range(2))
    assert first.properties["uuid"] == second.properties["uuid"]


def test_every_property_has_its_attributes(bench):
    """Nothing is left out: whoever sizes launches or textures by a field finds a number."""
    told = set(bench.device.snapshot().properties)
    fields = {name for name in dir(cudaDeviceProp) if not name.startswith("_")}
    untold = {"getPtr", "reserved", "luid", "luidDeviceNodeMask", "unifiedFunctionPointers"}
    assert told == fields - untold


# --- memory ---


def test_addresses_lie_above_every_window(open_bench):
    bench = open_bench("memory=64M,devices=3")
    streams = [device.create_stream() for device in bench.devices]
    addresses = [
        device.allocate(1, device.create_pool(), stream)
        for device, stream in zip(bench.devices, streams, strict=True)
    ]
    assert all(address >= 0x2000_0000_0000 for address in addresses)
    assert addresses[1] - addresses[0] == addresses[2] - addresses[1] == 1 << 40


def test_two_openings_share_no_addresses(open_bench):
    first, second = open_bench("memory=64M"), open_bench("memory=64M")
    a, b = first.allocate(4096), second.allocate(4096)
    first.device.fill(a, 1, 4096, first.stream)
    second.device.fill(b, 2, 4096, second.stream)
    assert first.read(a, 4096) == b"\1" * 4096
    assert second.read(b, 4096) == b"\2" * 4096


def test_close_unmaps_the_memory(open_bench):
    bench = open_bench("memory=64M")
    address = bench.allocate(4096)
    assert any(low <= address < high for low, high in mappings())
    bench.device.close()
    assert not any(low <= address < high for low, high in mappings())
    refused(709, bench.allocate, 4096)


def test_unused_memory_costs_nothing(open_bench):
    bench = open_bench()  # 8 GiB
    assert bench.device.memory() == (8 << 30, 8 << 30)
    address = bench.allocate(5 << 30)
    last = address + (5 << 30) - 1
    bench.device.fill(last, 9, 1, bench.stream)
    assert bench.read(last, 1) == b"\x09"


def test_bounds_are_exact(bench):
    size = 4000
    below, block, above = (bench.allocate(size) for _ in range(3))
    host = bench.pinned(2 * size)
    host[:] = 0xEE
    for address in (below, block, above):
        bench.device.fill(address, 0x11, size, bench.stream)
    outside = [(block, size + 1), (block + size, 1), (block + size - 1, 2), (block - 1, 2)]
    for address, count in [*outside, (below, above - below), (block, 1 << 62), (block, -1)]:
        refused(1, bench.device.copy, address, host.ctypes.data, count, bench.stream)
        refused(1, bench.device.copy, host.ctypes.data, address, count, bench.stream)
        refused(1, bench.device.fill, address, 0, count, bench.stream)
    refused(1, bench.device.copy, block, host.ctypes.data + size + 1, size, bench.stream)
    for address in (below, block, above):
        assert bench.read(address, size) == b"\x11" * size
    assert host.tobytes() == b"\xee" * 2 * size


def test_host_memory_must_be_registered(bench):
    host, address = bench.pageable(4096), bench.allocate(4096)
    refused(1, bench.device.copy, address, host.ctypes.data, 4096, bench.stream)
    refused(1, bench.device.copy, host.ctypes.data, address, 4096, bench.stream)
    bench.device.register(host.ctypes.data, 4096)
    bench.device.copy(address, host.ctypes.data, 4096, bench.stream)
    bench.device.unregister(host.ctypes.data)
    refused(1, bench.device.copy, address, host.ctypes.data, 1, bench.stream)


def test_device_memory_can_not_be_registered(bench):
    address = bench.allocate(4096)
    refused(1, bench.device.register, address, 4096)
    refused(1, bench.device.register, address - MIB, 2 * MIB)


def test_use_after_free(bench):
    address, other = bench.allocate(4096), bench.allocate(4096)
    gate = bench.hold()
    bench.device.free(address, bench.stream)  # not reached yet, and refused already
    refused(1, bench.device.copy, other, address, 4096, bench.stream)
    refused(1, bench.device.copy, address, other, 4096, bench.stream)
    refused(1, bench.device.fill, address, 0, 1, bench.stream)
    refused(1, bench.device.free, address, bench.stream)
    gate.set()
    assert bench.wait() == 0


def test_freed_memory_keeps_its_bytes(bench):
    address = bench.allocate(4096)
    bench.device.fill(address, 0xAB, 4096, bench.stream)
    bench.device.free(address, bench.stream)
    assert bench.wait() == 0
    assert bench.allocate(4096) == address
    assert bench.read(address, 4096) == b"\xab" * 4096


def test_memory_is_finite(open_bench):
    bench = open_bench("memory=1M")
    refused(2, bench.allocate, MIB + 1)
    blocks = [bench.allocate(1) for _ in range(MIB // 512)]
    assert bench.device.memory() == (0, MIB)
    refused(2, bench.allocate, 1)
    random.Random(1).shuffle(blocks)
    for address in blocks[1:]:
        bench.device.free(address, bench.stream)
    assert bench.wait() == 0
    refused(2, bench.allocate, MIB)  # one block is in the way
    bench.device.free(blocks[0], bench.stream)
    assert bench.wait() == 0
    assert bench.device.memory() == (MIB, MIB)
    bench.allocate(MIB)


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_that_is_none(bench, size):
    refused(1, bench.allocate, size)


def test_memory_is_reused_in_the_order_of_the_stream(open_bench):
    bench = open_bench("memory=1M")
    other = bench.device.create_stream()
    address = bench.allocate(MIB)
    gate = bench.hold()
    bench.device.free(address, bench.stream)
    assert bench.device.memory()[0] == 0
    refused(2, bench.device.allocate, 512, bench.pool, other)
    assert bench.allocate(MIB) == address  # its own stream can't use it too early
    bench.device.fill(address, 7, MIB, bench.stream)
    gate.set()
    assert bench.wait() == 0
    refused(2, bench.device.allocate, 512, bench.pool, other)
    assert bench.read(address, MIB) == b"\7" * MIB
    bench.device.free(address, bench.stream)
    assert bench.wait() == 0
    assert bench.device.allocate(MIB, bench.pool, other) == address


def test_a_destroyed_pool_goes_with_its_last_block(open_bench):
    bench = open_bench("memory=1M")
    pool = bench.device.create_pool()
    left = [bench.device.allocate(1000, pool, bench.stream) for _ in range(10)]
    bench.device.destroy_pool(pool)
    refused(1, bench.device.allocate, 512, pool, bench.stream)
    refused(1, bench.device.destroy_pool, pool)
    assert bench.device.memory() == (MIB - 10 * 1024, MIB)
    for address in left:
        bench.device.free(address, bench.stream)
    assert bench.wait() == 0
    assert bench.device.memory() == (MIB, MIB)


# --- order ---


def test_a_copy_returns_before_its_bytes_move(bench):
    source, sink = bench.random(4096), bench.pinned(4096)
    gate = bench.hold()
    bench.device.copy(sink.ctypes.data, source.ctypes.data, 4096, bench.stream)
    assert not sink.any()
    source[:] = 0x42  # too early: CUDA gives the later bytes, and so do we
    gate.set()
    assert bench.wait() == 0
    assert sink.tobytes() == b"\x42" * 4096


def test_events_of_a_held_stream(bench):
    first, second = bench.device.create_event(0), bench.device.create_event(0)
    bench.device.record(first, bench.stream)
    gate = bench.hold()
    bench.device.record(second, bench.stream)
    assert bench.device.query(second) is False
    refused(600, bench.device.elapsed, first, second)
    gate.set()
    assert bench.wait() == 0
    assert bench.device.query(second) is True
    assert bench.device.elapsed(first, second) > 0
    assert bench.device.elapsed(second, first) < 0


def test_recording_again_takes_the_latest(bench):
    event, other = bench.device.create_event(), bench.device.create_stream()
    bench.device.record(event, bench.stream)
    assert bench.wait() == 0
    gate = bench.hold()
    bench.device.record(event, bench.stream)
    assert bench.device.query(event) is False
    bench.device.record(event, other)
    assert bench.wait(other) == 0
    assert bench.device.query(event) is True
    gate.set()


def test_streams_do_not_wait_for_each_other(bench):
    bench.hold()
    other = bench.device.create_stream()
    source, sink = bench.random(4096), bench.pinned(4096)
    bench.device.copy(sink.ctypes.data, source.ctypes.data, 4096, other)
    assert bench.wait(other) == 0
    assert np.array_equal(source, sink)


def test_a_wait_captures_the_record_of_its_time(bench):
    source, sink = bench.random(4096), bench.pinned(4096)
    waiting, quick = bench.device.create_stream(), bench.device.create_stream()
    event, after = bench.device.create_event(), bench.device.create_event()
    gate = bench.hold()
    bench.device.record(event, bench.stream)
    bench.device.wait_event(waiting, event)
    bench.device.copy(sink.ctypes.data, source.ctypes.data, 4096, waiting)
    bench.device.record(after, waiting)
    bench.device.record(event, quick)  # another record, done at once: changes nothing
    assert bench.wait(quick) == 0
    time.sleep(0.05)  # time for a waiting stream to go wrong
    assert bench.device.query(after) is False
    assert not sink.any()
    gate.set()
    assert bench.wait(waiting) == 0
    assert np.array_equal(source, sink)


def test_a_later_record_holds_nobody_up(bench):
    event, other = bench.device.create_event(), bench.device.create_stream()
    bench.device.wait_event(other, event)
    bench.hold()
    bench.device.record(event, bench.stream)
    assert bench.wait(other) == 0


def test_unregister_waits_for_all_work_of_all_devices(open_bench):
    bench = open_bench("memory=64M,devices=2")
    second = bench.devices[1]
    stream = second.create_stream()
    host, address = bench.pageable(4096), bench.allocate(4096)
    bench.device.register(host.ctypes.data, 4096)
    gate = bench.hold(stream, second)
    second.destroy_stream(stream)  # destroyed, but not done
    thread = threading.Thread(target=bench.device.unregister, args=[host.ctypes.data])
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    refused(1, bench.device.copy, address, host.ctypes.data, 1, bench.stream)
    gate.set()
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_a_notification_may_not_wait_for_itself(bench):
    host, codes = bench.pageable(4096), []
    bench.device.register(host.ctypes.data, 4096)

    def call(code):
        for wait in (lambda: bench.device.unregister(host.ctypes.data), bench.device.close):
            try:
                wait()
            except DeviceError as exc:
                codes.append(exc.code)

    bench.device.notify(bench.stream, call)
    assert bench.wait() == 0
    assert codes == [800, 800]
    bench.device.unregister(host.ctypes.data)


# --- handles ---


def test_handles_that_are_none(open_bench):
    bench = open_bench("memory=64M,devices=2")
    first, second = bench.devices
    event, gone = first.create_event(), first.create_event()
    first.destroy_event(gone)
    stream, dead = second.create_stream(), first.create_stream()
    first.destroy_stream(dead)
    address = bench.allocate(512)
    for handle in (stream, dead, None, 0, 12345, event):
        refused(400, first.copy, address, address, 1, handle)
        refused(400, first.fill, address, 0, 1, handle)
        refused(400, first.free, address, handle)
        refused(400, first.allocate, 512, bench.pool, handle)
        refused(400, first.record, event, handle)
        refused(400, first.wait_event, handle, event)
        refused(400, first.notify, handle, lambda code: None)
        refused(400, first.destroy_stream, handle)
    for handle in (gone, None, 0, stream):
        refused(400, first.record, handle, bench.stream)
        refused(400, first.wait_event, bench.stream, handle)
        refused(400, first.query, handle)
        refused(400, first.elapsed, handle, handle)
        refused(400, first.destroy_event, handle)
    refused(400, second.record, event, stream)  # an event is recorded on its own device
    for handle in (second.create_pool(), None, 0, stream):
        refused(1, first.allocate, 512, handle, bench.stream)
        refused(1, first.destroy_pool, handle)
    assert first.memory()[0] == first.memory()[1] - 512


def test_from_one_device_to_another(open_bench):
    bench = open_bench("memory=64M,devices=2")
    first, second = bench.devices
    stream = second.create_stream()
    source, sink = bench.random(MIB), bench.pinned(MIB)  # registered for every device
    a, b = bench.allocate(MIB), second.allocate(MIB, second.create_pool(), stream)
    event = first.create_event()
    first.copy(a, source.ctypes.data, MIB, bench.stream)
    first.record(event, bench.stream)
    second.wait_event(stream, event)
    second.copy(b, a, MIB, stream)
    second.copy(sink.ctypes.data, b, MIB, stream)
    assert bench.wait(stream, second) == 0
    assert np.array_equal(source, sink)
    refused(1, second.free, a, stream)


# --- slowness ---


def test_bandwidth_and_latency_slow_copies_down(open_bench):
    bench = open_bench("memory=64M,bandwidth=0.1,latency=0.05")
    source = bench.random(MIB)
    address = bench.allocate(MIB)
    first, second = bench.device.create_event(0), bench.device.create_event(0)
    bench.device.record(first, bench.stream)
    bench.device.copy(address, source.ctypes.data, MIB, bench.stream)
    bench.device.record(second, bench.stream)
    assert bench.wait() == 0
    # 50 ms and 1 MiB at 100 MB/s; a little less for the clocks' steps.
    assert bench.device.elapsed(first, second) > 50 + MIB / 1e5 - 2


def test_close_ends_slow_copies_with_their_bytes(open_bench):
    bench = open_bench("memory=64M,latency=1000")
    source, sink = bench.random(4096), bench.pinned(4096)
    for _ in range(3):
        bench.device.copy(sink.ctypes.data, source.ctypes.data, 4096, bench.stream)
    codes = []
    bench.device.notify(bench.stream, codes.append)
    bench.device.close()
    assert codes == [0]
    assert np.array_equal(source, sink)


def test_close_drops_work_that_can_not_begin(open_bench, monkeypatch):
    monkeypatch.setattr(emulated, "CLOSE_PATIENCE", 0.1)
    bench = open_bench("memory=64M,devices=2")
    first, second = bench.devices
    stream, event = second.create_stream(), second.create_event()
    gate = bench.hold(stream, second)
    second.record(event, stream)
    source, sink, codes = bench.random(4096), bench.pinned(4096), []
    first.wait_event(bench.stream, event)
    first.copy(sink.ctypes.data, source.ctypes.data, 4096, bench.stream)
    first.notify(bench.stream, codes.append)
    monkeypatch.setattr(emulated, "CLOSE_LIMIT", 1.0)
    first.close()
    assert codes == [709]
    assert not sink.any()
    gate.set()
    assert bench.wait(stream, second) == 0


def test_close_leaves_memory_mapped_while_another_device_may_use_it(open_bench, monkeypatch):
    monkeypatch.setattr(emulated, "CLOSE_LIMIT", 0.2)
    bench = open_bench("memory=64M,devices=2")
    first, second = bench.devices
    stream = second.create_stream()
    source = bench.allocate(4096)
    target = second.allocate(4096, second.create_pool(), stream)
    gate = bench.hold(stream, second)
    second.copy(target, source, 4096, stream)
    first.close()
    gate.set()
    assert bench.wait(stream, second) == 0  # to read unmapped memory would end the process


# --- faults ---


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("memory", lambda b, a, e: b.device.memory()),
        ("create_pool", lambda b, a, e: b.device.create_pool()),
        ("allocate", lambda b, a, e: b.allocate(512)),
        ("register", lambda b, a, e: b.pinned(4096)),
        ("create_stream", lambda b, a, e: b.device.create_stream()),
        ("create_event", lambda b, a, e: b.device.create_event()),
        ("record", lambda b, a, e: b.device.record(e, b.stream)),
        ("query", lambda b, a, e: b.device.query(e)),
        ("wait_event", lambda b, a, e: b.device.wait_event(b.stream, e)),
        ("notify", lambda b, a, e: b.wait()),
        ("copy", lambda b, a, e: b.device.copy(a, a, 512, b.stream)),
        ("fill", lambda b, a, e: b.device.fill(a, 0, 512, b.stream)),
    ],
)
def test_the_nth_call_fails(open_bench, operation, call):
    used = {"create_pool": 1, "create_stream": 1, "allocate": 1, "create_event": 1}
    nth = used.get(operation, 0) + 2
    bench = open_bench(f"memory=64M,fault={operation}:46:{nth}")
    address, event = bench.allocate(512), bench.device.create_event()
    call(bench, address, event)
    refused(46, call, bench, address, event)
    call(bench, address, event)
    assert bench.wait() == 0


def test_a_failed_call_changes_nothing(open_bench):
    bench = open_bench("memory=64M,fault=free:46:1,fault=allocate:2:2,fault=unregister:46:1")
    address, host = bench.allocate(512), bench.pageable(4096)
    refused(46, bench.device.free, address, bench.stream)
    refused(2, bench.allocate, 512)
    assert bench.device.memory()[0] == bench.device.memory()[1] - 512
    bench.device.free(address, bench.stream)
    bench.device.register(host.ctypes.data, 4096)
    refused(46, bench.device.unregister, host.ctypes.data)
    bench.device.unregister(host.ctypes.data)


@pytest.mark.parametrize("operation", ["copy", "fill"])
def test_asynchronous_fault(open_bench, operation):
    bench = open_bench(f"memory=64M,fault={operation}:46:2:async")
    other = bench.device.create_stream()
    source, address = bench.random(4096), bench.allocate(4096)

    def work():
        if operation == "copy":
            bench.device.copy(address, source.ctypes.data, 4096, bench.stream)
        else:
            bench.device.fill(address, int(source[0]), 4096, bench.stream)

    work()
    before = bench.read(address, 4096) if operation == "fill" else source.tobytes()
    source[:] = source[0] + 1
    if operation == "copy":
        bench.device.fill(address, before[0], 4096, bench.stream)
        before = before[:1] * 4096
    work()  # succeeds as a call, and writes nothing
    assert bench.wait(other) == 0
    assert bench.wait() == 46
    assert bench.wait() == 0  # reported once
    assert bench.read(address, 4096) == before
    work()
    assert bench.read(address, 4096) == source.tobytes()


@pytest.mark.parametrize("operation", ["free", "record", "wait_event", "allocate"])
def test_other_asynchronous_faults_are_notified(open_bench, operation):
    bench = open_bench(f"memory=64M,fault={operation}:46:1:async")
    address, event = bench.allocate(512), bench.device.create_event()
    bench.device.record(event, bench.stream)
    bench.device.wait_event(bench.stream, event)
    bench.device.free(address, bench.stream)
    assert bench.wait() == 46
    assert bench.wait() == 0
    assert bench.device.query(event) is True
    assert bench.device.memory() == (64 * MIB, 64 * MIB)


@pytest.mark.parametrize("code", sorted(STICKY))
def test_a_sticky_fault_breaks_every_device(open_bench, code):
    bench = open_bench(f"memory=64M,devices=2,fault=fill:{code}:1:async")
    first, second = bench.devices
    stream, event = second.create_stream(), first.create_event()
    address, host = bench.allocate(4096), bench.pinned(4096)
    notified, done = [], threading.Event()
    gate = bench.hold()
    first.fill(address, 1, 4096, bench.stream)
    first.copy(host.ctypes.data, address, 4096, bench.stream)
    host[:] = 0x5A
    first.record(event, bench.stream)
    for call in (notified.append, notified.append, lambda code: done.set()):
        first.notify(bench.stream, call)
    second.memory()  # nothing has failed yet
    gate.set()
    assert done.wait(LIMIT)
    assert notified == [code, code]
    assert host.tobytes() == b"\x5a" * 4096  # a broken context does no more work
    for call in (
        first.memory,
        second.memory,
        second.create_stream,
        first.create_pool,
        lambda: first.query(event),
        lambda: first.copy(address, address, 0, bench.stream),
        lambda: second.notify(stream, notified.append),
        lambda: first.unregister(host.ctypes.data),
        lambda: first.destroy_stream(bench.stream),
    ):
        refused(code, call)


def test_a_sticky_fault_at_the_call(open_bench):
    bench = open_bench("memory=64M,devices=2,fault=copy:719:1")
    refused(719, bench.device.copy, 0, 0, 0, bench.stream)
    refused(719, bench.devices[1].memory)


def test_a_broken_context_releases_its_waiters(open_bench):
    bench = open_bench("memory=64M,fault=fill:700:1:async")
    address = bench.allocate(512)
    waiting, failing = bench.device.create_stream(), bench.device.create_stream()
    event, done = bench.device.create_event(), []
    released = threading.Event()
    gate = bench.hold()
    bench.device.record(event, bench.stream)
    bench.device.wait_event(waiting, event)
    bench.device.notify(waiting, lambda code: (done.append(code), released.set()))
    bench.device.fill(address, 0, 512, failing)
    assert released.wait(LIMIT)
    assert done == [700]
    gate.set()


def test_a_broken_context_stays_with_its_devices():
    """A fresh process opens fresh devices; so do fresh devices in this one."""
    (broken,) = open_devices("emulated", "memory=64M,fault=memory:719:1")
    refused(719, broken.memory)
    broken.close()
    (device,) = open_devices("emulated", "memory=64M")
    assert device.memory() == (64 * MIB, 64 * MIB)
    device.close()


def test_infinite_bandwidth_is_the_default():
    assert emulated_options.EmulatedOptions().bandwidth == math.inf
