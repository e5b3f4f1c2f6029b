// SPDX-License-Identifier: Apache-2.0
// An ordinary CUDA program with a kernel: nvcc -cudart shared -o vector vector.cu
#include <cstdio>
#include <vector>

__global__ void add(int *at, int value, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        at[i] += value;
}

int main() {
    const int count = 100000;
    std::vector<int> values(count);
    int *at = nullptr, wrong = 0;
    for (int i = 0; i < count; i++)
        values[i] = i;
    wrong += cudaMalloc(&at, count * sizeof(int)) != cudaSuccess;
    wrong += cudaMemcpy(at, values.data(), count * sizeof(int), cudaMemcpyHostToDevice) != cudaSuccess;
    for (int value = 1; value <= 3; value++)
        add<<<(count + 255) / 256, 256>>>(at, value, count);
    wrong += cudaGetLastError() != cudaSuccess;
    wrong += cudaDeviceSynchronize() != cudaSuccess;
    wrong += cudaMemcpy(values.data(), at, count * sizeof(int), cudaMemcpyDeviceToHost) != cudaSuccess;
    for (int i = 0; i < count; i++)
        wrong += values[i] != i + 6;
    wrong += cudaFree(at) != cudaSuccess;
    printf("wrong %d\n", wrong);
    return wrong != 0;
}
