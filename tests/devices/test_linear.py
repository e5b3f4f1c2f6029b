# SPDX-License-Identifier: Apache-2.0
"""Rows, gates and pools of every device, emulated or not."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from flyt.backend.devices.base import Row
from flyt.errors import DeviceError

LIMIT = 30.0
MIB = 1 << 20

RELEASE_THRESHOLD, RESERVED, RESERVED_HIGH, USED, USED_HIGH = 4, 5, 6, 7, 8
"""cudaMemPoolAttr."""


def refused(code, call, *arguments):
    with pytest.raises(DeviceError) as caught:
        call(*arguments)
    assert caught.value.code == code, str(caught.value)


# --- rows ---


@pytest.mark.parametrize(("width", "height"), [(1, 1), (3, 1), (5, 7), (100, 31), (128, 1000)])
def test_rows_to_the_device_and_back(bench, width, height):
    pitch, narrow = 136, width + 1
    source = bench.random(narrow * height)
    address = bench.allocate(pitch * height)
    bench.device.fill(address, 0xEE, pitch * height, bench.stream)
    bench.device.copy_rows(
        Row(address, pitch), Row(source.ctypes.data, narrow), width, height, bench.stream
    )
    seen = np.frombuffer(bench.read(address, pitch * height), np.uint8).reshape(height, pitch)
    assert np.array_equal(seen[:, :width], source.reshape(height, narrow)[:, :width])
    assert (seen[:, width:] == 0xEE).all()
    sink = bench.pinned(narrow * height)
    bench.device.copy_rows(
        Row(sink.ctypes.data, narrow), Row(address, pitch), width, height, bench.stream
    )
    assert bench.wait() == 0
    back = sink.reshape(height, narrow)
    assert np.array_equal(back[:, :width], seen[:, :width])
    assert (back[:, width:] == 0).all()


def test_rows_between_blocks(bench):
    first, second = bench.allocate(64 * 10), bench.allocate(32 * 10)
    bench.device.fill(first, 1, 640, bench.stream)
    bench.device.fill(second, 2, 320, bench.stream)
    bench.device.copy_rows(Row(second, 32), Row(first, 64), 16, 9, bench.stream)
    seen = np.frombuffer(bench.read(second, 320), np.uint8).reshape(10, 32)
    assert (seen[:9, :16] == 1).all()
    assert (seen[:, 16:] == 2).all()
    assert (seen[9] == 2).all()


def test_rows_are_filled(bench):
    address = bench.allocate(64 * 10)
    bench.device.fill(address, 2, 640, bench.stream)
    bench.device.fill_rows(Row(address + 1, 64), 0x107, 30, 10, bench.stream)
    seen = np.frombuffer(bench.read(address, 640), np.uint8).reshape(10, 64)
    assert (seen[:, 1:31] == 7).all()
    assert (seen[:, 0] == 2).all()
    assert (seen[:, 31:] == 2).all()


@pytest.mark.emulated_only("CUDA checks against the memory that a pool has mapped, not the block")
def test_rows_stay_in_their_block(bench):
    address, host = bench.allocate(64 * 10), bench.pinned(64 * 10)
    to, origin = Row(address, 64), Row(host.ctypes.data, 64)
    bench.device.copy_rows(to, origin, 64, 10, bench.stream)
    refused(1, bench.device.copy_rows, to, origin, 64, 11, bench.stream)
    refused(1, bench.device.copy_rows, Row(address + 1, 64), origin, 64, 10, bench.stream)
    refused(1, bench.device.fill_rows, to, 0, 64, 11, bench.stream)
    refused(12, bench.device.fill_rows, Row(address, 63), 0, 64, 2, bench.stream)
    bench.device.fill_rows(Row(address, 0), 0, 64, 1, bench.stream)  # no second row to reach


# --- gates ---


def test_a_gate_holds_what_comes_behind_it(bench):
    other = bench.device.create_stream()
    address, sink = bench.allocate(4096), bench.pinned(4096)
    bench.device.fill(address, 1, 4096, bench.stream)
    gate, passed = bench.device.gate(bench.stream), threading.Event()
    bench.device.copy(sink.ctypes.data, address, 4096, bench.stream)
    bench.device.notify(bench.stream, lambda code: passed.set())
    bench.device.fill(bench.allocate(16), 0, 16, other)
    assert bench.wait(other) == 0, "another stream goes on"
    assert not passed.is_set()
    assert (sink == 0).all()
    bench.device.open_gate(gate)
    assert passed.wait(LIMIT)
    assert (sink == 1).all()
    bench.device.destroy_stream(other)


def test_gates_one_after_another(bench):
    gates = [bench.device.gate(bench.stream) for _ in range(20)]
    address, sink = bench.allocate(16), bench.pinned(16)
    bench.device.fill(address, 3, 16, bench.stream)
    bench.device.copy(sink.ctypes.data, address, 16, bench.stream)
    for gate in reversed(gates):
        assert (sink == 0).all()
        bench.device.open_gate(gate)
    assert bench.wait() == 0
    assert (sink == 3).all()
    again = bench.device.gate(bench.stream)  # a word that has served before holds again
    bench.device.fill(address, 4, 16, bench.stream)
    bench.device.copy(sink.ctypes.data, address, 16, bench.stream)
    assert (sink == 3).all()
    bench.device.open_gate(again)
    assert bench.wait() == 0
    assert (sink == 4).all()


# --- pools ---


def test_a_pool_counts_its_memory(bench):
    pool, ask = bench.device.create_pool(), bench.device.pool_attribute
    assert (ask(pool, USED), ask(pool, USED_HIGH)) == (0, 0)
    address = bench.device.allocate(8 * MIB, pool, bench.stream)
    assert ask(pool, USED) >= 8 * MIB
    assert ask(pool, RESERVED) >= ask(pool, USED)
    bench.device.free(address, bench.stream)
    assert bench.wait() == 0
    assert ask(pool, USED) == 0
    assert ask(pool, USED_HIGH) >= 8 * MIB
    bench.device.set_pool_attribute(pool, USED_HIGH, 0)
    assert ask(pool, USED_HIGH) == 0
    bench.device.trim_pool(pool, 0)
    assert ask(pool, RESERVED) == 0
    bench.device.destroy_pool(pool)


def test_what_can_be_set(bench):
    pool, ask = bench.device.create_pool(), bench.device.pool_attribute
    assert [ask(pool, n) for n in (1, 2, 3, RELEASE_THRESHOLD)] == [1, 1, 1, 0]
    for attribute, value in ((1, 0), (2, 0), (3, 0), (RELEASE_THRESHOLD, 1 << 40)):
        bench.device.set_pool_attribute(pool, attribute, value)
        assert ask(pool, attribute) == value
    for attribute, value in ((RESERVED_HIGH, 1), (USED_HIGH, 1), (RESERVED, 0), (USED, 0)):
        refused(1, bench.device.set_pool_attribute, pool, attribute, value)
    bench.device.destroy_pool(pool)


def test_blocks_outlive_their_pool(bench):
    pool = bench.device.create_pool()
    address = bench.device.allocate(4096, pool, bench.stream)
    bench.device.destroy_pool(pool)
    bench.device.fill(address, 9, 4096, bench.stream)
    assert bench.read(address, 4096) == b"\t" * 4096
    bench.device.free(address, bench.stream)
    assert bench.wait() == 0
