# SPDX-License-Identifier: Apache-2.0
"""Copies with pauses, so that the backend's thread sleeps before each: first nothing but the
doorbell wakes it, then every ring is lost. Prints a line of JSON.
"""

import json
import sys
import time

import numpy as np

import flyt as cudart
from flyt.frontend.wire import Wire
from flyt.shm.doorbell import Doorbell

COPIES = 20
LOST = 2
PAUSE_SECONDS = 0.05
H2D = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
D2H = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost

source = np.arange(100_003, dtype=np.uint8)
back = np.zeros_like(source)
err, device = cudart.cudaMalloc(source.nbytes)
if err:
    sys.exit(f"{err!r}: {cudart.last_failure()}")


def copy(number: int) -> float:
    """There and back, compared; the milliseconds that it took."""
    time.sleep(PAUSE_SECONDS)
    data, begun = source + np.uint8(number), time.monotonic()
    codes = [
        cudart.cudaMemcpy(device, data, source.nbytes, H2D)[0],
        cudart.cudaMemcpy(back, device, source.nbytes, D2H)[0],
    ]
    if any(codes) or not (back == data).all():
        sys.exit(f"copy {number}: {codes}")
    return (time.monotonic() - begun) * 1000


def rung() -> int:
    return cudart.statistics()["doorbell_rings"]


nudge, Wire.nudge = Wire.nudge, lambda self: None  # what wakes it after a second
before = rung()
belled = sorted(copy(number) for number in range(COPIES))
rings = rung() - before

Wire.nudge, Doorbell.ring = nudge, lambda self: None
lost = [copy(number) for number in range(LOST)]
report = {"rings": rings, "fallback": cudart.statistics()["fallback_doorbell"]}
print(json.dumps({**report, "median_ms": belled[COPIES // 2], "lost_ms": lost}))
