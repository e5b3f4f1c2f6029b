# SPDX-License-Identifier: Apache-2.0
"""One of several processes in the guest: moves bytes to the device and back, and stays.

Arguments: a number that tells the processes apart, and how many MiB it moves. It writes
/tmp/share.N when it is done, goes when there is /tmp/go.N, and copies on until it is killed if
there is /tmp/forever.N.
"""

import json
import mmap
import os
import sys
import time
from pathlib import Path

import numpy as np

import flyt
import flyt as cudart
from flyt.frontend.current import current

SHOWN = 1 << 20
H2D = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
D2H = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
STAY_SECONDS = 100

number = int(sys.argv[1])
BYTES = int(sys.argv[2]) << 20
# Word i of process n is i * (2n + 3): the host computes the same.
source = np.arange(BYTES // 8, dtype=np.uint64) * np.uint64(2 * number + 3)
back = np.zeros_like(source)


def must(answer: tuple) -> object:
    if answer[0] != cudart.cudaError_t.cudaSuccess:
        sys.exit(f"{answer[0]!r}: {cudart.last_failure()}")
    return answer[-1]


device = must(cudart.cudaMalloc(BYTES))
must(cudart.cudaMemcpy(device, source, BYTES, H2D))
must(cudart.cudaMemcpy(back, device, BYTES, D2H))
if not (back == source).all():
    sys.exit("what came back is not what was sent")
pinned = flyt.pinned_empty(SHOWN, np.uint8)
must(cudart.cudaMemcpy(pinned, int(device) + BYTES - SHOWN, SHOWN, D2H))

session = current()
window = session.memory.window
report = {
    "pid": os.getpid(),
    "session": session.welcome.session,
    "vpn": (pinned.ctypes.data - window.base) // session.memory.geometry.page_size,
    "counts": flyt.statistics(),
}
part = Path(f"/tmp/part.{number}")
part.write_text(json.dumps(report))
part.rename(f"/tmp/share.{number}")

deadline = time.monotonic() + STAY_SECONDS
while not Path(f"/tmp/go.{number}").exists():
    if Path(f"/tmp/forever.{number}").exists():
        # The first byte of this file says whether a copy is under way.
        with open(f"/tmp/state.{number}", "w+b") as file:
            file.truncate(4096)
            state = mmap.mmap(file.fileno(), 4096)
        while True:
            state[0] = 1
            must(cudart.cudaMemcpy(device, source, BYTES, H2D))
            state[0] = 0
    if time.monotonic() > deadline:
        sys.exit("nobody let this process go")
    time.sleep(0.02)
must(cudart.cudaMemcpy(back, device, BYTES, D2H))
sys.exit(not (back == source).all())
