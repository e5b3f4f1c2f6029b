/* SPDX-License-Identifier: Apache-2.0 */
/* Allocation by CUDA's virtual memory management, for callers that only know pointers.
 *
 * The driver is opened at run time and its few structures are declared here, so neither CUDA's
 * headers nor PyTorch's are needed to compile this. */

#define _GNU_SOURCE
#include "vmm.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUhandle;
typedef struct CUctx_st *CUcontext;

enum { OUT_OF_MEMORY = 2, INVALID_VALUE = 1, NO_DRIVER = 35 /* cudaErrorInsufficientDriver */ };
enum { PINNED = 1, POSIX_FD = 1, ON_DEVICE = 1, READ_WRITE = 3, RECOMMENDED = 1 };

typedef struct {
    int type;
    int id;
} Location;

typedef struct {
    int type;
    int requested_handle_types;
    Location location;
    void *win32_meta;
    struct {
        unsigned char compression, gpu_direct_rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
} AllocationProp;

typedef struct {
    Location location;
    int flags;
} AccessDesc;

_Static_assert(sizeof(AllocationProp) == 32, "CUmemAllocationProp has 32 bytes");
_Static_assert(sizeof(AccessDesc) == 12, "CUmemAccessDesc has 12 bytes");

static struct {
    CUresult (*Init)(unsigned);
    CUresult (*DeviceGet)(int *, int);
    CUresult (*DevicePrimaryCtxRetain)(CUcontext *, int);
    CUresult (*CtxPushCurrent)(CUcontext);
    CUresult (*CtxPopCurrent)(CUcontext *);
    CUresult (*CtxSynchronize)(void);
    CUresult (*MemGetAllocationGranularity)(size_t *, const AllocationProp *, int);
    CUresult (*MemCreate)(CUhandle *, size_t, const AllocationProp *, unsigned long long);
    CUresult (*MemRelease)(CUhandle);
    CUresult (*MemAddressReserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*MemAddressFree)(CUdeviceptr, size_t);
    CUresult (*MemMap)(CUdeviceptr, size_t, size_t, CUhandle, unsigned long long);
    CUresult (*MemUnmap)(CUdeviceptr, size_t);
    CUresult (*MemSetAccess)(CUdeviceptr, size_t, const AccessDesc *, size_t);
    CUresult (*MemExportToShareableHandle)(void *, CUhandle, int, unsigned long long);
} cu;

static const struct {
    const char *name;
    void *place;
} symbols[] = {
    {"cuInit", &cu.Init},
    {"cuDeviceGet", &cu.DeviceGet},
    {"cuDevicePrimaryCtxRetain", &cu.DevicePrimaryCtxRetain},
    {"cuCtxPushCurrent_v2", &cu.CtxPushCurrent},
    {"cuCtxPopCurrent_v2", &cu.CtxPopCurrent},
    {"cuCtxSynchronize", &cu.CtxSynchronize},
    {"cuMemGetAllocationGranularity", &cu.MemGetAllocationGranularity},
    {"cuMemCreate", &cu.MemCreate},
    {"cuMemRelease", &cu.MemRelease},
    {"cuMemAddressReserve", &cu.MemAddressReserve},
    {"cuMemAddressFree", &cu.MemAddressFree},
    {"cuMemMap", &cu.MemMap},
    {"cuMemUnmap", &cu.MemUnmap},
    {"cuMemSetAccess", &cu.MemSetAccess},
    {"cuMemExportToShareableHandle", &cu.MemExportToShareableHandle},
};

enum { MAX_DEVICES = 64 };
static CUcontext contexts[MAX_DEVICES];
static pthread_mutex_t context_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static CUresult opened;

static void open_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "flyt: %s\n", dlerror());
        opened = NO_DRIVER;
        return;
    }
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *found = dlsym(library, symbols[i].name);
        if (!found) {
            fprintf(stderr, "flyt: the CUDA driver has no %s: update it\n", symbols[i].name);
            opened = NO_DRIVER;
            return;
        }
        memcpy(symbols[i].place, &found, sizeof found);
    }
    opened = cu.Init(0);
}

static CUresult context_of(int device, CUcontext *context)
{
    CUresult result = 0;
    pthread_once(&once, open_driver);
    if (opened)
        return opened;
    if (device < 0 || device >= MAX_DEVICES)
        return 101; /* CUDA_ERROR_INVALID_DEVICE */
    pthread_mutex_lock(&context_lock);
    if (!contexts[device]) {
        int handle;
        result = cu.DeviceGet(&handle, device);
        if (!result)
            result = cu.DevicePrimaryCtxRetain(&contexts[device], handle);
    }
    *context = contexts[device];
    pthread_mutex_unlock(&context_lock);
    return result;
}

/* --- the table of blocks, sorted by address --- */

typedef struct {
    struct flyt_block block;
    CUhandle handle;
    int exported;
} Entry;

static Entry *table;
static size_t count, room;
static uint64_t next_serial = 1;
static int watcher = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Index of the first entry behind this address. */
static size_t behind(uint64_t address)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (table[middle].block.start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int insert(Entry entry)
{
    int done = 0;
    pthread_mutex_lock(&lock);
    if (count == room) {
        size_t wanted = room ? 2 * room : 64;
        Entry *bigger = realloc(table, wanted * sizeof *table);
        if (bigger) {
            table = bigger;
            room = wanted;
        }
    }
    if (count < room) {
        size_t at = behind(entry.block.start);
        memmove(table + at + 1, table + at, (count - at) * sizeof *table);
        entry.block.serial = next_serial++;
        table[at] = entry;
        count++;
        done = 1;
    }
    pthread_mutex_unlock(&lock);
    return done;
}

int flyt_vmm_alloc(size_t size, int device, void **pointer)
{
    AllocationProp prop = {.type = PINNED, .requested_handle_types = POSIX_FD};
    AccessDesc access = {.flags = READ_WRITE};
    CUcontext context;
    CUdeviceptr address = 0;
    CUhandle handle = 0;
    size_t grain = 0;

    *pointer = NULL;
    if (size == 0)
        return 0;
    CUresult result = context_of(device, &context);
    if (result)
        return result;
    prop.location.type = access.location.type = ON_DEVICE;
    prop.location.id = access.location.id = device;
    result = cu.MemGetAllocationGranularity(&grain, &prop, RECOMMENDED);
    if (result)
        return result;
    if (grain == 0 || size > SIZE_MAX - grain)
        return OUT_OF_MEMORY;
    size = (size + grain - 1) / grain * grain;
    if ((result = cu.MemCreate(&handle, size, &prop, 0)))
        return result;
    if ((result = cu.MemAddressReserve(&address, size, grain, 0, 0)))
        goto release;
    if ((result = cu.MemMap(address, size, 0, handle, 0)))
        goto unreserve;
    if ((result = cu.MemSetAccess(address, size, &access, 1)))
        goto unmap;
    Entry entry = {.block = {.start = address, .size = size, .device = device}, .handle = handle};
    if (!insert(entry)) {
        result = OUT_OF_MEMORY;
        goto unmap;
    }
    *pointer = (void *)(uintptr_t)address;
    return 0;

unmap:
    cu.MemUnmap(address, size);
unreserve:
    cu.MemAddressFree(address, size);
release:
    cu.MemRelease(handle);
    return result;
}

int flyt_vmm_free(void *pointer, int *ours)
{
    uint64_t address = (uintptr_t)pointer;
    Entry entry = {.exported = 0};
    int told = -1;

    *ours = 0;
    pthread_mutex_lock(&lock);
    size_t at = behind(address);
    if (at > 0 && table[at - 1].block.start == address) {
        entry = table[at - 1];
        memmove(table + at - 1, table + at, (count - at) * sizeof *table);
        count--;
        told = watcher;
        *ours = 1;
    }
    pthread_mutex_unlock(&lock);
    if (!*ours)
        return 0;
    /* As cudaFree: nothing is unmapped under a running kernel. */
    CUresult result = cu.CtxPushCurrent(contexts[entry.block.device]);
    if (!result) {
        CUcontext popped;
        result = cu.CtxSynchronize();
        cu.CtxPopCurrent(&popped);
    }
    cu.MemUnmap(address, entry.block.size);
    cu.MemAddressFree(address, entry.block.size);
    cu.MemRelease(entry.handle);
    if (entry.exported && told >= 0) {
        ssize_t written;
        do
            written = write(told, &entry.block.serial, sizeof entry.block.serial);
        while (written < 0 && errno == EINTR);
    }
    return result;
}

int flyt_vmm_find(const void *pointer, struct flyt_block *block)
{
    uint64_t address = (uintptr_t)pointer;
    int found = 0;
    pthread_mutex_lock(&lock);
    size_t at = behind(address);
    if (at > 0 && address - table[at - 1].block.start < table[at - 1].block.size) {
        *block = table[at - 1].block;
        found = 1;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

int flyt_vmm_export(uint64_t serial, int *fd)
{
    CUresult result = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; i++) {
        if (table[i].block.serial == serial) {
            result = cu.MemExportToShareableHandle(fd, table[i].handle, POSIX_FD, 0);
            if (!result) {
                table[i].exported = 1;
                fcntl(*fd, F_SETFD, FD_CLOEXEC);
            }
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

void flyt_vmm_watch(int fd)
{
    pthread_mutex_lock(&lock);
    watcher = fd;
    pthread_mutex_unlock(&lock);
}
