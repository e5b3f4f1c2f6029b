# SPDX-License-Identifier: Apache-2.0
"""One copy of so many bytes (the argument) to the device and back, compared."""

import sys

import numpy as np

import flyt as cudart

size = int(sys.argv[1])
source = np.arange(size // 8, dtype=np.uint64)
err, device = cudart.cudaMalloc(size)
if err == 0:
    (err,) = cudart.cudaMemcpy(device, source, size, cudart.cudaMemcpyKind.cudaMemcpyHostToDevice)
back = np.zeros_like(source)
if err == 0:
    (err,) = cudart.cudaMemcpy(back, device, size, cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost)
counts = cudart.statistics()
print(err, counts)
moved = (counts["staged_h2d_bytes"], counts["staged_d2h_bytes"])
sys.exit(err != 0 or not np.array_equal(back, source) or moved != (size, size))
