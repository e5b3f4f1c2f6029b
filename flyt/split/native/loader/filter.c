/* SPDX-License-Identifier: Apache-2.0 */
/* Which system calls are trapped: those that let the kernel choose an address, where the instruction that
 * makes them lies in a window. Filters survive exec, the handler (place.c) does not. A child by vfork runs
 * code of a window until it execs, and needs the handler: clone3, which can take all handlers from it
 * (CLONE_CLEAR_SIGHAND, in memory that a filter can't see), is answered ENOSYS; libcs then clone.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "loader.h"

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, field)
#define HIGH(field) ((uint32_t)(field) + 4)
#define ARGUMENT(i) (uint32_t)(offsetof(struct seccomp_data, args) + 8 * (i))
#define POINTER (uint32_t) offsetof(struct seccomp_data, instruction_pointer)
#define JUMP(test, value, yes, no) BPF_JUMP(BPF_JMP | BPF_##test | BPF_K, value, yes, no)

void filter_install(void) {
    struct kernel_action action = {(uint64_t)place_on_sigsys, SA_SIGINFO | 0x04000000 | SA_RESTART,
                                   (uint64_t)restorer, ~0ull};
    struct sock_filter code[128];
    uint32_t upper = (uint32_t)(info.half[0].base >> 32), after_upper = upper + (uint32_t)(info.half[0].size >> 32);
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
        case 1: /* where the caller names a place itself, it has it; the program's own are looked at */
            ADD(JUMP(JEQ, calls[i].call, 0, 11));
            ADD(LOAD(ARGUMENT(3)));
            ADD(JUMP(JSET, MAP_FIXED | MAP_FIXED_NOREPLACE, 0, 8));
            ADD(LOAD(HIGH(POINTER)));
            ADD(JUMP(JGE, upper, 0, 5));
            ADD(JUMP(JGE, after_upper, 4, 0));
            ADD(LOAD(HIGH(ARGUMENT(0))));
            ADD(JUMP(JEQ, 0, 2, 0)); /* below 4 GiB: a program that is not position-independent */
            ADD(JUMP(JGE, upper, 0, 2));
            ADD(JUMP(JGE, after_upper, 1, 0));
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
