/* SPDX-License-Identifier: Apache-2.0 */
/* Signals: a handler runs with the TLS of the half that installed it, whatever it interrupts.
 *
 * rt_sigaction is trapped (place.c); the kernel gets `enter`, which knows the half that runs by
 * its TLS base, and switches. A signal that reaches a thread of a lower half's own, which has no
 * TLS block in the handler's half, is sent on to the main thread, which has one in every half.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>

#include "loader.h"

#define SIGNALS 65
#define GENERATIONS 16 /* of one signal's action: a handler that starts reads an old one safely */
#define RESTORER_FLAG 0x04000000ull
#define BIT(number) (1ull << ((number)-1))

struct action {
    uint64_t handler, flags, mask;
    unsigned owner;
};

static struct action store[SIGNALS][GENERATIONS];
static struct action *current[SIGNALS]; /* NULL: the kernel's own record is the truth */
static unsigned generation[SIGNALS];

static void by_default(int number) {
    struct kernel_action plain = {(uint64_t)SIG_DFL, RESTORER_FLAG, (uint64_t)restorer, 0};
    sys4(SYS_rt_sigaction, number, &plain, 0, 8);
}

static int is_fault(int number, const siginfo_t *about) {
    return about->si_code > 0 && (number == SIGSEGV || number == SIGBUS || number == SIGFPE ||
                                  number == SIGILL || number == SIGTRAP);
}

/* To a thread that has TLS in every half; a fault can't be sent on: it ends the process. */
static void send_on(int number, siginfo_t *about) {
    long process = sys0(SYS_getpid), thread = sys0(SYS_gettid);
    if (is_fault(number, about) || thread == process) {
        by_default(number); /* the instruction faults again */
        if (!is_fault(number, about))
            sys3(SYS_tgkill, process, thread, number);
        return;
    }
    if (FAILED(sys4(SYS_rt_tgsigqueueinfo, process, process, number, about)))
        sys3(SYS_tgkill, process, process, number); /* the kernel forbids to pass on its own siginfo */
}

static void enter(int number, siginfo_t *about, void *context) {
    const struct action *action = __atomic_load_n(&current[number], __ATOMIC_ACQUIRE);
    uint64_t sigsys = BIT(SIGSYS), fs = split_get_fs();
    if (!action || action->handler <= 1)
        return; /* it was taken back in this moment */
    void (*handler)(int, siginfo_t *, void *) = (void (*)(int, siginfo_t *, void *))action->handler;
    unsigned owner = action->owner;
    if (action->flags & SA_RESETHAND)
        __atomic_store_n(&current[number], NULL, __ATOMIC_RELEASE);
    /* The mask in force may be sigsuspend's: a trapped call under a blocked SIGSYS would kill. */
    sys4(SYS_rt_sigprocmask, SIG_UNBLOCK, &sigsys, 0, 8);
    int half = split_half_at(&info, fs);
    if (half < 0 || (unsigned)half == owner) {
        handler(number, about, context);
        return;
    }
    const struct split_thread *thread = threads_mine();
    if (!thread || !thread->fs[owner]) {
        send_on(number, about);
        return;
    }
    split_set_fs(thread->fs[owner]);
    handler(number, about, context);
    split_set_fs(fs);
}

static void on_request(int number, siginfo_t *about, void *context) {
    (void)number, (void)about, (void)context;
    *info.open = 0; /* the next stub call attends to it */
}

long signals_action(unsigned owner, int number, const struct kernel_action *new_action,
                    struct kernel_action *old, uint64_t mask_size) {
    if (mask_size != 8 || number < 1 || number >= SIGNALS)
        return -EINVAL;
    const struct action *before = __atomic_load_n(&current[number], __ATOMIC_ACQUIRE);
    struct kernel_action kernel = {0}, previous = {0};
    struct action *after = NULL;
    if (number == SIGSYS) { /* the loader's; posix_spawn's child resets it without harm */
        if (old)
            *old = previous;
        return 0;
    }
    if (new_action) {
        kernel = *new_action;
        if (kernel.handler > 1) {
            unsigned slot = __atomic_fetch_add(&generation[number], 1, __ATOMIC_RELAXED);
            after = &store[number][slot % GENERATIONS];
            *after = (struct action){kernel.handler, kernel.flags, kernel.mask, owner};
            kernel.handler = (uint64_t)enter;
            kernel.flags |= SA_SIGINFO | RESTORER_FLAG;
            kernel.restorer = (uint64_t)restorer;
            kernel.mask &= ~BIT(SIGSYS);
            __atomic_store_n(&current[number], after, __ATOMIC_RELEASE);
        }
    }
    long result = sys4(SYS_rt_sigaction, number, new_action ? &kernel : NULL, &previous, 8);
    if (FAILED(result))
        return result;
    if (new_action && !after)
        __atomic_store_n(&current[number], NULL, __ATOMIC_RELEASE);
    if (old) {
        if (before && previous.handler == (uint64_t)enter)
            previous = (struct kernel_action){before->handler, before->flags, RESTORER_FLAG, before->mask};
        else if (previous.handler == (uint64_t)on_request)
            previous = (struct kernel_action){0};
        *old = previous;
    }
    return 0;
}

void signals_start(void) {
    struct kernel_action action = {(uint64_t)on_request, SA_SIGINFO | SA_RESTART | RESTORER_FLAG,
                                   (uint64_t)restorer, 0};
    sys4(SYS_rt_sigaction, SPLIT_SIGNAL, &action, 0, 8);
}

unsigned signals_save(struct saved_action *to) {
    unsigned count = 0;
    for (int number = 1; number < SIGNALS; number++) {
        const struct action *action = current[number];
        struct kernel_action kernel = {0};
        if (action && action->owner == SPLIT_UPPER)
            to[count++] = (struct saved_action){(uint64_t)number, action->handler, action->flags, action->mask};
        else if (!action && !FAILED(sys4(SYS_rt_sigaction, number, 0, &kernel, 8)) &&
                 kernel.handler == (uint64_t)SIG_IGN)
            to[count++] = (struct saved_action){(uint64_t)number, (uint64_t)SIG_IGN, 0, 0};
    }
    return count;
}

void signals_restore(const struct saved_action *from, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        struct kernel_action action = {from[i].handler, from[i].flags, (uint64_t)restorer, from[i].mask};
        signals_action(SPLIT_UPPER, (int)from[i].signal, &action, NULL, 8);
    }
}
