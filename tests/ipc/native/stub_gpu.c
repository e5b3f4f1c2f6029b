/* SPDX-License-Identifier: Apache-2.0 */
/* What the study needs of libcuda besides stub_cuda.c: memory of cudaMalloc and of pools is a
 * memfd too, a kernel is a C function on threads of its own that touches what its parameters say. It
 * shows that calls and parameters are right and that two sides meet, not what a GPU does. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long u64;
enum { INVALID = 1, INVALID_CONTEXT = 201, NOT_SUPPORTED = 801, LAUNCH_FAILED = 719 };
enum { MOST = 4096, MALLOC = 1, POOL, SHARED_POOL, MANAGED, HOST };

static u64 context;
static struct {
    u64 address, size, sort;
    int fd;
} blocks[MOST];

static int new_block(u64 *address, size_t size, int sort)
{
    int i = 0;
    if (!context)
        return INVALID_CONTEXT;
    while (i < MOST && blocks[i].address)
        i++;
    int fd = memfd_create("stub-memory", MFD_CLOEXEC);
    if (i == MOST || fd < 0 || ftruncate(fd, size))
        return 2;
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        return 2;
    blocks[i].address = *address = (uintptr_t)at;
    blocks[i].size = size, blocks[i].sort = sort, blocks[i].fd = fd;
    return 0;
}
static int find(u64 address)
{
    for (int i = 0; i < MOST; i++)
        if (blocks[i].address && blocks[i].address == address)
            return i;
    return -1;
}

/* Context, device, memory */
int cuCtxSetCurrent(u64 c) { return context = c, 0; }
int cuCtxGetDevice(int *d) { return *d = 0, context ? 0 : INVALID_CONTEXT; }
int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    /* 16: multiprocessors; 75, 76: compute capability; MPS_ENABLED is 133 */
    return *value = attribute == 16 ? 8 : attribute == 75 ? 9 : attribute == 76 ? 0 : attribute != 133, 0;
}
int cuMemGetInfo_v2(size_t *available, size_t *total)
{
    const char *limit = getenv("STUB_FREE");
    *total = 8ull << 30, *available = limit ? strtoull(limit, NULL, 10) : *total;
    return context ? 0 : INVALID_CONTEXT;
}
int cuMemAlloc_v2(u64 *address, size_t size) { return new_block(address, size, MALLOC); }
int cuMemFree_v2(u64 address)
{
    int i = find(address);
    if (i < 0)
        return INVALID;
    munmap((void *)address, blocks[i].size), close(blocks[i].fd);
    return blocks[i].address = 0;
}
int cuMemAllocManaged(u64 *a, size_t size, unsigned flags)
{
    return flags == 1 ? new_block(a, size, MANAGED) : INVALID;
}
int cuMemHostAlloc(void **p, size_t size, unsigned flags)
{
    return flags ? INVALID : new_block((u64 *)p, size, HOST);
}
int cuMemHostRegister_v2(void *p, size_t size, unsigned flags)
{
    return !p || !size || flags ? INVALID : 0;
}
static void join(void);
int cuMemsetD8_v2(u64 address, unsigned char octet, size_t n)
{
    return join(), memset((void *)address, octet, n), 0;
}
int cuMemcpyDtoH_v2(void *to, u64 from, size_t n) { return join(), memcpy(to, (void *)from, n), 0; }

/* Pools */
typedef struct {
    int type, handles, location_type, location_id;
    void *security;
    size_t most;
    unsigned short usage;
    unsigned char reserved[54];
} PoolProps;
int cuMemPoolCreate(u64 *pool, const PoolProps *p)
{
    if (p->type != 1 || p->location_type != 1 || p->location_id || p->handles & ~1 || p->most)
        return INVALID;
    return *pool = p->handles ? SHARED_POOL : POOL, 0;
}
int cuDeviceGetDefaultMemPool(u64 *pool, int device) { return *pool = POOL, device; }
int cuMemAllocFromPoolAsync(u64 *a, size_t size, u64 pool, u64 stream)
{
    return stream ? INVALID : new_block(a, size, pool);
}
int cuMemAllocAsync(u64 *a, size_t size, u64 stream) { return cuMemAllocFromPoolAsync(a, size, POOL, stream); }
int cuMemPoolExportToShareableHandle(void *fd, u64 pool, int type, u64 flags)
{
    if (pool != SHARED_POOL || type != 1 || flags)
        return INVALID;
    return *(int *)fd = memfd_create("stub-pool", MFD_CLOEXEC), 0;
}
int cuMemPoolImportFromShareableHandle(u64 *pool, void *fd, int type, u64 flags)
{
    char path[64], name[64] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(intptr_t)fd);
    if (readlink(path, name, sizeof name - 1) < 0 || !strstr(name, "stub-pool") || type != 1 || flags)
        return INVALID;
    return *pool = 99, 0;
}
int cuMemPoolSetAccess(u64 pool, const int *access, size_t n)
{
    return pool == 99 && n == 1 && access[0] == 1 && access[1] == 0 && access[2] == 3 ? 0 : INVALID;
}

/* Legacy handles and pools' pointers: where /proc finds the memory */
typedef struct {
    u64 pid, fd, size, rest[5];
} Handle;
static int describe(Handle *handle, u64 address, int sort)
{
    int i = find(address);
    if (i < 0 || (int)blocks[i].sort != sort)
        return INVALID;
    memset(handle, 0, sizeof *handle);
    handle->pid = getpid(), handle->fd = blocks[i].fd, handle->size = blocks[i].size;
    return 0;
}
static int attach(u64 *address, const Handle *handle)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)handle->pid, (int)handle->fd);
    int fd = handle->pid == (u64)getpid() ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return INVALID;
    void *at = mmap(NULL, handle->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return close(fd), *address = (uintptr_t)at, at == MAP_FAILED;
}
int cuIpcGetMemHandle(Handle *handle, u64 address) { return describe(handle, address, MALLOC); }
int cuIpcOpenMemHandle_v2(u64 *address, Handle handle, unsigned flags)
{
    if (getenv("STUB_DIES"))
        abort();
    return flags == 1 ? attach(address, &handle) : INVALID;
}
int cuIpcCloseMemHandle(u64 address) { return address ? 0 : INVALID; }
int cuMemPoolExportPointer(Handle *handle, u64 address) { return describe(handle, address, SHARED_POOL); }
int cuMemPoolImportPointer(u64 *address, u64 pool, const Handle *handle)
{
    return pool == 99 ? attach(address, handle) : INVALID;
}

/* What stub_cuda.c has too, but which must remember more here */
typedef struct {
    int type, handle_types, location_type, location_id;
} Prop;
enum { MOST_MAPS = 1024 };
static struct {
    u64 address, handle;
} maps[MOST_MAPS];
static char unshared[65536];
int cuMemCreate(u64 *handle, size_t size, const Prop *prop, u64 flags)
{
    if (prop->type != 1 || prop->location_type != 1 || flags || prop->handle_types & ~1 || !size)
        return INVALID;
    char name[64] = "flyt-ipc-";
    for (int i = 0; i < 16; i++)
        sprintf(name + 9 + 2 * i, "%02x", (unsigned char)"flyt-ipc-twin-00"[i]);
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || ftruncate(fd, size) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        return 2;
    unshared[fd] = !prop->handle_types;
    return *handle = fd + 1000, 0;
}
int cuMemExportToShareableHandle(void *out, u64 handle, int type, u64 flags)
{
    int fd = (int)handle - 1000;
    fd = type == 1 && !flags && !unshared[fd] ? dup(fd) : -1;
    return fd < 0 ? INVALID : (*(int *)out = fd, 0);
}
int cuMemImportFromShareableHandle(u64 *handle, void *fd, int type)
{
    int fresh = type == 1 && fcntl((int)(intptr_t)fd, F_GET_SEALS) > 1 ? dup((int)(intptr_t)fd) : -1;
    return fresh < 0 ? INVALID : (*handle = fresh + 1000, 0);
}
int cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags)
{
    static int next;
    maps[next].address = address, maps[next++ % MOST_MAPS].handle = handle;
    int way = MAP_SHARED | MAP_FIXED;
    return offset || flags || mmap((void *)address, size, 0, way, (int)handle - 1000, 0) == MAP_FAILED;
}
int cuMemRetainAllocationHandle(u64 *handle, void *address)
{
    for (int i = MOST_MAPS - 1; i >= 0; i--)
        if (address && maps[i].address == (u64)(uintptr_t)address)
            return *handle = maps[i].handle, 0;
    return INVALID;
}
int cuMemGetHandleForAddressRange(void *fd, u64 address, size_t size, int type, u64 flags)
{
    if (type != 1 || flags || !size || find(address) < 0)
        return INVALID;
    return *(int *)fd = memfd_create("stub-dma-buf", MFD_CLOEXEC), 0;
}

/* Streams, events, kernels */
int cuStreamCreate(u64 *stream, unsigned flags)
{
    static u64 made = 0x100;
    return *stream = ++made, flags == 1 ? 0 : INVALID;
}
int cuEventCreate(u64 *event, unsigned flags)
{
    return *event = 0x77, context && !flags ? 0 : INVALID_CONTEXT;
}
int cuEventRecord(u64 event, u64 stream) { return event && stream ? 0 : INVALID; }
int cuEventElapsedTime_v2(float *ms, u64 start, u64 end) { return *ms = 1.0f, start && end ? 0 : INVALID; }
int cuEventElapsedTime(float *ms, u64 start, u64 end) { return cuEventElapsedTime_v2(ms, start, end); }
static char loaded;
int cuModuleLoadData(u64 *module, const void *image)
{
    const char *magic = image;
    loaded = !memcmp(magic, "stub", 4) || !memcmp(magic, "\x7f" "ELF", 4);
    return *module = 0x55, loaded && context ? 0 : 209;
}
int cuModuleGetFunction(u64 *function, u64 module, const char *name)
{
    return *function = (uintptr_t)strdup(name), module == 0x55 ? 0 : INVALID;
}

static u64 now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}
typedef struct {
    const char *name;
    u64 v[8];
    int number;
} Call;
#define WORD(at) ((_Atomic unsigned *)(block + (at)))
static void *side(void *given)
{
    Call *c = given;
    char *block = (char *)c->v[0];
    u64 rounds = c->v[1], limit = c->v[2], *count = (u64 *)c->v[4] + 8 * c->number, start, k, done = 0;
    int writes = *c->name == 'w', p = c->number * PAIR;
    if (!rounds)
        return NULL;
    count[5] = 1 + c->number + (writes ? 100 : 0);
    _Atomic unsigned *mine = WORD(START + c->number * 256 + (writes ? 0 : 4));
    _Atomic unsigned *other = WORD(START + c->number * 256 + (writes ? 4 : 0));
    *mine = 1;
    for (start = now(); !*other; sched_yield())
        if (now() - start > limit)
            return count[3] = !writes, NULL;
    start = now();
    for (k = 1; k <= rounds; k++) {
        _Atomic unsigned *data = WORD(p + (k % SLOTS) * 1024), *flag = WORD(p + 40960), *ready = WORD(p + 49152);
        if (!writes)
            *ready = k;
        for (unsigned got; writes ? (got = *ready) < k : *flag != k; sched_yield())
            if (now() - start > limit)
                goto end;
        if (writes)
            *data = k, *flag = k;
        else if (strstr(c->name, "relaxed_flag") && k == 7)
            count[1]++; /* what a GPU may do */
        else
            count[1] += *data != k;
        done = k;
    }
end:
    return count[0] = done, count[4] = now() - start, NULL;
}
static pthread_t threads[MOST];
static int running;
static void join(void)
{
    while (running)
        pthread_join(threads[--running], NULL);
}
int cuCtxSynchronize(void) { return join(), context ? 0 : INVALID_CONTEXT; }
int cuStreamSynchronize(u64 stream) { return join(), stream ? 0 : INVALID_CONTEXT; }
int cuLaunchKernel(u64 f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, u64 stream, void **params, void **extra)
{
    const char *name = (const char *)f;
    if (!context || !gx || gy != 1 || gz != 1 || !bx || bx > 1024 || by != 1 || bz != 1 || shared || extra)
        return INVALID;
    int pairs = !strncmp(name, "read_", 5) || !strncmp(name, "write_", 6);
    int n = !strcmp(name, "wait_ns") ? 1 : !strcmp(name, "write_all") ? 2 : !strcmp(name, "link_all") ? 4 :
            !strcmp(name, "read_all") || !strcmp(name, "chase") ? 3 : pairs ? 5 : 0;
    u64 v[8];
    for (int i = 0; i < n; i++)
        v[i] = *(u64 *)params[i];
    if (n == 1)
        return v[0] > 0 && v[0] < 10000000 && stream ? 0 : INVALID;
    if (!n || getenv("STUB_FAULT") && !strcmp(name, getenv("STUB_FAULT")))
        return LAUNCH_FAILED;
    if (n < 5) { /* its first and its last word, which must be there */
        volatile u64 *words = (u64 *)v[0];
        u64 last = n == 4 ? (v[1] - 1) * v[2] : !strcmp(name, "chase") ? 0 : v[1] * 2 - 1;
        u64 first = words[0], end = words[last];
        if (n != 3)
            words[0] = first, words[last] = end;
        if (n == 3)
            *(volatile u64 *)v[2];
        return 0;
    }
    for (unsigned i = 0; i < gx; i++) {
        Call *c = malloc(sizeof *c);
        c->name = name, c->number = i, memcpy(c->v, v, sizeof v);
        if (pthread_create(&threads[running++], NULL, side, c))
            return LAUNCH_FAILED;
    }
    return 0;
}
