/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for libcuda.so.1: physical memory is a sealed memfd, named as `TwinDriver` names its own,
 * so what is exported here can be imported there. It checks its arguments as the CUDA documentation
 * says, and writes each call to the file that STUB_LOG names. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef unsigned long long u64;
enum { INVALID = 1, OOM = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };
enum { GRAIN = 65536, DEVICES = 2, SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

typedef struct {
    int type, handle_types, location_type, location_id;
    void *win32;
    unsigned char flags[8];
} Prop;
typedef struct {
    int location_type, location_id, flags;
} Access;

static __thread u64 current;

static void note(const char *format, ...)
{
    const char *path = getenv("STUB_LOG");
    if (!path)
        return;
    char line[256];
    va_list list;
    va_start(list, format);
    int n = vsnprintf(line, sizeof line - 1, format, list);
    va_end(list);
    line[n++] = '\n';
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (write(fd, line, n) != n)
        abort();
    close(fd);
}

int cuInit(unsigned flags) { return flags ? INVALID : 0; }
int cuDriverGetVersion(int *v) { return *v = 13000, 0; }
int cuDeviceGetCount(int *n) { return *n = DEVICES, 0; }
int cuDeviceGet(int *d, int n) { return n < 0 || n >= DEVICES ? INVALID_DEVICE : (*d = n, 0); }
__attribute__((weak)) int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    note("attribute %d of %d", attribute, device);
    return *value = 1, 0;
}
int cuDeviceGetUuid_v2(char *uuid, int device)
{
    char text[17];
    snprintf(text, sizeof text, "flyt-ipc-twin-%02d", device);
    memcpy(uuid, text, 16);
    return 0;
}
int cuDeviceGetUuid(char *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
int cuDeviceCanAccessPeer(int *can, int device, int peer)
{
    return *can = !getenv("STUB_NO_PEER") || device == peer, 0;
}
int cuDevicePrimaryCtxRetain(u64 *context, int device) { return *context = 0x1000 + device, 0; }
int cuCtxGetCurrent(u64 *context) { return *context = current, 0; }
int cuCtxPushCurrent_v2(u64 context) { return current = context, 0; }
int cuCtxPopCurrent_v2(u64 *context) { return *context = current, current = 0, 0; }
__attribute__((weak)) int cuCtxSynchronize(void) { return note("synchronize %llx", current), current ? 0 : INVALID_CONTEXT; }
__attribute__((weak)) int cuStreamSynchronize(u64 stream)
{
    return note("synchronize stream %llu", stream), current ? 0 : INVALID_CONTEXT;
}
int cuMemGetAllocationGranularity(size_t *size, const Prop *prop, int option)
{
    return prop->location_id >= DEVICES ? INVALID_DEVICE : (*size = option ? 2 << 20 : GRAIN, 0);
}

__attribute__((weak)) int cuMemCreate(u64 *handle, size_t size, const Prop *prop, u64 flags)
{
    note("create %zu on %d", size, prop->location_id);
    const char *limit = getenv("STUB_MEMORY");
    if (prop->type != 1 || prop->handle_types != 1 || prop->location_type != 1 || flags ||
        prop->win32 || size % GRAIN || !size)
        return INVALID;
    if (limit && size > strtoull(limit, NULL, 10))
        return OOM;
    char uuid[16], name[64] = "flyt-ipc-";
    cuDeviceGetUuid_v2(uuid, prop->location_id);
    for (int i = 0; i < 16; i++)
        sprintf(name + 9 + 2 * i, "%02x", (unsigned char)uuid[i]);
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || ftruncate(fd, size) || fcntl(fd, F_ADD_SEALS, SEALS))
        return OOM;
    return *handle = fd + 1000, 0;
}
int cuMemRelease(u64 handle) { return note("release"), close((int)handle - 1000) ? INVALID : 0; }
int cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 hint, u64 flags)
{
    if (size % GRAIN || (alignment & (alignment - 1)) || flags || hint)
        return INVALID;
    note("reserve %zu", size);
    char *start = mmap(NULL, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *at = (char *)(((uintptr_t)start + alignment - 1) & ~(alignment - 1));
    if (at > start)
        munmap(start, at - start);
    if (at < start + alignment)
        munmap(at + size, start + alignment - at);
    return *address = (uintptr_t)at, 0;
}
int cuMemAddressFree(u64 address, size_t size)
{
    return note("unreserve %zu", size), munmap((void *)address, size) ? INVALID : 0;
}
__attribute__((weak)) int cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags)
{
    struct stat state;
    note("map %zu", size);
    int fd = (int)handle - 1000;
    if (offset || flags || fstat(fd, &state) || (size_t)state.st_size != size)
        return INVALID;
    return mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED;
}
int cuMemUnmap(u64 address, size_t size)
{
    note("unmap %zu", size);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    return mmap((void *)address, size, PROT_NONE, flags, -1, 0) == MAP_FAILED;
}
int cuMemSetAccess(u64 address, size_t size, const Access *access, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        note("access %d: %d", access[i].location_id, access[i].flags);
        if (access[i].location_type != 1 || access[i].location_id >= DEVICES)
            return INVALID;
    }
    return mprotect((void *)address, size, access->flags) ? INVALID : 0; /* 1 and 3 are PROT_'s */
}
__attribute__((weak)) int cuMemExportToShareableHandle(void *out, u64 handle, int type, u64 flags)
{
    note("export");
    int fd = type == 1 && !flags ? dup((int)handle - 1000) : -1; /* not closed on exec */
    return fd < 0 ? INVALID : (*(int *)out = fd, 0);
}
__attribute__((weak)) int cuMemImportFromShareableHandle(u64 *handle, void *os_handle, int type)
{
    note("import");
    int fd = type == 1 ? fcntl((int)(intptr_t)os_handle, F_DUPFD_CLOEXEC, 0) : -1;
    return fd < 0 ? INVALID : (*handle = fd + 1000, 0);
}
int cuMemGetAllocationPropertiesFromHandle(Prop *prop, u64 handle)
{
    char path[64], name[128];
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)handle - 1000);
    ssize_t n = readlink(path, name, sizeof name - 1);
    if (n < 0)
        return INVALID;
    name[n] = 0;
    char *digits = strstr(name, "flyt-ipc-");
    memset(prop, 0, sizeof *prop);
    prop->type = prop->handle_types = prop->location_type = 1;
    if (!digits)
        return INVALID;
    prop->location_id = digits[9 + 2 * 15 + 1] - '0'; /* the UUID's last digit, in hexadecimal */
    return 0;
}
__attribute__((weak)) int cuEventCreate(u64 *event, unsigned flags)
{
    return note("event %u in %llx", flags, current), *event = 0x77, current ? 0 : INVALID_CONTEXT;
}
__attribute__((weak)) int cuEventRecord(u64 event, u64 stream) { return note("record %llx on %llu", event, stream), 0; }
int cuEventDestroy_v2(u64 event) { return note("destroy %llx", event), 0; }
int cuIpcGetEventHandle(char *handle, u64 event)
{
    memset(handle, 'h', 64);
    return event == 0x77 ? 0 : INVALID;
}
typedef struct {
    char bytes[64];
} EventHandle;
int cuIpcOpenEventHandle(u64 *event, EventHandle handle)
{
    note("open %.4s in %llx", handle.bytes, current);
    return *event = 0x88, 0;
}
int cuStreamWaitEvent(u64 stream, u64 event, unsigned flags)
{
    return note("stream %llu waits for %llx", stream, event), flags ? INVALID : 0;
}
int cuGetErrorName(int code, const char **name) { return (void)code, *name = "STUB", 0; }

int cuGetProcAddress_v2(const char *symbol, void **function, int version, u64 flags, int *status)
{
    char name[128];
    (void)version, (void)flags;
    snprintf(name, sizeof name, "%s_v2", symbol);
    if (!(*function = dlsym(RTLD_DEFAULT, name)) || !strcmp(symbol, "cuGetProcAddress")) {
        void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        *function = dlsym(self, name);
        if (!*function)
            *function = dlsym(self, symbol);
    }
    if (status)
        *status = *function ? 0 : 1;
    return *function ? 0 : 500;
}
int cuGetProcAddress(const char *symbol, void **function, int version, u64 flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
