# SPDX-License-Identifier: Apache-2.0
"""numba-cuda: sums of several arrays, each on a stream of its own, timed by events; one stream
waits for another's event. Nothing in here knows of Flyt."""

import numpy as np
from numba import cuda, int64

THREADS = 256
BLOCKS = 64
N = 1 << 20
STREAMS = 4


@cuda.jit
def reduce(values, partial):
    shared = cuda.shared.array(THREADS, int64)
    i, step = cuda.grid(1), cuda.gridsize(1)
    total = int64(0)
    while i < values.size:
        total += values[i]
        i += step
    place = cuda.threadIdx.x
    shared[place] = total
    cuda.syncthreads()
    half = THREADS // 2
    while half:
        if place < half:
            shared[place] += shared[place + half]
        cuda.syncthreads()
        half //= 2
    if place == 0:
        partial[cuda.blockIdx.x] = shared[0]


@cuda.jit
def finish(partial, total):
    if cuda.grid(1) == 0:
        for value in partial:
            total[0] += value


streams = [cuda.stream() for _ in range(STREAMS)]
ends = [cuda.event(timing=False) for _ in streams]
begun, ended = cuda.event(), cuda.event()
hosts = [cuda.pinned_array(N, np.int64) for _ in streams]
for n, host in enumerate(hosts):
    host[:] = np.arange(N) * (n + 1)
total = cuda.to_device(np.zeros(1, np.int64))
begun.record(streams[0])
parts = []
for stream, host, end in zip(streams, hosts, ends):
    values = cuda.to_device(host, stream=stream)
    part = cuda.device_array(BLOCKS, np.int64, stream=stream)
    reduce[BLOCKS, THREADS, stream](values, part)
    end.record(stream)
    parts.append((values, part))
for end, (_, part) in zip(ends, parts):
    end.wait(streams[0])
    finish[1, 1, streams[0]](part, total)
ended.record(streams[0])
ended.synchronize()
expected = sum(int(host.sum()) for host in hosts)
assert int(total.copy_to_host()[0]) == expected, "the sum is wrong"
milliseconds = cuda.event_elapsed_time(begun, ended)
assert milliseconds > 0, "no time went by"
print(f"reduction_streams: {STREAMS} streams, {milliseconds:.2f} ms: right")
