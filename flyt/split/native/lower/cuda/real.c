/* SPDX-License-Identifier: Apache-2.0 */
/* The real CUDA runtime: libcudart for the calls, libcuda's VMM for memory at chosen addresses.
 *
 * No test runs it where there is no GPU; scripts/split-gpu does (docs/split.md).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#include "device.h"

/* libcuda's types, as far as VMM needs them. */
typedef struct {
    int type, id;
} location; /* CUmemLocation: 1 is a device */
typedef struct {
    int type, handle_types;
    location where;
    void *security;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} properties; /* CUmemAllocationProp: type 1 is pinned */
typedef struct {
    location where;
    int flags;
} access_of; /* CUmemAccessDesc: 3 is read and write */

#define DRIVER(CALL)                                                                               \
    CALL(cuInit, int, (unsigned))                                                                  \
    CALL(cuMemAddressReserve, int, (unsigned long long *, size_t, size_t, unsigned long long, unsigned long long)) \
    CALL(cuMemAddressFree, int, (unsigned long long, size_t))                                      \
    CALL(cuMemCreate, int, (unsigned long long *, size_t, const properties *, unsigned long long)) \
    CALL(cuMemRelease, int, (unsigned long long))                                                  \
    CALL(cuMemMap, int, (unsigned long long, size_t, size_t, unsigned long long, unsigned long long)) \
    CALL(cuMemUnmap, int, (unsigned long long, size_t))                                            \
    CALL(cuMemSetAccess, int, (unsigned long long, size_t, const access_of *, size_t))

#define RUNTIME(CALL)                                                                              \
    CALL(cudaFree, int, (void *))                                                                  \
    CALL(cudaMemcpy, int, (void *, const void *, size_t, int))                                     \
    CALL(cudaMemset, int, (void *, int, size_t))                                                   \
    CALL(cudaDeviceSynchronize, int, (void))                                                       \
    CALL(cudaGetLastError, int, (void))                                                            \
    CALL(cudaPeekAtLastError, int, (void))                                                         \
    CALL(cudaGetErrorName, const char *, (int))                                                    \
    CALL(cudaGetErrorString, const char *, (int))                                                  \
    CALL(cudaGetDeviceCount, int, (int *))                                                         \
    CALL(cudaGetDevice, int, (int *))                                                              \
    CALL(cudaSetDevice, int, (int))                                                                \
    CALL(cudaGetSymbolAddress, int, (void **, const void *))                                       \
    CALL(cudaLaunchKernel, int, (const void *, dim3, dim3, void **, size_t, void *))               \
    CALL(__cudaRegisterFatBinary, void **, (void *))                                               \
    CALL(__cudaRegisterFatBinaryEnd, void, (void **))                                              \
    CALL(__cudaUnregisterFatBinary, void, (void **))                                               \
    CALL(__cudaRegisterFunction, void,                                                             \
         (void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *)) \
    CALL(__cudaRegisterVar, void, (void **, char *, char *, const char *, int, size_t, int, int))  \
    CALL(__cudaPushCallConfiguration, unsigned, (dim3, dim3, size_t, void *))                      \
    CALL(__cudaPopCallConfiguration, int, (dim3 *, dim3 *, size_t *, void *))

#define RUNTIME_MAYBE(CALL) /* not in every version */                                             \
    CALL(__cudaInitModule, char, (void **))

static struct {
#define DECLARE(name, result, parameters) result(*name) parameters;
    DRIVER(DECLARE)
    RUNTIME(DECLARE)
    RUNTIME_MAYBE(DECLARE)
} cuda;

#define MODULES 1024
static void **handles[MODULES]; /* the runtime's, by the number that the upper half has */

static int whole; /* the arena is one reservation */

/* At best once for the whole arena: where a freed range lay the driver need not give the same addresses
 * again. Else each allocation reserves its own range. */
static void reserve_arena(void) {
    static int tried;
    unsigned long long got = 0, wanted = split_info->arena;
    if (tried++)
        return;
    if (cuda.cuMemAddressReserve(&got, split_info->arena_size, 0, wanted, 0))
        return;
    whole = got == wanted;
    if (!whole)
        cuda.cuMemAddressFree(got, split_info->arena_size);
}

static int refused(const char *what, int code, size_t size) {
    fprintf(stderr, "flyt split: cuda_lh: %s of %zu bytes: CUresult %d\n", what, size, code);
    return CUDA_MEMORY_ALLOCATION;
}

/* Under the lock of cuda_lh.c. */
static int map(void *at, size_t size) {
    unsigned long long got = 0, memory = 0, wanted = (unsigned long long)at;
    properties kind = {.type = 1, .where = {1, 0}};
    int error = cuda.cudaFree(NULL); /* makes the context */
    if (!error)
        error = cuda.cudaGetDevice(&kind.where.id);
    if (error)
        return error;
    reserve_arena();
    if (whole)
        got = wanted;
    else if ((error = cuda.cuMemAddressReserve(&got, size, 0, wanted, 0)))
        return refused("cuMemAddressReserve", error, size);
    if (got != wanted)
        error = refused("cuMemAddressReserve, at other addresses,", 0, size);
    else if ((error = cuda.cuMemCreate(&memory, size, &kind, 0)))
        error = error == 2 ? CUDA_MEMORY_ALLOCATION : refused("cuMemCreate", error, size);
    else if ((error = cuda.cuMemMap(got, size, 0, memory, 0)))
        error = refused("cuMemMap", error, size);
    if (memory)
        cuda.cuMemRelease(memory); /* lives on as long as it is mapped */
    access_of access = {kind.where, 3};
    if (!error && (error = cuda.cuMemSetAccess(got, size, &access, 1))) {
        cuda.cuMemUnmap(got, size);
        error = refused("cuMemSetAccess", error, size);
    }
    if (error && !whole)
        cuda.cuMemAddressFree(got, size);
    return error;
}

static int unmap(void *at, size_t size) {
    int error = cuda.cudaDeviceSynchronize(); /* as cudaFree does */
    if (cuda.cuMemUnmap((unsigned long long)at, size))
        return CUDA_INVALID_VALUE;
    if (!whole && cuda.cuMemAddressFree((unsigned long long)at, size))
        return CUDA_INVALID_VALUE;
    return error;
}

static void enroll(const struct registration *one) {
    if (one->module <= 0 || one->module >= MODULES) {
        fprintf(stderr, "flyt split: cuda_lh: more than %d fat binaries\n", MODULES - 1);
        return;
    }
    void **handle = handles[one->module];
    switch (one->kind) {
    case 1: handles[one->module] = cuda.__cudaRegisterFatBinary((void *)one->host); break;
    case 2: cuda.__cudaRegisterFatBinaryEnd(handle); break;
    case 3:
        cuda.__cudaRegisterFunction(handle, one->host, one->device, one->name, one->limit, NULL, NULL, NULL, NULL, NULL);
        break;
    default:
        cuda.__cudaRegisterVar(handle, (char *)one->host, one->device, one->name, one->external, one->size,
                               one->constant, one->global);
    }
}

static void dismiss(int module) {
    if (module > 0 && module < MODULES && handles[module])
        cuda.__cudaUnregisterFatBinary(handles[module]);
    if (module > 0 && module < MODULES)
        handles[module] = NULL;
}

static char init_module(int module) {
    return cuda.__cudaInitModule && module > 0 && module < MODULES ? cuda.__cudaInitModule(handles[module]) : 1;
}

/* nvcc's code keeps the handle in a static variable, where it outlives a restart and the runtime's own
 * would not: the handle is the host function, which cudaLaunchKernel takes just as well. */
static int get_kernel(void **kernel, const void *host) {
    *kernel = (void *)host;
    return find_function(host) ? 0 : CUDA_INVALID_DEVICE_FUNCTION;
}

static int last(int clear) { return clear ? cuda.cudaGetLastError() : cuda.cudaPeekAtLastError(); }

const struct device *real_device(const char **why_not) {
    static struct device device;
    static char why[160];
    *why_not = why;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!driver) {
        snprintf(why, sizeof why, "%s", dlerror());
        return NULL;
    }
    void *runtime = dlopen("libcudart.so.13", RTLD_NOW | RTLD_GLOBAL);
    if (!runtime)
        runtime = dlopen("libcudart.so.12", RTLD_NOW | RTLD_GLOBAL);
    if (!runtime) {
        snprintf(why, sizeof why, "%s", dlerror());
        return NULL;
    }
#define FIND_IN(library, name) *(void **)&cuda.name = dlsym(library, #name)
#define FIND_DRIVER(name, result, parameters)                                                      \
    if (!(FIND_IN(driver, name)))                                                                  \
        return snprintf(why, sizeof why, "libcuda.so.1 has no %s", #name), NULL;
#define FIND_RUNTIME(name, result, parameters)                                                     \
    if (!(FIND_IN(runtime, name)))                                                                 \
        return snprintf(why, sizeof why, "libcudart has no %s", #name), NULL;
#define FIND_MAYBE(name, result, parameters) FIND_IN(runtime, name);
    DRIVER(FIND_DRIVER)
    RUNTIME(FIND_RUNTIME)
    RUNTIME_MAYBE(FIND_MAYBE)
    int count = 0, error = cuda.cuInit(0);
    if (error || cuda.cudaGetDeviceCount(&count) || !count) {
        snprintf(why, sizeof why, "there is no GPU that CUDA can use (cuInit answers %d)", error);
        return NULL;
    }
    device = (struct device){
        map, unmap, cuda.cudaMemcpy, cuda.cudaMemset, cuda.cudaDeviceSynchronize, cuda.cudaGetDeviceCount,
        cuda.cudaGetDevice, cuda.cudaSetDevice, enroll, dismiss, init_module, cuda.__cudaPushCallConfiguration,
        cuda.__cudaPopCallConfiguration, cuda.cudaLaunchKernel, get_kernel, cuda.cudaGetSymbolAddress,
        cuda.cudaGetErrorName, cuda.cudaGetErrorString, last,
    };
    return &device;
}
