/* SPDX-License-Identifier: Apache-2.0 */
/* What answers cuda_lh's calls: the real runtime, or host memory. Chosen at the start. */
#ifndef FLYT_SPLIT_DEVICE_H
#define FLYT_SPLIT_DEVICE_H

#include "../../include/flyt_cuda.h"
#include "../lower.h"

#define GRAIN (2ull << 20) /* of device memory: the granularity of CUDA's VMM */
#define CUDA_INVALID_VALUE 1
#define CUDA_MEMORY_ALLOCATION 2
#define CUDA_INVALID_DEVICE_FUNCTION 98
#define CUDA_INVALID_DEVICE 101
#define CUDA_INVALID_COPY_KIND 21

/* One registration that nvcc's code has made; its pointers are the upper half's. */
struct registration {
    int kind; /* 0 gone; 1 fat binary; 2 its end; 3 function; 4 variable */
    int module, limit, external, constant, global;
    const void *host;
    char *device;
    const char *name;
    size_t size;
};

struct device {
    int (*map)(void *at, size_t size); /* whole grains, at this address or not at all */
    int (*unmap)(void *at, size_t size);
    int (*copy)(void *to, const void *from, size_t size, int kind);
    int (*set)(void *at, int value, size_t size);
    int (*synchronise)(void);
    int (*count)(int *count);
    int (*get)(int *device);
    int (*choose)(int device);
    void (*enroll)(const struct registration *entry);
    void (*dismiss)(int module);
    char (*init_module)(int module);
    unsigned (*push)(dim3 grid, dim3 block, size_t shared, void *stream);
    int (*pop)(dim3 *grid, dim3 *block, size_t *shared, void *stream);
    int (*launch)(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream);
    int (*get_kernel)(void **kernel, const void *function); /* what `launch` takes, also after a restart */
    int (*symbol)(void **at, const void *host); /* a variable's place on the device */
    const char *(*name)(int error);
    const char *(*text)(int error);
    int (*last)(int clear);
};

extern const struct device twin;
const struct device *real_device(const char **why_not);

/* Of the log. */
int is_device_memory(const void *at, size_t size);
const struct registration *find_function(const void *host);
const struct registration *find_module(int module);

#endif
