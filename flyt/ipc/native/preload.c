/* SPDX-License-Identifier: Apache-2.0 */
/* LD_PRELOAD: cudaMalloc and cudaFree of a program that is left as it is.
 *
 * The dynamic linker looks here before libcudart.so, whoever loads that, and however. A program
 * that links the runtime statically keeps its own. */

#define _GNU_SOURCE
#include "vmm.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static struct {
    int (*Free)(void *);
    int (*GetDevice)(int *);
} runtime;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

enum { NO_RUNTIME = 999 /* cudaErrorUnknown */ };

static int seen(struct dl_phdr_info *info, size_t size, void *path)
{
    (void)size;
    if (!info->dlpi_name || !strstr(info->dlpi_name, "libcudart.so"))
        return 0;
    *(const char **)path = info->dlpi_name;
    return 1;
}

/* RTLD_NEXT sees only what is loaded globally; Python loads extensions locally. */
static int find_runtime(void)
{
    int result = NO_RUNTIME;
    pthread_mutex_lock(&lock);
    if (!runtime.Free) {
        const char *path = NULL;
        void *library = NULL, *release, *device;
        if (dl_iterate_phdr(seen, &path))
            library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
        release = library ? dlsym(library, "cudaFree") : NULL;
        device = library ? dlsym(library, "cudaGetDevice") : NULL;
        if (release && device) {
            memcpy(&runtime.GetDevice, &device, sizeof device);
            memcpy(&runtime.Free, &release, sizeof release);
        } else {
            fprintf(stderr, "flyt: no libcudart.so is loaded, though cudaMalloc was called\n");
        }
    }
    if (runtime.Free)
        result = 0;
    pthread_mutex_unlock(&lock);
    return result;
}

int cudaMalloc(void **pointer, size_t size)
{
    int device, result;
    if (!pointer)
        return 1; /* cudaErrorInvalidValue */
    if ((result = find_runtime()))
        return result;
    /* The first call of a thread makes the primary context current, as the real one does. */
    if ((result = runtime.Free(NULL)) || (result = runtime.GetDevice(&device)))
        return result;
    return flyt_vmm_alloc(size, device, pointer);
}

int cudaFree(void *pointer)
{
    int ours = 0, result = 0;
    if (pointer)
        result = flyt_vmm_free(pointer, &ours);
    if (ours)
        return result;
    if ((result = find_runtime()))
        return result;
    return runtime.Free(pointer);
}
