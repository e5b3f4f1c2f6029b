// SPDX-License-Identifier: Apache-2.0
// An ordinary CUDA program that knows of no checkpoint: five steps, "ready", calls until its input is
// readable, five more steps; then every element is what the arithmetic says.
//
//   nvcc -cudart shared -o steps steps.cu
#include <cstdio>
#include <poll.h>
#include <vector>

__device__ unsigned total = 100;
__constant__ unsigned factor = 3;

__global__ void step(unsigned *at, unsigned count) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        at[i] = at[i] * factor + i;
    if (i == 0)
        total += 1;
}

__global__ void tell(unsigned *at) { *at = total; }

static const unsigned count = 1000003;
static int failed;
static void check(cudaError_t error) { failed += error != cudaSuccess; }

static void steps(unsigned *at) {
    for (int n = 0; n < 5; n++)
        step<<<(count + 255) / 256, 256>>>(at, count);
    check(cudaGetLastError());
    check(cudaDeviceSynchronize());
}

int main() {
    std::vector<unsigned> values(count);
    unsigned *at = nullptr, *told = nullptr, seen = 0, wrong = 0;
    for (unsigned i = 0; i < count; i++)
        values[i] = 7 * i + 1;
    check(cudaMalloc(&at, count * sizeof *at));
    check(cudaMalloc(&told, sizeof *told));
    check(cudaMemcpy(at, values.data(), count * sizeof *at, cudaMemcpyHostToDevice));
    steps(at);
    printf("ready %d at %p\n", failed, (void *)at);
    fflush(stdout);
    for (pollfd input = {0, POLLIN, 0}; poll(&input, 1, 2) <= 0;) // -1: the request's signal interrupts it
        check(cudaDeviceSynchronize());
    steps(at);
    tell<<<1, 1>>>(told);
    check(cudaMemcpy(&seen, told, sizeof seen, cudaMemcpyDeviceToHost));
    check(cudaMemcpy(values.data(), at, count * sizeof *at, cudaMemcpyDeviceToHost));
    for (unsigned i = 0; i < count; i++) {
        unsigned expected = 7 * i + 1;
        for (int n = 0; n < 10; n++)
            expected = expected * 3 + i;
        wrong += values[i] != expected;
    }
    check(cudaFree(at));
    check(cudaFree(told));
    printf("total %u wrong %u failed %d at %p\n", seen, wrong, failed, (void *)at);
    return wrong || failed || seen != 110;
}
