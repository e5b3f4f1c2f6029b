# SPDX-License-Identifier: Apache-2.0
"""A process that outlives its backend. Writes /tmp/restart, waits for /tmp/restarted."""

import os
import sys
import time
from pathlib import Path

import numpy as np

import flyt
import flyt as cudart
from flyt.frontend.current import current

UNAVAILABLE = cudart.cudaError_t.cudaErrorDevicesUnavailable

pinned = flyt.pinned_empty(100_000, np.uint8)
pinned[:] = 7
epoch = current().welcome.epoch
Path("/tmp/part").write_text(f"{os.getpid()}")
Path("/tmp/part").rename("/tmp/restart")
deadline = time.monotonic() + 60
while not Path("/tmp/restarted").exists():
    if time.monotonic() > deadline:
        sys.exit("nobody restarted the backend")
    time.sleep(0.02)

for _ in range(2):
    err, _ = cudart.cudaMalloc(4096)
    if err != UNAVAILABLE:
        sys.exit(f"{err!r} instead of {UNAVAILABLE!r}")
flyt.connect()
if current().welcome.epoch == epoch:
    sys.exit("the epoch is the old one")
source = np.arange(1_000_003, dtype=np.uint64)
back = np.zeros_like(source)
err, device = cudart.cudaMalloc(source.nbytes)
H2D = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
D2H = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
codes = [
    cudart.cudaMemcpy(device, source, source.nbytes, H2D)[0],
    cudart.cudaMemcpy(back, device, source.nbytes, D2H)[0],
]
counts = cudart.statistics()
print(codes, counts)
sys.exit(any(codes) or not (back == source).all() or counts["fallback_inline"] != 0)
