# SPDX-License-Identifier: Apache-2.0
"""Calls with pauses, so that the backend's thread sleeps before each, and nothing but the doorbell
wakes it. Prints a line of JSON.
"""

import json
import sys
import time

import numpy as np

import flyt as cudart
from flyt.frontend.wire import Wire

CALLS = 20
PAUSE_SECONDS = 0.05
H2D = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
D2H = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost

Wire.nudge = lambda self: None  # what wakes it after a second, should a ring be lost
source = np.arange(100_003, dtype=np.uint8)
back = np.zeros_like(source)
err, device = cudart.cudaMalloc(source.nbytes)
if err:
    sys.exit(f"{err!r}: {cudart.last_failure()}")
before = cudart.statistics()["doorbell_rings"]
slowest = 0.0
for number in range(CALLS):
    time.sleep(PAUSE_SECONDS)
    begun = time.monotonic()
    codes = [
        cudart.cudaMemcpy(device, source + np.uint8(number), source.nbytes, H2D)[0],
        cudart.cudaMemcpy(back, device, source.nbytes, D2H)[0],
    ]
    slowest = max(slowest, time.monotonic() - begun)
    if any(codes) or not (back == source + np.uint8(number)).all():
        sys.exit(f"call {number}: {codes}")
counts = cudart.statistics()
rings = counts["doorbell_rings"] - before
print(json.dumps({"rings": rings, "slowest": slowest, "fallback": counts["fallback_doorbell"]}))
