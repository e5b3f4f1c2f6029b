/* SPDX-License-Identifier: Apache-2.0 */
/* What nvcc makes of a program with one kernel, by hand: registration before main, launches
 * through Push/PopCallConfiguration. The kernel itself is the twin's: a function of this program. */
#include <stdio.h>
#include <string.h>

#include "flyt_cuda.h"
#include "flyt_split.h"

static _Thread_local int runs;

static void run_add(const dim3 *grid, const dim3 *block, void **arguments) {
    int *at = *(int **)arguments[0], value = *(int *)arguments[1];
    for (unsigned i = 0; i < grid->x * block->x; i++)
        at[i] += value;
    runs++;
}
static const struct flyt_twin_kernel kernels[] = {{"_Z3addPii", run_add}, {NULL, NULL}};
static const struct flyt_twin_module module = {{'F', 'L', 'Y', 'T', 'T', 'W', 'I', 'N'}, kernels};
static struct flyt_fatbin wrapper = {FLYT_FATBIN_MAGIC, 1, &module, NULL};
static void **handle;

static int add(int *at, int value) { /* the host-side stub that nvcc writes for add<<<...>>> */
    dim3 grid, block;
    size_t shared;
    void *stream, *arguments[] = {&at, &value};
    if (__cudaPopCallConfiguration(&grid, &block, &shared, &stream))
        return -1;
    return cudaLaunchKernel((const void *)add, grid, block, arguments, shared, stream);
}

__attribute__((constructor)) static void enroll(void) {
    handle = __cudaRegisterFatBinary(&wrapper);
    __cudaRegisterFunction(handle, (const char *)add, "_Z3addPii", "_Z3addPii", -1, NULL, NULL, NULL, NULL, NULL);
    __cudaRegisterFatBinaryEnd(handle);
}
__attribute__((destructor)) static void dismiss(void) { __cudaUnregisterFatBinary(handle); }

int main(int argc, char **argv) {
    int restarted = 0;
    int *at, values[256], wrong = 0, none;
    dim3 grid = {4, 1, 1}, block = {64, 1, 1};
    cudaMalloc((void **)&at, sizeof values);
    cudaMemset(at, 0, sizeof values);
    for (int value = 1; value <= 3; value++)
        wrong += __cudaPushCallConfiguration(grid, block, 0, NULL) || add(at, value);
    if (argc > 1) { /* what is registered, and a kernel's handle that is kept, hold over a restart */
        void *kernel, *arguments[] = {&at, &(int){10}};
        wrong += __cudaGetKernel(&kernel, (const void *)add) != 0;
        restarted = flyt_split_checkpoint(argv[1]);
        wrong += __cudaLaunchKernel(kernel, grid, block, arguments, 0, NULL) != 0;
        arguments[1] = &(int){-10};
        wrong += cudaLaunchKernel((const void *)add, grid, block, arguments, 0, NULL) != 0;
        printf("restarted %d\n", restarted);
    }
    cudaMemcpy(values, at, sizeof values, cudaMemcpyDeviceToHost);
    for (int i = 0; i < 256; i++)
        wrong += values[i] != 6;
    printf("wrong %d runs %d\n", wrong, runs);
    int unknown = cudaLaunchKernel(&none, grid, block, NULL, 0, NULL);
    const char *name = cudaGetErrorName(cudaGetLastError());
    printf("unknown %d %s\n", unknown, name);
    printf("cleared %d\n", cudaGetLastError());
    int freed = cudaFree(at), twice = cudaFree(at), null = cudaFree(NULL);
    printf("freed %d twice %d null %d\n", freed, twice, null);
    int kind = cudaMemcpy(values, values, 4, 9);
    int outside = cudaMemcpy(values, at, 4, cudaMemcpyDeviceToHost);
    int empty = cudaMemcpy(NULL, NULL, 0, cudaMemcpyDeviceToHost);
    int large = cudaMalloc((void **)&at, 1ul << 50);
    int last = cudaGetLastError(), cleared = cudaGetLastError();
    int again = cudaMalloc((void **)&at, 1ul << 50), peeked = cudaPeekAtLastError(), got = cudaGetLastError();
    printf("last %d %d; %d %d %d %d\n", last, cleared, again, peeked, got, cudaGetLastError());
    printf("kind %d outside %d empty %d large %d\n", kind, outside, empty, large);
    return 0;
}
