# SPDX-License-Identifier: Apache-2.0
"""numba-cuda: the sum of two vectors. Nothing in here knows of Flyt."""

import numpy as np
from numba import cuda

N = 1 << 20
THREADS = 256


@cuda.jit
def add(x, y, total):
    i = cuda.grid(1)
    if i < total.size:
        total[i] = x[i] + y[i]


x = np.arange(N, dtype=np.float32)
y = np.full(N, 0.5, np.float32)
total = cuda.device_array_like(x)
add[-(-N // THREADS), THREADS](cuda.to_device(x), cuda.to_device(y), total)
result = total.copy_to_host()
assert np.array_equal(result, x + y), "the sum is wrong"

# Host arrays as arguments: numba copies them there and back.
again = np.zeros_like(x)
add[-(-N // THREADS), THREADS](x, y, again)
assert np.array_equal(again, x + y), "the sum of host arrays is wrong"
print(f"vector_add: {N} elements on {cuda.get_current_device().name}: right")
