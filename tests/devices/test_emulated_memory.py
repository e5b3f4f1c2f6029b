# SPDX-License-Identifier: Apache-2.0
"""The allocator against a model: no overlaps, nothing lost, and all of it back in the end."""

from __future__ import annotations

import itertools

from hypothesis import example, given, settings, strategies as st

from flyt.backend.devices.emulated_memory import Memory, Pool
from flyt.errors import DeviceError

BASE, SIZE = 0x2000_0000_0000, 64 * 1024

steps = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 20_000)),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.tuples(st.just("reclaim"), st.integers(0, 1000)),
        st.tuples(st.just("reuse"), st.integers(1, 70_000)),
    ),
    max_size=60,
)


@settings(deadline=None)  # a busy machine is no fault of the allocator
@given(steps)
@example(  # the address of a reused block that died again, handed out by first fit
    [
        ("allocate", 1),
        ("allocate", 513),
        ("free", 0),
        ("free", 0),
        ("reclaim", 0),
        ("allocate", 1),
        ("reuse", 1),
        ("free", 1),
        ("reclaim", 1),
        ("allocate", 1),
    ]
)
def test_allocator(steps):
    memory, pool = Memory(BASE, SIZE), Pool(None)
    live: dict[int, tuple[int, int]] = {}  # address: bytes asked for, bytes occupied
    dying = []

    def occupied():
        return sorted(
            [(a, extent) for a, (_, extent) in live.items()]
            + [(block.address, block.extent) for block in dying if not block.reused]
        )

    for action, number in steps:
        if action in ("allocate", "reuse"):
            unused = [block for block in dying if not block.reused]
            try:
                address = memory.allocate(number, pool, dying if action == "reuse" else [])
            except DeviceError as exc:
                short = exc.code == 2
                gaps, end = [], BASE
                for start, extent in [*occupied(), (BASE + SIZE, 0)]:
                    gaps.append(start - end)
                    end = start + extent
                assert short
                assert max(gaps) < -(-number // 512) * 512
                continue
            reused = [block.extent for block in unused if block.reused]  # by this very call
            extent = reused[0] if reused else -(-number // 512) * 512
            live[address] = (number, extent)
        elif action == "free" and live:
            address = sorted(live)[number % len(live)]
            dying.append(memory.forget(address))
            del live[address]
        elif action == "reclaim" and dying:
            memory.reclaim(dying.pop(number % len(dying)))
        spans = occupied()
        for (low, extent), (high, _) in itertools.pairwise(spans):
            assert low + extent <= high
        assert all(a >= BASE and a % 512 == 0 and a + e <= BASE + SIZE for a, e in spans)
        assert memory.free == SIZE - sum(extent for _, extent in spans)
        for address, (size, _) in live.items():
            assert memory.covers(address, size)
            assert memory.covers(address + size - 1, 1)
            assert not memory.covers(address, size + 1)
        assert pool.blocks == set(live)
    for address in list(live):
        memory.reclaim(memory.forget(address))
    for block in dying:
        memory.reclaim(block)
    assert memory.allocate(SIZE, pool, []) == BASE
