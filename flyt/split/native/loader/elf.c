/* SPDX-License-Identifier: Apache-2.0 */
/* Maps one half's ld.so and makes the stack that it starts on.
 *
 * Only ld.so: started as a program with the half's name as its argument, it maps the rest
 * itself, and $ORIGIN is right. What files are fit to be loaded is checked before (elf.py).
 */
#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "loader.h"

#define STACK_LEAST (8ull << 20) /* Linux's usual RLIMIT_STACK, also where it is unlimited */
#define STACK_MOST (1ull << 30)
#define AUXV_MOST 40

static int protection(uint32_t flags) {
    return (flags & PF_R ? PROT_READ : 0) | (flags & PF_W ? PROT_WRITE : 0) |
           (flags & PF_X ? PROT_EXEC : 0);
}

static uint64_t map_linker(unsigned half, const char *path, uint64_t *entry, uint64_t *headers,
                           uint64_t *header_count) {
    union {
        Elf64_Ehdr elf;
        char bytes[4096];
    } start;
    long fd = sys4(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    if (FAILED(fd) || sys3(SYS_read, fd, start.bytes, sizeof start) < (long)sizeof start)
        fail(127, info.half[half].name, ": its ld.so can't be read: ", path, NULL);
    const Elf64_Phdr *part = (const void *)(start.bytes + start.elf.e_phoff);
    unsigned count = start.elf.e_phnum;
    if (start.elf.e_phoff + count * sizeof *part > sizeof start)
        fail(127, info.half[half].name, ": its ld.so has its headers far back: ", path, NULL);
    uint64_t end = 0;
    for (unsigned i = 0; i < count; i++)
        if (part[i].p_type == PT_LOAD && part[i].p_vaddr + part[i].p_memsz > end)
            end = part[i].p_vaddr + part[i].p_memsz;
    uint64_t base = place(half, UP(end), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (FAILED(base))
        fail(127, info.half[half].name, ": no room in its window for ld.so", NULL);
    for (unsigned i = 0; i < count; i++) {
        if (part[i].p_type != PT_LOAD)
            continue;
        uint64_t from = base + DOWN(part[i].p_vaddr);
        uint64_t file_end = base + part[i].p_vaddr + part[i].p_filesz;
        uint64_t memory_end = base + part[i].p_vaddr + part[i].p_memsz;
        long result = 0;
        if (part[i].p_filesz)
            result = sys6(SYS_mmap, (long)from, (long)(file_end - from), protection(part[i].p_flags),
                          MAP_PRIVATE | MAP_FIXED, fd, (long)DOWN(part[i].p_offset));
        if (!FAILED(result) && UP(memory_end) > UP(file_end))
            result = sys6(SYS_mmap, (long)UP(file_end), (long)(UP(memory_end) - UP(file_end)),
                          protection(part[i].p_flags), MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        if (FAILED(result))
            fail(127, info.half[half].name, ": ld.so can't be mapped: ", path, NULL);
        /* To the page's end: ld.so's first malloc takes the tail and trusts that it is zero. */
        if (part[i].p_flags & PF_W)
            memset((void *)file_end, 0, UP(file_end) - file_end);
    }
    sys1(SYS_close, fd);
    *entry = base + start.elf.e_entry;
    *headers = base + start.elf.e_phoff;
    *header_count = count;
    return base;
}

/* One word down the stack, a string with its end. */
static uint64_t push(uint64_t *at, const char *text, uint64_t size) {
    *at -= size;
    memcpy((void *)*at, text, size);
    return *at;
}

static uint64_t make_stack(unsigned half, uint64_t strings) {
    struct rlimit limit;
    uint64_t size = STACK_LEAST;
    if (!FAILED(sys4(SYS_prlimit64, 0, RLIMIT_STACK, 0, &limit)) && limit.rlim_cur > size)
        size = limit.rlim_cur < STACK_MOST ? UP(limit.rlim_cur) : STACK_LEAST;
    size += UP(strings);
    uint64_t base = place(half, size + PAGE, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (FAILED(base) || FAILED(sys3(SYS_mprotect, base, PAGE, PROT_NONE)))
        fail(127, info.half[half].name, ": no room in its window for a stack", NULL);
    return base + PAGE + size;
}

struct start elf_prepare(unsigned half, char **words, const char *name, char **envp, uint64_t *auxv) {
    static const char tunable[] = "glibc.pthread.rseq=0";
    uint64_t entry, headers, header_count, strings = 0;
    int argc = 0, variables = 0, lower = half != SPLIT_UPPER, tuned = 0;
    map_linker(half, words[0], &entry, &headers, &header_count);
    while (words[argc])
        strings += strlen(words[argc++]) + 9;
    for (; envp[variables]; variables++)
        strings += strlen(envp[variables]) + 9;
    uint64_t at = make_stack(half, strings + strlen(name) + 16 * AUXV_MOST + PAGE);

    /* The kernel's own order: strings on top, then auxv, envp, argv, argc, 16-byte aligned. */
    at -= 8;
    uint64_t name_at = push(&at, name, strlen(name) + 1), random_at = at -= 16;
    sys3(SYS_getrandom, random_at, 16, 0);
    uint64_t platform_at = push(&at, "x86_64", 7);
    uint64_t strings_top = at;
    at -= strings + sizeof "GLIBC_TUNABLES=:" + sizeof tunable;
    uint64_t next = at;
    uint64_t pairs = 0;
    while (auxv[2 * pairs] && pairs < AUXV_MOST - 1)
        pairs++;
    uint64_t slots = 1 + (uint64_t)argc + 1 + (uint64_t)(variables + 1) + 1 + 2 * (pairs + 1);
    at = (at - 8 * slots) & ~15ull;
    uint64_t *slot = (uint64_t *)at;
    *slot++ = (uint64_t)argc;
#define COPY(text)                                                                                 \
    do {                                                                                           \
        uint64_t copied = strlen(text) + 1;                                                        \
        *slot++ = next;                                                                            \
        memcpy((void *)next, text, copied);                                                        \
        next += copied;                                                                            \
    } while (0)
    for (int i = 0; i < argc; i++)
        COPY(words[i]);
    *slot++ = 0;
    for (int i = 0; i < variables; i++) {
        COPY(envp[i]);
        if (lower && same_start(envp[i], "GLIBC_TUNABLES=")) {
            ((char *)next)[-1] = ':';
            memcpy((void *)next, tunable, sizeof tunable);
            next += sizeof tunable;
            tuned = 1;
        }
    }
    /* One kernel thread has one rseq area: the upper half's libc registers it. */
    if (lower && !tuned) {
        *slot++ = next;
        memcpy((void *)next, "GLIBC_TUNABLES=", 15);
        memcpy((void *)(next + 15), tunable, sizeof tunable);
        next += 15 + sizeof tunable;
    }
    *slot++ = 0;
    if (next > strings_top)
        fail(127, info.half[half].name, ": its start stack was measured too small", NULL);
    for (uint64_t i = 0; i < pairs; i++) {
        uint64_t type = auxv[2 * i], value = auxv[2 * i + 1];
        switch (type) {
        case AT_PHDR: value = headers; break;
        case AT_PHNUM: value = header_count; break;
        case AT_PHENT: value = sizeof(Elf64_Phdr); break;
        case AT_BASE: value = 0; break;
        case AT_ENTRY: value = entry; break;
        case AT_RANDOM: value = random_at; break;
        case AT_EXECFN: value = name_at; break;
        case AT_PLATFORM: value = platform_at; break;
        case AT_SECURE: value = 0; break;
        /* The vdso lies elsewhere after a restart: the upper half's libc makes system calls. */
        case AT_SYSINFO_EHDR: type = lower ? type : AT_IGNORE; break;
        case AT_BASE_PLATFORM: type = AT_IGNORE; break;
        default: break;
        }
        *slot++ = type;
        *slot++ = value;
    }
    *slot++ = AT_NULL;
    *slot = 0;
    return (struct start){entry, at};
}
