/* SPDX-License-Identifier: Apache-2.0 */
/* Which TLS block a thread has in each half.
 *
 * An upper-half thread that calls a lower half runs with a TLS block that this half's own libc
 * made: the main thread with the main thread's, any other with one borrowed from a thread of the
 * lower half that sleeps meanwhile (lower.c). GS points to the thread's record; clone inherits
 * GS, so that a record counts only if it holds the FS that the thread has.
 */
#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>

#include "loader.h"

#define BORROW_LIMIT 30 /* seconds; a thread is made in some microseconds */

static long futex(uint32_t *word, int operation, uint32_t value, const struct timespec *limit) {
    return sys6(SYS_futex, (long)word, operation | FUTEX_PRIVATE_FLAG, value, (long)limit, 0, 0);
}

static void lock(uint32_t *word) {
    uint32_t seen = 0;
    if (__atomic_compare_exchange_n(word, &seen, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return;
    while (__atomic_exchange_n(word, 2, __ATOMIC_ACQUIRE))
        futex(word, FUTEX_WAIT, 2, NULL); /* its holder waits BORROW_LIMIT at most */
}

static void unlock(uint32_t *word) {
    if (__atomic_exchange_n(word, 0, __ATOMIC_RELEASE) == 2)
        futex(word, FUTEX_WAKE, 1, NULL);
}

static int is_main(void) { return sys0(SYS_gettid) == own_pid; }

struct split_thread *threads_mine(void) {
    uint64_t fs = split_get_fs();
    int half = split_half_at(&info, fs);
    struct split_thread *thread = split_get_gs();
    if (half >= 0 && thread && thread->fs[half] == fs)
        return thread;
    if (!is_main())
        return NULL;
    if (half == (int)SPLIT_UPPER)
        info.thread[0].fs[SPLIT_UPPER] = fs;
    return &info.thread[0];
}

struct look {
    uint64_t mark, stack;
    int found;
};

static int visit_mark(void *data, const struct mapping *mapping) {
    struct look *look = data;
    if (look->mark < mapping->start || look->mark >= mapping->end)
        return 0;
    const uint64_t *mark = (const uint64_t *)look->mark;
    int passed = look->stack > look->mark && look->stack < mapping->end; /* its frame is gone */
    look->found = mapping->readable && !passed && *mark == split_marked(mark);
    return 1;
}

/* A callback or a handler that was left by longjmp has not taken its note back: that is dropped here. */
int threads_called_by_lower(uint64_t stack) {
    struct split_thread *thread = threads_mine();
    for (; thread && thread->depth; thread->depth--) {
        struct look look = {thread->mark[thread->depth - 1], stack, 0};
        each_mapping(visit_mark, &look);
        if (look.found)
            return 1;
    }
    return 0;
}

struct split_thread *threads_new(void) {
    for (unsigned i = 1; i < SPLIT_THREADS; i++) {
        uint32_t free = 0;
        if (__atomic_compare_exchange_n(&info.thread[i].used, &free, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return &info.thread[i];
    }
    fail(134, "more than 1023 threads call the lower halves at the same time", NULL);
}

void threads_borrow(struct split_thread *thread, unsigned half) {
    struct split_mail *mail = ((const struct split_published *)info.half[half].published)->mail;
    struct timespec limit = {BORROW_LIMIT, 0};
    lock(&mail->lock);
    uint32_t before = mail->answer;
    thread->leave[half] = 0;
    mail->leave = &thread->leave[half];
    __atomic_store_n(&mail->request, before + 1, __ATOMIC_RELEASE);
    futex(&mail->request, FUTEX_WAKE, 1, NULL);
    while (__atomic_load_n(&mail->answer, __ATOMIC_ACQUIRE) == before)
        if (futex(&mail->answer, FUTEX_WAIT, before, &limit) == -ETIMEDOUT)
            fail(134, "the lower half ", info.half[half].name, " made no thread in 30 s", NULL);
    if (mail->error) {
        char room[24];
        fail(134, "the lower half ", info.half[half].name, " can't make a thread: errno ",
             decimal(mail->error, room), NULL);
    }
    thread->fs[half] = mail->fs;
    unlock(&mail->lock);
}

struct split_thread *threads_adopt(unsigned half) {
    uint64_t all = ~(1ull << (SIGSYS - 1)), before;
    sys4(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, 8);
    struct split_thread *thread = threads_mine();
    if (!thread) {
        thread = threads_new();
        thread->fs[SPLIT_UPPER] = split_get_fs();
    }
    split_set_gs(thread);
    if (!thread->fs[half])
        threads_borrow(thread, half);
    sys4(SYS_rt_sigprocmask, SIG_SETMASK, &before, 0, 8);
    return thread;
}

void threads_release(struct split_thread *thread) {
    if (!thread || thread == &info.thread[0] || sys0(SYS_getpid) != own_pid)
        return; /* a forked child has none of the threads that lend */
    split_set_gs(NULL);
    thread->depth = 0;
    for (unsigned half = 0; half < SPLIT_HALVES; half++) {
        if (half != SPLIT_UPPER && thread->fs[half]) {
            /* Its keeper sets it back to 0 when it has seen it: the record stays until then. */
            __atomic_store_n(&thread->leave[half], 1, __ATOMIC_RELEASE);
            futex(&thread->leave[half], FUTEX_WAKE, 1, NULL);
            struct timespec limit = {1, 0};
            for (int i = 0; i < BORROW_LIMIT && __atomic_load_n(&thread->leave[half], __ATOMIC_ACQUIRE); i++)
                futex(&thread->leave[half], FUTEX_WAIT, 1, &limit);
        }
        thread->fs[half] = 0;
    }
    __atomic_store_n(&thread->used, 0, __ATOMIC_RELEASE);
}
