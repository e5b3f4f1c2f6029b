/* SPDX-License-Identifier: Apache-2.0 */
/* Placement: what a half maps lies in its window, whenever it maps it.
 *
 * The handler of the calls that the filter (filter.c) traps: it makes each again with an address in the
 * window of the calling instruction.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <ucontext.h>

#include "loader.h"

#ifndef SYS_SECCOMP
#define SYS_SECCOMP 1 /* si_code; glibc 2.36 does not name it */
#endif

#define RETRIES 10000 /* another thread took the gap: each loss is another's success */

#define WHOLE (1ull << 32) /* windows are multiples of it, and the loader has one */
#define LOADER ((uint64_t)&info & ~(WHOLE - 1))

static uint64_t cursor[SPLIT_HALVES]; /* where the last mapping of a window ended: next fit */

struct gap {
    uint64_t from, end, size, found;
};

/* First fit among the kernel's own records, so that freed space is found again. */
static int visit_gap(void *data, const struct mapping *mapping) {
    struct gap *gap = data;
    if (mapping->end <= gap->from)
        return 0;
    if (mapping->start >= gap->end)
        return 1;
    if (mapping->start > gap->from && mapping->start - gap->from >= gap->size) {
        gap->found = gap->from;
        return 1;
    }
    gap->from = mapping->end;
    return 0;
}

static uint64_t first_fit(const struct split_half *half, uint64_t size) {
    struct gap gap = {half->base, half->base + half->size, size, 0};
    each_mapping(visit_gap, &gap);
    if (!gap.found && gap.from < gap.end && gap.end - gap.from >= size)
        gap.found = gap.from;
    return gap.found;
}

uint64_t place(unsigned half, uint64_t size, uint64_t prot, uint64_t flags, long fd, long offset) {
    const struct split_half *window = &info.half[half];
    uint64_t end = window->base + window->size;
    uint64_t needed = flags & MAP_HUGETLB ? (size + (2ull << 20) - 1) & ~((2ull << 20) - 1) : UP(size);
    if (!size)
        return (uint64_t)-EINVAL;
    if (needed < size || needed > window->size)
        return (uint64_t)-ENOMEM;
    flags = (flags & ~(uint64_t)(MAP_32BIT | MAP_GROWSDOWN)) | MAP_FIXED_NOREPLACE;
    for (int i = 0; i < RETRIES; i++) {
        uint64_t at = __atomic_load_n(&cursor[half], __ATOMIC_RELAXED);
        if (at < window->base || end - at < needed || i) {
            at = first_fit(window, needed);
            if (!at)
                return (uint64_t)-ENOMEM;
        }
        if (flags & MAP_HUGETLB)
            at = (at + (2ull << 20) - 1) & ~((2ull << 20) - 1);
        uint64_t got = (uint64_t)sys6(SYS_mmap, (long)at, (long)size, (long)prot, (long)flags, fd, offset);
        if (!FAILED(got)) {
            __atomic_store_n(&cursor[half], got + needed, __ATOMIC_RELAXED);
            return got;
        }
        if (got != (uint64_t)-EEXIST)
            return got;
        if (flags & MAP_HUGETLB)
            return (uint64_t)-ENOMEM; /* aligned up from a gap that then was too small */
    }
    return (uint64_t)-ENOMEM;
}

/* The arena is no half's: device memory is asked for there by hints. */
static int meets_a_window(uint64_t from, uint64_t size) {
    int met = from + size < from;
    for (unsigned i = 0; i < info.halves; i++)
        met |= from < info.half[i].base + info.half[i].size && info.half[i].base < from + size;
    return met;
}

/* A driver's reservation that its window has no room for lies where the kernel puts it, if that is outside. */
static uint64_t outside(const greg_t *r) {
    uint64_t size = (uint64_t)r[REG_RSI];
    uint64_t got = (uint64_t)sys6(SYS_mmap, 0, (long)size, r[REG_RDX], r[REG_R10], r[REG_R8], r[REG_R9]);
    if (!FAILED(got) && meets_a_window(got, size)) {
        sys2(SYS_munmap, got, size);
        got = (uint64_t)-ENOMEM;
    }
    return got;
}

static uint64_t stray_from = ~0ull, stray_to; /* from the first to the last place outside that the program named */

static int is_in(uint64_t address, uint64_t base, uint64_t size) { return address - base < size; }

static int visit_stray(void *data, const struct mapping *mapping) {
    if (mapping->end <= stray_from || mapping->start >= stray_to || split_half_at(&info, mapping->start) >= 0 ||
        is_in(mapping->start, LOADER, WHOLE) || is_in(mapping->start, info.arena, info.arena_size))
        return 0;
    *(uint64_t *)data = mapping->start;
    return 1;
}

uint64_t place_stray(void) {
    uint64_t found = 0;
    each_mapping(visit_stray, &found);
    return found;
}

/* The program names a place outside of its window: not in what is another half's; elsewhere it is noted, since no
 * checkpoint takes along what lies there. */
static uint64_t on_fixed_mmap(const greg_t *r) {
    uint64_t at = (uint64_t)r[REG_RDI], size = UP(r[REG_RSI]), end = at + size;
    if (size && (meets_a_window(at, size) || (at < LOADER + WHOLE && LOADER < end) ||
                 (at < info.arena + info.arena_size && info.arena < end)))
        return (uint64_t)(r[REG_R10] & MAP_FIXED_NOREPLACE ? -EEXIST : -ENOMEM);
    uint64_t got = (uint64_t)sys6(SYS_mmap, (long)at, r[REG_RSI], r[REG_RDX], r[REG_R10], r[REG_R8], r[REG_R9]);
    if (!FAILED(got)) {
        stray_from = at < stray_from ? at : stray_from;
        stray_to = end > stray_to ? end : stray_to;
    }
    return got;
}

static uint64_t on_mmap(unsigned half, const greg_t *r) {
    uint64_t hint = (uint64_t)r[REG_RDI], size = (uint64_t)r[REG_RSI], flags = (uint64_t)r[REG_R10];
    const struct split_half *window = &info.half[half];
    if (flags & (MAP_FIXED | MAP_FIXED_NOREPLACE))
        return on_fixed_mmap(r);
    if (half == SPLIT_UPPER && flags & MAP_32BIT) /* below 4 GiB all is the program's */
        return (uint64_t)sys6(SYS_mmap, (long)hint, (long)size, r[REG_RDX], (long)flags, r[REG_R8], r[REG_R9]);
    int inside = hint - window->base < window->size && size <= window->base + window->size - hint;
    if (hint && size && (inside || (window->own_hints && !meets_a_window(DOWN(hint), size)))) {
        uint64_t got = (uint64_t)sys6(SYS_mmap, (long)DOWN(hint), (long)size, r[REG_RDX],
                                      (long)(flags | MAP_FIXED_NOREPLACE), r[REG_R8], r[REG_R9]);
        if (got != (uint64_t)-EEXIST)
            return got;
    }
    uint64_t got = place(half, size, (uint64_t)r[REG_RDX], flags, r[REG_R8], r[REG_R9]);
    return got == (uint64_t)-ENOMEM && window->own_hints ? outside(r) : got;
}

static uint64_t on_mremap(unsigned half, const greg_t *r) {
    uint64_t old = (uint64_t)r[REG_RDI], size = (uint64_t)r[REG_RDX], flags = (uint64_t)r[REG_R10];
    uint64_t got = FAILED(-1);
    if (!(flags & MREMAP_DONTUNMAP)) {
        got = (uint64_t)sys5(SYS_mremap, old, r[REG_RSI], size, 0, 0);
        if (got != (uint64_t)-ENOMEM)
            return got;
    }
    uint64_t to = place(half, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (FAILED(to))
        return to;
    got = (uint64_t)sys5(SYS_mremap, old, r[REG_RSI], size, flags | MREMAP_MAYMOVE | MREMAP_FIXED, to);
    if (FAILED(got))
        sys2(SYS_munmap, to, size);
    return got;
}

static uint64_t on_shmat(unsigned half, const greg_t *r) {
    struct shmid_ds state;
    long result = sys3(SYS_shmctl, r[REG_RDI], IPC_STAT, &state);
    if (FAILED(result))
        return (uint64_t)result;
    uint64_t to = place(half, state.shm_segsz, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (FAILED(to))
        return to;
    uint64_t got = (uint64_t)sys3(SYS_shmat, r[REG_RDI], to, r[REG_RDX] | SHM_REMAP);
    if (FAILED(got))
        sys2(SYS_munmap, to, state.shm_segsz);
    return got;
}

/* The mask that the caller gets is the interrupted context's; SIGSYS stays open in it. */
static uint64_t on_sigprocmask(ucontext_t *context, const greg_t *r) {
    uint64_t *mask = (uint64_t *)&context->uc_sigmask;
    const uint64_t *wanted = (const uint64_t *)r[REG_RSI];
    uint64_t *old = (uint64_t *)r[REG_RDX], before = *mask;
    if (r[REG_R10] != 8)
        return (uint64_t)-EINVAL;
    if (!is_readable(wanted))
        return (uint64_t)-EFAULT;
    uint64_t bits = *wanted;
    if (r[REG_RDI] != SIG_BLOCK && r[REG_RDI] != SIG_SETMASK)
        return (uint64_t)-EINVAL;
    if (old && !is_writable(old))
        return (uint64_t)-EFAULT;
    *mask = (r[REG_RDI] == SIG_BLOCK ? before | bits : bits) & ~(1ull << (SIGSYS - 1));
    if (old)
        *old = before;
    return 0;
}

/* Natively, but the upper half's main thread's are noted: a restart makes them again. */
static uint64_t on_registration(unsigned half, long call, const greg_t *r) {
    uint64_t result = (uint64_t)sys4(call, r[REG_RDI], r[REG_RSI], r[REG_RDX], r[REG_R10]);
    if (half != SPLIT_UPPER || FAILED(result) || sys0(SYS_gettid) != own_pid)
        return result;
    struct split_upper *upper = &info.upper;
    if (call == SYS_set_tid_address)
        upper->tid_address = (uint64_t)r[REG_RDI];
    else if (call == SYS_set_robust_list)
        upper->robust_list = (uint64_t)r[REG_RDI], upper->robust_size = (uint64_t)r[REG_RSI];
    else if (!r[REG_RDX])
        upper->rseq = (uint64_t)r[REG_RDI], upper->rseq_size = (uint64_t)r[REG_RSI],
        upper->rseq_signature = (uint64_t)r[REG_R10];
    return result;
}

/* Goes on outside of the handler, on the thread's own stack below the calling function's. */
static void on_exit_group(unsigned half, greg_t *r) {
    r[REG_RSI] = r[REG_RDI] & 0xff;
    r[REG_RDI] = half;
    r[REG_RIP] = (greg_t)leave_from;
    r[REG_RSP] = ((r[REG_RSP] - 1024) & ~15) - 8;
}

void place_on_sigsys(int number, siginfo_t *about, void *data) {
    ucontext_t *context = data;
    greg_t *r = context->uc_mcontext.gregs;
    int half = about->si_code == SYS_SECCOMP ? split_half_at(&info, (uint64_t)r[REG_RIP] - 1) : -1;
    long call = about->si_syscall;
    if (half < 0) { /* somebody's own SIGSYS: as by default */
        struct kernel_action plain = {0, 0x04000000, (uint64_t)restorer, 0};
        sys4(SYS_rt_sigaction, number, &plain, 0, 8);
        sys3(SYS_tgkill, sys0(SYS_getpid), sys0(SYS_gettid), number);
        return;
    }
    uint64_t result;
    unsigned owner = (unsigned)half;
    is_borrower(); /* a forked child notes itself at its first trapped call */
    switch (call) {
    case SYS_mmap: result = on_mmap(owner, r); break;
    case SYS_mremap: result = on_mremap(owner, r); break;
    case SYS_shmat: result = on_shmat(owner, r); break;
    case SYS_brk: result = 0; break; /* no break: malloc then takes mmap */
    case SYS_rt_sigprocmask: result = on_sigprocmask(context, r); break;
    case SYS_rt_sigaction:
        result = (uint64_t)signals_action(owner, (int)r[REG_RDI], (void *)r[REG_RSI], (void *)r[REG_RDX],
                                          (uint64_t)r[REG_R10]);
        break;
    case SYS_set_tid_address:
    case SYS_set_robust_list:
    case SYS_rseq: result = on_registration(owner, call, r); break;
    case SYS_exit_group: on_exit_group(owner, r); return;
    default: result = (uint64_t)-ENOSYS; break;
    }
    r[REG_RAX] = (greg_t)result;
}
