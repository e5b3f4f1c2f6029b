/* SPDX-License-Identifier: Apache-2.0 */
/* Signals: each half has actions of its own, and a handler runs with the TLS of its half.
 *
 * rt_sigaction is trapped (place.c) and answered from the calling half's own table, so that a
 * library in a lower half neither takes a handler away from the program nor calls it by itself.
 * The kernel gets `enter` where any half has a handler. A fault goes to the half whose code it is
 * in; else, and for all other signals, the upper half comes first. A signal that reaches a thread
 * of a lower half's own, without TLS in the handler's half, is sent on to the main thread.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>

#include "loader.h"

#define SIGNALS 65
#define GENERATIONS 8 /* of one action: a handler that is about to start reads an old one safely */
#define RESTORER_FLAG 0x04000000ull
#define BIT(number) (1ull << ((number)-1))
#define DEFAULT ((uint64_t)SIG_DFL)
#define IGNORE ((uint64_t)SIG_IGN)

struct action {
    uint64_t handler, flags, mask;
};

static struct action store[SPLIT_HALVES][SIGNALS][GENERATIONS];
static struct action *current[SPLIT_HALVES][SIGNALS]; /* NULL: as at the start */
static unsigned generation[SPLIT_HALVES][SIGNALS];
static struct action start[SIGNALS]; /* what was inherited: ignored, or the default */

static const struct action *action_of(unsigned half, int number) {
    const struct action *found = __atomic_load_n(&current[half][number], __ATOMIC_ACQUIRE);
    return found ? found : &start[number];
}

static int has_handler(unsigned half, int number) { return action_of(half, number)->handler > IGNORE; }

static void to_kernel(int number, uint64_t handler, uint64_t flags, uint64_t mask) {
    struct kernel_action action = {handler, flags | RESTORER_FLAG, (uint64_t)restorer, mask & ~BIT(SIGSYS)};
    sys4(SYS_rt_sigaction, number, &action, 0, 8);
}

static int is_fault(int number, const siginfo_t *about) {
    return about->si_code > 0 && (number == SIGSEGV || number == SIGBUS || number == SIGFPE ||
                                  number == SIGILL || number == SIGTRAP);
}

/* Whose handler it is; -1 if no half has one. */
static int choose(int number, int faulted) {
    if (faulted >= 0 && has_handler((unsigned)faulted, number))
        return faulted;
    for (unsigned half = 0; half < info.halves; half++)
        if (has_handler(half, number))
            return (int)half;
    return -1;
}

static void on_request(int number, siginfo_t *about, void *context) {
    (void)number, (void)about, (void)context;
    *info.open = 0; /* the next stub call attends to it */
}

/* To a thread that has TLS in every half; a fault can't be sent on: it ends the process. */
static void send_on(int number, siginfo_t *about) {
    long process = sys0(SYS_getpid), thread = sys0(SYS_gettid);
    if (is_fault(number, about) || thread == process) {
        to_kernel(number, DEFAULT, 0, 0); /* the instruction faults again */
        if (!is_fault(number, about))
            sys3(SYS_tgkill, process, thread, number);
        return;
    }
    if (FAILED(sys4(SYS_rt_tgsigqueueinfo, process, process, number, about)))
        sys3(SYS_tgkill, process, process, number); /* the kernel forbids to pass on its own siginfo */
}

static void enter(int number, siginfo_t *about, void *context) {
    uint64_t sigsys = BIT(SIGSYS), fs = split_get_fs();
    uint64_t at = (uint64_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
    int owner = choose(number, is_fault(number, about) ? split_half_at(&info, at) : -1);
    if (owner < 0)
        return; /* it was taken back in this moment */
    const struct action *action = action_of((unsigned)owner, number);
    void (*handler)(int, siginfo_t *, void *) = (void (*)(int, siginfo_t *, void *))action->handler;
    /* The mask in force may be sigsuspend's: a trapped call under a blocked SIGSYS would kill. */
    sys4(SYS_rt_sigprocmask, SIG_UNBLOCK, &sigsys, 0, 8);
    int half = split_half_at(&info, fs);
    struct split_thread *thread = half < 0 || half == owner ? NULL : threads_mine();
    if (half >= 0 && half != owner && (!thread || !thread->fs[owner])) {
        send_on(number, about);
        return;
    }
    if (action->flags & SA_RESETHAND)
        signals_action((unsigned)owner, number, &(struct kernel_action){0}, NULL, 8);
    if (thread) {
        uint64_t mark;
        uint32_t depth = split_note(thread, &mark);
        split_set_fs(thread->fs[owner]);
        handler(number, about, context);
        split_set_fs(fs);
        split_forget(thread, &mark, depth);
    } else {
        handler(number, about, context);
    }
    /* A handler may write the mask that its return sets; there SIGSYS stays open too. */
    *(uint64_t *)&((ucontext_t *)context)->uc_sigmask &= ~sigsys;
}

/* What the kernel has to do so that every half gets what it has asked for. */
static void settle(int number) {
    int owner = choose(number, -1);
    if (owner >= 0) {
        const struct action *action = action_of((unsigned)owner, number);
        to_kernel(number, (uint64_t)enter, (action->flags & ~(uint64_t)SA_RESETHAND) | SA_SIGINFO, action->mask);
    } else if (number == SPLIT_SIGNAL) {
        to_kernel(number, (uint64_t)on_request, SA_SIGINFO | SA_RESTART, 0);
    } else { /* the upper half's word, else a lower half's */
        const struct action *action = action_of(SPLIT_UPPER, number);
        for (unsigned half = 1; half < info.halves && !current[SPLIT_UPPER][number]; half++)
            if (current[half][number])
                action = action_of(half, number);
        to_kernel(number, action->handler, action->flags, action->mask);
    }
}

/* The tables are the parent's: a child by vfork, which only sets what exec is to inherit, does so in
 * the kernel alone. The loader's own handler stays until exec. */
static long child_action(unsigned owner, int number, const struct kernel_action *new_action, struct kernel_action *old) {
    struct kernel_action now, after;
    if (new_action) {
        after = *new_action;
        after.mask &= ~BIT(SIGSYS);
    }
    long result = sys4(SYS_rt_sigaction, number, new_action && number != SIGSYS ? &after : NULL, &now, 8);
    if (now.handler == (uint64_t)enter || number == SIGSYS || number == SPLIT_SIGNAL) {
        const struct action *known = action_of(owner, number);
        now = (struct kernel_action){known->handler, known->flags, RESTORER_FLAG, known->mask};
    }
    if (old && !FAILED(result))
        *old = now;
    return result;
}

long signals_action(unsigned owner, int number, const struct kernel_action *new_action,
                    struct kernel_action *old, uint64_t mask_size) {
    if (mask_size != 8 || number < 1 || number >= SIGNALS || number == SIGKILL || number == SIGSTOP)
        return -EINVAL;
    if (new_action && (!is_readable(new_action) || !is_readable(&new_action->mask)))
        return -EFAULT;
    struct kernel_action wanted = new_action ? *new_action : (struct kernel_action){0}; /* `old` may be the same */
    new_action = new_action ? &wanted : NULL;
    if (old && (!is_writable(old) || !is_writable(&old->mask)))
        return -EFAULT;
    if (is_borrower())
        return child_action(owner, number, new_action, old);
    struct action before = *action_of(owner, number);
    if (new_action && number != SIGSYS) { /* that one is the loader's */
        unsigned slot = __atomic_fetch_add(&generation[owner][number], 1, __ATOMIC_RELAXED);
        struct action *after = &store[owner][number][slot % GENERATIONS];
        *after = (struct action){new_action->handler, new_action->flags, new_action->mask};
        __atomic_store_n(&current[owner][number], after, __ATOMIC_RELEASE);
        settle(number);
    }
    if (old)
        *old = (struct kernel_action){before.handler, before.flags, RESTORER_FLAG, before.mask};
    return 0;
}

void signals_start(void) {
    struct kernel_action inherited;
    for (int number = 1; number < SIGNALS; number++)
        if (!FAILED(sys4(SYS_rt_sigaction, number, 0, &inherited, 8)))
            start[number].handler = inherited.handler;
    settle(SPLIT_SIGNAL);
}

unsigned signals_save(struct saved_action *to) {
    unsigned count = 0;
    for (int number = 1; number < SIGNALS; number++) {
        const struct action *action = action_of(SPLIT_UPPER, number);
        if (action != &start[number] || action->handler != DEFAULT)
            to[count++] = (struct saved_action){(uint64_t)number, action->handler, action->flags, action->mask};
    }
    return count;
}

void signals_restore(const struct saved_action *from, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        struct kernel_action action = {from[i].handler, from[i].flags, (uint64_t)restorer, from[i].mask};
        signals_action(SPLIT_UPPER, (int)from[i].signal, &action, NULL, 8);
    }
}
