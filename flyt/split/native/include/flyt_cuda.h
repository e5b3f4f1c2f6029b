/* SPDX-License-Identifier: Apache-2.0 */
/* As much of the CUDA runtime API as the lower half cuda answers, for programs without NVIDIA's
 * headers; the ABI is the same. With them, include cuda_runtime_api.h instead. */
#ifndef FLYT_CUDA_H
#define FLYT_CUDA_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    unsigned x, y, z;
} dim3;

enum { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };

int cudaMalloc(void **devPtr, size_t size);
int cudaFree(void *devPtr);
int cudaMemcpy(void *dst, const void *src, size_t count, int kind);
int cudaMemset(void *devPtr, int value, size_t count);
int cudaDeviceSynchronize(void);
int cudaGetLastError(void);
int cudaPeekAtLastError(void);
const char *cudaGetErrorName(int error);
const char *cudaGetErrorString(int error);
int cudaGetDeviceCount(int *count);
int cudaGetDevice(int *device);
int cudaSetDevice(int device);
void **__cudaRegisterFatBinary(void *fatCubin);
void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaUnregisterFatBinary(void **handle);
void __cudaRegisterFunction(void **handle, const char *hostFun, char *deviceFun, const char *deviceName, int thread_limit,
                            void *tid, void *bid, void *bDim, void *gDim, int *wSize);
unsigned __cudaPushCallConfiguration(dim3 gridDim, dim3 blockDim, size_t sharedMem, void *stream);
int __cudaPopCallConfiguration(dim3 *gridDim, dim3 *blockDim, size_t *sharedMem, void *stream);
int cudaLaunchKernel(const void *func, dim3 gridDim, dim3 blockDim, void **args, size_t sharedMem, void *stream);
int __cudaGetKernel(void **kernel, const void *func);
int __cudaLaunchKernel(void *kernel, dim3 gridDim, dim3 blockDim, void **args, size_t sharedMem, void *stream);

/* The twin's stand-in for device code: where a fat binary's data begins with FLYT_TWIN, a kernel
 * is a function of the program, which is called once a launch. */
#define FLYT_TWIN "FLYTTWIN"
#define FLYT_FATBIN_MAGIC 0x466243b1

struct flyt_twin_kernel {
    const char *name;
    void (*run)(const dim3 *gridDim, const dim3 *blockDim, void **args);
};

struct flyt_twin_module {
    char magic[8];
    const struct flyt_twin_kernel *kernels; /* ended by a name of NULL */
};

/* What nvcc's __fatBinC_Wrapper_t is. */
struct flyt_fatbin {
    int magic, version;
    const void *data;
    void *file;
};

#ifdef __cplusplus
}
#endif
#endif
