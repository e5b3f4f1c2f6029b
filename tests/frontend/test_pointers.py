# SPDX-License-Identifier: Apache-2.0
"""The pointer map: what lies where, to the byte."""

from __future__ import annotations

import random

import pytest

from flyt.errors import DeviceError
from flyt.frontend.pointers import Allocation, Place, PointerMap, Space

INVALID_VALUE = 1
BASE = 0x2000_0000_0000
DEVICE = Allocation(Space.DEVICE, BASE, 1000, 0)
PINNED = Allocation(Space.PINNED, 0x1000_0020_0000, 0x3000, 0, index=0x20_0000, vpn=32, flags=2)


@pytest.fixture
def pointers() -> PointerMap:
    pointers = PointerMap()
    pointers.add(PINNED)
    pointers.add(DEVICE)
    return pointers


def test_spaces_are_cuda_memory_types() -> None:
    # driver_types.h: unregistered 0, host 1, device 2
    assert (Space.PAGEABLE, Space.PINNED, Space.DEVICE) == (0, 1, 2)


@pytest.mark.parametrize("block", [DEVICE, PINNED])
def test_the_edges_of_a_block(pointers: PointerMap, block: Allocation) -> None:
    first, last = block.address, block.address + block.size - 1
    for address in (first, first + 1, first + block.size // 2, last):
        assert pointers.find(address) is block
        assert pointers.place(address, 1) == Place(address, block.space, block)
    assert pointers.find(first - 1) is None
    assert pointers.find(last + 1) is None
    assert pointers.place(first - 1, 1).space is Space.PAGEABLE
    assert pointers.place(last + 1, 1).space is Space.PAGEABLE


@pytest.mark.parametrize("block", [DEVICE, PINNED])
@pytest.mark.parametrize("offset", [0, 1, 999])
def test_one_byte_past_the_end(pointers: PointerMap, block: Allocation, offset: int) -> None:
    address, left = block.address + offset, block.size - offset
    assert pointers.place(address, left).allocation is block
    for size in (left + 1, 1 << 40, (1 << 64) - 1):
        with pytest.raises(DeviceError, match=f"end {size - left} bytes behind") as caught:
            pointers.place(address, size)
        assert caught.value.code == INVALID_VALUE


@pytest.mark.parametrize("block", [DEVICE, PINNED])
def test_host_memory_that_runs_into_a_block(pointers: PointerMap, block: Allocation) -> None:
    assert pointers.place(block.address - 10, 10) == Place(block.address - 10, Space.PAGEABLE)
    for size in (11, 10 + block.size, 11 + block.size, 1 << 40):
        with pytest.raises(DeviceError, match=f"run into .* {block.address:#x}") as caught:
            pointers.place(block.address - 10, size)
        assert caught.value.code == INVALID_VALUE


def test_the_index_of_a_place(pointers: PointerMap) -> None:
    assert pointers.place(PINNED.address, 1).index == 0x20_0000
    assert pointers.place(PINNED.address + 0x2FFF, 1).index == 0x20_2FFF
    assert pointers.place(DEVICE.address, 1).index == -1
    assert pointers.place(4096, 1).index == -1
    inline = Allocation(Space.PINNED, 0x7000_0000_0000, 4096, 0)  # pinned, but without a window
    pointers.add(inline)
    assert pointers.place(inline.address + 5, 1).index == -1


def test_neighbours_do_not_merge() -> None:
    pointers = PointerMap()
    blocks = [Allocation(Space.DEVICE, BASE + i * 512, 512, 0) for i in range(3)]
    for block in (blocks[1], blocks[2], blocks[0]):
        pointers.add(block)
    assert pointers.all() == blocks
    assert pointers.find(BASE + 511) is blocks[0]
    assert pointers.find(BASE + 512) is blocks[1]
    with pytest.raises(DeviceError):
        pointers.place(BASE + 511, 2)
    pointers.remove(BASE + 512, Space.DEVICE)
    assert pointers.find(BASE + 512) is None
    assert pointers.all() == [blocks[0], blocks[2]]


def test_only_the_start_of_a_block_of_that_kind_is_freed(pointers: PointerMap) -> None:
    wrong = [
        (DEVICE.address + 1, Space.DEVICE),
        (DEVICE.address - 1, Space.DEVICE),
        (DEVICE.address + DEVICE.size, Space.DEVICE),
        (DEVICE.address, Space.PINNED),
        (PINNED.address, Space.DEVICE),
        (PINNED.address + 4096, Space.PINNED),
        (0, Space.DEVICE),
    ]
    for address, space in wrong:
        with pytest.raises(DeviceError, match=f"{address:#x} is not the start") as caught:
            pointers.remove(address, space)
        assert caught.value.code == INVALID_VALUE
    assert pointers.all() == [PINNED, DEVICE]
    assert pointers.remove(DEVICE.address, Space.DEVICE) is DEVICE
    with pytest.raises(DeviceError):  # twice
        pointers.remove(DEVICE.address, Space.DEVICE)
    assert pointers.remove(PINNED.address, Space.PINNED) is PINNED
    assert pointers.all() == []


def test_many_blocks_against_a_plain_search() -> None:
    dice = random.Random(1)
    pointers, blocks = PointerMap(), {}
    for _ in range(2000):
        slot = dice.randrange(200)
        address = BASE + slot * 64
        if address in blocks:
            assert pointers.remove(address, Space.DEVICE) is blocks.pop(address)
        else:
            blocks[address] = Allocation(Space.DEVICE, address, dice.randint(1, 64), 0)
            pointers.add(blocks[address])
        probe = BASE + dice.randrange(-64, 201 * 64)
        expected = [b for b in blocks.values() if b.address <= probe < b.address + b.size]
        assert pointers.find(probe) is (expected[0] if expected else None)
    assert pointers.all() == [blocks[address] for address in sorted(blocks)]
