/* SPDX-License-Identifier: Apache-2.0 */
/* A checkpoint: the upper half's memory and registers, and what each lower half says it needs. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>

#include "image.h"

#define LOOKS 200 /* at a thread that runs; 1 ms apart */

static char buffer[IMAGE_BUFFER];
static uint32_t buffered; /* bytes of a lower half's frame */
static uint64_t written;
static uint32_t crc;
static long file, memory, pages;
static long problem; /* -errno of the first write that failed */

static void out(const void *bytes, uint64_t size) {
    crc = crc32(crc, bytes, size);
    written += size;
    for (uint64_t done = 0; done < size && !problem;) {
        long result = sys3(SYS_write, file, (const char *)bytes + done, size - done);
        if (FAILED(result) && result != -EINTR)
            problem = result;
        else if (!FAILED(result))
            done += (uint64_t)result;
    }
}

static void flush_frame(void) {
    uint64_t size = buffered;
    out(&size, sizeof size);
    out(buffer, size);
    buffered = 0;
}

static void put(const void *bytes, uint64_t size) {
    for (const char *from = bytes; size;) {
        uint64_t part = IMAGE_BUFFER - buffered < size ? IMAGE_BUFFER - buffered : size;
        memcpy(buffer + buffered, from, part);
        buffered += (uint32_t)part, from += part, size -= part;
        if (buffered == IMAGE_BUFFER)
            flush_frame();
    }
}

static const char *save_halves(void) {
    const char *refusal = NULL;
    uint64_t fs = split_get_fs();
    for (unsigned i = 1; i < info.halves && !refusal; i++) {
        const struct split_published *published = (const void *)info.half[i].published;
        split_set_fs(info.thread[0].fs[i]);
        refusal = published->save ? published->save(put) : NULL;
        split_set_fs(fs);
        if (buffered)
            flush_frame();
        flush_frame(); /* an empty one ends it */
        if (refusal)
            say("no checkpoint: the lower half ", info.half[i].name, ": ", refusal, NULL);
    }
    return refusal;
}

/* --- memory --- */

static int is_zero(const char *page) {
    for (const uint64_t *word = (const uint64_t *)page; word < (const uint64_t *)(page + PAGE); word++)
        if (*word)
            return 0;
    return 1;
}

/* Whether each page of a piece holds anything that a fresh anonymous one would not. */
static void write_piece(uint64_t start, uint64_t size, int anonymous) {
    static uint64_t entries[IMAGE_BUFFER / PAGE];
    uint64_t count = size / PAGE, first = 0;
    if (sys4(SYS_pread64, pages, entries, 8 * count, start / PAGE * 8) != (long)(8 * count))
        for (uint64_t i = 0; i < count; i++)
            entries[i] = 3ull << 62; /* unknown: look at all */
    for (uint64_t i = 0; i <= count; i++) {
        int kept = i < count && (!anonymous || entries[i] >> 62);
        if (kept && sys4(SYS_pread64, memory, buffer + i * PAGE, PAGE, start + i * PAGE) != (long)PAGE)
            kept = 0; /* beyond the end of a mapped file: nobody can read it */
        if (kept && !is_zero(buffer + i * PAGE))
            continue;
        if (i > first) {
            struct image_run run = {start + first * PAGE, (i - first) * PAGE};
            out(&run, sizeof run);
            out(buffer + first * PAGE, run.size);
        }
        first = i + 1;
    }
}

static int write_region(void *data, const struct mapping *mapping) {
    char room[24];
    if (!is_upper(mapping->start))
        return 0;
    if (mapping->shared && mapping->writable) {
        say("no checkpoint: memory at 0x", hexadecimal(mapping->start, room), " is shared (", mapping->name,
            "): unmap it before", NULL);
        *(int *)data = 1;
        return 1;
    }
    struct image_region region = {mapping->start, mapping->end,
                                  (uint64_t)((mapping->readable ? PROT_READ : 0) | (mapping->writable ? PROT_WRITE : 0) |
                                             (mapping->executable ? PROT_EXEC : 0))};
    struct image_run last = {0, 0};
    out(&region, sizeof region);
    for (uint64_t at = region.start; at < region.end && !problem; at += IMAGE_BUFFER)
        write_piece(at, region.end - at < IMAGE_BUFFER ? region.end - at : IMAGE_BUFFER, mapping->name[0] != '/');
    out(&last, sizeof last);
    return problem != 0;
}

/* --- threads: the main one only --- */

static uint64_t last_but_one(const char *text) { /* "nr args sp pc": the stack pointer */
    uint64_t value = 0, before = 0;
    for (const char *at = text; *at; at++) {
        if (*at != 'x')
            continue;
        before = value, value = 0;
        for (at++; (*at >= '0' && *at <= '9') || (*at >= 'a' && *at <= 'f'); at++)
            value = value * 16 + (uint64_t)(*at <= '9' ? *at - '0' : *at - 'a' + 10);
        at--;
    }
    return before;
}

/* Whether a thread runs on a stack of the upper half's; -1 if it can't be told. */
static int is_upper_thread(const char *task) {
    char path[64] = "/proc/self/task/", text[256];
    size_t base = strlen(path), length = strlen(task);
    memcpy(path + base, task, length);
    memcpy(path + base + length, "/syscall", 9);
    for (int look = 0; look < LOOKS; look++) {
        struct timespec pause = {0, 1000000};
        long fd = sys4(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
        if (FAILED(fd))
            return 0; /* it has just ended */
        long got = sys3(SYS_read, fd, text, sizeof text - 1);
        sys1(SYS_close, fd);
        if (got <= 0)
            return got == -ESRCH ? 0 : -1;
        text[got] = 0;
        if (text[0] != 'r') { /* "running" */
            int half = split_half_at(&info, last_but_one(text));
            return half == (int)SPLIT_UPPER;
        }
        sys2(SYS_nanosleep, &pause, 0);
    }
    return -1;
}

static int has_other_threads(void) {
    static char entries[4096];
    char room[24];
    long fd = sys4(SYS_openat, AT_FDCWD, "/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    const char *own = decimal((uint64_t)own_pid, room);
    long looks = sys4(SYS_openat, AT_FDCWD, "/proc/self/syscall", O_RDONLY | O_CLOEXEC, 0);
    int found = FAILED(fd) || FAILED(looks); /* then it can't be told */
    sys1(SYS_close, looks);
    for (long got; !found && (got = sys3(SYS_getdents64, fd, entries, sizeof entries)) > 0;)
        for (long at = 0; at < got && !found; at += *(unsigned short *)(entries + at + 16)) {
            const char *name = entries + at + 19;
            found = name[0] != '.' && strcmp(name, own) && is_upper_thread(name) != 0;
        }
    sys1(SYS_close, fd);
    return found;
}

/* --- all of it --- */

static void write_state(uint64_t resume_at, uint64_t mask) {
    static struct image_state state;
    state = (struct image_state){.resume_at = resume_at, .fs = split_get_fs(), .mask = mask, .upper = info.upper};
    sys2(SYS_sigaltstack, 0, state.stack);
    state.action_count = signals_save(state.action);
    out(&state, sizeof state);
}

static void write_header(void) {
    static union {
        struct image_header header;
        char page[PAGE];
    } first;
    memset(&first, 0, sizeof first);
    struct image_header *header = &first.header;
    memcpy(header->magic, IMAGE_MAGIC, 8);
    header->version = IMAGE_VERSION;
    header->size = written, header->crc = crc;
    header->halves = info.halves;
    header->build = image_build();
    header->arena = info.arena, header->arena_size = info.arena_size;
    for (unsigned i = 0; i < info.halves; i++) {
        memcpy(header->half[i].name, info.half[i].name, SPLIT_NAME);
        header->half[i].digest = info.half[i].digest;
        header->half[i].base = info.half[i].base, header->half[i].size = info.half[i].size;
    }
    header->header_crc = crc32(0, &first, PAGE);
    if (!problem && sys4(SYS_pwrite64, file, &first, PAGE, 0) != (long)PAGE)
        problem = -EIO;
}

static int write_all(uint64_t resume_at, uint64_t mask) {
    struct image_region last = {0, 0, 0};
    int refused = 0;
    written = 0, crc = 0, problem = 0, buffered = 0;
    sys3(SYS_lseek, file, PAGE, 0);
    write_state(resume_at, mask);
    each_mapping(write_region, &refused);
    out(&last, sizeof last);
    if (!refused)
        refused = save_halves() != NULL;
    write_header();
    if (!refused && !problem && FAILED(sys1(SYS_fsync, file)))
        problem = -EIO;
    return refused ? -EBUSY : (int)problem;
}

int image_write(const char *path, uint64_t resume_at) {
    static char target[4096], partial[4096 + 8];
    char room[24];
    uint64_t all = ~(1ull << (SIGSYS - 1)), mask;
    size_t length = strlen(path);
    if (length >= sizeof target)
        return -ENAMETOOLONG;
    if (sys0(SYS_gettid) != own_pid || has_other_threads()) {
        say("no checkpoint: the program has more threads than its main one, whose state is not saved", NULL);
        return -EBUSY;
    }
    if (threads_called_by_lower(resume_at)) {
        say("no checkpoint: a lower half has called this code and waits for it, and its frames are not saved: "
            "make it when they have returned", NULL);
        return -EBUSY;
    }
    uint64_t stray = place_stray();
    if (stray) {
        say("no checkpoint: memory at 0x", hexadecimal(stray, room), ", where the program has asked for it, lies "
            "outside of its window: unmap it before", NULL);
        return -EBUSY;
    }
    memcpy(target, path, length + 1);
    memcpy(partial, path, length);
    memcpy(partial + length, ".part", 6);
    file = sys4(SYS_openat, AT_FDCWD, partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    memory = sys4(SYS_openat, AT_FDCWD, "/proc/self/mem", O_RDONLY | O_CLOEXEC, 0);
    pages = sys4(SYS_openat, AT_FDCWD, "/proc/self/pagemap", O_RDONLY | O_CLOEXEC, 0);
    int result = FAILED(file) ? (int)file : FAILED(memory) ? (int)memory : 0;
    if (!result) {
        sys4(SYS_rt_sigprocmask, SIG_SETMASK, &all, &mask, 8);
        result = write_all(resume_at, mask);
        if (!result) /* whole or not at all: the last good image stays until then */
            result = (int)sys4(SYS_renameat, AT_FDCWD, partial, AT_FDCWD, target);
        if (problem == -EFBIG) { /* the error is the answer, not the signal that came with it */
            struct timespec none = {0, 0};
            uint64_t too_large = 1ull << (SIGXFSZ - 1);
            sys4(SYS_rt_sigtimedwait, &too_large, 0, &none, 8);
        }
        sys4(SYS_rt_sigprocmask, SIG_SETMASK, &mask, 0, 8);
    }
    sys1(SYS_close, memory), sys1(SYS_close, pages);
    if (!FAILED(file))
        sys1(SYS_close, file);
    if (result) {
        sys3(SYS_unlinkat, AT_FDCWD, partial, 0);
        if (result != -EBUSY) /* its reason is said */
            say("no checkpoint: ", target, " can't be written: errno ", decimal((uint64_t)-result, room), NULL);
    }
    return result;
}
