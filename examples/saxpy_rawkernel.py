# SPDX-License-Identifier: Apache-2.0
"""`flyt.RawKernel`: SAXPY from CUDA source, on device arrays and on pinned memory itself."""

import numpy as np

import flyt

SOURCE = r"""
extern "C" __global__ void saxpy(float a, const float *x, float *y, int n)
{
    int i = blockDim.x * blockIdx.x + threadIdx.x;
    if (i < n)
        y[i] = a * x[i] + y[i];
}
"""

N = 1 << 20
THREADS = 256

saxpy = flyt.RawKernel(SOURCE, "saxpy")
x = np.arange(N, dtype=np.float32)
y = np.ones(N, np.float32)
device_x, device_y = flyt.to_device(x), flyt.to_device(y)
saxpy((-(-N // THREADS),), (THREADS,), (np.float32(2), device_x, device_y, N))
assert np.array_equal(device_y.copy_to_host(), 2 * x + 1), "y is wrong"

# Pinned memory lies in the shared region: the kernel reads and writes it where it is.
pinned = flyt.pinned_empty(N, np.float32)
pinned[:] = 1
stream = flyt.Stream(non_blocking=True)
saxpy(-(-N // THREADS), THREADS, (np.float32(3), device_x, pinned.ctypes.data, N), stream=stream)
stream.sync()
assert np.array_equal(pinned, 3 * x + 1), "pinned y is wrong"
print(f"saxpy_rawkernel: {N} elements, device and pinned memory: right")
