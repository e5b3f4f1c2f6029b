/* SPDX-License-Identifier: Apache-2.0 */
/* libflytsplit.so: what all stub libraries of the upper half share. */
#include "../include/flyt_split.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "stub.h"

struct split_info *flyt_split_info;
__thread struct split_thread *flyt_split_thread __attribute__((tls_model("initial-exec")));
static pthread_key_t key; /* its destructor gives back what an ending thread has borrowed */

static void release(void *thread) {
    flyt_split_thread = NULL;
    flyt_split_info->release(thread);
}

/* Before any constructor without a priority: those may call a lower half. */
__attribute__((constructor(101))) static void find_loader(void) {
    static const char alone[] = "flyt split: this program needs its lower halves: start it with "
                                "`flyt split run`\n";
    const char *value = getenv(SPLIT_VARIABLE);
    struct split_info *info = value ? (struct split_info *)strtoull(value, NULL, 16) : NULL;
    if (!info || info == (void *)-1 || info->magic != SPLIT_MAGIC || info->version != SPLIT_VERSION ||
        pthread_key_create(&key, release)) {
        if (write(2, alone, sizeof alone - 1) < 0)
            _exit(125);
        _exit(126);
    }
    flyt_split_info = info;
    info->upper.exit = exit;
}

unsigned flyt_split_find(const char *name, uint64_t digest) {
    if (!flyt_split_info)
        find_loader();
    return flyt_split_info->find(name, digest);
}

struct split_thread *flyt_split_slow(unsigned half) {
    struct split_info *info = flyt_split_info;
    if (!*info->open)
        info->attend();
    struct split_thread *thread = info->adopt(half);
    if (flyt_split_thread != thread) {
        flyt_split_thread = thread;
        if (pthread_setspecific(key, thread))
            info->refuse("no memory to note a thread's lower halves", "", "");
    }
    return thread;
}

unsigned flyt_split_callback(void **known, void *function, const char *type) {
    for (unsigned i = 0; i < SPLIT_CALLBACKS; i++) {
        void *free = NULL;
        if (__atomic_load_n(&known[i], __ATOMIC_ACQUIRE) == function ||
            __atomic_compare_exchange_n(&known[i], &free, function, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) ||
            free == function)
            return i;
    }
    flyt_split_info->refuse("more than 8 different callbacks of the type ", type, "");
    return 0;
}

SPLIT_EXPORT int flyt_split_checkpoint(const char *path) {
    struct split_info *info = flyt_split_info;
    return info->checkpoint(path ? path : info->image);
}
