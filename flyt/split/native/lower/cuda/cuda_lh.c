/* SPDX-License-Identifier: Apache-2.0 */
/* The lower half cuda: the calls, and the log of what lives, which a restart makes again.
 *
 * Device memory comes from an arena at fixed addresses, so that pointers stay right. What is
 * freed or unregistered leaves the log: no pair of the two is ever played back.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

#define REGISTRATIONS 4096 /* fat binaries, functions and variables of one program */
#define CHUNK (1u << 20)   /* device memory goes to the image and comes back through this much */

struct allocation {
    uint64_t at, size; /* whole grains */
    uint64_t asked;
    struct allocation *next; /* by address */
};

static const struct device *device;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation *live;
static struct registration registered[REGISTRATIONS];
static int registered_count, modules;
static _Thread_local int noted; /* the last error that is this file's, not the device's */

static int answer(int error) {
    if (error)
        device->last(1), noted = error; /* the latest of both is the last */
    return error;
}

/* --- memory --- */

int is_device_memory(const void *at, size_t size) {
    uint64_t from = (uint64_t)at;
    int found = 0;
    pthread_mutex_lock(&lock);
    for (const struct allocation *one = live; one && one->at <= from; one = one->next)
        found |= from - one->at <= one->asked && size <= one->asked - (from - one->at);
    pthread_mutex_unlock(&lock);
    return found;
}

static int add(struct allocation **place, uint64_t at, uint64_t asked) {
    struct allocation *one = malloc(sizeof *one);
    uint64_t size = (asked + GRAIN - 1) & ~(GRAIN - 1);
    if (!one)
        return CUDA_MEMORY_ALLOCATION;
    int error = device->map((void *)at, size);
    if (error) {
        free(one);
        return error;
    }
    *one = (struct allocation){at, size, asked, *place};
    *place = one;
    return 0;
}

int lower_cudaMalloc(void **pointer, size_t size) {
    uint64_t end = split_info->arena + split_info->arena_size, at = split_info->arena;
    struct allocation **place = &live;
    if (!pointer)
        return answer(CUDA_INVALID_VALUE);
    *pointer = NULL;
    if (!size)
        return 0;
    if (size > split_info->arena_size - GRAIN)
        return answer(CUDA_MEMORY_ALLOCATION);
    pthread_mutex_lock(&lock);
    uint64_t whole = (size + GRAIN - 1) & ~(GRAIN - 1);
    for (; *place && (*place)->at - at < whole; place = &(*place)->next)
        at = (*place)->at + (*place)->size;
    int error = !*place && end - at < whole ? CUDA_MEMORY_ALLOCATION : add(place, at, size);
    pthread_mutex_unlock(&lock);
    if (!error)
        *pointer = (void *)at;
    return answer(error);
}

int lower_cudaFree(void *pointer) {
    int error = pointer ? CUDA_INVALID_VALUE : 0;
    pthread_mutex_lock(&lock);
    for (struct allocation **place = &live; pointer && *place; place = &(*place)->next)
        if ((*place)->at == (uint64_t)pointer) {
            struct allocation *gone = *place;
            error = device->unmap(pointer, gone->size);
            *place = gone->next;
            free(gone);
            break;
        }
    pthread_mutex_unlock(&lock);
    return answer(error);
}

int lower_cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    return device->copy(to, from, size, kind);
}
int lower_cudaMemset(void *at, int value, size_t size) { return device->set(at, value, size); }
int lower_cudaDeviceSynchronize(void) { return device->synchronise(); }

static int last_error(int clear) {
    int error = device->last(clear), own = noted;
    if (clear)
        noted = 0;
    return error ? error : own;
}

int lower_cudaGetLastError(void) { return last_error(1); }
int lower_cudaPeekAtLastError(void) { return last_error(0); }
const char *lower_cudaGetErrorName(int error) { return device->name(error); }
const char *lower_cudaGetErrorString(int error) { return device->text(error); }
int lower_cudaGetDeviceCount(int *count) { return device->count(count); }
int lower_cudaGetDevice(int *number) { return device->get(number); }
int lower_cudaSetDevice(int number) { return device->choose(number); }

/* --- what nvcc's code registers before main --- */

static void enroll(struct registration entry) {
    pthread_mutex_lock(&lock);
    if (registered_count == REGISTRATIONS) {
        fprintf(stderr, "flyt split: cuda_lh: more than %d registrations\n", REGISTRATIONS);
        abort();
    }
    registered[registered_count++] = entry;
    pthread_mutex_unlock(&lock);
    device->enroll(&entry);
}

static int module_of(void **handle) { return (int)(uintptr_t)handle; } /* a number: right after a restart */

void **lower___cudaRegisterFatBinary(void *binary) {
    int module = __atomic_add_fetch(&modules, 1, __ATOMIC_RELAXED);
    enroll((struct registration){.kind = 1, .module = module, .host = binary});
    return (void **)(uintptr_t)module;
}

void lower___cudaRegisterFatBinaryEnd(void **handle) {
    enroll((struct registration){.kind = 2, .module = module_of(handle)});
}

void lower___cudaRegisterFunction(void **handle, const char *host, char *function, const char *name, int limit,
                                  void *tid, void *bid, void *block, void *grid, int *size) {
    (void)tid, (void)bid, (void)block, (void)grid, (void)size; /* nvcc passes NULL */
    enroll((struct registration){.kind = 3, .module = module_of(handle), .limit = limit, .host = host,
                                 .device = function, .name = name});
}

void lower___cudaRegisterVar(void **handle, char *host, char *address, const char *name, int external, size_t size,
                             int constant, int global) {
    enroll((struct registration){.kind = 4, .module = module_of(handle), .external = external, .constant = constant,
                                 .global = global, .host = host, .device = address, .name = name, .size = size});
}

void lower___cudaUnregisterFatBinary(void **handle) {
    int module = module_of(handle), kept = 0;
    device->dismiss(module);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < registered_count; i++)
        if (registered[i].module != module)
            registered[kept++] = registered[i];
    registered_count = kept;
    pthread_mutex_unlock(&lock);
}

char lower___cudaInitModule(void **handle) { return device->init_module(module_of(handle)); }

static const struct registration *look_up(int kind, int module, const void *host) {
    const struct registration *found = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < registered_count && !found; i++)
        if (registered[i].kind == kind && (module ? registered[i].module == module : registered[i].host == host))
            found = &registered[i];
    pthread_mutex_unlock(&lock);
    return found;
}

const struct registration *find_function(const void *host) { return look_up(3, 0, host); }
const struct registration *find_module(int module) { return look_up(1, module, NULL); }

unsigned lower___cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    return device->push(grid, block, shared, stream);
}

int lower___cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    return device->pop(grid, block, shared, stream);
}

int lower_cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    return device->launch(function, grid, block, arguments, shared, stream);
}

int lower___cudaGetKernel(void **kernel, const void *function) { return device->get_kernel(kernel, function); }

int lower___cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    return device->launch(kernel, grid, block, arguments, shared, stream);
}

/* --- start, checkpoint, restart --- */

const char *lower_start(void) {
    const char *wanted = getenv("FLYT_SPLIT_CUDA"), *why = "FLYT_SPLIT_CUDA says so";
    if (wanted && *wanted && strcmp(wanted, "twin") && strcmp(wanted, "real"))
        return "FLYT_SPLIT_CUDA must be twin or real";
    if (!wanted || strcmp(wanted, "twin"))
        device = real_device(&why);
    if (!device && wanted && !strcmp(wanted, "real"))
        return why;
    if (!device) {
        device = &twin;
        fprintf(stderr, "flyt split: cuda_lh answers with host memory, not with a GPU: %s\n", why);
    } else {
        fprintf(stderr, "flyt split: cuda_lh answers with the real CUDA runtime\n");
    }
    return NULL;
}

static char chunk[CHUNK];

static int move(uint64_t at, uint64_t size, split_put put, split_get get) {
    for (uint64_t done = 0; done < size;) {
        uint64_t part = size - done < CHUNK ? size - done : CHUNK;
        int error = 0;
        if (put)
            error = device->copy(chunk, (void *)(at + done), part, cudaMemcpyDeviceToHost), put(chunk, part);
        else
            get(chunk, part), error = device->copy((void *)(at + done), chunk, part, cudaMemcpyHostToDevice);
        if (error)
            return error;
        done += part;
    }
    return 0;
}

static const char *each_variable(split_put put, split_get get) {
    for (int i = 0; i < registered_count; i++) {
        void *at;
        if (registered[i].kind != 4 || device == &twin)
            continue;
        if (device->symbol(&at, registered[i].host) || move((uint64_t)at, registered[i].size, put, get))
            return "a __device__ variable can't be copied";
    }
    return NULL;
}

const char *lower_save(split_put put) {
    uint64_t count = 0;
    if (device->synchronise())
        return "the device reports an error: its memory can't be trusted";
    for (const struct allocation *one = live; one; one = one->next)
        count++;
    put(&modules, sizeof modules);
    put(&registered_count, sizeof registered_count);
    put(registered, sizeof *registered * (size_t)registered_count);
    put(&count, sizeof count);
    for (const struct allocation *one = live; one; one = one->next) {
        put(&one->at, sizeof one->at), put(&one->asked, sizeof one->asked);
        if (move(one->at, one->asked, put, NULL))
            return "device memory can't be copied to the host";
    }
    return each_variable(put, NULL);
}

const char *lower_restore(split_get get) {
    static char problem[128];
    uint64_t count, at, asked;
    get(&modules, sizeof modules);
    get(&registered_count, sizeof registered_count);
    if (registered_count < 0 || registered_count > REGISTRATIONS)
        return "the image holds more registrations than there is room for";
    get(registered, sizeof *registered * (size_t)registered_count);
    for (int i = 0; i < registered_count; i++)
        device->enroll(&registered[i]);
    get(&count, sizeof count);
    for (struct allocation **place = &live; count--; place = &(*place)->next) {
        get(&at, sizeof at), get(&asked, sizeof asked);
        int error = add(place, at, asked);
        if (error) {
            snprintf(problem, sizeof problem, "%llu bytes of device memory can't be had at 0x%llx again: error %d",
                     (unsigned long long)asked, (unsigned long long)at, error);
            return problem;
        }
        if (move(at, asked, NULL, get))
            return "device memory can't be filled again";
    }
    return each_variable(NULL, get);
}
