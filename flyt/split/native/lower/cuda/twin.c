/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory in place of a GPU: the calls' results as CUDA documents them, no device code. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "device.h"

#define NESTED 8 /* launches whose configuration is pushed and not yet popped, per thread */

static _Thread_local int last_error;
static _Thread_local struct configuration {
    dim3 grid, block;
    size_t shared;
    void *stream;
} pushed[NESTED];
static _Thread_local unsigned depth;

static int answer(int error) {
    if (error)
        last_error = error;
    return error;
}

static int map(void *at, size_t size) {
    void *got = mmap(at, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    return answer(got == at ? 0 : CUDA_MEMORY_ALLOCATION);
}

static int unmap(void *at, size_t size) { return answer(munmap(at, size) ? CUDA_INVALID_VALUE : 0); }

static int copy(void *to, const void *from, size_t size, int kind) {
    int to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    int from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault)
        return answer(CUDA_INVALID_COPY_KIND);
    if (!size)
        return 0;
    if (!to || !from || (to_device && !is_device_memory(to, size)) || (from_device && !is_device_memory(from, size)))
        return answer(CUDA_INVALID_VALUE);
    memmove(to, from, size);
    return 0;
}

static int set(void *at, int value, size_t size) {
    if (!size)
        return 0;
    if (!is_device_memory(at, size))
        return answer(CUDA_INVALID_VALUE);
    memset(at, value, size);
    return 0;
}

static int synchronise(void) { return 0; }
static int count(int *number) { return number ? *number = 1, 0 : answer(CUDA_INVALID_VALUE); }
static int get(int *number) { return number ? *number = 0, 0 : answer(CUDA_INVALID_VALUE); }
static int choose(int number) { return answer(number ? CUDA_INVALID_DEVICE : 0); }
static void enroll(const struct registration *entry) { /* like the real runtime, it reads a fat binary at once */
    if (entry->kind == 1 && ((const struct flyt_fatbin *)entry->host)->magic != FLYT_FATBIN_MAGIC)
        fprintf(stderr, "flyt split: cuda_lh: what is registered is no fat binary\n");
}
static void dismiss(int module) { (void)module; }
static char init_module(int module) { return find_module(module) != NULL; }

static unsigned push(dim3 grid, dim3 block, size_t shared, void *stream) {
    if (depth == NESTED)
        return 1;
    pushed[depth++] = (struct configuration){grid, block, shared, stream};
    return 0;
}

static int pop(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    if (!depth)
        return answer(CUDA_INVALID_VALUE);
    const struct configuration *top = &pushed[--depth];
    *grid = top->grid, *block = top->block, *shared = top->shared;
    *(void **)stream = top->stream;
    return 0;
}

/* A kernel is a function of the upper half's, and runs with its TLS block. */
static int launch(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    (void)shared, (void)stream;
    const struct registration *function = find_function(host);
    const struct registration *module = function ? find_module(function->module) : NULL;
    const struct flyt_fatbin *wrapper = module ? module->host : NULL;
    if (!wrapper || wrapper->magic != FLYT_FATBIN_MAGIC || memcmp(wrapper->data, FLYT_TWIN, 8))
        return answer(CUDA_INVALID_DEVICE_FUNCTION); /* real device code: there is no device */
    const struct flyt_twin_kernel *kernel = ((const struct flyt_twin_module *)wrapper->data)->kernels;
    while (kernel->name && strcmp(kernel->name, function->name))
        kernel++;
    struct split_thread *thread = split_get_gs();
    uint64_t own = split_get_fs();
    if (!kernel->name || !thread)
        return answer(CUDA_INVALID_DEVICE_FUNCTION);
    uint64_t mark;
    uint32_t depth = split_note(thread, &mark);
    split_set_fs(thread->fs[SPLIT_UPPER]);
    kernel->run(&grid, &block, arguments);
    split_set_fs(own);
    split_forget(thread, &mark, depth);
    return 0;
}

static int get_kernel(void **kernel, const void *host) {
    *kernel = (void *)host;
    return answer(find_function(host) ? 0 : CUDA_INVALID_DEVICE_FUNCTION);
}

static int symbol(void **at, const void *host) {
    *at = (void *)host;
    return 0;
}

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {0, "cudaSuccess", "no error"},
    {CUDA_INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {CUDA_MEMORY_ALLOCATION, "cudaErrorMemoryAllocation", "out of memory"},
    {CUDA_INVALID_COPY_KIND, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {CUDA_INVALID_DEVICE_FUNCTION, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {CUDA_INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
};

static const char *name(int error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error)
            return errors[i].name;
    return "unrecognized error code";
}

static const char *text(int error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error)
            return errors[i].text;
    return "unrecognized error code";
}

static int last(int clear) {
    int error = last_error;
    if (clear)
        last_error = 0;
    return error;
}

const struct device twin = {
    map, unmap, copy, set, synchronise, count, get, choose, enroll, dismiss, init_module,
    push, pop, launch, get_kernel, symbol, name, text, last,
};
