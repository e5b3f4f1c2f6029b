# SPDX-License-Identifier: Apache-2.0
"""When commands are answered: no earlier than their work is done, and not much later."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.rpc import messages as m
from tests.pair.raw import LIMIT, RawClient, RegionView, eventually, hear

H2D = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
D2D = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice


@pytest.mark.emulated_only(reason="slowed copies")
def test_brief_work_is_answered_before_long_work_behind_it(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    session = connect(backend(device_options="bandwidth=0.1"))
    size = 16 << 20  # 0.17 s
    stream = cudart.cudaStreamCreate()[1]
    one, other = cudart.cudaMalloc(size)[1], cudart.cudaMalloc(size)[1]
    data = np.ones(4096, np.uint8)

    def flying() -> list[str]:
        session.connection.refresh()
        return [command.name for command in flyt.inflight()]

    for _ in range(8):
        assert cudart.cudaMemcpyAsync(one, data, data.size, H2D, stream) == (0,)
        assert cudart.cudaMemcpyAsync(other, one, size, D2D, stream) == (0,)
        assert eventually(lambda: "CopyIn" not in flying(), LIMIT)
        assert flying() == ["CopyOn"], "the brief copy was answered with the long one"
        assert cudart.cudaStreamSynchronize(stream) == (0,)


@pytest.mark.emulated_only(reason="slowed copies")
def test_brief_work_is_answered_before_an_inline_copy_behind_it(
    backend: Callable[..., Any],
) -> None:
    """Told together they would be one row of numbers, in one message."""
    served = backend(device_options="bandwidth=0.01")  # the inline copy takes 0.1 s
    with RawClient(served.endpoint) as client:
        assert client.attach_inline().status == 0
        block = client.malloc(m.INLINE_CHUNK)
        assert client.call(m.StreamCreate, m.FIRST_STREAM, 0, 1, 0).status == 0
        for _ in range(8):
            fill = client.post(m.Memset, block, 1, 512, m.FIRST_STREAM)
            copy = client.post(
                m.Push, block, m.INLINE_CHUNK, m.FIRST_STREAM, payload=bytes(m.INLINE_CHUNK)
            )
            frames = hear(client.dialer)
            assert frames is not None
            told = m.REPLIES.decode(frames[0])
            assert (told.first, told.count) == (fill, 1)
            assert client.answer(copy).status == 0


@pytest.mark.emulated_only(reason="slowed copies")
def test_frames_of_a_window_that_is_given_up_are_nobodys_before_the_copy_is_done(
    backend: Callable[..., Any],
) -> None:
    """A second ATTACH, inline, gives the window up while a copy into it is under way."""
    served = backend(device_options="latency=1.5", size="8M")
    with RawClient(served.endpoint) as client, RegionView(served.region) as view:
        assert client.attach().status == 0
        page = client.geometry.page_size
        block = client.malloc(page)
        client.bytes_at(page, page)[:] = b"\xab" * page
        assert client.call(m.CopyIn, block, page, page, client.pid).status == 0
        client.bytes_at(page, page)[:] = bytes(page)
        frames = view.frames_of(client.pid)
        started = time.monotonic()
        client.post(m.CopyOut, block, page, page, client.pid)
        assert client.attach_inline().status == 0
        assert time.monotonic() - started >= 1.4, "it did not wait for the copy"
        time.sleep(0.5)  # a late write would be over by then
        assert view.dirty(frame for frame in frames if view.are_free([frame])) == []
