# SPDX-License-Identifier: Apache-2.0
"""numba-cuda: a matrix product by tiles in shared memory. Nothing in here knows of Flyt."""

import numpy as np
from numba import cuda, float32

TILE = 16
N = 512


@cuda.jit
def matmul(a, b, c):
    left = cuda.shared.array((TILE, TILE), float32)
    right = cuda.shared.array((TILE, TILE), float32)
    row, column = cuda.grid(2)
    i, j = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for tile in range(a.shape[1] // TILE):
        left[i, j] = a[row, tile * TILE + j]
        right[i, j] = b[tile * TILE + i, column]
        cuda.syncthreads()
        for k in range(TILE):
            total += left[i, k] * right[k, j]
        cuda.syncthreads()
    c[row, column] = total


random = np.random.default_rng(1)
# Small whole numbers: their products and sums are exact in float32.
a = random.integers(-8, 8, (N, N)).astype(np.float32)
b = random.integers(-8, 8, (N, N)).astype(np.float32)
c = cuda.device_array((N, N), np.float32)
matmul[(N // TILE, N // TILE), (TILE, TILE)](cuda.to_device(a), cuda.to_device(b), c)
assert np.array_equal(c.copy_to_host(), a @ b), "the product is wrong"
print(f"matmul_shared: {N} x {N} on {cuda.get_current_device().name}: right")
