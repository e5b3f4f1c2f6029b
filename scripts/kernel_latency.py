# SPDX-License-Identifier: Apache-2.0
"""What a launch of an empty kernel costs: ``kernel_latency.py native|flyt`` prints microseconds.

``native`` is CuPy's RawKernel on this machine's GPU, ``flyt`` Flyt's against ``$FLYT_BACKEND``: the
same calls. *issue* is the launch call alone, in rows that a client may have in flight; *sync* is a
launch and a wait for its stream.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

ROW = 150
"""Launches in a row: fewer than a client's credits, so that the call is measured, not the queue."""

ROUNDS = 60
WARM_UP = 20
SYNCS = 1500

SOURCE = """
extern "C" __global__ void empty() {}
extern "C" __global__ void one(float *x, int n) {}
"""


def contender(name: str) -> tuple[Any, Any, Callable[[], Any]]:
    """Two kernels, arguments for the second, and a wait for the stream they are launched on."""
    if name == "native":
        cupy = importlib.import_module("cupy")
        module = cupy.RawModule(code=SOURCE)
        array = cupy.zeros(16, cupy.float32)
        stream = cupy.cuda.Stream.null
        wait = stream.synchronize
    else:
        flyt = importlib.import_module("flyt")
        numpy = importlib.import_module("numpy")
        module = flyt.RawModule(SOURCE)
        array = flyt.to_device(numpy.zeros(16, numpy.float32))
        wait = flyt.Stream.default.sync
    kernels = module.get_function("empty"), module.get_function("one")
    return kernels, array, wait


def measure(name: str) -> dict[str, float]:
    """Medians in microseconds."""
    (empty, one), array, wait = contender(name)
    clock = time.perf_counter
    issues, with_arguments, syncs = [], [], []
    for turn in range(ROUNDS + WARM_UP):
        for kernel, arguments, told in ((empty, (), issues), (one, (array, 16), with_arguments)):
            wait()
            started = clock()
            for _ in range(ROW):
                kernel((1,), (1,), arguments)
            if turn >= WARM_UP:
                told.append((clock() - started) / ROW * 1e6)
    wait()
    for turn in range(SYNCS + WARM_UP):
        started = clock()
        empty((1,), (1,), ())
        wait()
        if turn >= WARM_UP:
            syncs.append((clock() - started) * 1e6)
    median = statistics.median
    return {
        "issue": median(issues),
        "issue_with_arguments": median(with_arguments),
        "sync": median(syncs),
        "sync_p95": sorted(syncs)[int(0.95 * len(syncs))],
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
