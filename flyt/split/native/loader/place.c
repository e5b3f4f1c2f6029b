/* SPDX-License-Identifier: Apache-2.0 */
/* Placement: what a half maps lies in its window, whenever it maps it.
 *
 * A seccomp filter traps the system calls that let the kernel choose an address, where the
 * instruction that makes them lies in a window: filters survive exec, this handler does not. The
 * handler makes the call again with an address in the window of the calling instruction. A child by
 * vfork runs code of a window until it execs, and needs the handler: clone3, which can take all handlers
 * from it (CLONE_CLEAR_SIGHAND, in memory that a filter can't see), is answered ENOSYS; libcs then clone.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <ucontext.h>

#include "loader.h"

#ifndef SYS_SECCOMP
#define SYS_SECCOMP 1 /* si_code; glibc 2.36 does not name it */
#endif

#define RETRIES 10000 /* another thread took the gap: each loss is another's success */

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

static uint64_t on_mmap(unsigned half, const greg_t *r) {
    uint64_t hint = (uint64_t)r[REG_RDI], size = (uint64_t)r[REG_RSI], flags = (uint64_t)r[REG_R10];
    const struct split_half *window = &info.half[half];
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
    uint64_t *old = (uint64_t *)r[REG_RDX], before = *mask, bits = *wanted;
    if (r[REG_R10] != 8 || (r[REG_RDI] != SIG_BLOCK && r[REG_RDI] != SIG_SETMASK))
        return (uint64_t)-EINVAL;
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

static void on_sigsys(int number, siginfo_t *about, void *data) {
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

/* --- the filter --- */

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, field)
#define HIGH(field) ((uint32_t)(field) + 4)
#define ARGUMENT(i) (uint32_t)(offsetof(struct seccomp_data, args) + 8 * (i))
#define POINTER (uint32_t) offsetof(struct seccomp_data, instruction_pointer)
#define JUMP(test, value, yes, no) BPF_JUMP(BPF_JMP | BPF_##test | BPF_K, value, yes, no)

void place_install(void) {
    struct kernel_action action = {(uint64_t)on_sigsys, SA_SIGINFO | 0x04000000 | SA_RESTART,
                                   (uint64_t)restorer, ~0ull};
    struct sock_filter code[128];
    unsigned n = 0;
#define ADD(statement) code[n++] = (struct sock_filter)statement
    ADD(LOAD(offsetof(struct seccomp_data, arch)));
    ADD(JUMP(JEQ, AUDIT_ARCH_X86_64, 1, 0));
    ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    /* Windows are whole multiples of 4 GiB: the upper word of the address tells. */
    ADD(LOAD(HIGH(POINTER)));
    for (unsigned i = 0; i < info.halves; i++) {
        uint32_t first = (uint32_t)(info.half[i].base >> 32);
        uint32_t after = first + (uint32_t)(info.half[i].size >> 32);
        unsigned to_calls = 2 * (info.halves - i - 1) + 1; /* over the rest and the RET */
        ADD(JUMP(JGE, first, 0, 1));
        ADD(JUMP(JGE, after, 0, to_calls));
    }
    ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    ADD(LOAD(offsetof(struct seccomp_data, nr)));
    ADD(JUMP(JEQ, SYS_clone3, 0, 1));
    ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS));
    static const struct {
        uint32_t call;
        unsigned test; /* 0 always; else the case below */
    } calls[] = {
        {SYS_mmap, 1},        {SYS_rt_sigprocmask, 4},  {SYS_rt_sigaction, 0}, {SYS_mremap, 2},
        {SYS_brk, 0},         {SYS_shmat, 3},           {SYS_exit_group, 0},   {SYS_set_tid_address, 0},
        {SYS_rseq, 0},        {SYS_set_robust_list, 0},
    };
    for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++) {
        switch (calls[i].test) {
        case 0:
            ADD(JUMP(JEQ, calls[i].call, 0, 1));
            break;
        case 1: /* where the caller names a place itself, it has it */
            ADD(JUMP(JEQ, calls[i].call, 0, 4));
            ADD(LOAD(ARGUMENT(3)));
            ADD(JUMP(JSET, MAP_FIXED | MAP_FIXED_NOREPLACE, 0, 1));
            ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
            break;
        case 2:
            ADD(JUMP(JEQ, calls[i].call, 0, 5));
            ADD(LOAD(ARGUMENT(3)));
            ADD(JUMP(JSET, MREMAP_FIXED, 1, 0));
            ADD(JUMP(JSET, MREMAP_MAYMOVE | 4, 1, 0));
            ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
            break;
        case 3: /* without an address */
            ADD(JUMP(JEQ, calls[i].call, 0, 6));
            ADD(LOAD(ARGUMENT(1)));
            ADD(JUMP(JEQ, 0, 0, 2));
            ADD(LOAD(HIGH(ARGUMENT(1))));
            ADD(JUMP(JEQ, 0, 1, 0));
            ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
            break;
        default: /* blocking, with a set */
            ADD(JUMP(JEQ, calls[i].call, 0, 8));
            ADD(LOAD(ARGUMENT(0)));
            ADD(JUMP(JEQ, SIG_UNBLOCK, 4, 0));
            ADD(LOAD(ARGUMENT(1)));
            ADD(JUMP(JEQ, 0, 0, 3));
            ADD(LOAD(HIGH(ARGUMENT(1))));
            ADD(JUMP(JEQ, 0, 0, 1));
            ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
            break;
        }
        ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP));
    }
    ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    struct sock_fprog program = {(unsigned short)n, code};
    long result = sys4(SYS_rt_sigaction, SIGSYS, &action, 0, 8);
    uint64_t open = 1ull << (SIGSYS - 1);
    if (!FAILED(result))
        result = sys4(SYS_rt_sigprocmask, SIG_UNBLOCK, &open, 0, 8);
    if (!FAILED(result))
        result = sys5(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (!FAILED(result))
        result = sys3(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program);
    if (FAILED(result))
        fail(126, "the kernel refuses a seccomp filter, which keeps each half in its window: allow "
             "seccomp(2) in the container's profile", NULL);
}
