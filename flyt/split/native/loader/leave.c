/* SPDX-License-Identifier: Apache-2.0 */
/* The ordered exit: after the upper half's own, each lower half's main returns, so that its
 * destructors run and its output is written; the half that was loaded last comes first. A lower
 * half that calls exit itself is the first to end, then the upper half, then the others.
 */
#include <sys/syscall.h>

#include "loader.h"

static uint32_t began;
static int exit_code;
static struct split_thread *leaver;
static unsigned left; /* bits of halves whose exit has run or was begun by themselves */

static void end(int code) {
    for (;;)
        sys1(SYS_exit_group, code);
}

void leave_from(unsigned half, int code) {
    if (sys0(SYS_getpid) != own_pid)
        end(code); /* a child by fork or vfork: the lower halves are its parent's */
    if (half != SPLIT_UPPER && !info.half[half].published)
        fail(code ? code : 127, "the lower half ", info.half[half].name,
             " ended before it had published its functions", NULL);
    struct split_thread *mine = threads_mine();
    if (__atomic_exchange_n(&began, 1, __ATOMIC_ACQ_REL)) {
        if (!mine || mine != leaver)
            for (;;)
                sys1(SYS_exit, 0); /* another thread is leaving already: this one only ends */
    } else {
        exit_code = code;
        leaver = mine ? mine : threads_new();
    }
    left |= 1u << half;
    if (!(left & 1u << SPLIT_UPPER) && info.upper.exit && leaver->fs[SPLIT_UPPER]) {
        /* A lower half called exit: the upper half's destructors run and come back by exit_group. */
        left |= 1u << SPLIT_UPPER;
        split_set_fs(leaver->fs[SPLIT_UPPER]);
        info.upper.exit(exit_code);
    }
    for (unsigned next = info.halves; --next > SPLIT_UPPER;) {
        uint64_t unused;
        if (left & 1u << next || !info.half[next].published)
            continue;
        left |= 1u << next;
        split_set_gs(leaver);
        if (!leaver->fs[next])
            threads_borrow(leaver, next);
        split_set_fs(leaver->fs[next]);
        context_switch(&unused, info.half[next].parked, (uint64_t)exit_code); /* comes back here anew */
    }
    end(exit_code);
    __builtin_unreachable();
}
